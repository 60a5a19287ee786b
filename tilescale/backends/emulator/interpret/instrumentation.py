# SPDX-License-Identifier: MIT
"""The compiler's interface to the recording of costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.grid import Together
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.program.model import Launch


class Instrumentation(Protocol):
    """Adds the recording of costs to closures as they are made."""

    def statement(self, compiler: Compiler, stmt: ir.Stmt, closure: Closure) -> Closure:
        """The closure of any statement."""

    def operation(self, compiler: Compiler, call: ir.Call, closure: Closure | None) -> Closure | None:
        """The closure of an operation, None where it has no effect of its own."""

    def store(self, compiler: Compiler, stmt: ir.BufferStore, closure: Closure) -> Closure:
        """The closure of a store outside of parallel loops."""

    def loop(
        self, compiler: Compiler, stmt: ir.For, body: Closure, over: Callable[[Closure], Closure]
    ) -> Closure:
        """The closure of a serial loop outside of parallel ones; `over` makes the closure that repeats a body."""

    def nest(self, compiler: Compiler, body: ir.Stmt) -> Callable[[Frame, tuple[int, ...]], bool]:
        """A function to call before the body of a nest of parallel loops runs over a space; its result says whether the
        body must run."""

    def representatives(self, compiler: Compiler, launch: Launch, stmt: ir.Stmt) -> Together | None:
        """A runner of a grid phase where some programs represent others; None where all must run."""

    def copy(self, compiler: Compiler, call: ir.Call) -> Closure:
        """A function that records a copy executed by a copy queue."""

    def chunk(self, compiler: Compiler, made: Any, source: Any, flag: Any) -> Callable[..., None]:
        """The same for a chunk of a gather or an all-to-all."""
