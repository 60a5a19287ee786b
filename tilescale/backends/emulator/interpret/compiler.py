# SPDX-License-Identifier: MIT
"""Compile a program's statements and expressions into closures over frames, once per program.

Variables and buffers get slot numbers, so that a frame is a list. Rules for statements, expressions and operations are
in tables: this package and `operations` register theirs in registry.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tilelang_core import ir, tl
from tilescale.backends.emulator.execute.barriers import MBarrier
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.execute.grid import Together
from tilescale.backends.emulator.execute.memory import PrivateBuffer, meta_array, poison, poisoned
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.addresses import HostMemory
from tilescale.backends.emulator.interpret.closures import Closure, interruptible, is_step, located, synchronizing
from tilescale.backends.emulator.interpret.flags import signals
from tilescale.backends.emulator.interpret.registry import (
    EXPRESSIONS,
    IGNORED,
    OPERATIONS,
    STATEMENTS,
    TOGETHER,
    VALUES,
)
from tilescale.backends.emulator.interpret.symbols import Symbols
from tilescale.backends.emulator.numerics import element_type, lane_axis, numpy_dtype
from tilescale.errors import Location, TileScaleError, UnsupportedError
from tilescale.hda import Level, Machine
from tilescale.passes.faults import emulation_faults_reported
from tilescale.passes.structure import location
from tilescale.program.asynchronous import is_asynchronous, owns_a_queue
from tilescale.program.model import Launch, Program

if TYPE_CHECKING:
    from tilescale.backends.emulator.assumptions import Assumptions
    from tilescale.backends.emulator.interpret.lockstep import Lockstep

_MOVES = {tl.COPY, tl.ASYNC_COPY, tl.TMA_COPY, tl.FILL}
"""Operations that threads execute together without a barrier of their own."""

_UNKNOWN = (tl.SYNC_WARP, tl.CALL_EXTERN)
"""Operations that each thread executes for itself, and in which it may wait for others."""


class Compiler(Symbols):
    """Compiles one program for one machine.

    Args:
        data: whether tiles and tensors have values; without, only flags and thread-private variables do.
        preempts: whether a task may be interrupted after a statement.
        assumptions: values assumed by a run without data.

    Attributes:
        instrumentation: adds the recording of costs to closures; None where the run is not timed.
        lockstep: the program's grid in lockstep; None where its programs run one by one.
        axes: variables of the enclosing parallel loops, and their axes of the space.
        step: the statement that is being compiled; inside parallel loops, the outermost one of them.
        scales: levels of the enclosing scales; `vector_level`, the level whose ranks are an array over threads.
        deferred: bindings evaluated at their use: pointers, and those outside the loop whose variable they use
            (T.Persistent emits such). `bindings`: the values of the others.
        where: the current source line.
        reduction: the combination of enclosed reductions over threads.
        draws: the order of the random numbers in the enclosing parallel loops, once they draw one.
        generator: the last call that initializes generators of random numbers.
        threads_apart: number of enclosing thread-dependent conditions.
        in_lockstep: whether one frame executes what is compiled for many programs.
        host_memory: the memory that tables of pointers point into.
    """

    def __init__(
        self,
        program: Program,
        machine: Machine,
        data: bool = True,
        preempts: bool = False,
        assumptions: Assumptions | None = None,
    ):
        super().__init__(program, machine)
        self.instrumentation: Instrumentation | None = None
        self.lockstep: Lockstep | None = None
        self.data = data
        self.preempts = preempts
        self.assumptions = assumptions
        self.axes: dict[ir.Var, int] = {}
        self.step: ir.Stmt | None = None
        self.sliceable = True
        self.scales: list[Level] = []
        self.deferred: dict[ir.Var, ir.PrimExpr] = {}
        self.bindings: dict[ir.Var, Closure] = {}
        self.open_loops: list[ir.Var] = []
        self.vector_level: str | None = None
        self.where: Location | None = None
        self.threads_apart = 0
        self.in_lockstep = False
        self.reduction: Any = None
        self.draws: Any = None
        self.generator: ir.Call | None = None
        self.host_memory = HostMemory()
        # Slot of an allocation -> its extents, None where they are known at launch only.
        self._shapes: dict[int, tuple[int, ...] | None] = {}

    @contextlib.contextmanager
    def under(self, condition: ir.PrimExpr) -> Iterator[None]:
        """Context of the sides of a branch."""
        apart = int(self.differs_between_threads(condition))
        self.threads_apart += apart
        try:
            yield
        finally:
            self.threads_apart -= apart

    # -- scales ------------------------------------------------------------------------------------------------------

    @property
    def executing(self) -> Level:
        """The level whose units execute the statement that is being compiled."""
        return self.scales[-1] if self.scales else self.machine.program_level

    @contextlib.contextmanager
    def executing_as(self, level: Level) -> Iterator[None]:
        """Context of statements that units of `level` execute."""
        self.scales.append(level)
        try:
            yield
        finally:
            self.scales.pop()

    def enters(self, level: Level) -> Level:
        """The level that executes inside a scale of `level` opened here."""
        coarser = self.machine.index(level.name) >= self.machine.index(self.executing.name)
        if level.kind == "unit" or (self.scales and coarser):
            return self.executing
        return level

    # -- memory --------------------------------------------------------------------------------------------------------

    def allocate(self, buffers: list[ir.Buffer], unit: Unit, frame: Frame) -> None:
        """Allocate a unit's buffers, unless it has them, and bind them if the frame is the unit's.

        Extents that are known at launch are read in the frame; they are the same for all units.
        """
        for buffer in buffers:
            slot = self.slot(buffer.data)
            if slot not in unit.storage:
                unit.storage[slot] = self.instance(buffer, frame)
            if frame.unit is unit:
                frame.slots[slot] = unit.storage[slot]

    def instance(self, buffer: ir.Buffer, frame: Frame) -> Any:
        """Fresh memory for a buffer."""
        counts = self._barriers.get(self.slot(buffer.data))
        if counts is not None:
            return [MBarrier(f"{buffer.name}[{i}]", n, n) for i, n in enumerate(counts)]
        shape, dtype = self._shape(buffer, frame), numpy_dtype(element_type(str(buffer.dtype)))
        slot = self.slot(buffer.data)
        if slot in self.zeroed or (slot in self.flags and not self.data):
            return np.zeros(shape, dtype)
        if self.assumptions is not None:
            values = self.assumptions.of(buffer.name, frame.run.number(frame.unit), shape, dtype)
            return meta_array(shape, dtype) if values is None else values
        return poisoned(shape, dtype) if self.data else meta_array(shape, dtype)

    def _shape(self, buffer: ir.Buffer, frame: Frame) -> tuple[int, ...]:
        slot = self.slot(buffer.data)
        extents = [*buffer.shape, *lane_axis(str(buffer.dtype))]
        if slot not in self._shapes:
            constants = ir.constants(extents)
            self._shapes[slot] = None if constants is None else tuple(constants)
        known = self._shapes[slot]
        if known is not None:
            return known
        return tuple(uniform(self.expr(n)(frame), frame, f"the shape of {buffer.name!r}") for n in extents)

    def private(self, buffers: list[ir.Buffer], frame: Frame) -> dict[int, PrivateBuffer]:
        """Fresh thread-private buffers, by slot."""
        result = {}
        for buffer in buffers:
            dtype = numpy_dtype(element_type(str(buffer.dtype)))
            # stock TileLang sets variables to 0 when a program begins
            fresh = 0 if buffer.scope() == ir.VARIABLE else poison(dtype)
            result[self.slot(buffer.data)] = PrivateBuffer(self._shape(buffer, frame), dtype, fresh)
        return result

    # -- expressions and statements ------------------------------------------------------------------------------------

    def expr(self, expr: ir.PrimExpr | float) -> Closure:
        """The closure of an expression. Raises UnsupportedError: an unsupported kind of expression."""
        if isinstance(expr, bool | int | float):
            return lambda frame: expr
        rule = EXPRESSIONS.get(type(expr))
        if rule is None:
            raise UnsupportedError(f"the emulator does not run {type(expr).__name__} expressions: {expr}")
        return rule(self, expr)

    def stmt(self, stmt: ir.Stmt) -> Closure:
        """The closure of a statement. It returns None, or BREAK or CONTINUE (see statements.py). Raises
        UnsupportedError: the emulator does not support an operation; the error has its line."""
        rule = STATEMENTS.get(type(stmt))
        if rule is None:
            raise UnsupportedError(f"the emulator does not run {type(stmt).__name__} statements")
        outer = self.where, self.step
        self.where, self.step = location(stmt) or self.where, self.step if self.axes else stmt
        try:
            with emulation_faults_reported(lambda: self.where):
                closure = rule(self, stmt)
                if self.instrumentation is not None and not self.axes:
                    closure = self.instrumentation.statement(self, stmt, closure)
            if self.preempts and not self.axes and is_step(stmt):
                closure = interruptible(closure, signals(stmt))
            return located(closure, self.where)
        except TileScaleError as error:
            if self.where and not error.where:
                error.at(self.where)
            raise
        finally:
            self.where, self.step = outer

    def evaluate(self, call: ir.Call) -> Closure | None:
        """The closure of a call used as a statement; None if it has no effect here."""
        name = ir.op_name(call) or ""
        closure: Closure | None = None
        if name not in IGNORED:
            rule = OPERATIONS.get(name) or VALUES.get(name)
            if rule is None:
                raise UnsupportedError(
                    f"the emulator does not run {name or call.op}",
                    hint="express it with tile operations, or run this program on the hardware it is written for",
                )
            closure = rule(self, call)
        if self._may_synchronize(name):
            closure = synchronizing(closure)
        if self.instrumentation is None or self.is_queued(call):
            return closure
        return self.instrumentation.operation(self, call, closure)

    def _may_synchronize(self, name: str) -> bool:
        """Whether an operation may contain a barrier of the threads that execute it; asked of plain TileLang alone."""
        known = self.program.is_hierarchical or self.axes or self.in_lockstep
        return not known and name in {*TOGETHER, *_UNKNOWN} - _MOVES

    def is_queued(self, call: ir.Call) -> bool:
        """Whether the unit's copy queue executes the call, and hence records its costs."""
        return owns_a_queue(self.executing, self.machine) and is_asynchronous(call)

    def is_collective(self, stmt: ir.Stmt) -> bool:
        """Whether threads execute a part of `stmt` together, so that a subset of them needs its own coroutine."""

        def together(node: ir.Node) -> bool:
            if isinstance(node, ir.For) and node.kind == ir.ForKind.PARALLEL:
                return True
            return isinstance(node, ir.Evaluate) and ir.op_name(node.value) in TOGETHER

        return ir.contains(stmt, together)


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
