# SPDX-License-Identifier: MIT
"""Find out which tiles of a program its warpgroups or warps hold, as copies or as shares.

Why: a fragment belongs to one range of threads, so a fragment that units view is one fragment for each unit, and what
the whole program computes with it each unit computes with its own. Before: a phase with views. After: for each tile
held so, the level and the axis that is split. A view says it for its tile; it spreads to the other fragments of the
program's statements: a row maximum of shared-out columns becomes a copy for each unit. Nothing is rewritten.

Declines: two views that disagree, a view of a part of a fragment, views of views of fragments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tiles, tl
from tilescale.backends.tilelang.lowering.groups.unit import threads_of
from tilescale.backends.tilelang.lowering.phase import Stage
from tilescale.errors import Location
from tilescale.hda import Level
from tilescale.passes.structure import location
from tilescale.program import ops
from tilescale.program.operations import TileView

ELEMENTWISE = (tl.COPY, *tl.ATOMICS_ON_TILES)
"""Tile operations from a region to one of the same extents."""


@dataclass(frozen=True)
class TileDistribution:
    """Distribution of a tile over the units of a level: each has a copy (no axis), or a share along an axis.

    Attributes:
        count: units of the level in a program.
        cyclic: whether unit r has the indices that are r modulo `count`, not one contiguous share.
    """

    level: Level
    count: int
    axis: int | None = None
    cyclic: bool = False
    where: Location | None = None

    def like(self, axis: int | None) -> TileDistribution:
        """The same units, another axis."""
        return TileDistribution(self.level, self.count, axis, self.cyclic and axis is not None, self.where)

    def agrees(self, other: TileDistribution) -> bool:
        """Whether both say the same."""
        mine, theirs = ((h.level.name, h.axis, h.cyclic) for h in (self, other))
        return mine == theirs

    def __str__(self) -> str:
        how = "as copies" if self.axis is None else f"as shares along dimension {self.axis}"
        return f"by {self.level.name}s {how}"


def is_fragment(buffer: ir.Buffer) -> bool:
    """Whether a tile lies in the registers of a range of threads."""
    return buffer.scope() == "local.fragment"


def accesses(node: ir.Node) -> list[tuple[ir.Buffer, list[Any], bool]]:
    """Buffers that a statement names: indices, and whether it writes there. Regions of operations included.

    The source of a view is not an access.
    """
    found: list[tuple[ir.Buffer, list[Any], bool]] = []
    viewed: set[Any] = set()

    def visit(n: Any) -> None:
        if ir.op_name(n) == ops.VIEW.name:
            region = TileView.of(n).region
            viewed.update((region, tiles.first_element(region)))
        elif n in viewed:
            return
        elif tiles.is_region(n):
            buffer, begins, _ = ir.region_parts(n)
            found.append((buffer, begins, tiles.is_written(n)))
        elif isinstance(n, ir.BufferLoad | ir.BufferStore):
            found.append((n.buffer, list(n.indices), isinstance(n, ir.BufferStore)))

    ir.walk(node, visit)
    return found


def parallel_loops(stmt: ir.Stmt) -> list[ir.For]:
    """The loops of a nest of parallel loops, outermost first."""
    loops: list[ir.For] = []
    while isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
        loops.append(stmt)
        stmt = stmt.body
    return loops


def matching_axis(axis: int, extents: list[Any], others: list[Any]) -> int | None:
    """The dimension of a region that lies along `axis` of another one: those of extent 1 do not count."""
    mine, theirs = ([i for i, n in enumerate(e) if ir.constant(n) != 1] for e in (extents, others))
    return theirs[mine.index(axis)] if axis in mine and len(mine) == len(theirs) else None


class TileDistributions:
    """Distributions of the tiles of one phase.

    Args:
        owners: data variable of a tile that units allocate -> their level.
    """

    def __init__(self, stage: Stage, owners: Mapping[ir.Var, Level]):
        self.stage, self.owners = stage, owners
        self.held: dict[ir.Var, TileDistribution] = {}
        self.views: dict[ir.Var, TileView] = {}
        self._places: dict[ir.Var, Location | None] = {}
        self._statements: list[ir.Stmt] = []
        self._written: set[ir.Var] = set()
        self._named: dict[ir.Var, tuple[ir.Buffer, Level, bool]] = {}
        self._walk(stage.phase.stmt, None)
        if not self.views and not self._named:
            return
        for var, view in self.views.items():
            stage.where = self._places[var]
            self._seed(var, view)
        self._spread()
        self._direct_uses()
        self._spread()

    def of(self, buffer: ir.Buffer) -> TileDistribution | None:
        """Distribution of a tile; None if units do not hold it."""
        return self.held.get(buffer.data)

    def base(self, buffer: ir.Buffer) -> ir.Var:
        """The data variable of the tile or tensor that a buffer, or a unit's view of it, lies in."""
        data = buffer.data
        while data in self.views:
            data = self.views[data].base.data
        return self.stage.phase.parameters_of_views.get(data, data)

    def touched(self, node: ir.Node) -> TileDistribution | None:
        """Distribution of a tile that a statement names, preferring a split one."""
        found = [self.held[b.data] for b, _, _ in accesses(node) if b.data in self.held] if self.held else []
        return max(found, key=lambda h: h.axis is not None, default=None)

    # -- statements --------------------------------------------------------------------------------------------------

    def _walk(self, stmt: ir.Stmt, inside: Level | None) -> None:
        if isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == ops.SCALE:
            level = self.stage.target.machine.level(str(stmt.value.value))
            is_finer = level.kind == "thread_group" and (inside is None or threads_of(level) < threads_of(inside))
            self._walk(stmt.body, level if is_finer else inside)
        elif isinstance(stmt, ir.Bind) and ir.op_name(stmt.value) == ops.VIEW.name:
            if inside is not None:
                self.views[stmt.var] = TileView.of(stmt.value)
                self._places[stmt.var] = location(stmt)
        elif inside is not None:
            self._inside(stmt, inside)
        elif parallel_loops(stmt) or isinstance(stmt, ir.Evaluate | ir.BufferStore):
            self._statements.append(stmt)
        else:
            for inner in ir.children(stmt):
                self._walk(inner, None)

    def _inside(self, stmt: ir.Stmt, level: Level) -> None:
        """The accesses of a unit: its writes decide whether a view of a shared tile needs copies."""
        nested = list(ir.children(stmt))
        for inner in nested:
            self._walk(inner, level)
        if nested:
            return
        for buffer, _, writes in accesses(stmt):
            if writes:
                self._written.add(buffer.data)
            if is_fragment(buffer) and buffer.data not in self.views and buffer.data not in self.owners:
                written = writes or (buffer.data in self._named and self._named[buffer.data][2])
                self._named[buffer.data] = (buffer, level, written)

    # -- where it begins ---------------------------------------------------------------------------------------------

    def _seed(self, var: ir.Var, view: TileView) -> None:
        base, begins, extents = ir.region_parts(view.region)
        level, layout = self.stage.target.machine.level(view.level), view.layout
        if level.kind != "thread_group" or base.scope() == "global":
            return
        own = base.data in self.views or base.data in self.owners
        if own and (layout.is_replica or not is_fragment(base)):
            return  # A copy of what is a unit's own is that itself; a share of a shared tile is a slice.
        if own:
            raise self.stage.unsupported(f"a view that splits a {level.name}'s own part of the fragment {base.name!r}")
        if layout.is_replica:
            if is_fragment(base) or var in self._written:
                self._hold(base, self._at(level))
        elif is_fragment(base):
            whole = all(ir.constant(b) == 0 for b in begins) and [ir.constant(e) for e in extents] == [
                ir.constant(n) for n in base.shape
            ]
            if not whole:
                raise self.stage.unsupported(f"a view that splits a part of the fragment {base.name!r}")
            assert layout.dim is not None
            share = ir.integer(view.shape[layout.dim])
            self._hold(base, self._at(level, layout.dim, layout.block not in (None, share)))
            if layout.block not in (None, 1, share):
                raise self.stage.unsupported(f"a block-cyclic view of the fragment {base.name!r}")
        elif self.held.get(base.data):
            raise self.stage.unsupported(f"views of {base.name!r} as copies that units write and as shares")

    def _at(self, level: Level, axis: int | None = None, cyclic: bool = False) -> TileDistribution:
        return TileDistribution(
            level, self.stage.launch.thread_count // threads_of(level), axis, cyclic, self.stage.where
        )

    def _hold(self, buffer: ir.Buffer, held: TileDistribution) -> bool:
        """Note a holding; whether it is new."""
        known = self.held.setdefault(buffer.data, held)
        if not known.agrees(held):
            raise self.stage.unsupported(f"{buffer.name!r} is held {known} and {held}")
        return known is held

    # -- how it spreads ----------------------------------------------------------------------------------------------

    def _spread(self) -> None:
        changed = bool(self.held)
        while changed:
            changed = False
            for stmt in self._statements:
                held = self.touched(stmt)
                if held is not None:
                    self.stage.where = location(stmt) or self.stage.where
                    changed |= self._spread_to(stmt, held)

    def _spread_to(self, stmt: ir.Stmt, held: TileDistribution) -> bool:
        name = ir.op_name(stmt.value) if isinstance(stmt, ir.Evaluate) else None
        if parallel_loops(stmt) or isinstance(stmt, ir.BufferStore):
            return self._nest(stmt, held)
        if held.axis is not None and name in ELEMENTWISE:
            return self._copy(tiles.TileCopy.of(stmt.value), held)
        if held.axis is not None and name == tl.REDUCE:
            return self._reduce(tiles.Reduce.of(stmt.value))
        if held.axis is not None and name == tl.GEMM:
            return self._gemm(tiles.Gemm.of(stmt.value))
        return self._others(stmt, {}, held)

    def _others(self, stmt: ir.Stmt, axes: dict[ir.Var, int], held: TileDistribution) -> bool:
        """Fragments of a statement without a distribution yet: along an axis where one is known, else as copies."""
        changed = False
        for buffer, _, _ in accesses(stmt):
            if is_fragment(buffer) and buffer.data not in self.held:
                changed |= self._hold(buffer, held.like(axes.get(buffer.data)))
        return changed

    def _nest(self, stmt: ir.Stmt, held: TileDistribution) -> bool:
        var = self.split_loop(stmt)
        axes: dict[ir.Var, int] = {}
        for buffer, indices, _ in accesses(stmt):
            if var is not None and is_fragment(buffer):
                at = [a for a, index in enumerate(indices) if isinstance(index, ir.Var) and index.same_as(var)]
                axes.update({buffer.data: at[0]} if at else {})
        return self._others(stmt, axes, held)

    def split_loop(self, stmt: ir.Stmt) -> ir.Var | None:
        """The loop of a parallel nest that runs along the split dimension of the tiles it names. Raises
        UnsupportedError: none, or several."""
        loops = {loop.loop_var: ir.constant(loop.extent) for loop in parallel_loops(stmt)}
        found: list[ir.Var] = []
        for buffer, indices, _ in accesses(stmt):
            held = self.held.get(buffer.data)
            if held is None or held.axis is None:
                continue
            index = indices[held.axis]
            is_loop = isinstance(index, ir.Var) and loops.get(index) == ir.constant(buffer.shape[held.axis])
            if not is_loop or (found and not found[0].same_as(index)):
                raise self.stage.unsupported(
                    f"{buffer.name!r} is held {held}: index {index} of that dimension is not one whole T.Parallel loop"
                )
            found.append(index)
        return found[0] if found else None

    def _copy(self, copy: tiles.TileCopy, held: TileDistribution) -> bool:
        if not tiles.is_region(copy.source):
            return False
        changed = False
        for one, other in ((copy.source, copy.target), (copy.target, copy.source)):
            (a, _, extents), (b, _, others) = ir.region_parts(one), ir.region_parts(other)
            mine = self.of(a)
            if mine is not None and mine.axis is not None and is_fragment(b) and self.of(b) is None:
                axis = matching_axis(mine.axis, extents, others)
                changed |= self._hold(b, mine.like(axis))
        return changed

    def _reduce(self, made: tiles.Reduce) -> bool:
        source, target, dim = *(ir.region_parts(r)[0] for r in (made.source, made.target)), made.dim
        keeps = len(source.shape) == len(target.shape)
        mine, result = self.of(source), self.of(target)
        if mine is not None and result is None and is_fragment(target):
            axis = mine.axis
            if axis is not None and not keeps:
                axis = None if axis == dim else axis - (axis > dim)
            elif axis == dim:
                axis = None
            return self._hold(target, mine.like(axis))
        if mine is None and result is not None and is_fragment(source):
            axis = result.axis
            return self._hold(source, result.like(axis if axis is None or keeps else axis + (axis >= dim)))
        return False

    def _gemm(self, product: tiles.Gemm) -> bool:
        a, c = (ir.region_parts(r)[0] for r in (product.a, product.c))
        rows = len(a.shape) - (1 if product.transpose_a else 2)
        held_a, held_c = self.of(a), self.of(c)
        if held_c is not None and is_fragment(a) and held_a is None:
            return self._hold(a, held_c.like(rows if held_c.axis == len(c.shape) - 2 else None))
        if held_a is not None and held_c is None and is_fragment(c):
            return self._hold(c, held_a.like(len(c.shape) - 2 if held_a.axis == rows else None))
        return False

    # -- units that name a fragment of the program without a view ----------------------------------------------------

    def _direct_uses(self) -> None:
        outside = {b.data for stmt in self._statements for b, _, _ in accesses(stmt)}
        for data, (buffer, level, written) in self._named.items():
            alone = level.threads in (1, self.stage.launch.thread_count)
            if alone or data not in outside or data in self.held:
                continue
            if written:
                raise self.stage.unsupported(
                    f"{level.name}s write the fragment {buffer.name!r} without a view; the whole program uses it too"
                )
            self._hold(buffer, self._at(level))
