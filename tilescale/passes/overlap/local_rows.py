# SPDX-License-Identifier: MIT
"""Local rows of an all-gather that tiles read from its source.

Why: the copy of the local rows takes bandwidth of the memory, and the first tiles wait for it. Before: the device
copies its rows into the result. After: a grid branches by the number of the part. Its first programs read the source,
without a wait; the others read the result. Declines results that the caller sees, or several grids read, and tiles
whose part is not the last axis of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.legality import CollectiveSite
from tilescale.passes.overlap.raster import Raster, check_free, inside
from tilescale.passes.overlap.rewriter import LaunchRewriter, rank_of
from tilescale.passes.overlap.schedule import Move
from tilescale.passes.overlap.tile_order import ArrivalOrder, last_axis
from tilescale.program.model import GridPhase, location


def check_source(
    gathers: Sequence[tuple[CollectiveSite, tuple[TensorUse, ...]]], uses: AccessMaps, move: Move
) -> Raster:
    """The programs whose tiles read local rows of gathers from their sources, as `move` asks for. Raises Declined: they
    cannot."""
    found = [use for _, readers in gathers for use in readers]
    for site, readers in gathers:
        whole = ir.region_parts(site.made.target)[0]
        if uses.is_argument(uses.names.root(whole.data)):
            raise Declined(f"{whole.name!r} is an argument, which the caller sees", location(site.stmt))
        if len(readers) > 1 or readers[0].phase is not found[0].phase:
            raise Declined("several grids read it", location(site.stmt))
        last_axis(readers[0])
    first = next((use for use in found if use.tiles is not None), found[0])
    check_free(first, uses, move)
    return Raster.of(first, move)


def split_by_source(
    use: TensorUse, sites: Sequence[CollectiveSite], rewriter: LaunchRewriter, raster: Raster
) -> GridPhase:
    """The grid of a use in the order of arrival: programs of local rows, which read the sources, then the others.
    `rewriter`: changes of the others."""
    parts = use.rows.parts
    part, (rank, rank_is) = raster.axes[-1], rank_of(sites[0].made.level)
    rewriter.grid = raster.grid(parts)

    def branch(stmt: ir.Stmt) -> ir.Stmt:
        local = stmt
        for site in sites:
            local = _from_source(local, site)
        local = raster.arm(tir.renamed(local), lambda number: {part: rank})
        if parts == 1:
            return tir.sequence([rank_is, local])
        arrived = lambda number: {part: ArrivalOrder().part(number, rank, parts)}  # noqa: E731
        others = raster.arm(rewriter.statement(stmt), arrived, 1, parts - 1)
        return tir.sequence([rank_is, ir.IfThenElse(ir.EQ(part, ir.IntImm("int32", 0)), local, others)])

    return GridPhase(inside(use.phase.stmt, set(raster.axes), branch))


def _from_source(stmt: ir.Stmt, site: CollectiveSite) -> ir.Stmt:
    """A statement that reads the source in place of a part of the result, which has a dimension for the parts."""
    whole, (buffer, begins, extents) = ir.region_parts(site.made.target)[0], ir.region_parts(site.made.source)
    leading = len(extents) - len(whole.shape) + 1

    def enter(node: ir.Node) -> Any:
        if not _reads(node, whole):
            return None
        _, at, of = ir.region_parts(node)
        if site.name == "all_to_all":  # the source has all parts, too
            return ir.BufferLoad(buffer, at) if isinstance(node, ir.BufferLoad) else tir.region(buffer, at, of, "r")
        at = [*begins[:leading], *(begin + i for begin, i in zip(begins[leading:], at[1:], strict=True))]
        if isinstance(node, ir.BufferLoad):
            return ir.BufferLoad(buffer, at)
        return tir.region(buffer, at, [*[ir.IntImm("int32", 1)] * leading, *of[1:]], "r")

    return tir.rewrite(stmt, enter=enter)


def _reads(node: ir.Node, whole: ir.Buffer) -> bool:
    """Whether a node is an element or a region of a tensor."""
    load = ir.loaded_element(node) if ir.op_name(node) == tl.REGION else node
    return isinstance(load, ir.BufferLoad) and load.buffer.data.same_as(whole.data)
