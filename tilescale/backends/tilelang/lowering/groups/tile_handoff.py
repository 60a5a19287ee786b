# SPDX-License-Identifier: MIT
"""Hand tiles over between a loader and units in parts, each as early as what a unit does with it allows.

Why: where only one stage of a tile fits, nothing is loaded while units work on it, unless a part that all have used is
loaded again while they work on the next one. Before: one unit's statements of an iteration. After: with a wait before
the first statement that names a part, and an arrival after the last one. Products into the same accumulators start one
after another without waiting for each; one whose inner dimension runs over several parts becomes one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tiles, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.groups.distribution import accesses
from tilescale.backends.tilelang.lowering.groups.loops import PipelinedLoop
from tilescale.backends.tilelang.lowering.groups.state import GroupStage

ROWS = 16
"""Rows of a part are a multiple of what one matrix instruction takes of an inner dimension."""


def parts_of(stage: GroupStage, loop: PipelinedLoop) -> int:
    """Into how many parts, along the rows, the tiles of a loop are handed over: one for each unit, or one."""
    parts = len(stage.whole.units(loop.level))
    rows = {ir.integer(tile.shape[0]) for tile in loop.tiles}
    if loop.stages > 1 or len(rows) > 1 or any(n % (parts * ROWS) for n in rows):
        return 1
    extent = rows.pop()
    loaded = {tile.data for tile in loop.tiles}
    named: list[ir.Buffer] = []
    fitting: list[ir.Call] = []
    for stmt in loop.rest:
        named += [buffer for buffer, _, _ in accesses(stmt) if stage.distributions.base(buffer) in loaded]
        ir.walk(stmt, lambda node: fitting.extend(_fitting(stage, node, loaded, extent, extent // parts)))
    return parts if len(named) == 2 * len(fitting) else 1  # a region counts, and the load in it


def _fitting(stage: GroupStage, call: Any, loaded: set[ir.Var], extent: int, part: int) -> list[ir.Call]:
    """The operands of a product that are tiles and lie in one part, or can be taken part by part."""
    found: list[ir.Call] = []
    if ir.op_name(call) != tl.GEMM:
        return found
    product = tiles.Gemm.of(call)
    for region in (product.a, product.b):
        buffer, begins, extents = ir.region_parts(region)
        if stage.distributions.base(buffer) not in loaded:
            continue
        begin, rows = _offset(stage, buffer, begins[0], part), ir.integer(extents[0])
        inner = region is product.b and not product.transpose_b and rows == extent
        if begin is not None and (begin + rows <= part or inner):
            found.append(region)
    return found


def _offset(stage: GroupStage, buffer: ir.Buffer, begin: Any, part: int) -> int | None:
    """Offset in a part of a row of a tile's view; None if it differs between units."""
    views = stage.distributions.views
    while buffer.data in views:
        view = views[buffer.data]
        layout, share = view.layout, ir.integer(view.shape[0])
        if layout.dim == 0 and (layout.block not in (None, share) or share % part):
            return None
        buffer, begins, _ = ir.region_parts(view.region)
        begin = begins[0] + begin
    return ir.constant(ir.simplify(begin % part, {}) if isinstance(begin, ir.PrimExpr) else begin % part)


@dataclass(frozen=True)
class TileHandoff:
    """A unit's waits for the parts of its tiles, and their release.

    Attributes:
        wait: for each part, the wait until it is full.
        arrive: for each part, the arrival that releases it.
        overlaps: whether GEMMs are asynchronous.
        first: whether the unit waits for all parts before anything else: this implies the loader's waits.
    """

    wait: Sequence[ir.Stmt]
    arrive: Sequence[ir.Stmt]
    overlaps: bool
    first: bool = False

    def over(self, body: ir.Stmt, rows: dict[ir.Var, int]) -> list[ir.Stmt]:
        """The statements of an iteration, with waits and arrivals. `rows`: of a part of each tile, by its data
        variable."""
        stmts = [piece for stmt in ir.in_order(body) for piece in _by_part(stmt, rows)]
        named = [self._named(stmt, rows) for stmt in stmts]
        last = {part: number for number, parts in enumerate(named) for part in parts}
        waited = set(range(len(self.wait))) if self.first else set[int]()
        result = [self.wait[part] for part in sorted(waited)]
        for run in _chains(stmts) if self.overlaps else [[number] for number in range(len(stmts))]:
            asked = set().union(*(named[n] for n in run)) - waited
            waited |= asked
            result += [self.wait[part] for part in sorted(asked)]
            free = [[part for part in sorted(last) if last[part] == n] for n in run]
            result += self._run([stmts[n] for n in run], free)
        unused = [part for part in range(len(self.wait)) if part not in last]
        result += [self.wait[part] for part in unused if part not in waited]
        return [*result, *(self.arrive[part] for part in unused)]

    def _run(self, stmts: list[ir.Stmt], free: list[list[int]]) -> list[ir.Stmt]:
        """Products into the same accumulators, and the parts that are free after each."""
        if not any(free[:-1]):
            return [*map(_started, stmts[:-1]), stmts[-1], *(self.arrive[part] for part in free[-1])]
        result = [*map(_started, stmts)]
        for number, parts in enumerate(free):
            if parts or number == len(stmts) - 1:
                result.append(tir.evaluate(tir.call(tl.WAIT_WGMMA, len(stmts) - 1 - number)))
                result += [self.arrive[part] for part in parts]
        return result

    def _named(self, stmt: ir.Stmt, rows: dict[ir.Var, int]) -> set[int]:
        found: set[int] = set()
        for buffer, indices, _ in accesses(stmt):
            if buffer.data in rows:
                row = ir.constant(indices[0])
                found |= set(range(len(self.wait))) if row is None else {row // rows[buffer.data]}
        return found


def _product(stmt: ir.Stmt) -> tiles.Gemm | None:
    call = stmt.value if isinstance(stmt, ir.Evaluate) else None
    return tiles.Gemm.of(call) if ir.op_name(call) == tl.GEMM else None


def _by_part(stmt: ir.Stmt, rows: dict[ir.Var, int]) -> list[ir.Stmt]:
    """A product whose inner dimension runs over several parts as one for each part."""
    product = _product(stmt)
    if product is None or product.transpose_b:
        return [stmt]
    (a, at, box), (b, begins, extents) = (ir.region_parts(region) for region in (product.a, product.b))
    part, inner = rows.get(b.data), ir.integer(extents[0])
    if part is None or inner <= part:
        return [stmt]
    axis = len(at) - (2 if product.transpose_a else 1)
    made: list[ir.Stmt] = []
    for begin in range(0, inner, part):
        begin_a = [n + begin if i == axis else n for i, n in enumerate(at)]
        box_a = [ir.int_node(part) if i == axis else n for i, n in enumerate(box)]
        one = tir.region(a, begin_a, box_a, "r")
        other = tir.region(b, [begins[0] + begin, *begins[1:]], [ir.int_node(part), *extents[1:]], "r")
        clear = product.clear if begin == 0 else ir.IntImm("bool", 0)
        made.append(tir.at(product.on((one, other, product.c), (*product.sizes[:2], part), clear), stmt))
    return made


def _chains(stmts: list[ir.Stmt]) -> list[list[int]]:
    """Runs of products into the same accumulators; all other statements are runs of their own."""
    runs: list[list[int]] = []
    for number, stmt in enumerate(stmts):
        product, before = _product(stmt), _product(stmts[runs[-1][-1]]) if runs else None
        if product is not None and before is not None and _adds_to(product, before):
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _adds_to(product: tiles.Gemm, before: tiles.Gemm) -> bool:
    """Whether a product adds to the accumulators of another one."""
    is_same = ir.region_parts(product.c)[0].same_as(ir.region_parts(before.c)[0])
    return is_same and not ir.constant(product.clear)


def _started(stmt: ir.Stmt) -> ir.Stmt:
    product = _product(stmt)
    return stmt if product is None else tir.at(product.started(), stmt)
