# SPDX-License-Identifier: MIT
"""Where a grid uses a tensor, and which of its rows each program touches there.

Rows are counted over the whole tensor: those of a tensor (parts, rows, ...) one part after the other. A use is found as
deep in the grid phase as the touched rows depend on the loops around; what is inside counts with all that its own loops
reach. Everything errs on the side of more rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.hda import Machine
from tilescale.passes.overlap.schedule import Declined
from tilescale.program.effects import Access, Surroundings, phases
from tilescale.program.grids import Grid, Unknown, grid_of
from tilescale.program.model import GridPhase, Launch, Program, location
from tilescale.program.ops import SCALE
from tilescale.program.regions import Inside
from tilescale.program.waiting import TRIED


@dataclass(frozen=True)
class Rows:
    """How the rows of a tensor are counted; or its columns, where it is split along these: then they are its "rows".

    Attributes:
        buffer: the tensor.
        parts, height: as many parts of so many rows.
        slots: whether the parts are a dimension of their own, in front of the rows.
        axis: 1 for the columns of a matrix, else 0.
    """

    buffer: ir.Buffer
    parts: int
    height: int
    slots: bool
    axis: int = 0

    @property
    def across(self) -> int:
        """Elements of a row of a matrix."""
        return ir.integer(self.buffer.shape[-1 - self.axis])

    @property
    def part_shape(self) -> tuple[int, int]:
        """Extents of a part of a matrix."""
        return self.place(self.height, self.across)

    def place(self, row: Any, column: Any) -> tuple[Any, Any]:
        """Where an element of a row lies in a matrix, or how far so many of them extend there."""
        return (column, row) if self.axis else (row, column)

    @property
    def total(self) -> int:
        """Rows of all parts."""
        return self.parts * self.height

    def region(self, part: Any, first: Any, count: Any, access: str) -> ir.Call:
        """Some rows of a part, whole."""
        if self.axis:
            every = ir.integer(self.buffer.shape[0])
            return tir.region(self.buffer, [0, part * self.height + first], [every, count], access)
        rest = [ir.integer(n) for n in self.buffer.shape[1 + self.slots :]]
        begins = [part, first] if self.slots else [part * self.height + first]
        extents = [1, count] if self.slots else [count]
        return tir.region(self.buffer, [*begins, *[0] * len(rest)], [*extents, *rest], access)

    def interval(self, box: list[tuple[Any, Any] | None]) -> tuple[Any, Any]:
        """First row and the one behind the last of a box of elements; a row that is not there counts as the last."""
        if not self.slots:
            begin, end = box[self.axis] or (0, self.total)
            return begin, ir.Min(ir.int_node(end), ir.int_node(self.total))
        slots, inside = box[0] or (0, self.parts), box[1] or (0, self.height)
        end, last = ir.Min(ir.int_node(inside[1]), ir.int_node(self.height)), slots[1] - 1
        if ir.constant(last - slots[0]) != 0:
            last = ir.Min(ir.int_node(last), ir.int_node(self.parts - 1))
        return slots[0] * self.height + inside[0], last * self.height + end


@dataclass(frozen=True)
class Use:
    """The statements of a grid phase that touch a tensor.

    Attributes:
        stmts: the first and all after it in the same list, up to the last that touches it.
        begin, end: rows that they touch, in terms of what has a value before the first of them.
        loops: the loops around, outermost first, on which the rows depend.
        branches: conditions under which it happens, each with whether it holds.
    """

    phase: GridPhase
    launch: Launch
    stmts: tuple[ir.Stmt, ...]
    begin: ir.PrimExpr
    end: ir.PrimExpr
    loops: tuple[ir.For, ...]
    branches: tuple[tuple[ir.PrimExpr, bool], ...] = ()


class Uses:
    """The uses of tensors by the grids of a program.

    Args:
        sizes: units of each launched level.
    """

    def __init__(self, program: Program, machine: Machine, sizes: Mapping[str, int]):
        self.program, self.machine, self.sizes = program, machine, sizes
        self.names = Surroundings(program)

    def touches(self, stmt: ir.Stmt, root: ir.Var) -> bool:
        """Whether a statement, or one inside it, touches a tensor."""
        return any(a.root.same_as(root) for a in self.names.all_effects(stmt).accesses)

    def find(self, phase: GridPhase, launch: Launch, rows: Rows) -> Use:
        """The use of a tensor by a phase that touches it."""
        return _Descent(self, phase, launch, rows).use()

    def values(self, use: Use, ranks: Mapping[str, int]) -> Iterator[tuple[Any, Any, Any]]:
        """For each round of the loops around a use: its first row, the one behind the last, and whether it happens;
        each an array over the programs of the grid, in the order in which they start.

        Raises:
            Declined: they are not known before the launch.
        """
        grid = self.grid(use.launch, ranks)
        try:
            for at, runs in _rounds(use.loops, grid):
                begin, end = (np.broadcast_to(grid.value(e, at), (grid.count,)) for e in (use.begin, use.end))
                for condition, taken in use.branches:
                    runs = runs & (np.asarray(grid.value(condition, at), bool) == taken)
                yield begin, end, runs
        except Unknown:
            raise Declined("which rows a tile touches is known at launch only", location(use.stmts[0])) from None

    def by_rank(self, use: Use, level: str) -> Iterator[tuple[Any, Any, Any]]:
        """The values on each unit of a level, one after the other."""
        for rank in range(self.sizes[level]):
            yield from self.values(use, self.ranks(level, rank))

    def ranks(self, level: str, rank: int) -> dict[str, int]:
        """The ranks of a unit: 0 at all levels but one."""
        return {name: rank if name == level else 0 for name in self.sizes}

    def step(self, use: Use, height: int, level: str) -> int:
        """Rows that the tiles of a use are apart inside parts of so many rows; those of a tile if all begin a part."""
        touched = list(self.by_rank(use, level))
        tile = max(int((end - begin)[runs].max(initial=1)) for begin, end, runs in touched)
        begins = np.concatenate([begin[runs] % height for begin, _, runs in touched])
        return int(np.gcd.reduce(begins)) or min(tile, height)

    def grid(self, launch: Launch, ranks: Mapping[str, int]) -> Grid:
        """The programs of a launch. Raises Declined if their number is known at launch only."""
        grids = [phase.stmt for phase, of in phases(self.program.body) if of is launch and isinstance(phase, GridPhase)]
        found = grid_of(GridPhase(tir.sequence(grids)), launch, self.machine, self.sizes, ranks)
        if found is None:
            raise Declined("the extent of the grid is known at launch only", launch.where)
        return found


def _rounds(loops: tuple[ir.For, ...], grid: Grid) -> Iterator[tuple[dict[ir.Var, int], Any]]:
    """Values of loop variables, and in which programs they occur."""
    ranges: list[tuple[int, int, Any, Any]] = []
    for loop in loops:
        first, count = (np.broadcast_to(grid.value(e, {}), (grid.count,)) for e in (loop.min, loop.extent))
        ranges.append((int(first.min()), int((first + count).max()), first, count))
    if np.prod([high - low for low, high, _, _ in ranges], initial=grid.count) > TRIED:
        raise Unknown
    for values in itertools.product(*(range(low, high) for low, high, _, _ in ranges)):
        inside = np.ones(grid.count, bool)
        for value, (_, _, first, count) in zip(values, ranges, strict=True):
            inside &= (first <= value) & (value < first + count)
        yield {loop.loop_var: value for loop, value in zip(loops, values, strict=True)}, inside


class _Descent:
    """The way from a phase down to where it uses a tensor."""

    def __init__(self, uses: Uses, phase: GridPhase, launch: Launch, rows: Rows):
        self.uses, self.phase, self.launch, self.rows = uses, phase, launch, rows
        self.root = uses.names.root(rows.buffer.data)
        self.threads = {var: (0, ir.IntImm("int32", launch.threads[axis])) for var, axis in launch.thread_vars}
        self.loops: list[ir.For] = []
        self.branches: list[tuple[ir.PrimExpr, bool]] = []

    def use(self) -> Use:
        """The deepest place whose statements hold all uses."""
        stmts = (self.phase.stmt,)
        while (inner := self._inside(stmts)) is not None:
            stmts = inner
        begin, end = self._rows(stmts)
        return Use(self.phase, self.launch, stmts, begin, end, tuple(self.loops), tuple(self.branches))

    def _inside(self, stmts: tuple[ir.Stmt, ...]) -> tuple[ir.Stmt, ...] | None:
        """The statements one step further down; None where the way ends."""
        if len(stmts) > 1:
            return None
        (stmt,) = stmts
        if isinstance(stmt, ir.SeqStmt):
            touching = [i for i, s in enumerate(stmt.seq) if self.uses.touches(s, self.root)]
            return tuple(stmt.seq[touching[0] : touching[-1] + 1])
        if isinstance(stmt, ir.For):
            if self._depends(stmt) and stmt.kind == ir.ForKind.SERIAL:
                self.loops.append(stmt)
                return (stmt.body,)
            return (stmt.body,) if ir.constant(stmt.extent) == 1 and stmt.kind == ir.ForKind.SERIAL else None
        if isinstance(stmt, ir.IfThenElse):
            return self._branch(stmt)
        passes = isinstance(stmt, ir.SBlock | ir.SBlockRealize) or isinstance(stmt, ir.AttrStmt) and self._whole(stmt)
        return tuple(ir.children(stmt))[-1:] if passes else None

    def _branch(self, stmt: ir.IfThenElse) -> tuple[ir.Stmt, ...] | None:
        """The arm that uses the tensor, if all threads of a program take the same one."""
        arms = [arm for arm in ir.children(stmt) if self.uses.touches(arm, self.root)]
        if len(arms) != 1 or self.uses.touches(ir.Evaluate(stmt.condition), self.root):
            return None
        known = ir.is_pure(stmt.condition) and not ir.variables(stmt.condition) & self.threads.keys()
        if not known:
            return None
        self.branches.append((stmt.condition, arms[0].same_as(stmt.then_case)))
        return tuple(arms)

    def _whole(self, stmt: ir.AttrStmt) -> bool:
        """Whether whole programs execute what an attribute is around."""
        if str(stmt.attr_key) != SCALE:
            return True
        return self.uses.machine.level(str(stmt.value.value)).kind in ("unit", "program")

    def _depends(self, loop: ir.For) -> bool:
        """Whether the rows that a loop's body touches depend on its variable."""
        begin, end = self._rows((loop.body,))
        return loop.loop_var in ir.variables(begin) | ir.variables(end)

    def _rows(self, stmts: tuple[ir.Stmt, ...]) -> tuple[ir.PrimExpr, ir.PrimExpr]:
        body = tir.sequence(stmts)
        inside = Inside.of(body)
        inside.ranges |= self.threads
        found = [a for a in self.uses.names.all_effects(body).accesses if a.root.same_as(self.root)]
        pairs = {tuple(map(str, pair)): pair for pair in (self._interval(a, inside) for a in found)}
        (begin, end), *others = pairs.values()
        for first, last in others:
            begin, end = ir.Min(begin, first), ir.Max(end, last)
        return ir.simplify(begin, {}), ir.simplify(end, {})

    def _interval(self, access: Access, inside: Inside) -> tuple[ir.PrimExpr, ir.PrimExpr]:
        same = [str(n) for n in access.buffer.shape] == [str(n) for n in self.rows.buffer.shape]
        box: list[tuple[Any, Any] | None] = [None] * len(self.rows.buffer.shape)
        if same:
            box = inside.bounds(access)
        begin, end = self.rows.interval(box)
        return ir.int_node(begin), ir.int_node(end)
