# SPDX-License-Identifier: MIT
"""Costs of operations between two units: transfers over the machine's links, signals."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, active, spread, uniform
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Block, Region
from tilescale.backends.emulator.interpret.scales import instance
from tilescale.backends.emulator.operations.remote import Flag, Peer
from tilescale.backends.emulator.record.costs import Demands, Traffic
from tilescale.backends.emulator.record.recorder import Recorder
from tilescale.backends.emulator.record.registry import cost
from tilescale.cost.operations import copy_choice
from tilescale.errors import UnsupportedError
from tilescale.hda import Mechanism
from tilescale.program import ops
from tilescale.program.operations import AtomicAdd, Collective, Copy, Signal
from tilescale.timing.steps import WorkPart, merged


@cost(ops.COPY.name, runs=True)
def _remote_copy(recorder: Recorder, compiler: Compiler, call: ir.Call) -> Closure:
    """A put takes its startup and the transfer time of its bytes, and is visible a latency later. A get takes a round
    trip. Elements travel in the type of the peer's tile."""
    where, copy = compiler.where, Copy.of(call)
    near = Traffic(recorder, compiler, copy.near, not copy.to_peer)
    bits, far_bits = (ir.bits(str(ir.region_parts(region)[0].dtype)) for region in (copy.near, copy.far))
    peer = Peer(compiler, copy.peer, copy.level)
    is_queued = compiler.is_queued(call)
    choose = _by_host(copy.impl) if is_queued else _by_choice(recorder, compiler, call)
    name = "put" if copy.to_peer else "get"
    signals = None
    if copy.signal is not None:
        signals = _signal_cost(recorder, compiler, copy.signal, copy.value, copy.update, peer)

    def record(frame: Frame) -> None:
        here, there = frame.run.number(frame.unit), frame.run.number(peer.unit(frame))
        demands, _, held = near.demands(frame)
        nbytes = held * far_bits // bits
        path_cost = _path_cost(recorder, here, there, nbytes, name, choose, copy.level, frame.program is not None)
        far = recorder.far_memory(there, nbytes) if there != here else {}
        part = WorkPart(name, "transfer", where, merged([demands, path_cost.demands, far]), nbytes)
        if is_queued:
            recorder.work(frame, part, path_cost.moving + path_cost.latency)
        elif copy.to_peer:
            recorder.work(frame, part, path_cost.startup + path_cost.moving, path_cost.latency)
        else:
            recorder.work(frame, part, path_cost.startup + path_cost.moving + 2 * path_cost.latency)
        if signals is not None:
            signals(frame)

    return record


def chunk_cost(
    recorder: Recorder, compiler: Compiler, made: Collective, source: Region, flag: Flag
) -> Callable[[Frame, Unit, Block | None, Block], None]:
    """The cost of a collective's chunk on a copy queue: the transfer to a unit, None if it is local, and the signal.

    Like every queued operation it ends when it has arrived, and its startup overlaps the operations before it.
    """
    where = compiler.where
    choose, root = _by_host(made.impl), source.home.root
    title = f"signal {flag.region.home.name}"

    def record(frame: Frame, unit: Unit, block: Block | None, element: Block) -> None:
        here, there = frame.run.number(frame.unit), frame.run.number(unit)
        if block is not None:
            tile = (root, block.begins, block.extents), block.nbytes
            demands, nbytes = recorder.touches(frame, lambda _: tile, False)
            far = recorder.far_memory(there, nbytes)
            path_cost = PathCost({}, 0.0, 0.0, recorder.rates.latency("global"))
            if here != there:
                path_cost = _path_cost(recorder, here, there, nbytes, "put", choose, made.level, False)
            part = WorkPart(made.name, "transfer", where, merged([demands, path_cost.demands, far]), nbytes)
            recorder.work(frame, part, path_cost.moving + path_cost.latency)
        if element.within:
            recorder.signal(element.view(), "add", 1, _delay(recorder, here, there), where, title)

    return record


Chooser = Callable[[Sequence[Mechanism]], list[Mechanism]]
"""A selection among the mechanisms of a path."""


def _by_choice(recorder: Recorder, compiler: Compiler, call: ir.Call) -> Chooser:
    """The mechanism that the cost model chooses for a copy; all where no rule of it fits."""
    whole = compiler.executing == compiler.machine.tensor_level
    try:
        programs = None if whole else recorder.rates.places
        chosen = copy_choice(call, recorder.machine, recorder.extents, programs, names=compiler.program.names).name
    except UnsupportedError:
        return list
    return lambda offers: [m for m in offers if m.name == chosen] or list(offers)


def _by_host(impl: str | None) -> Chooser:
    """The requested mechanism, or one that moves data while no program runs.

    Raises (when called):
        UnsupportedError: the path has no such mechanism.
    """

    def choose(offers: Sequence[Mechanism]) -> list[Mechanism]:
        able = [m for m in offers if (m.name == impl if impl else m.started_by == "host")]
        if not able:
            found = ", ".join(m.name for m in offers) or "nothing"
            raise UnsupportedError(
                f"no {impl or 'mechanism that runs without programs'} on the path of this copy, which offers {found}",
                hint="copy from inside a program, or between units of one network that has a copy engine",
            )
        return able

    return choose


class PathCost(NamedTuple):
    """A transfer between two units: demands on links; seconds until it begins, minimum seconds of its bytes, and
    seconds from then until they are visible."""

    demands: Demands
    startup: float
    moving: float
    latency: float


def _path_cost(
    recorder: Recorder,
    here: int,
    there: int,
    nbytes: int,
    operation: str,
    choose: Chooser,
    level: str,
    by_program: bool,
) -> PathCost:
    if here == there:
        return _inside(recorder, nbytes, level)
    path = recorder.rates.path(here, there, recorder.sizes)
    offers = choose([m for m in path.mechanisms if m.rate(operation)])
    if not offers:
        return PathCost(recorder.rates.over(path, nbytes, 1.0), 0.0, 0.0, path.latency)
    best = min(offers, key=lambda m: m.seconds(nbytes, operation, bandwidth=path.bandwidth))
    rate = min(best.rate(operation) or 0.0, path.bandwidth)
    demands: dict[Hashable, float] = dict(recorder.rates.over(path, nbytes, rate / path.bandwidth))
    if by_program and best.per_program:
        # All transfers in flight of a program share its own resources.
        demands[best.name] = nbytes / best.per_program
        rate = min(rate, best.per_program)
    return PathCost(demands, best.startup, nbytes / rate, path.latency)


def _inside(recorder: Recorder, nbytes: int, level: str) -> PathCost:
    """The transfer between units of one tensor-owning unit: thread groups of a program, programs of a cluster."""
    network = recorder.machine.network(level)
    if network is None:
        layer = recorder.rates.layers["shared"]
        return PathCost(recorder.rates.on_chip("shared", 2 * nbytes), layer.latency, 0.0, layer.latency)
    offers = network.mechanisms
    startup = min(m.startup for m in offers)
    return PathCost({network.name: nbytes / network.bandwidth}, startup, 0.0, network.latency)


@cost(ops.SIGNAL.name, runs=True)
def _signal(recorder: Recorder, compiler: Compiler, call: ir.Call) -> Closure:
    signal = Signal.of(call)
    peer = None if signal.peer is None or signal.level is None else Peer(compiler, signal.peer, signal.level)
    return _signal_cost(recorder, compiler, signal.flag, signal.value, signal.op, peer)


def _signal_cost(
    recorder: Recorder, compiler: Compiler, flag: ir.Call, value: ir.PrimExpr, op: str, peer: Peer | None
) -> Closure:
    where = compiler.where
    region, amount = Region(compiler, flag), compiler.expr(value)

    def record(frame: Frame) -> None:
        unit = peer.unit(frame) if peer is not None else None
        array = None if unit is None else instance(compiler, region.home.slot, frame, unit)
        block = region.block(frame, array)
        here = frame.run.number(frame.unit)
        delay = _delay(recorder, here, here if unit is None else frame.run.number(unit))
        if block.within:
            name = f"signal {region.home.name}"
            recorder.signal(block.view(), op, uniform(amount(frame), frame, "a signal's value"), delay, where, name)

    return record


def _delay(recorder: Recorder, here: int, there: int) -> float:
    """Seconds until a signal is seen."""
    rates = recorder.rates
    return rates.path(here, there, recorder.sizes).latency if here != there else rates.latency("global")


@cost(ops.ATOMIC_ADD.name, runs=True)
def _atomic_add(recorder: Recorder, compiler: Compiler, call: ir.Call) -> Closure:
    """A put whose target is read and written; a fetch-add takes a round trip."""
    where, made = compiler.where, AtomicAdd.of(call)
    near = Traffic(recorder, compiler, made.value, False) if made.is_of_tiles else None
    target, peer = Region(compiler, made.target), Peer(compiler, made.peer, made.level)
    itemsize, wanted, ranks = target.home.dtype.itemsize, made.impl or "lsu", _ranks(compiler, peer)

    def choose(offers: Sequence[Mechanism]) -> list[Mechanism]:
        return [m for m in offers if m.name == wanted] or list(offers)

    def record(frame: Frame) -> None:
        for rank, count in ranks(frame):
            here, there = frame.run.number(frame.unit), frame.run.number(peer.at(frame, rank))
            read, _, nbytes = near.demands(frame) if near is not None else ({}, 0.0, count * itemsize)
            path_cost = _path_cost(recorder, here, there, nbytes, "put", choose, made.level, frame.program is not None)
            far = recorder.far_memory(there, 2 * nbytes)
            part = WorkPart("atomic add", "transfer", where, merged([read, path_cost.demands, far]), nbytes)
            if made.previous is None:
                recorder.work(frame, part, path_cost.startup + path_cost.moving, path_cost.latency)
            else:
                recorder.work(frame, part, path_cost.startup + path_cost.moving + 2 * path_cost.latency)

    return record


def _ranks(compiler: Compiler, peer: Peer) -> Callable[[Frame], list[tuple[int, int]]]:
    """The peers of an operation, and the number of times; in a parallel loop those of its elements."""
    if not compiler.axes:
        return lambda frame: [(uniform(peer.rank(frame), frame, "a peer's rank"), 1)]

    def of_elements(frame: Frame) -> list[tuple[int, int]]:
        ranks, counts = np.unique(spread(peer.rank(frame), frame)[active(frame)], return_counts=True)
        return list(zip(ranks.tolist(), counts.tolist(), strict=True))

    return of_elements
