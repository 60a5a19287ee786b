# SPDX-License-Identifier: MIT
"""The loads of a phase that may run ahead of its tasks: tiles of weights and caches, in pipelined loops.

They read tensors that no task has written before: weights, or a cache that the task itself adds to, behind its loads.
The loads of a task are numbered in the order in which it uses their tiles.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tilelang_core import ir, tiles, tl
from tilescale.passes.declined import Declined
from tilescale.passes.persistent.phases import Grid
from tilescale.program.effects import ProgramNames
from tilescale.program.footprint import stages_of
from tilescale.program.tile_boxes import TileAccesses

BULK_BYTES, BOX_EXTENT = 16, 256
"""Bulk copies take rows of multiples of these bytes, and at most this many rows (PTX ISA, cp.async.bulk.tensor)."""


@dataclass(frozen=True)
class Load:
    """A copy of a tile from memory.

    Attributes:
        source: the region that it reads, in terms of the grid's indices and of loops' variables.
        tile: where it puts that.
        first: loads before it in an iteration of the innermost loop.
        path: the loops around it, the innermost first: the loads before the loop in an iteration of the one around it,
            the loop, and the loads of an iteration of its own.
    """

    stmt: ir.Evaluate
    source: ir.Call
    tile: ir.Buffer
    first: int
    path: list[tuple[int, ir.For, int]] = field(default_factory=list)

    @property
    def loop(self) -> ir.For:
        return self.path[0][1]

    @property
    def number(self) -> Any:
        """Its number among the loads of its task."""
        return sum((loop.loop_var * each + first for first, loop, each in self.path), ir.IntImm("int32", self.first))

    def iteration(self, number: Any) -> dict[ir.Var, Any]:
        """Values of the loops' variables for a number."""
        found: dict[ir.Var, Any] = {}
        for first, loop, each in reversed(self.path):
            found[loop.loop_var], number = (number - first) // each, (number - first) % each
        return found

    def has(self, number: Any) -> Any:
        """Whether it has a number among the loads of its task."""
        conditions: list[Any] = []
        for first, loop, each in reversed(self.path):
            conditions += [first <= number, number < first + loop.extent * each]
            number = (number - first) % each
        return ir.simplify(functools.reduce(ir.And, [*conditions, number.equal(self.first)]), {})


@dataclass(frozen=True)
class Stream:
    """The loads of a phase.

    Attributes:
        order: those of a task, by their places in `loads`.
        roots: the tensors that they read.
    """

    grid: Grid
    loads: list[Load]
    order: list[int]
    roots: set[ir.Var]

    @property
    def trips(self) -> int:
        """Loads of a task."""
        return len(self.order)

    @property
    def forms(self) -> set[tuple[str, ...]]:
        """Extents and type of each tile."""
        return {(*map(str, load.tile.shape), str(load.tile.dtype)) for load in self.loads}

    @property
    def loops(self) -> list[tuple[ir.For, list[int]]]:
        """The innermost loops, and the places of their loads."""
        places = itertools.groupby(range(len(self.loads)), lambda place: self.loads[place].loop)
        return [(loop, list(of)) for loop, of in places]

    def uses(self, place: int) -> list[int]:
        """The statements of the loop of a load that use its tile, by their numbers."""
        load = self.loads[place]
        numbered = enumerate(ir.in_order(load.loop.body))
        return [n for n, stmt in numbered if not stmt.same_as(load.stmt) and _used(stmt, load.tile)]

    @classmethod
    def of(cls, grid: Grid, accesses: TileAccesses, names: ProgramNames, written: Collection[ir.Var]) -> Stream | None:
        """The stream of a phase whose pipelined loops, outside of branches, only load such tiles; None for others.

        `written`: tensors that other phases write.
        """
        search = _Search(accesses, names)
        try:
            order = search.order(grid.phase.stmt)
        except Declined:
            return None
        loads = search.loads
        roots = {access.root for load in loads for access in names.effects(load.stmt).reads}
        found = cls(grid, loads, order, roots)
        known = {*grid.launch.programs, *(() if grid.loop is None else (grid.loop.var,))}
        is_fit = order and not roots & set(written) and all(found._is_fit(load, known) for load in loads)
        is_apart = all(found._is_first(root, accesses, names) for root in roots)
        return found if is_fit and is_apart and all(map(found._is_in_order, found.loops)) else None

    def _is_fit(self, load: Load, known: set[ir.Var]) -> bool:
        """Whether the place of a load follows from the numbers of its task, and only its loop uses its tile."""
        names = known | {loop.loop_var for _, loop, _ in load.path}
        is_placed = all(ir.variables(begin) <= names for begin in ir.region_parts(load.source)[1])
        return is_placed and _used(self.grid.phase.stmt, load.tile) == _used(load.loop, load.tile)

    def _is_in_order(self, loop: tuple[ir.For, list[int]]) -> bool:
        """Whether loads are statements of their loop's body, and a tile is used before the next one is."""
        uses = [self.uses(place) for place in loop[1]]
        body = ir.in_order(loop[0].body)
        is_here = all(any(map(self.loads[place].stmt.same_as, body)) for place in loop[1])
        return is_here and all(uses) and all(one[-1] < other[0] for one, other in itertools.pairwise(uses))

    def _is_first(self, root: ir.Var, accesses: TileAccesses, names: ProgramNames) -> bool:
        """Whether the loads come before all writes of what they read, if no other phase writes the tensor.

        A task writes behind them, and in another iteration of the loop of phases other elements. Tasks of a phase are
        unordered, so other ones write other elements.
        """
        stmts, loop = list(ir.statements(self.grid.phase.stmt)), self.grid.loop
        writing = [n for n, stmt in enumerate(stmts) if root in {a.root for a in names.effects(stmt).writes}]
        if not writing:
            return True
        outer = [load.path[-1][1] for load in self.loads]
        ends = [n + len(list(ir.statements(stmt))) for n, stmt in enumerate(stmts) if any(map(stmt.same_as, outer))]
        is_apart = loop is None or accesses.form(root) is not None and bool(accesses.dimensions_at(root, loop.var))
        return is_apart and min(writing) >= max(ends)


class _Search:
    """The walk over a phase. `loads`: those found."""

    def __init__(self, accesses: TileAccesses, names: ProgramNames):
        self.accesses, self.names = accesses, names
        self.loads: list[Load] = []

    def order(self, stmt: ir.Stmt, first: int = 0, inside: bool = False) -> list[int]:
        """The loads of a statement in order, by their places in `loads`. Raises Declined: it does more.

        first: loads before it in the iteration of the loop around it. inside: whether a pipelined loop is around it.
        """
        if not inside and not any(stages_of(inner) for inner in ir.statements(stmt)):
            return []
        if isinstance(stmt, ir.SeqStmt):
            found: list[int] = []
            for inner in stmt.seq:
                found += self.order(inner, first + len(found), inside)
            return found
        if isinstance(stmt, ir.AttrStmt):
            return self.order(stmt.body, first, inside)
        if not any(self.names.shared(a.root) for a in self.names.all_effects(stmt).accesses):
            return []
        if isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.SERIAL and _is_counted(stmt):
            before = len(self.loads)
            each = self.order(stmt.body, 0, inside or bool(stages_of(stmt)))
            for load in self.loads[before:]:
                load.path.append((first, stmt, len(each)))
            return each * ir.integer(stmt.extent)
        if not _is_bulk(stmt):
            raise Declined("other accesses in a loop of loads")
        source, target = ir.regions_of_copy(stmt.value)
        tile = ir.region_parts(target)[0]
        self.loads.append(Load(stmt, self.accesses.inside.inlined(source), tile, first))
        return [len(self.loads) - 1]


def _is_counted(loop: ir.For) -> bool:
    """Whether a loop has a known trip count, from 0 on."""
    bounds = ir.constants([loop.min, loop.extent])
    return bounds is not None and not bounds[0]


def _is_bulk(stmt: ir.Stmt) -> bool:
    """Whether a statement is a copy that fills a whole tile and can be a bulk copy."""
    if not isinstance(stmt, ir.Evaluate) or ir.op_name(stmt.value) != tl.COPY:
        return False
    source, target = ir.regions_of_copy(stmt.value)
    if not tiles.is_region(source):
        return False
    tensor, _, box = ir.region_parts(source)
    tile, begins, _ = ir.region_parts(target)
    shape, extents, whole = ir.constants(tile.shape), ir.constants(box), ir.constants(tensor.shape)
    if shape is None or extents is None or whole is None or str(tensor.dtype) != str(tile.dtype):
        return False
    size = ir.bits(str(tile.dtype)) // 8
    is_whole = ir.constants(begins) == [0] * len(shape) and extents[-len(shape) :] == shape
    return (
        is_whole and not (shape[-1] * size % BULK_BYTES or whole[-1] * size % BULK_BYTES) and max(shape) <= BOX_EXTENT
    )


def _used(stmt: ir.Stmt, tile: ir.Buffer) -> int:
    """Statements that name a tile."""
    return sum(tile.data in ir.uses(inner) for inner in ir.statements(stmt))
