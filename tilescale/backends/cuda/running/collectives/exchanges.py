# SPDX-License-Identifier: MIT
"""Exchanges of messages between the blocks of a grid and those of its peers, for one_shot, two_shot and direct.

Short messages carry flags: words, of twice the bytes, or lines, of a fifteenth more, where the network delivers a line
atomically (LL and LL128). Long messages are plain stores followed by a flag, and take two steps more: a fence until the
stores have arrived, and the flag's transfer. The choice follows from the machine's latency and bandwidth.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilescale.backends.cuda.running.collectives.kernels import (
    THREADS,
    Element,
    ExchangeArgument,
    HeaderKernel,
    blocks_per_sm,
    functions,
    launch,
    most_threads,
)
from tilescale.backends.cuda.running.collectives.setting import PlacedCollective, SiblingDevices
from tilescale.backends.cuda.running.collectives.workspaces import Inbox, SlotShape
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import StreamWork, moved
from tilescale.backends.tilelang.lowering.reach import STORES
from tilescale.backends.tilelang.ptx import WARP
from tilescale.comm.heap.arena import round_up
from tilescale.cost.operations import network_of
from tilescale.cost.reach import delivers_lines

UNIT_BYTES, SHORT_SLOTS, LONG_SLOTS = 16, 2, 4
"""Bytes of a thread's store, and slots of a sender (headers/short_messages.cuh, long_messages.cuh)."""

SHARING = {"words": 1, "lines": 8}
"""Number of threads whose units share a flag (headers/words.cuh)."""

FLAG_BYTES = 8
"""Bytes of flags in such units."""

STEPS, AGREEING = 2.0, 0.25
"""In latencies of the network: the two additional steps of long messages, and the agreement of a line's threads (0.3 to
0.4 us on two H200)."""

ADDED = {"words": 1.0, "lines": 0.3}
"""Additional time of short messages, relative to the transfer time of their data. Words have as many bytes of flags as
of data. A block sends all its lines before it polls for others', where long messages overlap: all-gathers on two H200
take 11.1 us for 2 MiB of each by lines and 12.5 by long messages, for 4 MiB 19.7 and 19.0, for 8 MiB 37.6 and 31.7."""

SMALLEST_SLOT, LARGEST_SLOT = 8192, 32768
"""Bytes of a long message: the minimum, so that every thread stores some; and the maximum, divided by the number of
peers."""

FEWEST_THREADS, ROW_THREADS = 128, 256
"""Minimum threads of a block; and maximum in a cluster that has a row: registers last for several on an SM."""

ROW_UNITS = {2: 2}
"""Units of a row per thread, by ranks; one for more ranks, whose messages take more registers."""

ROW_BLOCKS = {2: 3, 3: 2, 4: 2}
"""Number of such blocks on an SM, by ranks; one for more ranks."""

SETS = {"reduce_twice": 2}
"""Functions of the headers that use several sets of slots."""

MOVING = ("move",)
"""Functions that can store straight into symmetric targets (headers/moved_messages.cuh). A broadcast gained 13 us by it
at 128 MiB, and lost 35 at 256."""


@dataclass(frozen=True)
class PartStrides:
    """Layout of the exchanged parts.

    Attributes:
        nbytes: bytes of a part.
        total: bytes of all parts; the last ones may be shorter.
        source_step, target_step: bytes from a part to the next.
    """

    nbytes: int
    total: int
    source_step: int = 0
    target_step: int = 0


class MessageGrid(NamedTuple):
    """A grid, and bytes of a slot."""

    blocks: int
    threads: int
    slot: int


def short_grid(nbytes: int, sms: int, sharing: int, most: int) -> MessageGrid:
    """The grid of short messages in which `sharing` threads share a flag: a thread for each unit, up to `most` threads
    in a block on each SM; for more units, each thread has several."""
    flags = -(-nbytes // data_bytes(sharing))
    each = max(-(-flags * sharing // sms), FEWEST_THREADS)
    threads = round_up(-(-each // -(-each // most)), WARP)
    blocks = min(sms, -(-flags * sharing // threads))
    return MessageGrid(blocks, threads, power_of_two(-(-flags // blocks) * sharing * UNIT_BYTES))


class KernelCapacity(NamedTuple):
    """Capacity of a device for a kernel.

    Attributes:
        sms: number of SMs.
        per_sm: resident blocks of an SM.
        threads: maximum threads of a block.
        cluster: maximum blocks of a cluster.
        units: units of a row per thread, if the largest cluster needs no more.
    """

    sms: int
    per_sm: int
    threads: int
    cluster: int
    units: int = 1

    @property
    def blocks(self) -> int:
        """Resident blocks, in whole clusters."""
        return self.sms * self.per_sm


class RowGrid(NamedTuple):
    """Distribution of rows over a grid.

    Attributes:
        cluster: blocks that share a row, `part` bytes each.
        each: units of a row per thread.
    """

    grid: MessageGrid
    cluster: int
    part: int
    each: int


def rows_grid(rows: int, nbytes: int, whole: int, room: KernelCapacity, sharing: int) -> RowGrid:
    """The grid of short messages for rows of `nbytes` bytes, which clusters of blocks process one after another. Few
    rows have as many blocks as are resident at once, up to a unit for each thread; many rows have few blocks, with
    several units for each thread, so that more rows are in flight. Parts are multiples of `whole` bytes."""
    units = -(-nbytes // data_bytes(sharing)) * sharing
    fewest = power_of_two(-(-units // (room.threads * room.units)))
    useful, free = (power_of_two(n + 1) // 2 for n in (units // FEWEST_THREADS, room.blocks // rows))
    cluster = min(room.cluster, max(fewest, min(free, useful), 1))
    part = round_up(-(-nbytes // cluster), whole)
    flags = -(-part // data_bytes(sharing))
    each = -(-flags * sharing // room.threads)
    clusters = min(rows, room.blocks // cluster)
    threads = round_up(-(-flags // each) * sharing, WARP)
    slot = power_of_two(-(-rows // clusters) * flags * sharing * UNIT_BYTES)
    return RowGrid(MessageGrid(clusters * cluster, threads, slot), cluster, part, each)


def data_bytes(sharing: int) -> int:
    """Bytes of data for a flag that `sharing` threads share."""
    return sharing * UNIT_BYTES - FLAG_BYTES


def slots_grid(nbytes: int, blocks: int, peers: int) -> MessageGrid:
    """The grid of long messages, of at most `blocks` blocks."""
    units = -(-nbytes // UNIT_BYTES)
    blocks = min(blocks, -(-units // THREADS))
    slot = power_of_two(-(-units // blocks) * UNIT_BYTES)
    return MessageGrid(blocks, THREADS, min(largest_slot(peers), max(SMALLEST_SLOT, slot)))


def largest_slot(peers: int) -> int:
    """Maximum bytes of a long message."""
    return max(SMALLEST_SLOT, power_of_two(LARGEST_SLOT // peers // 2 + 1))


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


class ShortForm(NamedTuple):
    """A form of short messages, and the largest part for which it is used."""

    form: str
    nbytes: float


def short(context: ProgramContext, placed: PlacedCollective, ranks: int) -> list[ShortForm]:
    """Forms of short messages, small parts first.

    Words are used while their additional time is less than the agreement of a line's threads, a fraction of the
    latency. Then lines are used, or words where no network delivers lines atomically (as between ranks that share a
    GPU), while their additional time is less than the two steps of long messages.
    """
    network = network_of(placed.made.call, context.target.machine, dict(context.sizes))
    stores = network.mechanism(STORES) if network is not None else None
    assert network is not None and stores is not None and stores.put, "the plan has asked for it"
    within = network.latency * stores.put / (ranks - 1)
    if not delivers_lines(network):
        return [ShortForm("words", STEPS * within / ADDED["words"])]
    return [ShortForm("words", AGREEING * within / ADDED["words"]), ShortForm("lines", STEPS * within / ADDED["lines"])]


@dataclass(frozen=True)
class HeaderCall:
    """A collective's use of a function of the headers.

    Attributes:
        function: its name without the form of its messages.
        element: the template's arguments for the elements.
        part: bytes of a part; None if calls differ: then all forms are compiled.
        flags: further arguments of the template.
    """

    function: str
    element: Element
    part: int | None
    flags: tuple[str, ...] = ()


class MessageForms:
    """The forms of messages for the parts of a collective."""

    def __init__(self, context: ProgramContext, placed: PlacedCollective, use: HeaderCall):
        machine = context.target.machine
        self.team, self.use = placed.team(context), use
        self.moves = use.function in MOVING
        self.sms = machine.program_units
        self._short = short(context, placed, self.team.size) if self.team.size > 1 else []

    def of(self, part: int) -> tuple[str, ...]:
        """The form for a part: the first that fits, or the last one where peers can store into its target."""
        for form, most in self._short:
            if part <= most:
                return (form,)
        blocks = self.sms * blocks_per_sm("slots", self.team.size)
        several = part > blocks * largest_slot(self.team.size - 1)
        return ("slots", "straight") if several and self.moves else ("slots",)

    @property
    def kernels(self) -> dict[str, HeaderKernel]:
        """The kernel of each form that a call may use; none for a team of one."""
        if self.team.size == 1:
            return {}
        use = self.use
        every = (*(form for form, _ in self._short), *self.of(sys.maxsize))
        forms = every if use.part is None else self.of(use.part)
        return {form: HeaderKernel(use.function, form, use.element, self.team.size, use.flags) for form in forms}


class BlockMessages:
    """A program's use of a function of the headers for one collective."""

    def __init__(self, context: ProgramContext, placed: PlacedCollective, use: HeaderCall):
        """Collective."""
        self._context, self._level = context, placed.made.level
        self._forms = MessageForms(context, placed, use)
        self.team, self._sets = self._forms.team, SETS.get(use.function, 1)
        self._functions: dict[str, dict[bool, Any]] = {}
        self._blocks: dict[str, int] = {}
        if self.team.size == 1:
            return
        self._site = placed.site(context)
        for form, kernel in self._forms.kernels.items():
            self._functions[form] = functions(context.device_code(kernel.text), kernel, context.device.index)
            self._blocks[form] = self._forms.sms * kernel.blocks_per_sm

    def between(
        self, source: torch.Tensor, target: torch.Tensor, parts: PartStrides, root: int = 0
    ) -> list[StreamWork]:
        """A launch that exchanges the parts of contiguous tensors. Collective if it needs a new workspace."""
        if parts.nbytes == 0:
            return []
        if self.team.size == 1:
            return moved(source, target)
        context, (form, *straight) = self._context, self._forms.of(parts.nbytes)
        blocks = self._blocks[form]
        if form in SHARING:
            most = most_threads(form, self.team.size)
            grid, slots = short_grid(parts.nbytes, blocks, SHARING[form], most), SHORT_SLOTS
        else:
            grid, slots = slots_grid(parts.nbytes, blocks, self.team.size - 1), LONG_SLOTS
        shape = SlotShape(self._level, self.team.size, self._sets, slots, blocks, grid.slot, form)
        exchange = exchange_of(context, self.team, shape, self._site, parts)
        exchange.source, exchange.target, exchange.root = source.data_ptr(), target.data_ptr(), root
        exchange.behind = self._behind(shape, target, parts) if straight else 0
        if exchange.behind:
            (form,) = straight
        function, follows = self._functions[form][is_aligned(exchange)], form in SHARING
        return [launch(function, grid.blocks, grid.threads, exchange, context.device, follows)]

    def _behind(self, shape: SlotShape, target: torch.Tensor, parts: PartStrides) -> int:
        """Offset of the target from the workspace in units, if peers may store into the target; else 0."""
        heap, slots = self._context.heap, self._context.exchanges.get(shape, self._context.peer_group).slots
        if not heap.is_symmetric(target) or parts.nbytes % UNIT_BYTES or parts.target_step % UNIT_BYTES:
            return 0
        units, rest = divmod(heap.offset(target) - heap.offset(slots), UNIT_BYTES)
        return 0 if rest else units


def is_aligned(exchange: ExchangeArgument) -> bool:
    """Whether all parts begin at multiples of a thread's store."""
    places = exchange.source, exchange.target, exchange.source_step, exchange.target_step
    return all(place % UNIT_BYTES == 0 for place in places)


NO_PARTS = PartStrides(0, 0)


def exchange_of(
    context: ProgramContext, team: SiblingDevices, shape: SlotShape | Inbox, site: int, parts: PartStrides = NO_PARTS
) -> ExchangeArgument:
    """A kernel's arguments except the tensors: workspace, parts and ranks. Collective if the workspace is new."""
    workspace = context.exchanges.get(shape, context.peer_group)
    return ExchangeArgument(
        workspace=workspace.first,
        stride=context.peer_group.stride,
        slot=shape.slot,
        counts=workspace.counts.data_ptr(),
        report=context.guard.records.device.data_ptr(),
        limit=context.guard.limit_ns,
        rank=team.rank,
        first=team.first - context.peer_group.first,
        step=team.step,
        shift=context.peer_group.shift,
        devices=context.peer_group.size,
        blocks=shape.blocks,
        site=site,
        bytes=parts.nbytes,
        total=parts.total,
        source_step=parts.source_step,
        target_step=parts.target_step,
    )
