# SPDX-License-Identifier: MIT
"""Instrumentation of closures with recording, as the compiler makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, is_vector
from tilescale.backends.emulator.interpret.access import element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Region
from tilescale.backends.emulator.interpret.symbols import PRIVATE
from tilescale.backends.emulator.operations.remote import Flag
from tilescale.backends.emulator.record.costs import loop_cost
from tilescale.backends.emulator.record.equivalence import Representatives, equivalence
from tilescale.backends.emulator.record.loops import timed
from tilescale.backends.emulator.record.recorder import Recorder
from tilescale.backends.emulator.record.registry import COSTS, RUN_WITHOUT_DATA
from tilescale.backends.emulator.record.tally import tally
from tilescale.backends.emulator.record.transfers import chunk_cost
from tilescale.passes.structure import location
from tilescale.program.effects import statements
from tilescale.program.model import Launch
from tilescale.program.operations import Collective, Operation, operation, signalled, waited
from tilescale.program.ops import COPY
from tilescale.program.persistent_loops import LoopIteration, iteration_of


class Recording:
    """Instrumentation that reports steps to a recorder before they are executed."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self._persistent: PersistentLoops | None = None

    def statement(self, compiler: Compiler, stmt: ir.Stmt, closure: Closure) -> Closure:
        return self._persistent_loops(compiler).instrumented(stmt, watched(self.recorder, compiler, stmt, closure))

    def operation(self, compiler: Compiler, call: ir.Call, closure: Closure | None) -> Closure | None:
        name = ir.op_name(call) or ""
        if name not in COSTS:
            return closure
        recorder, record = self.recorder, COSTS[name](self.recorder, compiler, call)
        if closure is None or (not compiler.data and name not in RUN_WITHOUT_DATA):
            return record

        def run(frame: Frame) -> Any:
            if not recorder.log.muted:
                record(frame)
            return closure(frame)

        return run

    def store(self, compiler: Compiler, stmt: ir.BufferStore, closure: Closure) -> Closure:
        recorder, record = self.recorder, loop_cost(self.recorder, compiler, tally(stmt, {}), "store")

        def run(frame: Frame) -> None:
            if not recorder.log.muted:
                record(frame, (frame.active(),))
            closure(frame)

        return run

    def loop(self, compiler: Compiler, stmt: ir.For, body: Closure, over: Callable[[Closure], Closure]) -> Closure:
        if stmt in self._persistent_loops(compiler).loops:
            return over(body)  # its roles hand over each tile
        return timed(self.recorder, compiler, stmt, body, over)

    def _persistent_loops(self, compiler: Compiler) -> PersistentLoops:
        if self._persistent is None:
            self._persistent = PersistentLoops(self.recorder, compiler)
        return self._persistent

    def nest(self, compiler: Compiler, body: ir.Stmt) -> Callable[[Frame, tuple[int, ...]], bool]:
        """A function to call before the body of a nest of parallel loops runs over a space; without data only flags are
        computed."""
        recorder, found = self.recorder, tally(body, compiler.axes)
        record = loop_cost(recorder, compiler, found, "elementwise")
        private = [compiler.slot(b.data) for b in found.stores if b.scope() in PRIVATE]
        written = {compiler.root(compiler.slot(b.data)) for b in found.stores}
        computes = compiler.data or bool(written & compiler.flags)

        def record_nest(frame: Frame, space: tuple[int, ...]) -> bool:
            if not recorder.log.muted:
                record(frame, space)
            if not computes:
                for slot in private:
                    frame.slots[slot].known = False
            return computes

        return record_nest

    def representatives(self, compiler: Compiler, launch: Launch, stmt: ir.Stmt) -> Representatives | None:
        if compiler.assumptions is not None:
            return None  # values may differ between programs and devices
        found = equivalence(compiler, launch, stmt)
        return Representatives(found, self.recorder) if found is not None else None

    def copy(self, compiler: Compiler, call: ir.Call) -> Closure:
        return COSTS[COPY.name](self.recorder, compiler, call)

    def chunk(self, compiler: Compiler, made: Collective, source: Region, flag: Flag) -> Callable[..., None]:
        return chunk_cost(self.recorder, compiler, made, source, flag)


class PersistentLoops:
    """The persistent loops of a program. `loops`: the loops; `refills`, the first statements after their pipelined
    loops, where there is an epilogue; `epilogues`: statements of epilogues, and whether they are the first one and the
    last one."""

    def __init__(self, recorder: Recorder, compiler: Compiler):
        self.recorder = recorder
        self.loops: set[ir.Stmt] = set()
        self.refills: set[ir.Stmt] = set()
        self.epilogues: dict[ir.Stmt, tuple[bool, bool]] = {}
        for stmt, _, launch in statements(compiler.program.body):
            iteration = None
            if isinstance(stmt, ir.For) and launch is not None:
                iteration = iteration_of(stmt, compiler.machine, compiler.surroundings)
            if iteration is not None:
                self.loops.add(stmt)
                self._note(iteration)

    def _note(self, iteration: LoopIteration) -> None:
        if iteration.epilogue:
            self.refills.add((*iteration.after, *iteration.epilogue)[0])
        for stmt in iteration.epilogue:
            self.epilogues[stmt] = stmt is iteration.epilogue[0], stmt is iteration.epilogue[-1]

    def instrumented(self, stmt: ir.Stmt, closure: Closure) -> Closure:
        """The closure of a statement, with a report of its role to the recorder."""
        if stmt in self.loops:
            return self._loop(closure)
        if stmt in self.epilogues:
            closure = self._epilogue(closure, *self.epilogues[stmt])
        return self._refilled(closure) if stmt in self.refills else closure

    def _loop(self, closure: Closure) -> Closure:
        recorder = self.recorder

        def run(frame: Frame) -> Any:
            has_roles = recorder.begins_persistent_loop()
            left = closure(frame)
            if has_roles:
                recorder.ends_persistent_loop()
            return left

        return run

    def _refilled(self, closure: Closure) -> Closure:
        recorder = self.recorder

        def run(frame: Frame) -> Any:
            recorder.waits_for_epilogue()
            return closure(frame)

        return run

    def _epilogue(self, closure: Closure, begins: bool, ends: bool) -> Closure:
        recorder = self.recorder

        def run(frame: Frame) -> Any:
            with recorder.as_epilogue(begins, ends):
                return closure(frame)

        return run


def _named_by(found: Operation | None) -> list[ir.Call]:
    """The flags that an operation of the language names."""
    waits = waited(found)
    return [*signalled(found), *([waits.flag] if waits is not None else [])]


class _FlagAccesses:
    """The flags of the accesses in a statement, where each is a single flag."""

    def __init__(self, compiler: Compiler, accesses: list[Any]):
        self._elements = [element(compiler, a.buffer, a.indices) for a in accesses if compiler.reaches_flags(a)]

    def of(self, frame: Frame) -> list[np.ndarray]:
        """Arrays of one element."""
        found = []
        for place in self._elements:
            index = [i(frame) for i in place.indices]
            array = place.home.array(frame)
            if any(is_vector(i) for i in index):
                continue
            if all(0 <= i < n for i, n in zip(index, array.shape, strict=True)):
                found.append(array[tuple(slice(i, i + 1) for i in index)])
        return found


def _without_own_flags(stmt: ir.Stmt) -> Sequence[Any]:
    """A statement without the flags that an operation of the language names, which are recorded anyway."""
    own = _named_by(operation(stmt.value)) if isinstance(stmt, ir.Evaluate) else []
    return [part for part in stmt.value.args if not any(part.same_as(flag) for flag in own)] if own else [stmt]


def watched(recorder: Recorder, compiler: Compiler, stmt: ir.Stmt, closure: Closure) -> Closure:
    """`closure`, followed by recording: if the statement may have changed flags, by a store or an atomic, all flags are
    read; if it is a loop that polls flags, the last values that it read are recorded."""
    is_parallel = isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL
    if not is_parallel and not isinstance(stmt, ir.While | ir.BufferStore | ir.Evaluate):
        return closure  # statements inside are watched on their own
    if not any(ir.contains(part, compiler.reaches_flags) for part in _without_own_flags(stmt)):
        return closure
    where = location(stmt)
    if isinstance(stmt, ir.While):
        polled = _FlagAccesses(compiler, ir.instances(stmt, ir.BufferLoad))

        def over(frame: Frame) -> Any:
            left = closure(frame)
            for flag in polled.of(frame):
                recorder.polled(flag, where)
            return left

        return over
    if isinstance(stmt, ir.BufferStore):
        targets, op = _FlagAccesses(compiler, [stmt]), "set"
    elif isinstance(stmt, ir.Evaluate):
        targets = _FlagAccesses(compiler, ir.instances(stmt, ir.BufferLoad))
        op = "add" if "atomic" in (ir.op_name(stmt.value) or "") else "set"
    else:
        targets, op = _FlagAccesses(compiler, []), "set"

    def run(frame: Frame) -> Any:
        for flag in targets.of(frame):
            recorder.flag(flag)
        left = closure(frame)
        recorder.written(op)
        return left

    return run
