# SPDX-License-Identifier: MIT
"""Turns a program's statements and expressions into closures over frames, once per program.

Variables and buffers get slot numbers, so that a frame is a list. Which operations exist is a table: the modules of
this package register theirs in registry.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.barriers import MBarrier
from tilescale.backends.emulator.execute.frame import Frame, Lanes, uniform
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret import expr as expressions
from tilescale.backends.emulator.interpret import flags
from tilescale.backends.emulator.interpret.access import Element, ElementWithoutData
from tilescale.backends.emulator.interpret.expr import Closure
from tilescale.backends.emulator.interpret.registry import (
    COSTS,
    IGNORED,
    OPERATIONS,
    RUN_WITHOUT_DATA,
    STATEMENTS,
    TOGETHER,
    VALUES,
    Rule,
)
from tilescale.backends.emulator.interpret.slices import Slices
from tilescale.backends.emulator.interpret.steps import interruptible, is_step, located
from tilescale.backends.emulator.numerics import convert, numpy_dtype
from tilescale.errors import Location, TileScaleError, UnsupportedError
from tilescale.hda import Level, Machine
from tilescale.passes.structure import location
from tilescale.program.asynchronous import is_asynchronous, owns_a_queue
from tilescale.program.effects import Surroundings, statements
from tilescale.program.model import Launch, Program, bytes_of
from tilescale.program.operations import Rank, TileView
from tilescale.program.ops import RANK, VIEW

if TYPE_CHECKING:
    from tilescale.backends.emulator.record.recorder import Clock

PRIVATE = ("local", "local.var")
"""Scopes of which every thread has its own."""


def poison(dtype: np.dtype) -> Any:
    """What fresh memory holds: NaN, or a pattern that no program means."""
    if dtype.kind == "b":
        return False
    if dtype.kind in "iu":
        return np.frombuffer(b"\xcd" * dtype.itemsize, dtype)[0]
    return convert(float("nan"), dtype)


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Fresh memory."""
    return np.full(shape, poison(dtype), dtype)


def phantom(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of that shape without data: all of its elements are one that nobody may write."""
    return np.broadcast_to(np.zeros((), dtype), shape)


class Compiler:
    """Compiles one program for one machine.

    Args:
        clock: told what operations cost; None where nobody asks.
        data: whether tiles and tensors have values; without, only flags and thread-private variables do.
    """

    def __init__(
        self, program: Program, machine: Machine, clock: Clock | None = None, data: bool = True, preempts: bool = False
    ):
        self.program = program
        self.machine = machine
        self.clock = clock
        self.data = data
        # Whether a task may be interrupted after a statement.
        self.preempts = preempts
        self.launch: Launch | None = None
        self.axes: dict[ir.Var, int] = {}
        self.sliceable = True
        self._slots: dict[ir.Var, int] = {}
        self._homes: dict[int, ir.Buffer] = {}
        # Slot of an allocation -> its extents, None where they are known at launch only.
        self._shapes: dict[int, tuple[int, ...] | None] = {}
        self._barriers: dict[int, tuple[int, ...]] = {}
        self._owners: dict[int, str] = {}
        self._safe: dict[int, ir.PrimExpr] = {}
        self.views: dict[int, TileView] = {}
        # Root of a flag tensor -> the lines that signal it; for reports.
        self.signals: dict[int, list[Location | None]] = {}
        # Roots of buffers whose instance of one unit another unit accesses by its rank.
        self.reached: set[int] = set()
        self._replicated: set[int] = set()
        self._reducers: dict[int, str] = {}
        self.scales: list[Level] = []
        # Bindings that stand outside the loop whose variable they use (T.Persistent emits such): read where used.
        self.deferred: dict[ir.Var, ir.PrimExpr] = {}
        # How the other ones get their values.
        self.bindings: dict[ir.Var, Closure] = {}
        self.open_loops: list[ir.Var] = []
        self.loop_variables: set[ir.Var] = set()
        self.vector_level: str | None = None
        self.where: Location | None = None
        # Variables that differ between lanes, and how many conditions on such are around the statement being compiled.
        self._lane_variables: set[ir.Var] = set()
        self.lanes_apart = 0
        self._survey()

    def _survey(self) -> None:
        """Find where buffers come from: parameters, allocations, views."""
        for parameter in self.program.parameters:
            if parameter.buffer is not None:
                self._homes[self.slot(parameter.buffer.data)] = parameter.buffer
        for launch in self.program.launches:
            self._lane_variables.update(var for var, _ in launch.thread_vars)
            for buffer in launch.buffers:
                self._homes.setdefault(self.slot(buffer.data), buffer)
            self._owners.update((self.slot(data), level) for data, level in launch.owners)
            self._barriers.update((self.slot(data), counts) for data, counts in launch.barriers)
            self._survey_reducers(dict(launch.notes))
        for stmt, _, _ in statements(self.program.body):
            self._survey_statement(stmt)
        self.surroundings = Surroundings(self.program)
        self.flags = {self.slot(root) for root in flags.named(self.program, self.surroundings)}
        # Those that are zero when a call begins.
        self.zeroed = {self.slot(data) for launch in self.program.launches for data in launch.flags}

    def _survey_statement(self, node: ir.Stmt) -> None:
        if isinstance(node, ir.Bind) and ir.op_name(node.value) == VIEW.name:
            view = self.views[self.slot(node.var)] = TileView.of(node.value)
            if view.layout.is_replica:
                self._replicated.add(self.root(self.slot(view.base.data)))
        elif isinstance(node, ir.Bind) and self._differs_between_lanes(node.value):
            self._lane_variables.add(node.var)
        elif isinstance(node, ir.For):
            self.loop_variables.add(node.loop_var)
        elif isinstance(node, ir.SBlock):
            self._survey_reducers(node.annotations)

    def _survey_reducers(self, notes: Mapping[str, Any]) -> None:
        for data, info in notes.get("reducer_info_v2", {}).items():
            self._reducers[self.slot(data)] = str(info["op"])

    def _differs_between_lanes(self, expr: Any) -> bool:
        def lane(node: Any) -> bool:
            if ir.op_name(node) == RANK.name:
                return self.machine.level(Rank.of(node).level).kind == "lanes"
            return isinstance(node, ir.Var) and node in self._lane_variables

        return ir.contains(expr, lane)

    @contextlib.contextmanager
    def under(self, condition: ir.PrimExpr) -> Iterator[None]:
        """Compile what follows as the sides of a branch."""
        apart = int(self._differs_between_lanes(condition))
        self.lanes_apart += apart
        try:
            yield
        finally:
            self.lanes_apart -= apart

    # -- names ---------------------------------------------------------------------------------------------------------

    def slot(self, var: ir.Var) -> int:
        """The slot number of a variable or of a buffer's data."""
        return self._slots.setdefault(var, len(self._slots))

    @property
    def slot_count(self) -> int:
        """How many slots a frame has."""
        return len(self._slots)

    def home(self, buffer: ir.Buffer) -> tuple[Sequence[Any], str] | None:
        """Shape and type with which the memory of a buffer was declared; None if it is not known."""
        slot = self.slot(buffer.data)
        if slot in self.views:
            return self.views[slot].shape, str(buffer.dtype)
        home = self._homes.get(slot)
        return (home.shape, str(home.dtype)) if home is not None else None

    def root(self, slot: int) -> int:
        """The slot of the tile or tensor behind a view."""
        while slot in self.views:
            slot = self.slot(self.views[slot].base.data)
        return slot

    def replicated_root(self, buffer: ir.Buffer) -> int | None:
        """The slot of the tile that a write to `buffer` changes, if units may hold replicas of that; else None."""
        slot = self.slot(buffer.data)
        while slot in self.views:
            if self.views[slot].layout.is_replica:
                return None
            slot = self.slot(self.views[slot].base.data)
        return slot if slot in self._replicated else None

    def is_replicated(self, slot: int) -> bool:
        """Whether units hold replicas of a tile."""
        return slot in self._replicated

    def begin_function(self, launch: Launch) -> None:
        """What is compiled from here on is a function of its own for stock TileLang, but in a plain program."""
        if self.program.is_hierarchical:
            self._safe.clear()
        self.note_safe_values(dict(launch.notes))

    def note_safe_values(self, notes: Mapping[str, Any]) -> None:
        """The notes of a block hold from here on, after its end too, as in stock TileLang."""
        for data, value in notes.get("safe_value_map", {}).items():
            self._safe[self.slot(data)] = value

    def safe_value(self, buffer: ir.Buffer) -> Any:
        """What a guarded load outside a tensor yields."""
        value = self._safe.get(self.slot(buffer.data))
        dtype = numpy_dtype(str(buffer.dtype))
        return convert(getattr(value, "value", value) or 0, dtype)

    # -- expressions and accesses --------------------------------------------------------------------------------------

    def expr(self, expr: Any) -> Closure:
        """The closure of an expression."""
        return expressions.compile_expr(self, expr)

    def element(self, buffer: ir.Buffer, indices: Sequence[Any]) -> Element:
        """The access to one element."""
        return (Element if self.data else ElementWithoutData)(self, buffer, indices)

    def slices(self, indices: Sequence[Any]) -> Slices | None:
        """The indices as slices over the parallel loops around them, if they are that simple."""
        if not self.axes or not self.sliceable or any(not isinstance(i, ir.PrimExpr | int) for i in indices):
            return None
        parts = [self._slice(i) for i in indices]
        axes = [axis for part in parts if part is not None for axis in [part[0]] if axis is not None]
        if None in parts or len(set(axes)) != len(axes):
            return None
        return Slices(len(set(self.axes.values())), tuple(parts))

    def _slice(self, index: Any) -> tuple[int | None, Closure] | None:
        if not any(var in self.axes for var in ir.variables(index)):
            return None, self.expr(index)
        if isinstance(index, ir.Var):
            return self.axes[index], lambda frame: 0
        if isinstance(index, ir.Add):
            for var, rest in ((index.a, index.b), (index.b, index.a)):
                free = not any(v in self.axes for v in ir.variables(rest))
                if isinstance(var, ir.Var) and var in self.axes and free:
                    return self.axes[var], self.expr(rest)
        return None

    def value_operation(self, name: str | None) -> Rule | None:
        """The rule of an operation with a value, if it is not a plain function of its arguments."""
        return VALUES.get(name)

    # -- scales and who owns what --------------------------------------------------------------------------------------

    @property
    def executing(self) -> Level:
        """The level whose units execute the statement that is being compiled."""
        return self.scales[-1] if self.scales else self.machine.program_level

    @contextlib.contextmanager
    def executing_as(self, level: Level) -> Iterator[None]:
        """Compile what follows for units of `level`."""
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

    def owner_level(self, buffer: ir.Buffer) -> str:
        """The level whose units own an instance of an allocation each."""
        default = self.machine.tensor_level if buffer.scope() == "global" else self.machine.program_level
        return self._owners.get(self.slot(buffer.data), default.name)

    def owned_by(self, level: str) -> list[ir.Buffer]:
        """The launch's buffers of which every unit of `level` owns an instance, thread-private ones left out."""
        return [
            b
            for b in self.launch.buffers
            if b.scope() not in PRIVATE and b.scope() != "global" and self.owner_level(b) == level
        ]

    def device_buffers(self, launch: Launch) -> list[ir.Buffer]:
        """The launch's workspaces in device memory."""
        return [b for b in launch.buffers if b.scope() == "global"]

    def owned_buffer(self, slot: int) -> ir.Buffer:
        """The allocation of a slot."""
        return self._homes[slot]

    def bytes_in(self, kind: str, launch: Launch) -> int:
        """Bytes that one program allocates in shared memory or in fragments."""
        prefix = {"shared": "shared", "fragment": "local.fragment"}[kind]
        total = 0
        for buffer in launch.buffers:
            size = bytes_of(buffer.shape, buffer.dtype)
            if buffer.scope().startswith(prefix) and size is not None:
                total += self._instances(buffer, launch) * size
        return total

    def _instances(self, buffer: ir.Buffer, launch: Launch) -> int:
        """How many instances of a tile one program holds: of its own, or one for each unit that has a replica."""
        root = self.slot(buffer.data)
        replicas = [
            view.level
            for slot, view in self.views.items()
            if view.layout.is_replica and self.root(slot) == root
        ]
        levels = [self.machine.level(name) for name in (self.owner_level(buffer), *replicas)]
        return max(launch.thread_count // level.threads if level.kind == "lanes" else 1 for level in levels)

    def allocate(self, buffers: list[ir.Buffer], unit: Unit, frame: Frame) -> None:
        """Make a unit's instances of buffers that it owns, unless it has them, and bind them if the frame is its own.

        Extents that are known at launch are read in the frame; they are the same for all units.
        """
        for buffer in buffers:
            slot = self.slot(buffer.data)
            if slot not in unit.storage:
                unit.storage[slot] = self._instance(buffer, frame)
            if frame.unit is unit:
                frame.slots[slot] = unit.storage[slot]

    def _instance(self, buffer: ir.Buffer, frame: Frame) -> Any:
        counts = self._barriers.get(self.slot(buffer.data))
        if counts is not None:
            return [MBarrier(f"{buffer.name}[{i}]", n, n) for i, n in enumerate(counts)]
        shape, dtype = self._shape(buffer, frame), numpy_dtype(str(buffer.dtype))
        slot = self.slot(buffer.data)
        if slot in self.zeroed or (slot in self.flags and not self.data):
            return np.zeros(shape, dtype)
        return poisoned(shape, dtype) if self.data else phantom(shape, dtype)

    def _shape(self, buffer: ir.Buffer, frame: Frame) -> tuple[int, ...]:
        slot = self.slot(buffer.data)
        if slot not in self._shapes:
            constants = [ir.constant(n) for n in buffer.shape]
            self._shapes[slot] = None if None in constants else tuple(constants)
        known = self._shapes[slot]
        if known is not None:
            return known
        return tuple(uniform(self.expr(n)(frame), frame, f"the shape of {buffer.name!r}") for n in buffer.shape)

    def private(self, buffers: list[ir.Buffer], frame: Frame) -> dict[int, Lanes]:
        """Fresh thread-private buffers, by slot."""
        result = {}
        for buffer in buffers:
            dtype = numpy_dtype(str(buffer.dtype))
            result[self.slot(buffer.data)] = Lanes(self._shape(buffer, frame), dtype, poison(dtype))
        return result

    def reducer_op(self, buffer: ir.Buffer) -> str:
        """The combining operation of a reducer."""
        return self._reducers[self.slot(buffer.data)]

    # -- statements ----------------------------------------------------------------------------------------------------

    def stmt(self, stmt: ir.Stmt) -> Closure:
        """The closure of a statement. It returns None, or BREAK or CONTINUE (see statements.py).

        Raises:
            UnsupportedError: an operation that the emulator does not run, with its line.
        """
        rule = STATEMENTS.get(type(stmt))
        if rule is None:
            raise UnsupportedError(f"the emulator does not run {type(stmt).__name__} statements")
        outer, self.where = self.where, location(stmt) or self.where
        try:
            closure = rule(self, stmt)
            if self.clock is not None and not self.axes:
                closure = flags.watched(self, stmt, closure)
            if self.preempts and not self.axes and is_step(stmt):
                closure = interruptible(closure, flags.signals(stmt))
            return located(closure, self.where)
        except TileScaleError as error:
            raise error.at(self.where) if self.where and not error.where else error from None
        finally:
            self.where = outer

    def evaluate(self, call: ir.Call) -> Closure | None:
        """The closure of a call used as a statement; None if it has no effect here."""
        name = ir.op_name(call)
        if name in IGNORED:
            return COSTS[name](self, call) if self.clock is not None and name in COSTS else None
        rule = OPERATIONS.get(name) or VALUES.get(name)
        if rule is None:
            raise UnsupportedError(
                f"the emulator does not run {name or call.op}",
                hint="express it with tile operations, or run this program on the hardware it is written for",
            )
        closure = rule(self, call)
        if self.clock is None or name not in COSTS or self.is_queued(call):
            return closure
        record = COSTS[name](self, call)
        if not self.data and name not in RUN_WITHOUT_DATA:
            return record

        clock = self.clock

        def run(frame: Frame) -> Any:
            if not clock.log.muted:
                record(frame)
            return closure(frame)

        return run

    def is_queued(self, call: ir.Call) -> bool:
        """Whether a call is one that the unit's copy queue executes, which then writes down its costs too."""
        return owns_a_queue(self.executing, self.machine) and is_asynchronous(call)

    def is_collective(self, stmt: ir.Stmt) -> bool:
        """Whether threads execute something below `stmt` together, so that a part of them needs its own coroutine."""

        def together(node: Any) -> bool:
            if isinstance(node, ir.For) and node.kind == ir.ForKind.PARALLEL:
                return True
            return isinstance(node, ir.Evaluate) and ir.op_name(node.value) in TOGETHER

        return ir.contains(stmt, together)
