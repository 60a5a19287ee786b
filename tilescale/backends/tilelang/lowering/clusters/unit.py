# SPDX-License-Identifier: MIT
"""Lower a cluster that executes as one unit: each of its programs does its share.

Before: a region of `T.Scale("cta_cluster")` with tiles of the cluster, tile operations on them, and regions of the
program level that hold views of them. After: every program runs the region. A tile of the cluster is split over its
programs, along the dimension of its views or as a GEMM needs it, or replicated, if all of a GEMM needs it; programs
then load or fetch each other's shares. Cluster barriers are inserted where one program may read another's writes.
Declines statements that cannot be split this way, with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeAlias

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import access_of, data_of
from tilescale.backends.tilelang.lowering.clusters.dsmem import ClusterStage, without_ends, without_repeats
from tilescale.backends.tilelang.lowering.clusters.pair import BlockPair
from tilescale.backends.tilelang.lowering.clusters.regions import access, regions, stored
from tilescale.backends.tilelang.lowering.clusters.sharding import ClusterShard, ClusterShards
from tilescale.backends.tilelang.lowering.markers import is_loading, located
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.registry import rule_for
from tilescale.backends.tilelang.lowering.role_graph.graph import Channel, RoleGraph
from tilescale.backends.tilelang.lowering.role_graph.split import apart, producer_graph
from tilescale.backends.tilelang.lowering.tile import TileRegion, parts
from tilescale.passes.structure import location
from tilescale.program import ops
from tilescale.program.operations import Rank, TileView

UNIT, MEMBER = "cluster", "program"
"""The kinds of levels whose operations this stage lowers: of a cluster that executes as one, and of its programs."""


Pipelined: TypeAlias = "Callable[[ClusterUnit, ir.For], list[ir.Stmt] | None]"
"""A loop with its loads ahead; None if it is not of that kind."""


class ClusterUnit(ClusterStage):
    """The cluster around a program, and regions that it executes as one unit.

    Args:
        pipelined: lowers pipelined loops.

    Attributes:
        views, shards, pair: the distribution of the cluster's tiles.
        bound: values of names that each program bound before the region.
        loops: number of loops around the current statement.
        channels: the rings of tiles that a producer loads.
    """

    def __init__(self, phase: Phase, pipelined: Pipelined):
        super().__init__(phase)
        self._pipelined = pipelined
        self.sharding = ClusterShards(self)
        self.views, self.shards = self.sharding.views, self.sharding.shards
        self.bound: dict[ir.Var, Any] = {}
        self.loops = 0
        self.channels: list[Channel] = []
        self.pair = BlockPair(self, self.sharding) if self.sharding.results else None
        self._in_member = False

    @cached_property
    def graph(self) -> RoleGraph:
        """The roles if warps can load ahead for this phase; pairs of blocks synchronize in ways of their own."""
        if self.pair is not None or ir.contains(self.phase.stmt, self._is_groups):
            return RoleGraph()
        return producer_graph(self.launch, self.target.machine, self.phase.stmt)

    def _is_groups(self, node: ir.Node) -> bool:
        """Whether a node is a region of units inside the program."""
        is_scale = isinstance(node, ir.AttrStmt) and str(node.attr_key) == ops.SCALE
        return is_scale and self._kind(str(node.value.value)) == "thread_group"

    @property
    def thread(self) -> ir.Var:
        """The index of a thread, along the first axis."""
        return next(var for var, axis in self.launch.thread_vars if axis == 0)

    def enclose(self, body: ir.Stmt) -> ir.Stmt:
        """`body` between the cluster's beginning and end, its loads split off."""
        return super().enclose(apart(without_ends(body)) if ir.contains(body, is_loading) else body)

    # -- the walk over what programs execute, each for itself --------------------------------------------------------

    def stmt(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement of a program, without regions of its cluster and their tiles."""
        return tir.rewrite(stmt, enter=self._enter, leave=self._leave)

    def expr(self, expr: ir.PrimExpr) -> ir.PrimExpr:
        """An expression of a program."""
        return tir.rewrite(tir.evaluate(expr), leave=self._leave).value if isinstance(expr, ir.PrimExpr) else expr

    def member(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement that programs execute, each for itself."""
        outer, self._in_member = self._in_member, True
        try:
            return self.stmt(stmt)
        finally:
            self._in_member = outer

    def _enter(self, node: ir.Node) -> ir.Stmt | None:
        if isinstance(node, ir.Stmt):
            self.where = location(node) or self.where
        if isinstance(node, ir.AttrStmt) and str(node.attr_key) == ops.SCALE:
            return self._scale(node)
        if isinstance(node, ir.Bind):
            return self._bound(node)
        if not isinstance(node, ir.Evaluate) or ir.op_name(node.value) not in ops.ALL_OPS:
            return None
        level = ir.attribute(node.value, "level")
        if level is None or self._kind(level) != MEMBER:
            return None
        name, impl = node.value.op.name, ir.attribute(node.value, "impl")
        rule = rule_for(name, MEMBER, impl)
        if rule is None:
            of_level = f" of level {level!r} has no CUDA lowering"
            how = of_level if impl is None else f"(impl={impl!r}) between programs of a cluster"
            raise self.unsupported(f"T.{name.removeprefix('tilescale.')}{how}")
        return located(rule(self, node.value), node)

    def _kind(self, level: str) -> str:
        return self.target.machine.level(level).kind

    def _scale(self, node: ir.AttrStmt) -> ir.Stmt | None:
        kind = self._kind(str(node.value.value))
        if kind == UNIT and not self._in_member:
            return self.execute(node.body)
        return self.member(node.body) if kind in ("unit", MEMBER, UNIT) else None

    def _bound(self, node: ir.Bind) -> ir.Stmt | None:
        """Bind a rank of a program or a cluster to its number, drop the name of a view of a cluster's tile."""
        if node.var in self.views:
            return tir.sequence([])
        if ir.op_name(node.value) != ops.RANK.name:
            return None
        kind = self._kind(Rank.of(node.value).level)
        rank = self.rank if kind == MEMBER else self.number() if kind == UNIT else None
        return None if rank is None else tir.at(ir.Bind(node.var, rank), node)

    def _leave(self, node: ir.Node) -> Any:
        is_access = isinstance(node, ir.BufferLoad | ir.BufferStore) and node.buffer.scope() != "global"
        return self.on_tile(node) if is_access else None

    # -- accesses ----------------------------------------------------------------------------------------------------

    def on_tile(self, node: ir.Node) -> Any:
        """An access to a view or a tile of the cluster, as a program makes it; None for other tiles."""
        data, indices = node.buffer.data, list(node.indices)
        if data in self.views:
            held, begins = self._held(self.views[data])
            indices = [i + b for i, b in zip(indices, begins, strict=True)]
            return access(node, held.local, held.index(indices))
        part = self.shards.get(data)
        if part is None:
            return None
        if part.dim is None and isinstance(node, ir.BufferLoad):
            return access(node, part.local, part.index(indices))
        if part.dim is None or not part.local.scope().startswith("shared") or part.stage is not None:
            raise self.unsupported(f"an access to single elements of {node.buffer.name!r}, a cluster's tile")
        return self._on_element(node, part, part.dim, indices)

    def _on_element(self, node: ir.Node, part: ClusterShard, dim: int, indices: list[Any]) -> Any:
        """A single element lies in the program whose share it is of."""
        self.reach(part.local)
        owner = indices[dim] // part.share
        indices[dim] = indices[dim] % part.share
        address = tir.call(tl.ADDRESS_OF, ir.BufferLoad(part.local, indices))
        if isinstance(node, ir.BufferLoad):
            return tir.extern("tilescale::cluster_load", address, owner, dtype=str(node.dtype))
        return tir.evaluate(tir.extern("tilescale::cluster_store", address, owner, node.value))

    def _held(self, view: TileView) -> tuple[ClusterShard, list[Any]]:
        """A program's shard of a view's tile, and the view's begin in it."""
        base, dim = view.base, view.axis
        part = self.shards[base.data]
        if part.stage is not None or part.dim not in (None, dim):
            raise self.unsupported(f"this view of {base.name!r}, which a product needs split differently")
        begins: list[Any] = [0] * len(base.shape)
        if part.dim is None:
            begins[dim] = self.rank * ir.constant(view.shape[dim])
        return part, begins

    def region(self, region: ir.Call) -> ir.Call:
        """A region with this program's part in place of a view; others as they are."""
        buffer, begins, extents = ir.region_parts(region)
        if buffer.data not in self.views:
            return region
        part, offset = self._held(self.views[buffer.data])
        at = [b + o for b, o in zip(begins, offset, strict=True)]
        return tir.region(part.local, at, extents, access_of(region))

    # -- statements of the cluster -----------------------------------------------------------------------------------

    def execute(self, body: ir.Stmt) -> ir.Stmt:
        """A region that the cluster executes as one unit."""
        self.bound, self.loops = self._values_outside(body), int(_is_repeated(self.phase.stmt, body))
        return tir.sequence(without_repeats([self.barrier(), *self.statements(body), self.barrier()]))

    def _values_outside(self, body: ir.Stmt) -> dict[ir.Var, Any]:
        inside = {bind.var for bind in ir.instances(body, ir.Bind)}
        return {bind.var: bind.value for bind in ir.instances(self.phase.stmt, ir.Bind) if bind.var not in inside}

    def first(self, node: ir.Node) -> Any:
        """A node as the cluster's first program has it: what a name means where all execute as one."""
        if not isinstance(node, ir.PrimExpr | ir.Stmt):
            return node
        launch = self.launch
        mapping = {
            var: var // programs * programs for var, programs in zip(launch.programs, launch.cluster, strict=False)
        }
        for var in set(ir.instances(node, ir.Var)) & self.bound.keys():
            if not ir.is_pure(self.bound[var]):
                raise self.unsupported(f"{var.name!r}, a value of one program, where its cluster executes")
            mapping[var] = self.first(self.bound[var])
        return ir.substitute(node, mapping)

    def value(self, expr: ir.PrimExpr) -> Any:
        """An expression of the cluster, lowered."""
        return self.expr(self.first(expr))

    def statements(self, stmt: ir.Stmt) -> list[ir.Stmt]:
        """Statements of the cluster as each of its programs runs them."""
        self.where = location(stmt) or self.where
        if isinstance(stmt, ir.SeqStmt):
            return [s for inner in stmt.seq for s in self.statements(inner)]
        if isinstance(stmt, ir.AttrStmt):
            return self._members(stmt.body) if self.is_member_scale(stmt) else self.statements(stmt.body)
        if isinstance(stmt, ir.Bind):
            return self._bind(stmt)
        if isinstance(stmt, ir.IfThenElse):
            condition = ir.Var("condition", "bool")
            cases = [None if c is None else tir.sequence(self.statements(c)) for c in (stmt.then_case, stmt.else_case)]
            return [*self._bind(ir.Bind(condition, stmt.condition)), ir.IfThenElse(condition, *cases)]
        if isinstance(stmt, ir.For):
            return self._parallel(stmt) if stmt.kind == ir.ForKind.PARALLEL else self._loop(stmt)
        if isinstance(stmt, ir.BufferStore):
            return self._store(stmt)
        if isinstance(stmt, ir.Evaluate):
            return self._operation(stmt.value)
        raise self.unsupported("this statement where a cluster executes as one unit has no CUDA lowering")

    def _bind(self, bind: ir.Bind) -> list[ir.Stmt]:
        if ir.op_name(bind.value) in (ops.VIEW.name, ops.RANK.name):
            return [self.member(bind)] if bind.var not in self.views else []
        bound = ir.Bind(bind.var, self.value(bind.value))
        # Operands may be overwritten as soon as all programs have read them.
        return [bound, self.barrier()] if self._touches(bind.value) else [bound]

    def is_member_scale(self, node: ir.Node) -> bool:
        """Whether a statement is a scale of the cluster's programs."""
        if not isinstance(node, ir.AttrStmt) or str(node.attr_key) != ops.SCALE:
            return False
        return self.target.machine.level(str(node.value.value)).kind == "program"

    def _loop(self, loop: ir.For) -> list[ir.Stmt]:
        staged = self._pipelined(self, loop)
        if staged is not None:
            return staged
        if ir.constant(loop.extent) == 1:
            return self.statements(ir.substitute(loop.body, {loop.loop_var: loop.min}))
        self.loops += 1
        body = tir.sequence(self.statements(loop.body))
        self.loops -= 1
        kind = ir.ForKind.SERIAL if "num_stages" in loop.annotations else loop.kind
        begin, extent = self.value(loop.min), self.value(loop.extent)
        return [tir.relooped(loop, min=begin, extent=extent, kind=kind, body=body, annotations={})]

    def _members(self, body: ir.Stmt) -> list[ir.Stmt]:
        """A region that each program runs; then shares of tiles that all need whole go round."""
        if any(data_of(r) in self.shards for r in regions(body)):
            raise self.unsupported("a tile of the cluster, not a view of it, where its programs execute")
        lowered = self.with_results(body, [self.member(body)])
        written = {data_of(r) for r in regions(body, written=True)} | stored(body)
        views = [self.views[data] for data in written if data in self.views]
        whole = {v.base.data: v for v in views if self.shards[v.base.data].dim is None}
        if whole:
            shares = [s for view in whole.values() for s in self._gather(view)]
            return [*lowered, self.barrier(), *shares, self.barrier()]
        return [*lowered, self.barrier()] if self._publishes(body) else lowered

    def _gather(self, view: TileView) -> list[ir.Stmt]:
        """Fetch the others' shares of a tile that is whole in each program."""
        part, _ = self._held(view)
        self.notes.append(f"shares of {part.local.name}: fetched through distributed shared memory")
        whole = TileRegion.whole(part.local)
        self.reach(part.local)
        extents, begins = parts(whole, view.axis, self.size)
        shares = [TileRegion.of(whole.region("rw", begin, extents)) for begin in begins]
        # A program fetches its own share too, in place: a branch here would cost more.
        return [self.move(share, share, peer, put=False) for peer, share in enumerate(shares)]

    def _publishes(self, body: ir.Stmt) -> bool:
        """Whether others see what a statement does: it touches memory, or single elements of the cluster's tiles."""

        def without_views(node: ir.Node) -> Any:
            is_view = isinstance(node, ir.Bind) and ir.op_name(node.value) == ops.VIEW.name
            return tir.sequence([]) if is_view else None

        def shows(node: ir.Node) -> bool:
            name = ir.op_name(node) or ""
            return name.startswith((tl.ATOMICS, tl.CALL_EXTERN)) or name in ops.ALL_OPS - {ops.RANK.name}

        bare = tir.rewrite(body, enter=without_views)
        return self._touches(bare) or ir.contains(bare, shows) or _writes_memory(bare)

    def _touches(self, node: ir.Node) -> bool:
        """Whether a node names a tile of the cluster itself: elements of it lie in other programs."""
        return ir.contains(
            node, lambda n: isinstance(n, ir.BufferLoad | ir.BufferStore) and n.buffer.data in self.shards
        )

    def with_results(self, stmt: ir.Stmt, lowered: list[ir.Stmt]) -> list[ir.Stmt]:
        """A statement's lowering, with results of products where it can use them."""
        return lowered if self.pair is None else self.pair.around(stmt, lowered)

    def _store(self, stmt: ir.BufferStore) -> list[ir.Stmt]:
        lowered = self.member(self.first(stmt))
        if stmt.buffer.scope().startswith("local") and stmt.buffer.data not in self.shards:
            return [lowered, self.barrier()] if self._touches(stmt) else [lowered]
        return [self.once(lowered), self.barrier()]

    def once(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement whose effect is the cluster's: its first program runs it."""
        return ir.IfThenElse(self.rank < 1, stmt, None)

    def _parallel(self, nest: ir.For) -> list[ir.Stmt]:
        """A nest of parallel loops: each program runs its share of the dimension along which its tiles are split."""
        loops: list[ir.Var] = []
        extents: list[Any] = []
        body: ir.Stmt = nest
        while isinstance(body, ir.For) and body.kind == ir.ForKind.PARALLEL:
            loops.append(body.loop_var)
            extents.append(body.extent)
            body = body.body
        split: set[ir.Var] = set()
        share = 0
        inner = ir.Var("inner", "int32")

        def leave(node: ir.Node) -> Any:
            nonlocal share
            if not isinstance(node, ir.BufferLoad | ir.BufferStore) or node.buffer.data not in self.shards:
                return None
            part, indices = self.shards[node.buffer.data], list(node.indices)
            if part.dim is not None:
                if indices[part.dim] not in loops:
                    raise self.unsupported(f"{node.buffer.name!r}, split over programs, at another index")
                split.add(indices[part.dim])
                share, indices[part.dim] = part.share, inner
            elif isinstance(node, ir.BufferStore):
                raise self.unsupported(f"a store to {node.buffer.name!r}, which each program has whole")
            return access(node, part.local, part.index(indices))

        body = self.first(tir.rewrite(body, leave=leave))
        if len(split) > 1:
            raise self.unsupported("tiles split along different loops")
        for var in split:
            if ir.constant(extents[loops.index(var)]) != share * self.size:
                raise self.unsupported(f"a loop {var.name!r} over a part of tiles that are split along it")
            extents[loops.index(var)] = share
            body = ir.substitute(ir.substitute(body, {var: var + self.rank * share}), {inner: var})
        lowered = self.member(tir.parallel(loops, [self.first(n) for n in extents], body))
        if not split:
            return [self.once(lowered), self.barrier()]
        return self.with_results(nest, [lowered, *([self.barrier()] if _writes_memory(nest) else [])])

    # -- tile operations of the cluster ------------------------------------------------------------------------------

    def _operation(self, call: Any) -> list[ir.Stmt]:
        name = ir.op_name(call)
        if name is None and ir.constant(call) is not None:
            return []
        rule = rule_for(name, UNIT)
        if rule is None:
            raise self.unsupported(f"{name} where a cluster executes as one unit has no CUDA lowering")
        return rule(self, call)

    def part_of(self, region: ir.Call) -> ir.Call:
        """This program's part of a region of a tile of the cluster."""
        buffer, begins, extents = ir.region_parts(region)
        part = self.shards.get(buffer.data)
        if part is None:
            raise self.unsupported(f"{buffer.name!r}, which its cluster does not own, in this operation")
        begins, extents = ([self.value(n) for n in axes] for axes in (begins, extents))
        if part.dim is not None:
            if ir.constant(begins[part.dim]) != 0 or ir.constant(extents[part.dim]) != part.share * self.size:
                raise self.unsupported(f"a slice, or uneven shares, of {buffer.name!r}, a cluster's tile")
            extents[part.dim] = part.share
        if part.stage is not None:
            begins, extents = [part.stage, *begins], [1, *extents]
        return tir.region(part.local, begins, extents, access_of(region))


def _is_repeated(phase: ir.Stmt, stmt: ir.Stmt) -> bool:
    loops = ir.instances(phase, ir.For, ir.While)
    return any(ir.contains(loop, lambda n: isinstance(n, ir.Stmt) and n.same_as(stmt)) for loop in loops)


def _writes_memory(stmt: ir.Stmt) -> bool:
    stores = ir.contains(stmt, lambda n: isinstance(n, ir.BufferStore) and n.buffer.scope() == "global")
    return stores or any(ir.region_parts(r)[0].scope() == "global" for r in regions(stmt, written=True))
