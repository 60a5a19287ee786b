# SPDX-License-Identifier: MIT
"""The memory through which messages go: slots on every device, and each block's count of what it has sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tilescale.backends.cuda.running.near import Near


SLOTS = "slots"
"""The form of long messages that lie in a workspace."""


@dataclass(frozen=True)
class Shape:
    """Slots of one device.

    Attributes:
        level: whose units send each other messages, and how many `ranks` there are.
        sets: of slots; each has `slots` for every sender and block.
        blocks: of a grid, at most.
        slot: bytes.
        form: of the messages in them: another would take for a flag what is data.
    """

    level: str
    ranks: int
    sets: int
    slots: int
    blocks: int
    slot: int
    form: str

    @property
    def nbytes(self) -> int:
        """Bytes; long messages have their flags behind the slots (headers/messages.cuh, moved_messages.cuh)."""
        messages = self.sets * self.slots * (self.ranks - 1) * self.blocks
        if self.form != SLOTS:
            return messages * self.slot
        return messages * (self.slot + 4) + 8 * (self.ranks - 1) * self.blocks


@dataclass(frozen=True)
class Inbox:
    """Slots of one device for the pieces that it gets in one call by an algorithm of so many `rounds`.

    Attributes:
        level: whose units send each other pieces, and how many `ranks` there are.
        slots: for each block one of each.
        blocks: of a grid, at most.
        slot: bytes.
    """

    level: str
    ranks: int
    slots: int
    rounds: int
    blocks: int
    slot: int

    @property
    def nbytes(self) -> int:
        """Bytes, with the flags of each round and sender, and of the beginning."""
        return self.blocks * (self.slots * self.slot + 4 * self.ranks * (self.rounds + 1))


@dataclass(frozen=True)
class Workspace:
    """A workspace of this device and its counts.

    Attributes:
        slots: symmetric.
        counts: of messages by block.
        first: address of the instance in the first slot of the heap.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    first: int


class Workspaces:
    """The workspaces of one program, made when they are first needed."""

    def __init__(self) -> None:
        self._made: dict[Shape | Inbox, Workspace] = {}

    def get(self, shape: Shape | Inbox, near: Near) -> Workspace:
        """The workspace of a shape, zero when it is made. Collective if it is new."""
        import torch

        if shape not in self._made:
            slots = near.heap.zeros((shape.nbytes,), torch.uint8)
            counts = torch.zeros(shape.blocks, dtype=torch.int32, device=near.heap.device)
            self._made[shape] = Workspace(slots, counts, near.heap.peers(slots).data_ptr())
        return self._made[shape]

    def clear(self) -> None:
        """Begin anew: nothing runs on any rank's device."""
        for workspace in self._made.values():
            workspace.slots.zero_()
            workspace.counts.zero_()
