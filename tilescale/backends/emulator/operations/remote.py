# SPDX-License-Identifier: MIT
"""Our operations between two units: remote copies, signals, waits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.execute.memory import address
from tilescale.backends.emulator.execute.observe import ATOMIC, ATOMIC_LOAD, ATOMIC_STORE
from tilescale.backends.emulator.execute.tasks import Wait
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.closures import Closure, located
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Block, Region
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.backends.emulator.interpret.scales import instance
from tilescale.backends.emulator.operations.tiles import fitted
from tilescale.errors import PeerOutOfRangeError
from tilescale.hda.route import advice_at_the_end
from tilescale.program import operations, ops

_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}

NOTHING_INSIDE = "a copy is clipped at the end of a tensor, and this one begins beyond it: correct where it begins"


def _numbered(units: int) -> str:
    return "rank 0 alone" if units == 1 else f"ranks 0 to {units - 1}"


# -- to and from a peer ------------------------------------------------------------------------------------------------


class Peer:
    """The unit that an operation names by its rank at a level."""

    def __init__(self, compiler: Compiler, rank: ir.PrimExpr, level: str):
        self.rank, self.level = compiler.expr(rank), level

    def unit(self, frame: Frame) -> Unit:
        """The peer. Raises PeerOutOfRangeError: the launch has no such unit."""
        return self.at(frame, uniform(self.rank(frame), frame, "a peer's rank"))

    def at(self, frame: Frame, rank: int) -> Unit:
        """The unit of a rank; raises PeerOutOfRangeError as `unit` does."""
        siblings = frame.unit.around(self.level).siblings
        if not 0 <= rank < siblings:
            raise PeerOutOfRangeError(
                f"{frame.unit} names peer {rank} of level {self.level!r}: the launch has {_numbered(siblings)}",
                hint=advice_at_the_end(frame.run.machine, self.level),
            )
        return frame.unit.counterpart(self.level, rank)


@operation(ops.COPY.name)
def _copy(compiler: Compiler, call: ir.Call) -> Closure:
    copy = operations.Copy.of(call)
    source, target = Region(compiler, copy.source), Region(compiler, copy.target)
    peer, to_peer = Peer(compiler, copy.peer, copy.level), copy.to_peer
    compiler.reached.add((target if to_peer else source).home.root)
    flag = None
    if copy.signal is not None:
        flag = Flag(compiler, copy.signal, copy.value, copy.update, peer.level)

    def run(frame: Frame) -> None:
        unit = peer.unit(frame)
        region = target if to_peer else source
        far = instance(compiler, region.home.slot, frame, unit)
        there = region.block(frame, far)
        if there.outside:
            raise region.home.out_of_bounds(frame, there.begins, there.array.shape, NOTHING_INSIDE)
        if compiler.data:
            tile = source.read(frame, None if to_peer else far)
            into, holder = (far, unit) if to_peer else (None, None)
            target.write(frame, fitted(tile, target.block(frame, into).extents), into, holder)
        frame.run.moved(frame.unit, unit, source.block(frame, None if to_peer else far).nbytes, to_peer)
        if flag is not None:
            flag.update(frame, unit)

    if not compiler.is_queued(call):
        return run
    gate = [waits(compiler, copy.after)] if copy.after is not None else []
    record = [compiler.instrumentation.copy(compiler, call)] if compiler.instrumentation is not None else []
    return queued(compiler, [*gate, *record, run])


class Flag:
    """A flag and the update by a signal."""

    def __init__(self, compiler: Compiler, region: ir.Call, value: Any, op: str, level: str | None):
        self.compiler, self.op, self.level = compiler, op, level
        self.region, self.value = Region(compiler, region), compiler.expr(value)
        compiler.signals.setdefault(compiler.root(self.region.home.slot), []).append(compiler.where)

    def update(self, frame: Frame, unit: Unit | None) -> None:
        """Update the flag of a unit, or the frame's unit's own."""
        array = None if unit is None else instance(self.compiler, self.region.home.slot, frame, unit)
        self.update_at(frame, self.region.block(frame, array))

    def update_at(self, frame: Frame, block: Block) -> None:
        """Update the flag that is the element of a block."""
        if not block.within:
            raise self.region.home.out_of_bounds(frame, block.begins, block.array.shape)
        flag, value = block.view(), uniform(self.value(frame), frame, "the value of a signal")
        self.region.home.touched(frame, ATOMIC if self.op == "add" else ATOMIC_STORE, flag)
        before = flag.item()
        frame.run.flag_at_begin(flag, before)
        if self.op == "set":
            flag[...] = value
        else:
            flag += numerics.convert(value, flag.dtype)
        frame.run.scheduler.progress += 1
        frame.run.signalled(frame.unit, self.level, address(flag))
        for observer in frame.run.observers:
            observer.signals(frame, self.region.home, flag, self.op, before)


@operation(ops.SIGNAL.name, collective=False)
def _signal(compiler: Compiler, call: ir.Call) -> Closure:
    signal = operations.Signal.of(call)
    flag = Flag(compiler, signal.flag, signal.value, signal.op, signal.level)
    peer = None if signal.peer is None or signal.level is None else Peer(compiler, signal.peer, signal.level)
    return lambda frame: flag.update(frame, peer.unit(frame) if peer is not None else None)


@operation(ops.WAIT.name)
def _wait(compiler: Compiler, call: ir.Call) -> Closure:
    return waits(compiler, operations.Wait.of(call))


def waits(compiler: Compiler, wait: operations.Wait) -> Closure:
    """A wait of the current task until all flags of a region of the unit, or any of them, compare true."""
    flags, value = Region(compiler, wait.flag), compiler.expr(wait.value)
    index = Region(compiler, wait.index) if wait.index is not None else None
    symbol, where, quantified = wait.compare, compiler.where, "" if index is None else "any of "
    holds, root = _COMPARE[symbol], compiler.root(flags.home.slot)

    def run(frame: Frame) -> None:
        block, wanted = flags.block(frame), uniform(value(frame), frame, "the value a wait compares with")
        if not block.within:
            raise flags.home.out_of_bounds(frame, block.begins, block.array.shape)
        view, name = block.view(), f"{flags.home.name}[{_sliced(block)}]"
        for flag in (_single(view, number) for number in range(view.size)):
            begin = frame.run.flag_at_begin(flag, flag.item())
            if begin and holds(begin, wanted):
                frame.run.stale.setdefault((flags.home.name, name), begin)

        def holding() -> np.ndarray:
            return np.asarray(holds(view, wanted)).reshape(-1)

        frame.run.scheduler.block(
            Wait(
                lambda: bool(holding().all() if index is None else holding().any()),
                f"{quantified}{name} {symbol} {wanted}",
                lambda: f"{name} = {view.item() if view.size == 1 else view.reshape(-1).tolist()}",
                where,
                lambda: frame.run.signallers(
                    address(_single(view, int(holding().argmin()))), compiler.signals.get(root, [])
                ),
                patient=True,
                flag=(flags.home, tuple(map(int, block.begins)), frame.unit),
            )
        )
        chosen = range(view.size)
        if index is not None:
            found = frame.run.scheduler.pick(np.flatnonzero(holding()).tolist())
            index.write(frame, np.array([found]))
            chosen = range(found, found + 1)
        for number in chosen:
            flag = _single(view, number)
            flags.home.touched(frame, ATOMIC_LOAD, flag)
            for observer in frame.run.listeners:
                observer.waited(frame, flags.home, flag, lambda seen: bool(holds(seen, wanted)))

    return run


def _single(view: np.ndarray, number: int) -> np.ndarray:
    """One element of a region of flags, as an array that shares its memory."""
    at = np.unravel_index(number, view.shape)
    return view[tuple(slice(i, i + 1) for i in at)].reshape(1)


def _sliced(block: Block) -> str:
    """The indices of a region, in the notation of the language."""
    pairs = zip(block.begins, block.extents, strict=True)
    return ", ".join(str(b) if n == 1 else f"{b}:{b + n}" for b, n in pairs)


def queued(compiler: Compiler, steps: Sequence[Closure]) -> Closure:
    """Start an asynchronous operation of these steps. They use the unit's variables of now, and memory as it is at
    their execution."""
    where = compiler.where

    def perform(side: Frame) -> None:
        for step in steps:
            step(side)
        side.run.scheduler.preempt(True)

    execute = located(perform, where)

    def start(frame: Frame) -> None:
        side = frame.fork(frame.unit, None)
        frame.run.queue_of(frame.unit).start(where, lambda: execute(side))

    return start
