# SPDX-License-Identifier: MIT
"""Closures of persistent loops, which report their epilogue role to the recorder."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.program.effects import statements
from tilescale.program.persistent_loops import LoopIteration, iteration_of


class PersistentLoops:
    """The persistent loops of a program.

    Attributes:
        loops: the loops; `refills`, the first statements after their pipelined loops, where there is an epilogue;
            `epilogues`: statements of epilogues, and whether they are the first one and the last one.
    """

    def __init__(self, compiler: Compiler):
        self.recorder = compiler.instrumentation.recorder
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

    def told(self, stmt: ir.Stmt, closure: Closure) -> Closure:
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
