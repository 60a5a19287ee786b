# SPDX-License-Identifier: MIT
"""The symbol table of a program: slots of variables and buffers, their owners, views, replicas, flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilelang_core import ir, tl
from tilescale.backends.emulator.interpret import flags
from tilescale.backends.emulator.numerics import convert, element_type, numpy_dtype
from tilescale.errors import Location
from tilescale.hda import Machine
from tilescale.program.effects import names_of, statements
from tilescale.program.model import Launch, Program
from tilescale.program.operations import Rank, TileView
from tilescale.program.ops import RANK, VIEW
from tilescale.program.pointers import is_address
from tilescale.program.shares import held_whole

PRIVATE = ("local", ir.VARIABLE, *ir.DESCRIPTORS)
"""Thread-private scopes."""

POINTERS = (tl.DECLARED_PTR, tl.ADDRESS_OF, tl.ACCESS_PTR, tl.HANDLE_ADD_BYTE_OFFSET)
"""Operations whose value is a pointer to elements."""


class Symbols:
    """The symbol table of a program on a machine.

    Attributes:
        views: slot of a view -> its definition.
        flags: slots of the tensors that are flags; `zeroed`, the ones that are zero when a call begins.
        signals: root of a flag tensor -> the lines that signal it; for reports.
        addressed: slots of tensors whose address is stored in memory.
        reached: roots of buffers that other units access by rank.
        held_whole: roots of cluster tiles that each program holds whole, where the cluster acts as one unit.
        loop_variables: of the loops inside the compiled part.
    """

    def __init__(self, program: Program, machine: Machine):
        self.program = program
        self.machine = machine
        self._launch: Launch | None = None
        self._slots: dict[ir.Var, int] = {}
        self._homes: dict[int, ir.Buffer] = {}
        self._barriers: dict[int, tuple[int, ...]] = {}
        self._owners: dict[int, str] = {}
        self._safe: dict[int, ir.PrimExpr] = {}
        self._safe_of_tiles: dict[int, ir.PrimExpr] = {}
        self.views: dict[int, TileView] = {}
        self.signals: dict[int, list[Location | None]] = {}
        self.addressed: set[int] = set()
        self.reached: set[int] = set()
        self.held_whole: set[int] = set()
        self._replicated: set[int] = set()
        self._reducers: dict[int, str] = {}
        self.loop_variables: set[ir.Var] = set()
        # Variables that differ between threads of a program.
        self._thread_variables: set[ir.Var] = set()
        self._used: set[ir.Var] = set()
        self._survey()

    def _survey(self) -> None:
        """Find the origin of buffers: parameters, allocations, views."""
        for parameter in self.program.parameters:
            if parameter.buffer is not None:
                self._homes[self.slot(parameter.buffer.data)] = parameter.buffer
        for launch in self.program.launches:
            self._thread_variables.update(var for var, _ in launch.thread_vars)
            for buffer in launch.buffers:
                self._homes.setdefault(self.slot(buffer.data), buffer)
            self._owners.update((self.slot(data), level) for data, level in launch.owners)
            self._barriers.update((self.slot(data), counts) for data, counts in launch.barriers)
            self.held_whole.update(map(self.slot, held_whole(self.machine, launch)))
            self._survey_reducers(dict(launch.notes))
            self._used.update(var for buffer in launch.buffers for n in buffer.shape for var in ir.variables(n))
        for stmt, _, _ in statements(self.program.body):
            self._survey_statement(stmt)
            self._used.update(ir.uses(stmt))
        self.surroundings = names_of(self.program)
        self.flags = {self.slot(root) for root in flags.named(self.program, self.surroundings)}
        self.zeroed = {self.slot(data) for launch in self.program.launches for data in launch.flags}

    def _survey_statement(self, node: ir.Stmt) -> None:
        if isinstance(node, ir.Bind) and ir.op_name(node.value) == VIEW.name:
            view = self.views[self.slot(node.var)] = TileView.of(node.value)
            if view.layout.is_replica:
                self._replicated.add(self.root(self.slot(view.base.data)))
        elif isinstance(node, ir.Bind) and is_address(node.value):
            self.addressed.add(self.slot(node.var))
        elif isinstance(node, ir.Bind) and self.differs_between_threads(node.value):
            self._thread_variables.add(node.var)
        elif isinstance(node, ir.For):
            self.loop_variables.add(node.loop_var)
        elif isinstance(node, ir.SBlock):
            self._survey_reducers(node.annotations)

    def _survey_reducers(self, notes: Mapping[str, Any]) -> None:
        for name in ("reducer_info", "reducer_info_v2"):
            self._reducers.update((self.slot(data), str(info["op"])) for data, info in notes.get(name, {}).items())

    def differs_between_threads(self, expr: ir.PrimExpr) -> bool:
        """Whether the value of an expression may differ between threads of a program."""

        def lane(node: ir.Node) -> bool:
            if ir.op_name(node) == RANK.name:
                return self.machine.level(Rank.of(node).level).kind == "thread_group"
            return isinstance(node, ir.Var) and node in self._thread_variables

        return ir.contains(expr, lane)

    def is_alias_only(self, stmt: ir.Bind) -> bool:
        """Whether a name for elements is unused: then nothing is loaded, as in stock TileLang's text."""
        return (
            stmt.var not in self._used
            and ir.reads_memory(stmt.value)
            and not ir.contains(stmt.value, lambda node: isinstance(node, ir.Call) and not ir.is_pure(node))
        )

    # -- launches ------------------------------------------------------------------------------------------------------

    @property
    def is_in_launch(self) -> bool:
        """Whether a launch is being compiled, or was before."""
        return self._launch is not None

    @property
    def launch(self) -> Launch:
        """The launch that is being compiled."""
        assert self._launch is not None, "only a launch has this statement"
        return self._launch

    @launch.setter
    def launch(self, launch: Launch) -> None:
        self._launch = launch

    # -- names ---------------------------------------------------------------------------------------------------------

    def slot(self, var: ir.Var) -> int:
        """The slot number of a variable or of a buffer's data."""
        return self._slots.setdefault(var, len(self._slots))

    @property
    def slot_count(self) -> int:
        """Number of slots of a frame."""
        return len(self._slots)

    def home(self, buffer: ir.Buffer) -> tuple[Sequence[Any], str, Sequence[Any]] | None:
        """Shape, type and strides with which the memory of a buffer was declared; None if it is not known."""
        slot = self.slot(buffer.data)
        if slot in self.views:
            return self.views[slot].shape, str(buffer.dtype), buffer.strides
        if slot in self.addressed:
            self._homes.setdefault(slot, buffer)  # declared only by their uses
        home = self._homes.get(slot)
        return (home.shape, str(home.dtype), home.strides) if home is not None else None

    def root(self, slot: int) -> int:
        """The slot of the tile or tensor behind a view."""
        while slot in self.views:
            slot = self.slot(self.views[slot].base.data)
        return slot

    def replicated_root(self, buffer: ir.Buffer) -> int | None:
        """The slot of the tile that a write to `buffer` changes, if units may hold replicas of it; else None."""
        slot = self.slot(buffer.data)
        while slot in self.views:
            if self.views[slot].layout.is_replica:
                return None
            slot = self.slot(self.views[slot].base.data)
        return slot if slot in self._replicated else None

    def is_replicated(self, slot: int) -> bool:
        """Whether units hold replicas of a tile."""
        return slot in self._replicated

    # -- buffers -------------------------------------------------------------------------------------------------------

    def reaches_flags(self, node: ir.Node) -> bool:
        return hasattr(node, "buffer") and self.root(self.slot(node.buffer.data)) in self.flags

    def begin_function(self, launch: Launch) -> None:
        """Begin a function: outside of plain programs, stock TileLang compiles the following part separately."""
        if self.program.is_hierarchical:
            self._safe.clear()
        self._safe_of_tiles = self._note_safe_values(dict(launch.notes))

    @contextlib.contextmanager
    def inside_block(self, notes: Mapping[str, Any]) -> Iterator[None]:
        """Context of the statements in a block with these annotations.

        Its safe values hold for tile operations inside the block, and for accesses to elements even after its end:
        stock TileLang lowers tile operations block by block, and accesses in one walk.
        """
        outer = self._safe_of_tiles
        self._safe_of_tiles = outer | self._note_safe_values(notes)
        yield
        self._safe_of_tiles = outer

    def _note_safe_values(self, notes: Mapping[str, Any]) -> dict[int, ir.PrimExpr]:
        values = {self.slot(data): value for data, value in notes.get("safe_value_map", {}).items()}
        self._safe.update(values)
        return values

    def safe_value(self, buffer: ir.Buffer, of_tile: bool) -> Any:
        """The value of a guarded load outside a tensor, by a tile operation or of an element."""
        value = (self._safe_of_tiles if of_tile else self._safe).get(self.slot(buffer.data))
        dtype = numpy_dtype(element_type(str(buffer.dtype)))
        return convert(getattr(value, "value", value) or 0, dtype)

    def owner_level(self, buffer: ir.Buffer) -> str:
        """The level whose units each own an instance of an allocation."""
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

    def buffer_named(self, data: ir.Var) -> ir.Buffer | None:
        """The parameter or allocation of a data variable; None for other variables."""
        return self._homes.get(self.slot(data))

    def reducer_op(self, buffer: ir.Buffer) -> str:
        """The combining operation of a reducer."""
        return self._reducers[self.slot(buffer.data)]

    def accumulates(self, stmt: ir.BufferStore) -> str | None:
        """The combining operation, if a store adds a part to a reducer, as iterations of parallel loops do."""
        op = self._reducers.get(self.slot(stmt.buffer.data))
        return op if op is not None and isinstance(stmt.value, _COMBINES[op]) else None


_COMBINES = {"sum": ir.Add, "max": ir.Max, "min": ir.Min}
