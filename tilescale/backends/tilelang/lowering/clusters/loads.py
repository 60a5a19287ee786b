# SPDX-License-Identifier: MIT
"""Find the loops of a cluster whose tiles bulk copies can load ahead.

Before: a pipelined loop whose body begins with copies from memory into tiles of the cluster, each program copying its
share. After: the same loop around a ring of tiles (ring.py). Declines, by returning None, loops that it cannot prove to
be like this: they run in order, and shares go round through shared memory.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import Gemm, TileCopy, data_of
from tilescale.backends.tilelang.lowering.clusters.ring import RingLoad, TileRing
from tilescale.backends.tilelang.lowering.clusters.unit import ClusterUnit
from tilescale.backends.tilelang.lowering.role_graph.loads import is_box
from tilescale.backends.tilelang.lowering.statements import tiles_named
from tilescale.backends.tilelang.ptx import BOX_EXTENT
from tilescale.program import ops
from tilescale.program.effects import names_of
from tilescale.program.operations import Rank


def pipelined(cluster: ClusterUnit, loop: ir.For) -> list[ir.Stmt] | None:
    """The loop with its loads ahead; None if it is not of that kind."""
    body = ir.in_order(loop.body)
    loads: list[RingLoad] = []
    while body:
        found = _loads(cluster, body[0])
        if found is None:
            break
        loads += found
        body.pop(0)
    tiles = {load.tile for load in loads}
    rest = tir.sequence(body)
    if not loads or not body or len(tiles) < len(loads) or not _stand_alone(cluster, loop, rest, tiles):
        return None
    if _stored(cluster) & {load.source.data for load in loads}:
        return None  # other warps would load ahead of what the program stores
    return TileRing(cluster, loop, loads).statements(rest)


def _stored(cluster: ClusterUnit) -> set[ir.Var]:
    """The tensors that the program stores to, and views of them."""
    names = names_of(cluster.program)
    written = {access.root for access in names.all_effects(cluster.phase.stmt).writes if access.at is None}
    return {data for data in (*names.homes, *names.views) if names.root(data) in written}


def _stand_alone(cluster: ClusterUnit, loop: ir.For, rest: ir.Stmt, tiles: set[ir.Var]) -> bool:
    """Whether the loaded tiles are operands of products of this loop, and nothing else."""
    named = tiles | {var for var, view in cluster.views.items() if view.base.data in tiles}
    accesses = ir.instances(rest, ir.BufferLoad, ir.BufferStore)
    products = map(Gemm.of, ir.nodes(rest, lambda node: ir.op_name(node) == tl.GEMM))
    operands = sum(data_of(region) in tiles for product in products for region in product.operands[:2])
    is_outside = any(tile.data in named for tile in tiles_named(cluster.phase.stmt, besides=loop))
    return not is_outside and sum(access.buffer.data in named for access in accesses) == operands


def _loads(cluster: ClusterUnit, stmt: ir.Stmt) -> list[RingLoad] | None:
    """The loads that a statement of the loop is, or None."""
    if not cluster.is_member_scale(stmt):
        load = _load(cluster, stmt, {})
        return None if load is None else [load]
    inner = ir.in_order(stmt.body)
    bound: dict[ir.Var, Any] = {}
    loads: list[RingLoad] = []
    for one in inner:
        if isinstance(one, ir.Bind):
            if not _is_inlined(cluster, one.value):
                return None
            bound[one.var] = one.value
            continue
        load = _load(cluster, one, bound)
        if load is None:
            return None
        loads.append(load)
    return loads


def _is_inlined(cluster: ClusterUnit, value: Any) -> bool:
    if ir.op_name(value) == ops.RANK.name:
        return _is_rank(cluster, value)
    return ir.op_name(value) == ops.VIEW.name or ir.is_pure(value)


def _is_rank(cluster: ClusterUnit, value: Any) -> bool:
    is_rank = ir.op_name(value) == ops.RANK.name
    return is_rank and cluster.target.machine.level(Rank.of(value).level).kind == "program"


def _load(cluster: ClusterUnit, stmt: ir.Stmt, bound: dict[ir.Var, Any]) -> RingLoad | None:
    call: Any = stmt.value if isinstance(stmt, ir.Evaluate) else None
    if ir.op_name(call) != tl.COPY:
        return None
    copy = TileCopy.of(call)
    source, sides, extents = ir.region_parts(copy.source)
    target, offsets, _ = ir.region_parts(copy.target)
    if source.scope() != "global" or any(ir.constant(o) != 0 for o in offsets):
        return None
    view = cluster.views.get(target.data)
    tile = target if view is None else view.base
    if tile.data not in cluster.shards or tile.scope() != "shared.dyn" or str(source.dtype) != str(tile.dtype):
        return None
    known = [ir.constant(n) for n in extents]
    shape = [ir.integer(n) for n in tile.shape]
    if view is not None:
        axis = view.axis - len(shape)
        begins = _first_begins(cluster, sides, bound, axis, ir.integer(view.shape[axis]))
        known[axis] = shape[axis]
    else:
        begins = [cluster.first(b) for b in sides]
    if begins is None or known[-len(shape) :] != shape or not _is_bulk(cluster, source, tile):
        return None
    return RingLoad(tile.data, source, tuple(begins), tuple(known))


def _first_begins(
    cluster: ClusterUnit, begins: list[Any], bound: dict[ir.Var, Any], axis: int, share: int
) -> list[Any] | None:
    """The begin of the first program's share, if the others' are consecutive along `axis`."""
    launch, rank, step = cluster.launch, ir.IntImm("int32", 0), 1
    place: dict[ir.Var, Any] = {}
    back: dict[ir.Var, Any] = {}
    ranges: dict[ir.Var, tuple[Any, Any]] = {}
    for var, programs in zip(launch.programs, launch.cluster, strict=False):
        own, inside = ir.Var(f"{var.name}_cluster", "int32"), ir.Var(f"{var.name}_inside", "int32")
        place[var], back[own], ranges[inside] = own * programs + inside, var // programs, (0, programs)
        rank, step = rank + inside * step, step * programs

    known = {**cluster.bound, **bound}

    def spelled(expr: ir.PrimExpr) -> ir.PrimExpr:
        while inner := ir.variables(expr) & known.keys():
            expr = ir.substitute(expr, {v: rank if _is_rank(cluster, known[v]) else known[v] for v in inner})
        return ir.substitute(expr, place)

    result = []
    for number, begin in enumerate(begins):
        here = spelled(begin)
        if not ir.is_pure(here):
            return None
        there = ir.substitute(here, {inside: ir.IntImm("int32", 0) for inside in ranges})
        expected = there + rank * share if number == len(begins) + axis else there
        if ir.constant(ir.simplify(here - expected, ranges)) != 0:
            return None
        result.append(ir.substitute(there, back))
    return result


def _is_bulk(cluster: ClusterUnit, source: ir.Buffer, tile: ir.Buffer) -> bool:
    """Whether a bulk copy takes what a program loads."""
    box = [ir.integer(n) for n in cluster.shards[tile.data].local.shape]
    return len(box) > 1 and box[-1] <= BOX_EXTENT and is_box(source, box, cluster.phase)
