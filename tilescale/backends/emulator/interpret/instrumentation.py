# SPDX-License-Identifier: MIT
"""What the compiler asks of who wants to write down what closures cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.grid import Memoized
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.program.model import Launch

if TYPE_CHECKING:
    from tilescale.backends.emulator.interpret.compiler import Compiler


class Instrumentation(Protocol):
    """Adds to closures, as they are made, what writes down their costs."""

    def statement(self, compiler: Compiler, stmt: ir.Stmt, closure: Closure) -> Closure:
        """The closure of any statement."""

    def operation(self, compiler: Compiler, call: ir.Call, closure: Closure | None) -> Closure | None:
        """The closure of an operation, None where it has no effect of its own."""

    def store(self, compiler: Compiler, stmt: ir.BufferStore, closure: Closure) -> Closure:
        """The closure of a store outside of parallel loops."""

    def loop(
        self, compiler: Compiler, stmt: ir.For, body: Closure, over: Callable[[Closure], Closure]
    ) -> Closure:
        """The closure of a serial loop outside of parallel ones; `over` makes that which runs a body so often."""

    def nest(self, compiler: Compiler, body: ir.Stmt) -> Callable[[Frame, tuple[int, ...]], bool]:
        """What to call before the body of a nest of parallel loops runs over a space; it says whether that has to."""

    def memoized(self, compiler: Compiler, launch: Launch, stmt: ir.Stmt) -> Memoized | None:
        """What runs a grid phase where some programs stand for others; None where all have to run."""

    def copy(self, compiler: Compiler, call: ir.Call) -> Closure:
        """What writes down a copy that a copy queue executes."""

    def chunk(self, compiler: Compiler, made: Any, source: Any, flag: Any) -> Callable[..., None]:
        """The same for a chunk of a gather or an all-to-all."""
