# SPDX-License-Identifier: MIT
"""Lowering of what the programs of a cluster do together: copies, barriers and collectives through shared memory.

Before: an operation of the program level in a launch with clusters. After: loads and stores of peers' shared memory
between meetings of the cluster. A collective begins with a meeting, after which all sources are there, and ends with
one, after which they may change. Tiles in registers are laid down in shared memory first.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.clusters.dsmem import Cluster
from tilescale.backends.cuda.lowering.combine import fold, reduced
from tilescale.backends.cuda.lowering.exchange import Tile, parts, whole_loops
from tilescale.backends.cuda.lowering.lower import GridLowering, lowers
from tilescale.backends.cuda.lowering.peers import signal_here
from tilescale.program import ops
from tilescale.program.operations import Collective, Combine, Copy

LEVEL = "program"
"""The kind of level whose operations these rules lower."""

IMPL = "dsmem"
"""The mechanism of a copy that these rules make."""


def _cluster(lowering: GridLowering, call: ir.Call) -> Cluster:
    """The cluster around the programs that an operation speaks of."""
    name = f"T.{call.op.name.removeprefix('tilescale.')}"
    if lowering.cluster is None:
        raise lowering.unsupported(f"{name} between all programs of a grid has no CUDA lowering")
    if call.op.name != ops.COPY.name:
        lowering.notes.append(f"{name} of level {ir.attribute(call, 'level')!r}: distributed shared memory")
    return lowering.cluster


def _tile(lowering: GridLowering, region: ir.Call) -> Tile:
    """A tile argument; of a view of a cluster's tile, what this program holds of it."""
    return Tile(lowering, region if lowering.cluster is None else lowering.cluster.region(region))


def _shared(lowering: GridLowering, tile: Tile, target: Tile | None = None) -> tuple[Tile, list[ir.Stmt]]:
    """A tile for peers to read: itself, or a copy of it in shared memory, with what makes the copy.

    The copy is for tiles in registers, and for those of which `target`, which changes meanwhile, is a part.
    """
    if tile.buffer.scope().startswith("shared") and not (target and target.buffer.same_as(tile.buffer)):
        return tile, []
    staged = tir.local_buffer(f"{tile.name}_staged{lowering.next_number()}", tile.extents, tile.dtype, "shared.dyn")
    lowering.tiles.append(staged)
    held = Tile(lowering, tir.region(staged, [0] * len(tile.extents), tile.extents, "rw"))
    return held, [tir.tile_call("copy", tile.region("r"), held.region("w"))]


@lowers(ops.BARRIER, LEVEL)
def _barrier(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    return _cluster(lowering, call).meet()


@lowers(ops.COPY, LEVEL)
def _copy(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    cluster = _cluster(lowering, call)
    asked = Copy.of(call)
    if asked.impl not in (None, IMPL):
        raise lowering.unsupported(f"T.copy(impl={asked.impl!r}) between programs of a cluster")
    to_peer = asked.to_peer
    source, target = _tile(lowering, asked.source), _tile(lowering, asked.target)
    near, far = (source, target) if to_peer else (target, source)
    peer = lowering.expr(asked.peer)
    lowering.notes.append(f"T.copy({'dst' if to_peer else 'src'}=) of {far.name}: distributed shared memory")
    # Other threads have written the source, or are still reading the target.
    steps = [lowering.sync(), cluster.move(near, far, peer, put=to_peer), lowering.sync()]
    # The peer may be at its beginning, and must not end before this.
    cluster.meets = True
    if asked.signal is not None:
        steps.append(signal_here(lowering, call))
    return tir.sequence(steps)


@lowers(ops.ALLREDUCE, LEVEL)
def _allreduce(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    cluster, made = _cluster(lowering, call), Collective.of(call)
    if made.combine is not None:
        return _allreduce_function(lowering, cluster, made, made.combine)
    tile = _tile(lowering, made.target)
    held, down = _shared(lowering, tile)
    up = [tir.tile_call("copy", held.region("r"), tile.region("w"))] if down else []
    return tir.sequence([*down, cluster.meet(), cluster.allreduce(held, made.reduction), cluster.meet(), *up])


class _Received:
    """A tile of all programs, as the fold over ranks reads it."""

    def __init__(self, cluster: Cluster, tile: Tile):
        self.cluster, self.tile, self.devices = cluster, tile, cluster.size

    def received(self, sender: Any, loops: list[Any]) -> ir.PrimExpr:
        """An element of a program's tile."""
        return self.cluster.element(self.tile, loops, sender)


def _allreduce_function(
    lowering: GridLowering, cluster: Cluster, made: Collective, combine: Combine
) -> ir.Stmt:
    """With the user's combination: results stay in registers until everyone has read what they replace."""
    tiles = [_tile(lowering, region) for region in made.tiles]
    held = [_shared(lowering, tile) for tile in tiles]
    results, folds, stores = [], [], []
    for tile in tiles:
        name = f"{tile.name}_combined{lowering.next_number()}"
        result = tir.local_buffer(name, tile.extents, tile.dtype, "local.fragment")
        lowering.tiles.append(result)
        results.append(Tile(lowering, tir.region(result, [0] * len(tile.extents), tile.extents, "rw")))
    received = [_Received(cluster, tile) for tile, _ in held]
    for which, tile in enumerate(tiles):
        folds.append(fold(lowering, combine, which, results, received))
        stores.append(tir.tile_call("copy", results[which].region("r"), tile.region("w")))
    down = [stmt for _, stmts in held for stmt in stmts]
    return tir.sequence([*down, cluster.meet(), *folds, cluster.meet(), *stores])


@lowers(ops.REDUCE_SCATTER, LEVEL)
def _reduce_scatter(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    cluster, made = _cluster(lowering, call), Collective.of(call)
    source, target = _tile(lowering, made.source), _tile(lowering, made.target)
    held, down = _shared(lowering, source, target)
    axis = made.axis
    loops = [ir.Var(f"i{a}", "int32") for a in range(len(target.extents))]
    index = [i + cluster.rank * target.extents[a] if a == axis else i for a, i in enumerate(loops)]
    values = [cluster.element(held, index, sender) for sender in range(cluster.size)]
    total = reduced(values, made.reduction, source.dtype, target.dtype)
    body = tir.parallel(loops, target.extents, ir.BufferStore(target.buffer, total, target.at(loops)))
    return tir.sequence([*down, cluster.meet(), body, cluster.meet()])


@lowers(ops.ALL_GATHER, LEVEL)
def _all_gather(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    cluster, made = _cluster(lowering, call), Collective.of(call)
    source, target = _tile(lowering, made.source), _tile(lowering, made.target)
    held, down = _shared(lowering, source, target)
    takes = _take_parts(cluster, target, made.axis, held)
    return tir.sequence([*down, cluster.meet(), *takes, cluster.meet()])


def _take_parts(cluster: Cluster, target: Tile, axis: int, wanted: Tile) -> list[ir.Stmt]:
    """Copy the tile `wanted` of each program into the part of `target` along an axis that has its number."""
    part, begins = parts(target, axis, cluster.size)
    if target.in_registers:
        loops, sender, index = whole_loops(target, axis, part)
        value = cluster.element(wanted, index, sender)
        value = ir.Cast(target.dtype, value) if target.dtype != wanted.dtype else value
        return [tir.parallel(loops, target.extents, ir.BufferStore(target.buffer, value, target.at(loops)))]
    return [
        cluster.move(Tile(cluster.lowering, target.region("w", begin, part)), wanted, sender, put=False)
        for sender, begin in enumerate(begins)
    ]


@lowers(ops.ALL_TO_ALL, LEVEL)
def _all_to_all(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    cluster, made = _cluster(lowering, call), Collective.of(call)
    source, target = _tile(lowering, made.source), _tile(lowering, made.target)
    held, down = _shared(lowering, source, target)
    axis = made.axis
    part, _ = parts(source, axis, cluster.size)
    mine = [cluster.rank * part[a] if a == axis else 0 for a in range(len(part))]
    wanted = Tile(lowering, held.region("r", mine, part))
    takes = _take_parts(cluster, target, axis, wanted)
    return tir.sequence([*down, cluster.meet(), *takes, cluster.meet()])


@lowers(ops.BROADCAST, LEVEL)
def _broadcast(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    cluster, made = _cluster(lowering, call), Collective.of(call)
    tile, root = _tile(lowering, made.target), lowering.expr(made.root)
    held, down = _shared(lowering, tile)
    # The root's tile onto itself changes nothing.
    take = cluster.move(tile, held, root, put=False)
    return tir.sequence([*down, cluster.meet(), take, cluster.meet()])
