# SPDX-License-Identifier: MIT
"""Instrumentation of closures with recording, as the compiler makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Region
from tilescale.backends.emulator.interpret.symbols import PRIVATE
from tilescale.backends.emulator.operations.remote import Flag
from tilescale.backends.emulator.record.costs import loop_cost
from tilescale.backends.emulator.record.equivalence import equivalence
from tilescale.backends.emulator.record.flags import watched
from tilescale.backends.emulator.record.loops import timed
from tilescale.backends.emulator.record.memoization import Memoization
from tilescale.backends.emulator.record.persistent import PersistentLoops
from tilescale.backends.emulator.record.recorder import Recorder
from tilescale.backends.emulator.record.registry import COSTS, RUN_WITHOUT_DATA
from tilescale.backends.emulator.record.tally import tally
from tilescale.backends.emulator.record.transfers import chunk_cost
from tilescale.program.model import Launch
from tilescale.program.operations import Collective
from tilescale.program.ops import COPY


class Recording:
    """Instrumentation that reports steps to a recorder before they are executed."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self._persistent: PersistentLoops | None = None

    def statement(self, compiler: Compiler, stmt: ir.Stmt, closure: Closure) -> Closure:
        """The closure of any statement."""
        return self._persistent_loops(compiler).told(stmt, watched(compiler, stmt, closure))

    def operation(self, compiler: Compiler, call: ir.Call, closure: Closure | None) -> Closure | None:
        """The closure of an operation, None where it has no effect of its own."""
        name = ir.op_name(call)
        if name not in COSTS:
            return closure
        recorder, record = self.recorder, COSTS[name](compiler, call)
        if closure is None or (not compiler.data and name not in RUN_WITHOUT_DATA):
            return record

        def run(frame: Frame) -> Any:
            if not recorder.log.muted:
                record(frame)
            return closure(frame)

        return run

    def store(self, compiler: Compiler, stmt: ir.BufferStore, closure: Closure) -> Closure:
        """The closure of a store outside of parallel loops."""
        recorder, record = self.recorder, loop_cost(compiler, tally(stmt, {}), "store")

        def run(frame: Frame) -> None:
            if not recorder.log.muted:
                record(frame, (frame.active(),))
            closure(frame)

        return run

    def loop(self, compiler: Compiler, stmt: ir.For, body: Closure, over: Callable[[Closure], Closure]) -> Closure:
        """The closure of a serial loop outside of parallel ones; `over` makes the closure that repeats a body."""
        if stmt in self._persistent_loops(compiler).loops:
            return over(body)  # its roles hand over each tile
        return timed(compiler, stmt, body, over)

    def _persistent_loops(self, compiler: Compiler) -> PersistentLoops:
        if self._persistent is None:
            self._persistent = PersistentLoops(compiler)
        return self._persistent

    def nest(self, compiler: Compiler, body: ir.Stmt) -> Callable[[Frame, tuple[int, ...]], bool]:
        """A function to call before the body of a nest of parallel loops runs over a space; without data only flags are
        computed.
        """
        recorder, found = self.recorder, tally(body, compiler.axes)
        record = loop_cost(compiler, found, "elementwise")
        private = [compiler.slot(b.data) for b in found.stores if b.scope() in PRIVATE]
        written = {compiler.root(compiler.slot(b.data)) for b in found.stores}
        computes = compiler.data or bool(written & compiler.flags)

        def tell(frame: Frame, space: tuple[int, ...]) -> bool:
            if not recorder.log.muted:
                record(frame, space)
            if not computes:
                for slot in private:
                    frame.slots[slot].known = False
            return computes

        return tell

    def memoized(self, compiler: Compiler, launch: Launch, stmt: ir.Stmt) -> Memoization | None:
        """A runner of a grid phase where some programs represent others; None where all must run."""
        if compiler.assumptions is not None:
            return None  # values may differ between programs and devices
        found = equivalence(compiler, launch, stmt)
        return Memoization(found) if found is not None else None

    def copy(self, compiler: Compiler, call: ir.Call) -> Closure:
        """A function that records a copy executed by a copy queue."""
        return COSTS[COPY.name](compiler, call)

    def chunk(self, compiler: Compiler, made: Collective, source: Region, flag: Flag) -> Callable[..., None]:
        """The same for a chunk of a gather or an all-to-all."""
        return chunk_cost(compiler, made, source, flag)
