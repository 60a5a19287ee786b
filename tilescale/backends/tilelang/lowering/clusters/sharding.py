# SPDX-License-Identifier: MIT
"""Distribution of a cluster's tiles over its programs.

A tile is split along the dimension of its views, or as a GEMM needs it: a program computes its rows (or columns) of the
result, for which it needs its share of one operand and the whole of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import Gemm, data_of
from tilescale.backends.tilelang.lowering.clusters.dsmem import ClusterStage
from tilescale.backends.tilelang.ptx import WARPGROUP
from tilescale.program import ops
from tilescale.program.model import location
from tilescale.program.operations import TileView
from tilescale.program.shares import paired, split

SCOPES = (*ir.SHARED, "local.fragment")
"""Scopes of a cluster's tiles."""


@dataclass(frozen=True)
class ClusterShard:
    """A program's shard of a tile of its cluster.

    Attributes:
        local: its buffer; with a stage, of one more leading dimension.
        dim: the dimension that is split, None for the whole tile.
        share: the extent along `dim` here.
        stage: index of the leading dimension.
    """

    local: ir.Buffer
    dim: int | None
    share: int
    stage: Any = None

    def index(self, indices: list[Any]) -> list[Any]:
        """Indices of the local buffer."""
        return indices if self.stage is None else [self.stage, *indices]


class ClusterShards:
    """The shards of a cluster's tiles.

    Attributes:
        views: data variable of a view -> the view, for views of the cluster's tiles.
        shards: data variable of a tile -> a program's shard.
        results: tiles that two blocks multiply into as a pair.
    """

    def __init__(self, cluster: ClusterStage):
        self.cluster = cluster
        self.views: dict[ir.Var, TileView] = {}
        self.shards: dict[ir.Var, ClusterShard] = {}
        self.results: list[ir.Buffer] = []
        self._dims: dict[ir.Var, int | None] = {}
        self._viewed: dict[ir.Var, set[int]] = {}
        launch, machine = self.cluster.launch, self.cluster.target.machine
        owned = {data for data, level in launch.owners if machine.level(level).kind == "cluster"}
        self._tiles = {b.data: b for b in launch.buffers if b.data in owned and b.scope() in SCOPES}
        self._survey()
        for data, tile in self._tiles.items():
            self.shards[data] = self._shard(tile)

    def _survey(self) -> None:
        """Note the views, and what products need."""
        found: list[tuple[Any, Any]] = []
        where = self.cluster.where

        def visit(node: ir.Node) -> None:
            nonlocal where
            if isinstance(node, ir.Stmt):
                where = location(node) or where
            is_view = isinstance(node, ir.Bind) and ir.op_name(node.value) == ops.VIEW.name
            if is_view and TileView.of(node.value).base.data in self._tiles:
                found.append((node, where))
            elif ir.op_name(node) == tl.GEMM and any(data_of(r) in self._tiles for r in Gemm.of(node).operands):
                found.append((node, where))

        ir.walk(self.cluster.phase.stmt, visit)
        views, products = ([x for x in found if isinstance(x[0], ir.Bind) == bind] for bind in (True, False))
        for node, self.cluster.where in views:
            view = self.views[node.var] = TileView.of(node.value)
            data = view.base.data
            self._viewed.setdefault(data, set()).add(self._view_dim(view, self._tiles[data]))
        for node, self.cluster.where in products:
            self._split_product(Gemm.of(node))

    def _view_dim(self, view: TileView, tile: ir.Buffer) -> int:
        _, begins, extents = ir.region_parts(view.region)
        layout = view.layout
        if self.cluster.target.machine.level(view.level).kind != "program":
            raise self.cluster.unsupported(f"a view of {tile.name!r}, a cluster's tile, by threads")
        whole = [ir.constant(n) for n in extents] == [ir.constant(n) for n in tile.shape]
        if layout.dim is None or not whole or any(ir.constant(b) != 0 for b in begins):
            raise self.cluster.unsupported(f"a view of {tile.name!r} that is not a share of the whole tile")
        if layout.block not in (None, ir.constant(view.shape[layout.dim])):
            raise self.cluster.unsupported(f"a cyclic view of {tile.name!r}")
        return layout.dim

    def _split_product(self, product: Gemm) -> None:
        a, b, c = map(data_of, product.operands)
        if not all(x in self._tiles for x in (a, b, c)):
            raise self.cluster.unsupported("a product of a cluster with operands that the cluster does not own")
        by_rows = 1 not in self._viewed.get(c, ())
        pair = by_rows and self._paired([self._tiles[x] for x in (a, b, c)])
        if pair:
            self.results.append(self._tiles[c])
        for data, dim in split(product, by_rows, pair).items():
            name = self._tiles[data].name
            if self._dims.setdefault(data, dim) != dim:
                raise self.cluster.unsupported(f"{name!r} in two products that need it split differently")
            if dim is not None and ir.integer(self._tiles[data].shape[dim]) % self.cluster.size:
                raise self.cluster.unsupported(f"{name!r} does not divide among {self.cluster.size} programs")

    def _paired(self, tiles: list[ir.Buffer]) -> bool:
        launch = self.cluster.launch
        return paired(self.cluster.target.machine, launch, tiles) and launch.thread_count % WARPGROUP == 0

    def _shard(self, tile: ir.Buffer) -> ClusterShard:
        viewed = self._viewed.get(tile.data, {0})
        if tile.data not in self._dims and len(viewed) > 1:
            raise self.cluster.unsupported(f"views that split {tile.name!r} along different dimensions")
        dim = self._dims.get(tile.data, min(viewed))
        shape = ir.constants(tile.shape)
        if shape is None or tile.data in dict(self.cluster.launch.notes).get(tl.LAYOUTS, {}):
            raise self.cluster.unsupported(f"a symbolic extent or a given layout of {tile.name!r}, a cluster's tile")
        share = 0
        if dim is not None:
            share = shape[dim] = -(-shape[dim] // self.cluster.size)
        local = tir.local_buffer(tile.name, shape, str(tile.dtype), tile.scope())
        self.cluster.tiles.append(local)
        return ClusterShard(local, dim, share)
