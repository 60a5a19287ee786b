# SPDX-License-Identifier: MIT
"""The stage of clusters: what the programs of a cluster do together, each of them for its part.

Before: a phase of a launch with clusters: regions that a cluster executes as one unit, operations between its programs.
After: statements of one program, with what it needs of its peers through distributed shared memory. Launches without
clusters pass as they are.
"""

from __future__ import annotations

from dataclasses import replace

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import Fill, Gemm, TileCopy, access_of, data_of
from tilescale.backends.tilelang.lowering.clusters import collectives  # noqa: F401 - they register rules
from tilescale.backends.tilelang.lowering.clusters.loads import pipelined
from tilescale.backends.tilelang.lowering.clusters.unit import UNIT, ClusterUnit
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.registry import lowers


def lower(phase: Phase) -> Phase:
    """A phase in which no cluster is named any more. Raises UnsupportedError: something that has no lowering, with its
    line."""
    if phase.launch.cluster_size == 1:
        return phase
    cluster = ClusterUnit(phase, pipelined)
    body = cluster.enclose(cluster.stmt(phase.stmt))
    return cluster.done(
        body,
        graph=replace(cluster.graph, channels=tuple(cluster.channels)) if cluster.channels else phase.graph,
        headers=(*phase.headers, "cluster.cuh"),
        ordered=phase.ordered or cluster.has_barriers,
    )


@lowers(tl.FILL, UNIT)
def _fill(cluster: ClusterUnit, call: ir.Call) -> list[ir.Stmt]:
    fill = Fill.of(call)
    filled = [tir.tile_call("fill", cluster.part_of(fill.target), cluster.value(fill.value))]
    return filled + (cluster.pair.filled(fill) if cluster.pair is not None else [])


@lowers(tl.GEMM, UNIT)
def _gemm(cluster: ClusterUnit, call: ir.Call) -> list[ir.Stmt]:
    product = Gemm.of(call)
    operands = [cluster.part_of(region) for region in product.operands]
    clear = cluster.value(product.clear)
    if cluster.pair is not None and cluster.pair.holds(product.c):
        return cluster.pair.product(product, operands, clear)
    axis = cluster.shards[data_of(product.c)].dim
    assert axis is not None, "a product splits its result"
    sizes = list(map(cluster.value, product.sizes))
    sizes[axis] = ir.region_parts(operands[2])[2][-2:][axis]
    return [product.on(operands, sizes, clear)]


@lowers(tl.COPY, UNIT)
def _copy(cluster: ClusterUnit, call: ir.Call) -> list[ir.Stmt]:
    """Each program copies its share; a tile that all have whole, each for itself, or the first one out of it."""
    copy = TileCopy.of(call)
    sides = [copy.source, copy.target]
    found = [_split(cluster, region) for region in sides if data_of(region) in cluster.shards]
    splits = {split for split in found if split is not None}
    if len(splits) > 1:
        raise cluster.unsupported("a copy between tiles of a cluster that are split differently")
    back, share = splits.pop() if splits else (0, 0)
    moved = [_share_of(cluster, region, back, share) for region in sides]
    copied = tir.evaluate(tir.recall(call, moved))
    into_memory = data_of(sides[1]) not in cluster.shards
    if into_memory and not back:
        copied = cluster.once(copied)
    return cluster.with_results(tir.evaluate(call), [copied, *([cluster.barrier()] if into_memory else [])])


def _split(cluster: ClusterUnit, region: ir.Call) -> tuple[int, int] | None:
    """The dimension along which a region is split, from the back, and the extent of a share."""
    part = cluster.shards[data_of(region)]
    return None if part.dim is None else (part.dim - len(ir.region_parts(region)[2]), part.share)


def _share_of(cluster: ClusterUnit, region: ir.Call, back: int, share: int) -> ir.Call:
    """This program's share of one side of a copy, split along dimension `back` (0: not split)."""
    buffer, begins, extents = ir.region_parts(region)
    if buffer.data in cluster.shards:
        if back and cluster.shards[buffer.data].dim is None:
            raise cluster.unsupported(f"a copy between {buffer.name!r}, whole, and a tile that is split")
        return cluster.part_of(region)
    if buffer.scope() != "global":
        raise cluster.unsupported(f"{buffer.name!r}, a program's own tile, where its cluster executes")
    begins, extents = ([cluster.value(n) for n in axes] for axes in (begins, extents))
    if back:
        begins[back] = begins[back] + cluster.rank * share
        extents[back] = share
    return tir.region(buffer, begins, extents, access_of(region))
