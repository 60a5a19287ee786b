# SPDX-License-Identifier: MIT
"""A grid and the all-reduce of its result, tile by tile.

Why: the network is idle while the grid computes, and the sum of a small result takes less time than the start of a copy
queue. Before: programs store tiles, then the devices all-reduce the tensor. After: a program all-reduces its tile with
those of the same programs of other devices, and stores the sum; programs of a persistent grid compute the next tile
meanwhile. Declines grids that do not store each element once, and tiles that are not stored by one copy from shared
memory in the type of the tensor.
"""

from __future__ import annotations

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilelang_core.trace import call
from tilescale.cost.calibrated import in_force
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.arrival_reduce import whole
from tilescale.passes.overlap.epilogue import is_free, stored
from tilescale.passes.overlap.estimate import in_order, tiles_summed, wanted_of
from tilescale.passes.overlap.legality import CollectiveSite
from tilescale.passes.overlap.part_tiles import axis_of_tiles
from tilescale.passes.overlap.partition import Partition, check_whole
from tilescale.passes.overlap.producers_consumers import maker_of
from tilescale.passes.overlap.raster import Raster, check_free
from tilescale.passes.overlap.rewriter import LaunchRewriter, located
from tilescale.passes.overlap.schedule import Move
from tilescale.passes.overlap.tile_cost import TileWork
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.model import bytes_of, location
from tilescale.program.ops import ALLREDUCE


def reduce_tiles(
    site: CollectiveSite, mine: ProgramStep, graph: Dependence, uses: AccessMaps, move: Move
) -> ir.PrimFunc:
    """The program whose tiles are all-reduced before they are stored; `move` records that. Raises Declined: it stays
    unchanged."""
    made, (total, _, _) = site.made, ir.region_parts(site.made.source)
    if made.name != "allreduce":
        raise Declined(f"tiles are all-reduced, and it is a {made.name}", location(site.stmt))
    check_whole(made.source, "reduces", location(site.stmt))
    phase = maker_of(uses.names.root(total.data), mine, graph, "what it reduces")
    use = uses.find(phase, site.launch, Partition(total, 1, slots=False))
    (tile, _), store = stored(use), use.stmts[0]
    if tile.dtype != total.dtype or not is_free(tile, store, use, uses):
        reason = f"the stored tile is not one of {total.dtype} in shared memory, or is used again"
        raise Declined(reason, location(store))
    _check_once(use, total)
    if not uses.symbolic:
        work = TileWork.of(use, uses, made.level)
        move.in_order_s = in_order(site, uses, work.seconds)
        nbytes = bytes_of(tile.shape, tile.dtype) or 0
        move.overlapped_s = tiles_summed(in_force(uses.machine), wanted_of(site, uses), work, nbytes)
    rewriter = LaunchRewriter(uses.program, site.launch, uses.machine)
    summed = tir.evaluate(call(ALLREDUCE, whole(tile, "rw"), level=made.level, op=str(made.op)))
    rewriter.statements.append((store, tir.sequence([*located([summed], site.stmt), store])))
    if move.group is not None or move.blocks is not None:
        check_free(use, uses, move)
        grid = Raster.of(use, move).changed(phase, rewriter, [], lambda number: {})
        rewriter.phases.append((phase, (grid,)))
    rewriter.instead(site.phase, site.stmt, [])
    move.why = "programs all-reduce their tiles before they store them"
    return rewriter.apply()


def _check_once(use: TensorUse, total: ir.Buffer) -> None:
    """Raise Declined unless the programs of a grid store each element of a tensor once."""
    where, grid = location(use.stmts[0]), dict(zip(use.launch.programs, use.launch.grid, strict=True))
    if use.box is None:
        raise Declined("tiles are stored in a loop or a branch", where)
    for pair, extent in zip(use.box, total.shape, strict=True):
        axis = None if pair is None else axis_of_tiles(pair, extent, grid)
        if axis is not None:
            del grid[axis]
        elif pair is None or ir.constant(pair[0]) != 0 or ir.constant(pair[1] - extent) != 0:
            raise Declined("the tiles of the grid are not those of the result", where)
    if any(ir.constant(extent) != 1 for extent in grid.values()):
        raise Declined("several programs store the same tile", where)
