# SPDX-License-Identifier: MIT
"""What operations cost: one rule each, beside the rules in which they are run.

A rule's closure writes down, before the operation runs, what it demands of the machine: arithmetic, bytes of each
memory, links. Numbers come from the machine description (`tilescale/timing/rates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, spread, uniform
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.access import Block, Region
from tilescale.backends.emulator.interpret.compiler import PRIVATE, Compiler
from tilescale.backends.emulator.interpret.expr import Closure
from tilescale.backends.emulator.interpret.registry import cost
from tilescale.backends.emulator.interpret.scales import instance
from tilescale.backends.emulator.operations.remote import Flag, Peer
from tilescale.backends.emulator.operations.threads import pointed
from tilescale.backends.emulator.record.tally import Tally, points
from tilescale.cost.operations import copy_choice
from tilescale.errors import UnsupportedError
from tilescale.hda import Mechanism
from tilescale.program import ops
from tilescale.program.operations import Collective, Copy, Signal
from tilescale.timing.steps import Part, merged

Demands = dict[Any, float]


class Traffic:
    """One side of a tile's way: the memory that it is read from or written to.

    `each`: whether each thread moves a tile of its own, from or to a thread-private buffer.
    """

    def __init__(self, compiler: Compiler, region: Any, writes: bool, each: bool = False):
        self.region, self.writes, self.each = Region(compiler, region), writes, each
        self.kind = ir.scope_kind(self.region.home.buffer)
        self.root = compiler.root(self.region.home.slot)
        self.clock = compiler.clock
        layer = self.clock.rates.layers[self.kind]
        self.latency = 0.0 if writes else layer.latency
        self.per_program = layer.per_program
        self.itemsize = self.region.home.dtype.itemsize

    def demands(self, frame: Frame) -> tuple[Demands, float, int]:
        """What it demands, how long it takes at least, and how many bytes it is."""
        if self.region.home.lanes:
            return {}, 0.0, 0
        if self.kind != "global":
            _, nbytes = self._tile(frame)
            return self.clock.rates.on_chip(self.kind, nbytes), self.latency, nbytes
        demands, nbytes = self.clock.touches(frame, self._tile, self.writes)
        floor = nbytes / self.per_program if self.per_program and frame.program is not None else 0.0
        return demands, floor + self.latency, nbytes

    def _tile(self, frame: Frame) -> tuple[Hashable, int]:
        """What names the elements, and their bytes."""
        if self.each:
            return self._tiles_of_threads(frame)
        block = self.region.block(frame)
        return (self.root, block.begins, block.extents), block.nbytes

    def _tiles_of_threads(self, frame: Frame) -> tuple[Hashable, int]:
        """Threads that begin at the same place move one tile."""
        extents = tuple(uniform(n(frame), frame, "a tile's extent") for n in self.region.extents)
        active = spread(True if frame.mask is None else frame.mask, frame)
        begins = np.unique([spread(b(frame), frame)[active] for b in self.region.begins], axis=1)
        return (self.root, begins.tobytes(), extents), begins.shape[1] * math.prod(extents) * self.itemsize


def _moves(compiler: Compiler, name: str, sides: list[Traffic], asynchronous: bool = False) -> Closure:
    """A step that moves tiles; it is a transfer if one of them lies in device memory."""
    clock, where = compiler.clock, compiler.where
    kind = "transfer" if any(side.kind == "global" for side in sides) else "compute"

    def record(frame: Frame) -> None:
        found = [side.demands(frame) for side in sides]
        nbytes = max(size for _, _, size in found)
        floor = max(seconds for _, seconds, _ in found)
        part = Part(name, kind, where, merged([demands for demands, _, _ in found]), nbytes)
        clock.work(frame, part, floor, asynchronous=asynchronous)

    return record


def _copies(name: str, asynchronous: bool) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        each = any(ir.region_parts(region)[0].scope() in PRIVATE for region in call.args[:2])
        sides = [Traffic(compiler, call.args[0], False, each), Traffic(compiler, call.args[1], True, each)]
        return _moves(compiler, name, sides, asynchronous)

    return rule


cost("tl.tileop.copy", runs=True)(_copies("copy", False))
cost("tl.tileop.async_copy", "tl.tileop.tma_copy", runs=True)(_copies("async copy", True))
cost("tl.tileop.transpose")(_copies("transpose", False))
cost("tl.tileop.im2col", "tl.tileop.c2d_im2col")(_copies("im2col", False))


@cost("tl.tileop.fill", runs=True)
def _fill(compiler: Compiler, call: ir.Call) -> Closure:
    return _moves(compiler, "fill", [Traffic(compiler, call.args[0], True)])


@cost("tirx.ptx_wait_group", "tl.tma_store_wait", runs=True)
def _settle(compiler: Compiler, call: ir.Call) -> Closure:
    left = ir.constant(call.args[0]) if len(call.args) else 0
    return lambda frame: compiler.clock.settle(left or 0)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _product(a: int, b: int, transpose: tuple[int, int]) -> Callable[[Compiler, ir.Call], Closure]:
    """A matrix product whose operands are arguments `a` and `b`, and the result the one after."""

    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        clock, where = compiler.clock, compiler.where
        left, result = Region(compiler, call.args[a]), Region(compiler, call.args[b + 1])
        operands = [Traffic(compiler, call.args[i], False) for i in (a, b)]
        flipped = bool(ir.constant(call.args[transpose[0]]))
        # A structured-sparse operand holds every second element of its rows.
        dense = 2 if b - a > 1 else 1

        def record(frame: Frame) -> None:
            shape, out = left.block(frame).extents[-2:], result.block(frame).extents[-2:]
            flops = 2 * math.prod(out) * shape[0 if flipped else 1] * dense
            arithmetic = clock.rates.product(flops / dense, str(left.home.buffer.dtype))
            moved = [side.demands(frame)[0] for side in operands if side.kind == "shared"]
            clock.work(frame, Part("gemm", "compute", where, merged([arithmetic, *moved]), flops=flops))

        return record

    return rule


cost("tl.tileop.gemm", "tl.tileop.wgmma_gemm", "tl.tileop.tcgen05_gemm", runs=True)(_product(0, 1, (3, 4)))
cost("tl.tileop.gemm_sp", "tl.tileop.wgmma_gemm_sp", "tl.tileop.tcgen05_gemm_sp")(_product(0, 2, (4, 6)))


def _elements(name: str) -> Callable[[Compiler, ir.Call], Closure]:
    """An operation that takes each element of its first tile once, and stores its second."""

    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        clock, where = compiler.clock, compiler.where
        is_tile = ir.op_name(call.args[0]) == "tl.region" or isinstance(call.args[0], ir.BufferLoad)
        sides = [Traffic(compiler, call.args[0], False)] if is_tile else []
        if len(call.args) > 1 and ir.op_name(call.args[1]) == "tl.region":
            sides.append(Traffic(compiler, call.args[1], True))

        def record(frame: Frame) -> None:
            found = [side.demands(frame) for side in sides]
            count = max([size // side.itemsize for side, (_, _, size) in zip(sides, found, strict=True)], default=0)
            dtype = str(sides[0].region.home.buffer.dtype) if sides else "float32"
            arithmetic = clock.rates.arithmetic({("vector", dtype): 2 * count})
            demands = merged([arithmetic, *(demands for demands, _, _ in found)])
            floor = max([seconds for _, seconds, _ in found], default=0.0)
            kind = "transfer" if any(side.kind == "global" for side in sides) else "compute"
            clock.work(frame, Part(name, kind, where, demands, flops=count), floor)

        return record

    return rule


for _name in ("reduce", "cumsum", "cummax", "atomicadd", "atomicmax", "atomicmin", "reducer_init"):
    cost(f"tl.tileop.{_name}")(_elements(_name))
cost("tl.tileop.finalize_reducer_v2")(_elements("finalize_reducer"))
cost("tl.reducer_update")(lambda compiler, call: lambda frame: None)


def _atomic(lanes: int = 1, returns: bool = False) -> Callable[[Compiler, ir.Call], Closure]:
    """An update of one element, or of `lanes` neighbouring ones, by each active thread: read, and written."""

    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        clock, where = compiler.clock, compiler.where
        home = pointed(compiler, call.args[0]).home
        scope, root = ir.scope_kind(home.buffer), compiler.root(home.slot)
        far = scope == "global"
        latency = clock.rates.latency(scope) if returns else 0.0

        def record(frame: Frame) -> None:
            nbytes = 2 * lanes * home.dtype.itemsize * frame.active()
            moved = clock.rates.on_chip(scope, nbytes)
            if far:
                moved, _ = clock.touches(frame, lambda _: ((root, where), nbytes), True)
            clock.work(frame, Part("atomic", "transfer" if far else "compute", where, moved, nbytes), latency)

        return record

    return rule


for _name in ("add", "max", "min"):
    cost(f"tl.atomic_{_name}_elem_op", runs=True)(_atomic())
    cost(f"tl.atomic_{_name}_ret_elem_op", runs=True)(_atomic(returns=True))
cost("tl.atomic_or_elem_op", "tl.atomic_store_elem_op", runs=True)(_atomic())
cost("tl.atomic_load_elem_op", runs=True)(_atomic(returns=True))
cost("tl.atomic_addx2_elem_op", runs=True)(_atomic(lanes=2))
cost("tl.atomic_addx4_elem_op", runs=True)(_atomic(lanes=4))


def loop_cost(compiler: Compiler, found: Tally, name: str) -> Callable[[Frame, tuple[int, ...]], None]:
    """Writes down what a statement on single elements costs over a space of points."""
    clock, where = compiler.clock, compiler.where
    flops = sum(found.operations.values())
    slots = [(compiler.root(compiler.slot(access.buffer.data)), access) for access in found.accesses]
    layer = clock.rates.layers["global"]
    kind = "transfer" if slots else "compute"
    one = merged([clock.rates.arithmetic(found.operations), clock.rates.on_chip("shared", found.shared)])

    def record(frame: Frame, space: tuple[int, ...]) -> None:
        every = math.prod(space)
        parts = [merged([one], every)]
        total = 0
        for slot, access in slots:
            nbytes = access.nbytes * access.times * points(space, access.axes)
            total += nbytes
            moved, _ = clock.touches(frame, _mine(slot, nbytes), access.writes)
            parts.append(moved)
        floor = layer.latency if any(not access.writes for _, access in slots) else 0.0
        if layer.per_program and frame.program is not None:
            floor += total / layer.per_program
        clock.work(frame, Part(name, kind, where, merged(parts), total, flops * every), floor)

    programs = [compiler.slot(var) for var in compiler.launch.programs] if compiler.launch is not None else []

    def _mine(slot: int, nbytes: int) -> Callable[[Frame], tuple[Hashable, int]]:
        return lambda frame: ((slot, where, tuple(frame.slots[s] for s in programs)), nbytes)

    return record


# -- to and from a peer ------------------------------------------------------------------------------------------------


@cost(ops.COPY.name, runs=True)
def _remote_copy(compiler: Compiler, call: ir.Call) -> Closure:
    """A put takes its start-up and its bytes' way, and is seen there a latency later. A get takes there and back."""
    clock, where, copy = compiler.clock, compiler.where, Copy.of(call)
    near = Traffic(compiler, copy.near, not copy.to_peer)
    peer = Peer(compiler, copy.peer, copy.level)
    is_queued = compiler.is_queued(call)
    choose = _by_host(copy.impl) if is_queued else _by_choice(compiler, call)
    name = "put" if copy.to_peer else "get"
    tells = None
    if copy.signal is not None:
        tells = _tells(compiler, copy.signal, copy.value, copy.op, peer)

    def record(frame: Frame) -> None:
        here, there = frame.run.number(frame.unit), frame.run.number(peer.unit(frame))
        demands, _, nbytes = near.demands(frame)
        way = _way(clock, here, there, nbytes, name, choose, copy.level, frame.program is not None)
        far = clock.far_memory(there, nbytes) if there != here else {}
        part = Part(name, "transfer", where, merged([demands, way.demands, far]), nbytes)
        if is_queued:
            clock.work(frame, part, way.moving + way.latency)
        elif copy.to_peer:
            clock.work(frame, part, way.startup + way.moving, way.latency)
        else:
            clock.work(frame, part, way.startup + way.moving + 2 * way.latency)
        if tells is not None:
            tells(frame)

    return record


def sends(
    compiler: Compiler, gather: Collective, source: Region, flag: Flag
) -> Callable[[Frame, Unit, Block | None, Block], None]:
    """What a chunk of a gather takes on a copy queue: its way to a unit, None where it is there, and the signal.

    Like all that a queue executes it is over when it has arrived, and its start-up was while others were before it.
    """
    clock, where, choose, root = compiler.clock, compiler.where, _by_host(gather.impl), source.home.root
    told = f"signal {flag.region.home.name}"

    def record(frame: Frame, unit: Unit, block: Block | None, element: Block) -> None:
        here, there = frame.run.number(frame.unit), frame.run.number(unit)
        if block is not None:
            tile = (root, block.begins, block.extents), block.nbytes
            demands, nbytes = clock.touches(frame, lambda _: tile, False)
            far = clock.far_memory(there, nbytes)
            way = Way({}, 0.0, 0.0, clock.rates.latency("global"))
            if here != there:
                way = _way(clock, here, there, nbytes, "put", choose, gather.level, False)
            part = Part(gather.name, "transfer", where, merged([demands, way.demands, far]), nbytes)
            clock.work(frame, part, way.moving + way.latency)
        if element.within:
            clock.signal(element.view(), "add", 1, _delay(clock, here, there), where, told)

    return record


Chooser = Callable[[Sequence[Mechanism]], list[Mechanism]]
"""Which mechanisms of a way come into question."""


def _by_choice(compiler: Compiler, call: ir.Call) -> Chooser:
    """The mechanism that the cost model takes for a copy; all where no rule of it fits."""
    clock, whole = compiler.clock, compiler.executing == compiler.machine.tensor_level
    try:
        chosen = copy_choice(call, clock.machine, clock.extents, None if whole else clock.rates.places).name
    except UnsupportedError:
        return list
    return lambda offers: [m for m in offers if m.name == chosen] or list(offers)


def _by_host(impl: str | None) -> Chooser:
    """What moves data while no program runs, or what was asked for.

    Raises (when called):
        UnsupportedError: the way offers no such mechanism.
    """

    def choose(offers: Sequence[Mechanism]) -> list[Mechanism]:
        able = [m for m in offers if (m.name == impl if impl else m.started_by == "host")]
        if not able:
            found = ", ".join(m.name for m in offers) or "nothing"
            raise UnsupportedError(
                f"no {impl or 'mechanism that runs without programs'} on the way of this copy, which offers {found}",
                hint="copy from inside a program, or between units of one network that has a copy engine",
            )
        return able

    return choose


class Way(NamedTuple):
    """What a transfer between two units takes: demands on links; seconds until it begins, that its bytes take at least,
    and from then until they are there."""

    demands: Demands
    startup: float
    moving: float
    latency: float


def _way(
    clock: Any, here: int, there: int, nbytes: int, operation: str, choose: Chooser, level: str, by_program: bool
) -> Way:
    if here == there:
        return _inside(clock, nbytes, level)
    path = clock.rates.path(here, there, clock.sizes)
    offers = choose([m for m in path.mechanisms if m.rate(operation)])
    if not offers:
        return Way(clock.rates.over(path, nbytes, 1.0), 0.0, 0.0, path.latency)
    best = min(offers, key=lambda m: m.seconds(nbytes, operation, bandwidth=path.bandwidth))
    rate = min(best.rate(operation), path.bandwidth)
    demands: dict[Hashable, float] = dict(clock.rates.over(path, nbytes, rate / path.bandwidth))
    if by_program and best.per_program:
        # All that a program has under way shares what it reaches alone.
        demands[best.name] = nbytes / best.per_program
        rate = min(rate, best.per_program)
    return Way(demands, best.startup, nbytes / rate, path.latency)


def _inside(clock: Any, nbytes: int, level: str) -> Way:
    """Between units that share a tensor-owning one: lanes of a program, programs of a cluster."""
    network = clock.machine.network(level)
    if network is None:
        layer = clock.rates.layers["shared"]
        return Way(clock.rates.on_chip("shared", 2 * nbytes), layer.latency, 0.0, layer.latency)
    offers = network.mechanisms
    startup = min(m.startup for m in offers)
    return Way({network.name: nbytes / network.bandwidth}, startup, 0.0, network.latency)


@cost(ops.SIGNAL.name, runs=True)
def _signal(compiler: Compiler, call: ir.Call) -> Closure:
    signal = Signal.of(call)
    peer = Peer(compiler, signal.peer, signal.level) if signal.peer is not None else None
    return _tells(compiler, signal.flag, signal.value, signal.op, peer)


def _tells(compiler: Compiler, flag: Any, value: Any, op: str, peer: Peer | None) -> Closure:
    clock, where = compiler.clock, compiler.where
    region, amount = Region(compiler, flag), compiler.expr(value)

    def record(frame: Frame) -> None:
        unit = peer.unit(frame) if peer is not None else None
        array = None if unit is None else instance(compiler, region.home.slot, frame, unit)
        block = region.block(frame, array)
        here = frame.run.number(frame.unit)
        delay = _delay(clock, here, here if unit is None else frame.run.number(unit))
        if block.within:
            name = f"signal {region.home.name}"
            clock.signal(block.view(), op, uniform(amount(frame), frame, "a signal's value"), delay, where, name)

    return record


def _delay(clock: Any, here: int, there: int) -> float:
    """Seconds until a signal is seen."""
    return clock.rates.path(here, there, clock.sizes).latency if here != there else clock.rates.latency("global")


