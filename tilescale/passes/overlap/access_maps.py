# SPDX-License-Identifier: MIT
"""Accesses of a grid to a tensor, and the rows that each program touches there.

A use is as deep in the grid phase as its rows depend on the enclosing loops; inner loops count with all rows that they
reach. The analysis errs on the side of more rows. Rows that follow from numbers in memory, such as the first token of
an expert, count as all possible rows; or as the actual ones, where tiles can read these numbers before they wait.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilelang_core import accesses, ir
from tilelang_core import rewrite as tir
from tilescale.hda import Machine
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.part_tiles import PartTiles
from tilescale.passes.overlap.partition import Partition, SliceBox
from tilescale.program.effects import Access, Completion, names_of, phases, statements
from tilescale.program.grids import GridValues, UnknownValue, grid_of
from tilescale.program.model import GridPhase, Launch, Program, location
from tilescale.program.operations import Rank, operation
from tilescale.program.ops import SCALE
from tilescale.program.regions import BoundVariables
from tilescale.program.waiting import TRIED


@dataclass(frozen=True)
class TensorUse:
    """The statements of a grid phase that touch a tensor.

    Attributes:
        stmts: the first and all after it in the same list, up to the last that touches it.
        begin, end: rows that they touch, in terms of variables with values before the first of them.
        loops: the loops around, outermost first, on which the rows depend.
        branches: conditions under which it happens, each with whether it holds.
        ranges: where variables in them begin, and how many values they take, as far as that is known.
        named: tensors whose elements say which rows these are.
        looks_up: whether tiles look at these elements themselves; else the rows are all that these may say.
        high: how many rows there are, all of one index of the other dimensions that are counted; None: not known.
        box: the elements of a program, in terms of its indices; None: there are several such boxes, or it happens in a
            loop or a branch.
        tiles: what numbers the parts and the tiles; None: nothing does.
    """

    phase: GridPhase
    launch: Launch
    rows: Partition
    stmts: tuple[ir.Stmt, ...]
    begin: ir.PrimExpr
    end: ir.PrimExpr
    loops: tuple[ir.For, ...]
    branches: tuple[tuple[ir.PrimExpr, bool], ...] = ()
    ranges: dict[ir.Var, tuple[int, int]] = field(default_factory=dict)
    named: tuple[str, ...] = ()
    looks_up: bool = False
    high: int | None = None
    box: SliceBox | None = None
    tiles: PartTiles | None = None

    @property
    def deeper(self) -> Partition | None:
        """The rows with one more dimension counted, where each tile is within one index of those counted now."""
        return self.rows.deeper if self.high == 1 else None

    @property
    def part(self) -> ir.PrimExpr | None:
        """The part of a program where parts have a separate dimension; None: it may touch several."""
        bounds = self.box[self.rows.lead] if self.rows.slots and self.box is not None else None
        if bounds is None or ir.constant(bounds[1] - bounds[0]) != 1:
            return None
        return ir.simplify(bounds[0], {})

    @property
    def place(self) -> tuple[Any, Any]:
        """The part of the first row, and the row in it."""
        if self.tiles is not None:
            return self.tiles.part, self.tiles.row
        height = self.rows.height
        return ir.simplify(self.begin // height, self.ranges), ir.simplify(self.begin % height, self.ranges)

    @property
    def is_all(self) -> bool:
        """Whether it may be any row."""
        return ir.constant(self.begin) == 0 and ir.constant(self.end - self.rows.total) == 0


class AccessMaps:
    """The uses of tensors by the grids of a program.

    Args:
        sizes: units of each launched level.
        symbolic: whether extents of the program are known at launch only.
    """

    def __init__(self, program: Program, machine: Machine, sizes: Mapping[str, int], symbolic: bool = False):
        self.program, self.machine, self.sizes, self.symbolic = program, machine, sizes, symbolic
        self.names = names_of(program)

    def is_argument(self, root: ir.Var) -> bool:
        """Whether a tensor is an argument of the program, which the caller sees in the end."""
        return any(p.buffer is not None and p.buffer.data.same_as(root) for p in self.program.parameters)

    def touches(self, stmt: ir.Stmt, root: ir.Var) -> bool:
        """Whether a statement, or one inside it, touches a tensor."""
        return any(a.root.same_as(root) for a in self.names.all_effects(stmt).accesses)

    def find(self, phase: GridPhase, launch: Launch, rows: Partition, *, looks_up: bool = False) -> TensorUse:
        """Analyse the accesses of a phase to a tensor: its rows as a function of the tile. `looks_up`: whether rows may
        be selected by values in memory."""
        return _Descent(self, phase, launch, rows, looks_up).use()

    def values(
        self, use: TensorUse, ranks: Mapping[str, int], *, likely: bool = False
    ) -> Iterator[tuple[Any, Any, Any]]:
        """For each iteration of the loops around a use: its first row, the end of its rows, and whether it happens;
        each an array over the programs of the grid, in the order in which they start. Raises Declined: they are not
        known before the launch. `likely`: assume zero for numbers in memory, one iteration for loops that depend on
        them, and taken branches. Assumptions suffice for a choice, not for a proof."""
        grid = self.grid(use.launch, ranks)
        try:
            places = replace(grid, loaded=0) if likely else grid
            for at, runs in _rounds(use.loops, grid, likely):
                begin, end = (np.broadcast_to(places.value(e, at), (grid.count,)) for e in (use.begin, use.end))
                for condition, taken in use.branches:
                    try:
                        runs = runs & (np.asarray(grid.value(condition, at), bool) == taken)
                    except UnknownValue:
                        if not likely:
                            raise
                yield begin, end, runs
        except UnknownValue:
            raise self.unknown(use) from None

    def unknown(self, use: TensorUse) -> Declined:
        """The reason not to overlap: which rows a tile uses is known only at launch."""
        said = f": {' and '.join(map(repr, use.named))} says" if use.named else ""
        return Declined(f"which rows a tile touches is known at launch only{said}", location(use.stmts[0]))

    def by_rank(self, use: TensorUse, level: str, *, likely: bool = False) -> Iterator[tuple[Any, Any, Any]]:
        """The values on each unit of a level, one after the other."""
        for rank in range(self.sizes[level]):
            yield from self.values(use, self.ranks(level, rank), likely=likely)

    def ranks(self, level: str, rank: int) -> dict[str, int]:
        """The ranks of a unit: 0 at all levels but one."""
        return {name: rank if name == level else 0 for name in self.sizes}

    def step(self, use: TensorUse, height: int, level: str) -> int:
        """Distance in rows between the tiles of a use inside parts of `height` rows; the tile height if all begin a
        part."""
        touched = list(self.by_rank(use, level, likely=True))
        begins = np.concatenate([begin[runs] % height for begin, _, runs in touched])
        return int(np.gcd.reduce(begins)) or min(self.tile(use, level), height)

    def tile(self, use: TensorUse, level: str) -> int:
        """The most rows of a tile."""
        return max(int((e - b)[runs].max(initial=1)) for b, e, runs in self.by_rank(use, level, likely=True))

    def repeats(self, use: TensorUse, level: str) -> int:
        """Likely trip count of a program's loops of unknown extent: such that each row is touched once."""
        if not use.looks_up:
            return 1
        binds = {stmt.var: stmt.value for stmt in ir.statements(use.phase.stmt) if isinstance(stmt, ir.Bind)}
        behind, programs = _behind(use.begin, binds), zip(use.launch.programs, use.launch.grid, strict=True)
        apart = math.prod(ir.integer(count) for var, count in programs if var in behind)
        return max(1, use.rows.total // (apart * self.tile(use, level)))

    def steady(self, phase: GridPhase) -> set[ir.Var]:
        """Tensors, and views of them, that stay as they are during a phase: neither it nor a copy queue writes them."""
        written = {a.root for a in self.names.all_effects(phase.stmt).writes}
        for stmt, _, _ in statements(self.program.body):
            effects = self.names.effects(stmt, on_device=True)
            if effects.completes is Completion.QUEUED:
                written |= {a.root for a in effects.writes}
        known = [data for data in (*self.names.homes, *self.names.views) if self.names.shared(self.names.root(data))]
        return {data for data in known if self.names.root(data) not in written}

    def grid(self, launch: Launch, ranks: Mapping[str, int]) -> GridValues:
        """The programs of a launch. Raises Declined if their number is known at launch only."""
        grids = [phase.stmt for phase, of in phases(self.program.body) if of is launch and isinstance(phase, GridPhase)]
        found = grid_of(GridPhase(tir.sequence(grids)), launch, self.machine, self.sizes, ranks)
        if found is None:
            raise Declined("the extent of the grid is known at launch only", launch.where)
        return found


def _rounds(
    loops: tuple[ir.For, ...], grid: GridValues, likely: bool = False
) -> Iterator[tuple[dict[ir.Var, int], Any]]:
    """Values of loop variables, and in which programs they occur."""
    ranges: list[tuple[int, int, Any, Any]] = []
    for loop in loops:
        try:
            first, count = (np.broadcast_to(grid.value(e, {}), (grid.count,)) for e in (loop.min, loop.extent))
        except UnknownValue:
            if not likely:
                raise
            first, count = np.zeros(grid.count, int), np.ones(grid.count, int)
        ranges.append((int(first.min()), int((first + count).max()), first, count))
    if np.prod([high - low for low, high, _, _ in ranges], initial=grid.count) > TRIED:
        raise UnknownValue
    for values in itertools.product(*(range(low, high) for low, high, _, _ in ranges)):
        inside = np.ones(grid.count, bool)
        for value, (_, _, first, count) in zip(values, ranges, strict=True):
            inside &= (first <= value) & (value < first + count)
        yield {loop.loop_var: value for loop, value in zip(loops, values, strict=True)}, inside


def _behind(expr: ir.PrimExpr, binds: Mapping[ir.Var, ir.PrimExpr]) -> set[ir.Var]:
    """The variables that an expression depends on, through those that are bound."""
    found: set[ir.Var] = set()
    for var in ir.variables(expr):
        found |= _behind(binds[var], binds) if var in binds else {var}
    return found


class _Descent:
    """The way from a phase down to where it uses a tensor."""

    def __init__(self, uses: AccessMaps, phase: GridPhase, launch: Launch, rows: Partition, looks_up: bool):
        self.uses, self.phase, self.launch, self.rows = uses, phase, launch, rows
        self.steady: frozenset[ir.Var] = frozenset(uses.steady(phase)) if looks_up else frozenset()
        self.looks_up, self.root = looks_up, uses.names.root(rows.buffer.data)
        self.threads = {var: (0, ir.IntImm("int32", launch.threads[axis])) for var, axis in launch.thread_vars}
        self.binds = {stmt.var: stmt.value for stmt in ir.statements(phase.stmt) if isinstance(stmt, ir.Bind)}
        self.loops: list[ir.For] = []
        self.branches: list[tuple[ir.PrimExpr, bool]] = []

    def use(self) -> TensorUse:
        """The deepest place whose statements hold all uses."""
        stmts = (self.phase.stmt,)
        while (inner := self._inside(stmts)) is not None:
            stmts = inner
        begin, end = self._rows(stmts)
        boxes = self._boxes(stmts)
        heights = {self.rows.high(box) for box in boxes}
        alone = len(boxes) == 1 and not self.branches
        box = list(map(self._written_out, boxes[0])) if alone else None
        return TensorUse(
            *(self.phase, self.launch, self.rows, stmts, begin, end, tuple(self.loops), tuple(self.branches)),
            ranges=self._ranges(),
            named=self._named(stmts),
            looks_up=self.looks_up,
            high=heights.pop() if len(heights) == 1 else None,
            box=None if self.loops else box,
            tiles=None if box is None else PartTiles.of(self.rows, box, self.launch, self.loops),
        )

    def _inside(self, stmts: tuple[ir.Stmt, ...]) -> tuple[ir.Stmt, ...] | None:
        """The statements one step further down; None where the way ends."""
        if len(stmts) > 1:
            return None
        (stmt,) = stmts
        if isinstance(stmt, ir.SeqStmt):
            touching = [i for i, s in enumerate(stmt.seq) if self.uses.touches(s, self.root)]
            return tuple(stmt.seq[touching[0] : touching[-1] + 1])
        if isinstance(stmt, ir.For):
            if stmt.kind == ir.ForKind.SERIAL and self._depends(stmt):
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
        if not self._is_known(stmt.condition) or _behind(stmt.condition, self.binds) & self.threads.keys():
            return None
        self.branches.append((stmt.condition, arms[0].same_as(stmt.then_case)))
        return tuple(arms)

    def _whole(self, stmt: ir.AttrStmt) -> bool:
        """Whether whole programs execute what an attribute is around."""
        if str(stmt.attr_key) != SCALE:
            return True
        return self.uses.machine.level(str(stmt.value.value)).kind in ("unit", "program")

    def _depends(self, loop: ir.For) -> bool:
        """Whether the rows that a loop's body touches depend on its variable, and its extent is valid."""
        begin, end = self._rows((loop.body,))
        return loop.loop_var in ir.variables(begin) | ir.variables(end) and self._is_known(loop.extent)

    def _rows(self, stmts: tuple[ir.Stmt, ...]) -> tuple[ir.PrimExpr, ir.PrimExpr]:
        pairs = {tuple(map(str, pair)): pair for pair in (self.rows.interval(box) for box in self._boxes(stmts))}
        (begin, end), *others = pairs.values()
        for first, last in others:
            begin, end = ir.Min(begin, first), ir.Max(end, last)
        return ir.simplify(begin, {}), ir.simplify(end, {})

    def _boxes(self, stmts: tuple[ir.Stmt, ...]) -> list[SliceBox]:
        """The elements that some statements touch, for each kind of access."""
        body = tir.sequence(stmts)
        # A value that is only looked up in a branch need not exist outside of it.
        branches = [stmt for stmt in ir.statements(body) if isinstance(stmt, ir.IfThenElse)]
        in_branch = any(self.uses.touches(stmt, self.root) for stmt in branches)
        inside = replace(BoundVariables.of(body), steady=frozenset() if in_branch else self.steady)
        inside.ranges |= self.threads
        boxes = [self._box(access, inside) for access in self._accesses(body)]
        return list({str(box): box for box in boxes}.values())

    def _written_out(self, pair: tuple[Any, Any] | None) -> tuple[Any, Any] | None:
        """The bounds of a dimension in terms of the program's indices, as far as they follow from these."""
        if pair is None:
            return None
        begin, end = map(ir.int_node, pair)
        known = {var: value for var, value in self.binds.items() if not isinstance(operation(value), Rank)}
        pure = {var: value for var, value in known.items() if ir.is_pure(value)}
        while pure.keys() & (ir.variables(begin) | ir.variables(end)):
            begin, end = ir.substitute(begin, pure), ir.substitute(end, pure)
        return begin, end

    def _accesses(self, body: ir.Stmt) -> list[Access]:
        return [a for a in self.uses.names.all_effects(body).accesses if a.root.same_as(self.root)]

    def _is_like(self, access: Access) -> bool:
        """Whether an access counts elements as the tensor does."""
        return [str(n) for n in access.buffer.shape] == [str(n) for n in self.rows.buffer.shape]

    def _box(self, access: Access, inside: BoundVariables) -> SliceBox:
        if not self._is_like(access):
            return [None] * len(self.rows.buffer.shape)
        return [pair if pair and all(map(self._is_known, pair)) else None for pair in inside.bounds(access)]

    def _ranges(self) -> dict[ir.Var, tuple[int, int]]:
        """The ranges of programs' numbers, of loops, and of values computed from them."""
        programs = zip(self.launch.programs, self.launch.grid, strict=True)
        loops = [(loop.loop_var, loop.extent) for loop in self.loops if ir.constant(loop.min) == 0]
        extents = {var: ir.constant(extent) for var, extent in (*programs, *loops)}
        found = {var: (0, extent) for var, extent in extents.items() if extent is not None}
        for var, value in self.binds.items():
            made = operation(value)
            if isinstance(made, Rank) and made.level in self.uses.sizes:
                found[var] = (0, self.uses.sizes[made.level])
            elif "int" in str(value.dtype) and (bounds := accesses.span(value, 1, found)) and (
                known := ir.constants(bounds)
            ):
                found[var] = (known[0], known[1] - known[0])
        return found

    # -- numbers in memory ---------------------------------------------------------------------------------------------

    def _is_known(self, expr: ir.PrimExpr) -> bool:
        """Whether an expression has a value in front of the use: from no memory but that of steady tensors."""
        acts = ir.contains(ir.int_node(expr), lambda node: isinstance(node, ir.Call) and not ir.is_pure(node))
        return not acts and all(load.buffer.data in self.steady for load in self._loads(expr))

    def _loads(self, expr: ir.PrimExpr) -> Iterator[ir.BufferLoad]:
        """The elements that an expression is made of, through the variables that are bound."""
        found: list[Any] = []
        ir.walk(ir.int_node(expr), lambda node: found.append(node))
        for node in found:
            if isinstance(node, ir.BufferLoad):
                yield node
            elif isinstance(node, ir.Var) and node in self.binds:
                yield from self._loads(self.binds[node])

    def _named(self, stmts: tuple[ir.Stmt, ...]) -> tuple[str, ...]:
        """Names of the tensors whose elements say which rows are touched."""
        exprs = [loop.extent for loop in self.loops]
        for access in self._accesses(tir.sequence(stmts)):
            numbers = self.rows.dimensions if self._is_like(access) else range(len(access.buffer.shape))
            exprs += [region[i] for region in (access.begins, access.extents) if region is not None for i in numbers]
        return tuple(dict.fromkeys(load.buffer.name for expr in exprs for load in self._loads(expr)))
