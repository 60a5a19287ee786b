# SPDX-License-Identifier: MIT
"""Workspaces of messages: slots on every device, and each block's count of sent messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilescale.backends.cuda.running.peer_group import PeerGroup
from tilescale.comm.heap.lasting import lasting

SLOTS = "slots"
"""The form of long messages in workspace slots."""


@dataclass(frozen=True)
class SlotShape:
    """Slots of one device.

    Attributes:
        level: the level whose units exchange messages, and the number of its `ranks`.
        sets: number of sets of slots; each has `slots` for every sender and block.
        blocks: maximum blocks of a grid.
        slot: bytes of a slot.
        form: the form of the messages in them: another form would read data as flags.
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
        """Bytes; flags of long messages follow the slots (headers/messages.cuh, moved_messages.cuh)."""
        messages = self.sets * self.slots * (self.ranks - 1) * self.blocks
        if self.form != SLOTS:
            return messages * self.slot
        return messages * (self.slot + 4) + 8 * (self.ranks - 1) * self.blocks


@dataclass(frozen=True)
class Inbox:
    """Slots of one device for the pieces that it receives in one call of an algorithm with `rounds` rounds.

    Attributes:
        level: the level whose units exchange pieces, and the number of its `ranks`.
        slots: number of slots of each block.
        blocks: maximum blocks of a grid.
        slot: bytes of a slot.
    """

    level: str
    ranks: int
    slots: int
    rounds: int
    blocks: int
    slot: int

    @property
    def nbytes(self) -> int:
        """Bytes, including the flags of each round and sender, and of the start."""
        return self.blocks * (self.slots * self.slot + 4 * self.ranks * (self.rounds + 1))


@dataclass(frozen=True)
class MessageWorkspace:
    """A workspace of this device and its counts.

    Attributes:
        slots: symmetric memory.
        counts: number of messages by block.
        first: address of the instance in the first slot of the heap.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    first: int


class MessageWorkspaces:
    """The workspaces of one program, allocated at their first use."""

    def __init__(self) -> None:
        self._made: dict[SlotShape | Inbox, MessageWorkspace] = {}

    def get(self, shape: SlotShape | Inbox, near: PeerGroup) -> MessageWorkspace:
        """The workspace of a shape, initially zero. Collective if it is new."""
        if shape not in self._made:
            slots = near.heap.zeros((shape.nbytes,), torch.uint8)
            counts = lasting(lambda: torch.zeros(shape.blocks, dtype=torch.int32, device=near.heap.device))
            self._made[shape] = MessageWorkspace(slots, counts, near.heap.peers(slots).data_ptr())
        return self._made[shape]

    def clear(self) -> None:
        """Zero all workspaces: nothing runs on any rank's device."""
        for workspace in self._made.values():
            workspace.slots.zero_()
            workspace.counts.zero_()
