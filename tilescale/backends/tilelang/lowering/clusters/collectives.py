# SPDX-License-Identifier: MIT
"""Lowering of copies, barriers and collectives between the programs of a cluster, through shared memory.

Before: an operation of the program level in a launch with clusters. After: loads and stores of peers' shared memory
between barriers of the cluster. A collective begins with a barrier, after which all sources are there, and ends with
one, after which they may change. Tiles in registers are staged in shared memory first.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.clusters.unit import MEMBER, ClusterUnit
from tilescale.backends.tilelang.lowering.combine import fold, reduced
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.backends.tilelang.lowering.tile import TileRegion, parts, take_parts
from tilescale.program import ops
from tilescale.program.operations import Barrier, Collective, Combine


def _begun(cluster: ClusterUnit, call: ir.Call) -> Collective:
    made = Collective.of(call)
    cluster.notes.append(f"T.{made.name} of level {made.level!r}: distributed shared memory")
    return made


def tile_of(cluster: ClusterUnit, region: ir.Call) -> TileRegion:
    """A tile argument; of a view of a cluster's tile, what this program holds of it."""
    tile = TileRegion.of(cluster.region(region), cluster.expr)
    if not tile.is_static:
        raise cluster.unsupported(f"a collective on {tile.name!r}, whose extents are symbolic, has no CUDA lowering")
    return tile


def _shared(
    cluster: ClusterUnit, tile: TileRegion, target: TileRegion | None = None
) -> tuple[TileRegion, list[ir.Stmt]]:
    """A tile for peers to read: itself, or a copy of it in shared memory, with what makes the copy.

    The copy is for tiles in registers, and for those of which `target`, which changes meanwhile, is a part.
    """
    if tile.buffer.scope().startswith("shared") and not (target and target.buffer.same_as(tile.buffer)):
        return tile, []
    staged = tir.local_buffer(f"{tile.name}_staged{cluster.next_number()}", tile.extents, tile.dtype, "shared.dyn")
    cluster.tiles.append(staged)
    held = TileRegion.of(tir.region(staged, [0] * len(tile.extents), tile.extents, "rw"))
    return held, [tir.tile_call("copy", tile.region("r"), held.region("w"))]


@lowers(ops.BARRIER.name, MEMBER)
def _barrier(cluster: ClusterUnit, call: ir.Call) -> ir.Stmt:
    barrier = Barrier.of(call)
    cluster.notes.append(f"T.barrier of level {barrier.level!r}: distributed shared memory")
    return cluster.barrier()


@lowers(ops.ALLREDUCE.name, MEMBER)
def _allreduce(cluster: ClusterUnit, call: ir.Call) -> ir.Stmt:
    made = _begun(cluster, call)
    if made.combine is not None:
        return _allreduce_function(cluster, made, made.combine)
    tile = tile_of(cluster, made.target)
    held, down = _shared(cluster, tile)
    up = [tir.tile_call("copy", held.region("r"), tile.region("w"))] if down else []
    return tir.sequence([*down, *cluster.between_barriers([held], cluster.allreduce(held, made.reduction)), *up])


class _Received:
    """A tile of all programs, as the fold over ranks reads it."""

    def __init__(self, cluster: ClusterUnit, tile: TileRegion):
        self.cluster, self.tile, self.devices = cluster, tile, cluster.size

    def received(self, sender: Any, loops: list[Any]) -> ir.PrimExpr:
        return self.cluster.element(self.tile, loops, sender)


def _allreduce_function(cluster: ClusterUnit, made: Collective, combine: Combine) -> ir.Stmt:
    """With the user's combination: results stay in registers until everyone has read what they replace."""
    tiles = [tile_of(cluster, region) for region in made.tiles]
    held = [_shared(cluster, tile) for tile in tiles]
    results, folds, stores = [], [], []
    for tile in tiles:
        name = f"{tile.name}_combined{cluster.next_number()}"
        result = tir.local_buffer(name, tile.extents, tile.dtype, "local.fragment")
        cluster.tiles.append(result)
        results.append(TileRegion.of(tir.region(result, [0] * len(tile.extents), tile.extents, "rw")))
    received = [_Received(cluster, tile) for tile, _ in held]
    for which, tile in enumerate(tiles):
        folds.append(fold(cluster.unsupported, combine, which, results, received))
        stores.append(tir.tile_call("copy", results[which].region("r"), tile.region("w")))
    down = [stmt for _, stmts in held for stmt in stmts]
    return tir.sequence([*down, *cluster.between_barriers([tile for tile, _ in held], *folds), *stores])


@lowers(ops.REDUCE_SCATTER.name, MEMBER, "direct")
def _reduce_scatter(cluster: ClusterUnit, call: ir.Call) -> ir.Stmt:
    made = _begun(cluster, call)
    source, target = tile_of(cluster, made.source), tile_of(cluster, made.target)
    held, down = _shared(cluster, source, target)
    axis = made.axis
    loops = [ir.Var(f"i{a}", "int32") for a in range(len(target.extents))]
    index = [i + cluster.rank * target.extents[a] if a == axis else i for a, i in enumerate(loops)]
    values = [cluster.element(held, index, sender) for sender in range(cluster.size)]
    total = reduced(values, made.reduction, source.dtype, target.dtype)
    body = tir.parallel(loops, target.extents, ir.BufferStore(target.buffer, total, target.at(loops)))
    return tir.sequence([*down, *cluster.between_barriers([held], body)])


@lowers(ops.ALL_GATHER.name, MEMBER, "direct")
def _all_gather(cluster: ClusterUnit, call: ir.Call) -> ir.Stmt:
    made = _begun(cluster, call)
    source, target = tile_of(cluster, made.source), tile_of(cluster, made.target)
    held, down = _shared(cluster, source, target)
    takes = _take_parts(cluster, target, made.axis, held)
    return tir.sequence([*down, *cluster.between_barriers([held], *takes)])


def _take_parts(cluster: ClusterUnit, target: TileRegion, axis: int, wanted: TileRegion) -> list[ir.Stmt]:
    """Copy the tile `wanted` of each program into the part of `target` along an axis that has its number."""

    def moved(sender: int, part: ir.Call) -> ir.Stmt:
        return cluster.move(TileRegion.of(part), wanted, sender, put=False)

    return take_parts(target, axis, cluster.size, lambda sender, at: cluster.element(wanted, at, sender), moved)


@lowers(ops.ALL_TO_ALL.name, MEMBER, "direct")
def _all_to_all(cluster: ClusterUnit, call: ir.Call) -> ir.Stmt:
    made = _begun(cluster, call)
    source, target = tile_of(cluster, made.source), tile_of(cluster, made.target)
    held, down = _shared(cluster, source, target)
    axis = made.axis
    part, _ = parts(source, axis, cluster.size)
    mine = [cluster.rank * part[a] if a == axis else 0 for a in range(len(part))]
    wanted = TileRegion.of(held.region("r", mine, part))
    takes = _take_parts(cluster, target, axis, wanted)
    return tir.sequence([*down, *cluster.between_barriers([held], *takes)])


@lowers(ops.BROADCAST.name, MEMBER, "direct")
def _broadcast(cluster: ClusterUnit, call: ir.Call) -> ir.Stmt:
    made = _begun(cluster, call)
    tile, root = tile_of(cluster, made.target), cluster.expr(made.root)
    held, down = _shared(cluster, tile)
    # The root's tile onto itself changes nothing.
    take = cluster.move(tile, held, root, put=False)
    return tir.sequence([*down, *cluster.between_barriers([held], take)])
