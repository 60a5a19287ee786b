# SPDX-License-Identifier: MIT
"""Collectives between groups of devices that share memory: kernels inside a group, messages between groups, in chunks.

A device's *rail* is the devices of the same position in all groups. Between groups each number is sent once, along its
sender's rail, so all adapters work. While a chunk is in flight, the group works on the next one. Sums follow the rounds
of `hierarchical_direct`: a group's in the order of its devices, then those of all groups in their order, of short
floating types in float32, rounded to the type once in each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tilescale.backends.cuda.running.collectives import dense
from tilescale.backends.cuda.running.collectives.exchanges import BlockMessages, HeaderCall, PartStrides
from tilescale.backends.cuda.running.collectives.kernels import combining, moving
from tilescale.backends.cuda.running.collectives.setting import (
    BoundCollective,
    Operands,
    PlacedCollective,
    SiblingDevices,
)
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import StreamWork, run
from tilescale.backends.cuda.running.transports import TensorMessage, TransportWait
from tilescale.backends.tilelang.lowering.reach import chunk_bytes, split


@dataclass(frozen=True)
class DeviceGroups:
    """The groups of a collective's devices, relative to this device.

    Attributes:
        placed: the collective inside this device's group.
        team: all devices.
        group: this device's group, of `across`; `place` is its position in the group, of `inside`.
        chunk: bytes of a message.
    """

    context: ProgramContext
    placed: PlacedCollective
    team: SiblingDevices
    group: int
    across: int
    place: int
    inside: int
    chunk: int

    @classmethod
    def of(cls, context: ProgramContext, placed: PlacedCollective) -> DeviceGroups:
        """The groups of a collective with several devices in each."""
        found, team = split(context.target, placed.made.level), SiblingDevices.of(context, placed.made.level)
        assert found is not None and found.inside > 1, "the plan has asked for it"
        group, place = divmod(team.rank, found.inside)
        near = SiblingDevices(place, found.inside, team.device(group * found.inside), team.step)
        inside = replace(placed, among=near, nbytes=None)
        return cls(context, inside, team, group, found.across, place, found.inside, chunk_bytes(context.target))

    def device(self, group: int, place: int) -> int:
        """The number of a device among all."""
        return self.team.device(group * self.inside + place)

    def kernel(self, function: str, *flags: str) -> BlockMessages:
        """A function of the headers inside the group. Collective."""
        combines = function == "reduce"
        dtype = self.placed.dtype
        element = combining(dtype, self.placed.made.reduction) if combines else moving(dtype)
        return BlockMessages(self.context, self.placed, HeaderCall(function, element, None, flags))

    def others(self) -> Iterator[tuple[int, int]]:
        """The groups to send to and to receive from, in each iteration."""
        for step in range(1, self.across):
            yield (self.group + step) % self.across, (self.group - step) % self.across

    def chunks(self, elements: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Begin of each chunk of a part, and its elements."""
        most = max(1, self.chunk // itemsize)
        for begin in range(0, elements, most):
            yield begin, min(most, elements - begin)

    def swap(self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int) -> TransportWait:
        """Start messages along the rail, to one group and from another."""
        give, take = (
            TensorMessage(sent, self.device(to, self.place)),
            TensorMessage(received, self.device(source, self.place)),
        )
        return self.context.transport.exchange([give], [take])

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> TransportWait:
        """Start messages along the rail to each other group, and from each."""
        ranks = list(self.others())
        gives = [TensorMessage(sent[to], self.device(to, self.place)) for to, _ in ranks]
        takes = [TensorMessage(received[origin], self.device(origin, self.place)) for _, origin in ranks]
        return self.context.transport.exchange(gives, takes)


COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
"""PyTorch's names of combining operations."""


def combined(parts: Sequence[torch.Tensor] | torch.Tensor, reduction: str) -> torch.Tensor:
    """The combination of tensors in their order, of short floating types in float32."""
    combine, dtype = getattr(torch, COMBINE[reduction]), parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total: torch.Tensor = parts[0].to(wide)
    for part in parts[1:]:
        total = combine(total, part.to(wide))
    return total


class RailSum:
    """The sum of a part over the devices of a rail, in place: each sums a share of it, which it sends to the others.

    NCCL's all-reduce sends as much, but adds in another order and rounds each time.
    """

    def __init__(self, groups: DeviceGroups, part: torch.Tensor):
        """Start to gather shares."""
        self._groups = groups
        share = -(-part.numel() // groups.across)
        self._shares = part.tensor_split([share * g for g in range(1, groups.across)])
        mine = self._shares[groups.group]
        self._brought = mine.new_empty(groups.across, mine.numel())
        self._brought[groups.group].copy_(mine)
        self._wait = groups.exchange(self._shares, [*self._brought])

    def add(self) -> None:
        """Sum this device's share once it has arrived, and start to send the sum."""
        self._wait()
        mine = self._shares[self._groups.group]
        mine.copy_(combined(self._brought, self._groups.placed.made.reduction))
        self._wait = self._groups.exchange([mine] * self._groups.across, self._shares)

    def wait(self) -> None:
        """Let the current stream wait for the others' sums."""
        self._wait()


def allreduce(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.allreduce`: each device sums a part for its group, then the rail sums these, then all get all. Collective."""
    groups = DeviceGroups.of(context, placed)
    scatter, gather = groups.kernel("reduce", "false"), groups.kernel("move", "true")
    context.transport  # noqa: B018 - opened where all ranks are

    def launch(flat: torch.Tensor) -> None:
        parts: list[tuple[torch.Tensor, torch.Tensor, RailSum]] = []
        for begin, count in groups.chunks(flat.numel() // groups.inside, flat.itemsize):
            whole = flat[begin * groups.inside :][: count * groups.inside]
            part = whole.new_empty(count)
            run(_scattered(scatter, whole, part))
            parts.append((whole, part, RailSum(groups, part)))
        for *_, total in parts:
            total.add()
        for whole, part, total in parts:
            total.wait()
            run(_gathered(gather, part, whole))

    def change(x: torch.Tensor) -> list[StreamWork]:
        return [lambda: _padded(x.view(-1), groups.inside, launch)]

    return lambda given: dense.in_place(given, change)


def reduce_scatter(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.reduce_scatter`: each group sums the parts of every other one and sends it the sums. Collective."""
    groups = DeviceGroups.of(context, placed)
    scatter = groups.kernel("reduce", "false")
    context.transport  # noqa: B018 - opened where all ranks are

    def launch(source: torch.Tensor, target: torch.Tensor) -> None:
        whole, mine = source.view(groups.across, groups.inside, -1), target.view(-1)
        sums = mine.new_empty(groups.across, mine.numel())
        waits: list[TransportWait] = []
        for begin, count in groups.chunks(mine.numel(), mine.itemsize):
            for to, origin in groups.others():
                part = mine.new_empty(count)
                run(_scattered(scatter, whole[to, :, begin : begin + count], part))
                waits.append(groups.swap(part, to, sums[origin, begin : begin + count], origin))
            own_part = sums[groups.group, begin : begin + count]
            run(_scattered(scatter, whole[groups.group, :, begin : begin + count], own_part))
        for wait in waits:
            wait()
        mine.copy_(combined(sums, placed.made.reduction))

    return _along(placed, launch)


def all_gather(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.all_gather`: parts along the rails; each group spreads what it receives. Collective."""
    groups = DeviceGroups.of(context, placed)
    gather = groups.kernel("move", "true")
    context.transport  # noqa: B018 - opened where all ranks are

    def launch(source: torch.Tensor, target: torch.Tensor) -> None:
        mine, whole = source.view(-1), target.view(groups.across, groups.inside, -1)
        arrived = mine.new_empty(groups.across, mine.numel())
        chunks = list(groups.chunks(mine.numel(), mine.itemsize))
        waits: list[tuple[int, slice, TransportWait]] = []
        for begin, count in chunks:
            part = slice(begin, begin + count)
            for to, origin in groups.others():
                waits.append((origin, part, groups.swap(mine[part], to, arrived[origin, part], origin)))
        run(_gathered(gather, mine, whole[groups.group]))
        for origin, part, wait in waits:
            wait()
            run(_gathered(gather, arrived[origin, part], whole[origin, :, part]))

    return _along(placed, launch)


def all_to_all(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.all_to_all`: to the device of this group at the target's position, then along its rail. Collective."""
    groups = DeviceGroups.of(context, placed)
    exchange = groups.kernel("move", "false")
    context.transport  # noqa: B018 - opened where all ranks are

    def launch(source: torch.Tensor, target: torch.Tensor) -> None:
        shape = (groups.across, groups.inside, -1)
        given, taken = source.view(shape), target.view(shape)
        waits: list[tuple[torch.Tensor, torch.Tensor, TransportWait]] = []
        for begin, count in groups.chunks(given.shape[-1], given.itemsize):
            part = slice(begin, begin + count)
            for to, origin in groups.others():
                sent, received = (given.new_empty(groups.inside, count) for _ in range(2))
                run(_exchanged(exchange, given[to, :, part], sent))
                waits.append((received, taken[origin, :, part], groups.swap(sent, to, received, origin)))
        run(_exchanged(exchange, given[groups.group], taken[groups.group]))
        for received, place, wait in waits:
            wait()
            place.copy_(received)

    return _along(placed, launch)


def broadcast(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.broadcast`: along the root's rail; each group spreads what it receives. Collective."""
    groups = DeviceGroups.of(context, placed)
    spread = groups.kernel("broadcast")
    context.transport  # noqa: B018 - opened where all ranks are

    def launch(flat: torch.Tensor, root: int) -> None:
        home, place = divmod(root % groups.team.size, groups.inside)
        on_rail = groups.place == place
        waits: list[tuple[torch.Tensor, TransportWait]] = []
        for begin, count in groups.chunks(flat.numel(), flat.itemsize):
            part = flat[begin : begin + count]
            peers = [g for g in range(groups.across) if g != home] if groups.group == home else [home]
            messages = [TensorMessage(part, groups.device(g, place)) for g in peers if on_rail]
            ends = (messages, []) if groups.group == home else ([], messages)
            waits.append((part, context.transport.exchange(*ends)))
        for part, wait in waits:
            wait()
            run(spread.between(part, part, PartStrides(part.nbytes, part.nbytes * groups.inside), place))

    def bind(given: Operands) -> list[StreamWork]:
        return dense.in_place(given, lambda x: [lambda: launch(x.view(-1), given.root)])

    return bind


def _scattered(kernel: BlockMessages, whole: torch.Tensor, part: torch.Tensor) -> list[StreamWork]:
    """A part of the sum of all `whole`, each of which has the parts of all devices, possibly with gaps between them."""
    rows = whole.view(kernel.team.size, -1) if whole.ndim == 1 else whole
    return kernel.between(whole, part, PartStrides(part.nbytes, part.nbytes * len(rows), source_step=_step(rows)))


def _gathered(kernel: BlockMessages, part: torch.Tensor, whole: torch.Tensor) -> list[StreamWork]:
    """All devices' parts, possibly with gaps between them."""
    rows = whole.view(kernel.team.size, -1) if whole.ndim == 1 else whole
    return kernel.between(part, whole, PartStrides(part.nbytes, part.nbytes * len(rows), target_step=_step(rows)))


def _exchanged(kernel: BlockMessages, given: torch.Tensor, taken: torch.Tensor) -> list[StreamWork]:
    """Row r to device r, and row r from it."""
    nbytes = given.shape[-1] * given.itemsize
    return kernel.between(
        given, taken, PartStrides(nbytes, nbytes * len(given), source_step=_step(given), target_step=_step(taken))
    )


def _step(rows: torch.Tensor) -> int:
    """Bytes from a row to the next one."""
    return rows.stride(0) * rows.itemsize


def _padded(flat: torch.Tensor, multiple: int, launch: Callable[[torch.Tensor], None]) -> None:
    """`launch` on a tensor whose length is a multiple of `multiple`: this one, or a padded copy."""
    missing = -flat.numel() % multiple
    if not missing:
        return launch(flat)
    longer = torch.nn.functional.pad(flat, (0, missing))
    launch(longer)
    flat.copy_(longer[: flat.numel()])


def _along(placed: PlacedCollective, launch: Callable[[torch.Tensor, torch.Tensor], None]) -> BoundCollective:
    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
        return [lambda: launch(source, target)]

    return lambda given: dense.along(placed.made.axis, given.source, given.target, exchange)
