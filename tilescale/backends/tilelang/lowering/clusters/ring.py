# SPDX-License-Identifier: MIT
"""A loop over a ring of tiles that bulk copies fill ahead, shared operands once for all programs of the cluster.

A tile that each program has whole is loaded by one multicast, which the first program issues. Each stage of the ring
has two mbarriers, whose phases count the uses of the stage:

- `full` of a program counts one arrival, of the thread that issues its loads and sets their expected bytes: a
  multicast's too, whose data may arrive before that, as the phase cannot complete without the arrival. After a wait for
  it the stage may be read.
- `empty` of a program counts an arrival of every warp, of all programs of the cluster where some tile is shared. After
  a wait for it the stage may be refilled: no program still reads its instance, and none is a phase behind, so no bytes
  reach a `full` whose last phase is unfinished.

The last arrivals at `empty` reach a program that may be done: the barrier at the cluster's end keeps it there. A
program has waited for all of its bytes when its loop ends, so the memory of a ring that is used once may then be
reused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.clusters.sharding import ClusterShard
from tilescale.backends.tilelang.lowering.clusters.unit import ClusterUnit
from tilescale.backends.tilelang.lowering.markers import loading, one_thread, sync
from tilescale.backends.tilelang.lowering.role_graph import mbarriers
from tilescale.backends.tilelang.lowering.role_graph.graph import COMPUTE, LOAD, Channel
from tilescale.backends.tilelang.ptx import WARP


@dataclass(frozen=True)
class RingLoad:
    """One copy from memory into a whole tile of the cluster: where it begins, as the first program has it."""

    tile: ir.Var
    source: ir.Buffer
    begins: tuple[Any, ...]
    extents: tuple[Any, ...]


class TileRing:
    """The loop of one pipeline: tiles, barriers and statements."""

    def __init__(self, cluster: ClusterUnit, loop: ir.For, loads: list[RingLoad]):
        self.cluster, self.loop, self.loads = cluster, loop, loads
        self.stages = max(ir.constant(loop.annotations.get("num_stages", 1)) or 1, 1)
        self.begin, self.extent = cluster.value(loop.min), cluster.value(loop.extent)
        self.whole = {load.tile: cluster.shards[load.tile] for load in loads}
        self.is_shared = any(part.dim is None for part in self.whole.values())
        self.roles = bool(cluster.graph.roles)
        self.rings = {tile: self._ring(part) for tile, part in self.whole.items()}
        number = cluster.next_number()
        self.done = cluster.variable(f"loads{number}") if cluster.loops else None
        self.full = cluster.mbarrier(f"full{number}", [1] * self.stages)
        self.empty = None
        if self.roles or self.is_shared:
            arrivals = cluster.launch.thread_count // WARP if self.roles else 1
            programs = cluster.size if self.is_shared else 1
            self.empty = cluster.mbarrier(f"empty{number}", [arrivals * programs] * self.stages, remote=self.is_shared)
        if (
            self.roles and self.is_shared
        ):  # TileLang lets all synchronize once these barriers are there, before the body.
            cluster.begun = True

    def _ring(self, part: ClusterShard) -> ir.Buffer:
        local = part.local
        ring = tir.local_buffer(local.name, [self.stages, *local.shape], str(local.dtype), local.scope())
        tiles = self.cluster.tiles
        tiles[next(i for i, tile in enumerate(tiles) if tile.same_as(local))] = ring
        self.cluster.reach(ring, to_the_end=not self.roles or self.cluster.loops > 0)
        return ring

    def statements(self, rest: ir.Stmt) -> list[ir.Stmt]:
        """The loop with its loads, `rest` being what it does with them."""
        tiles, shared = list(self.rings.values()), {t for t, part in self.whole.items() if part.dim is None}
        multicast = frozenset(self.rings[tile].data for tile in shared)
        producer = LOAD if self.roles else COMPUTE
        self.cluster.channels.append(Channel("tiles", tiles, self.stages, producer, shared=multicast))
        return self._by_roles(rest) if self.roles else self._by_all_threads(rest)

    # -- other warps load --------------------------------------------------------------------------------------------

    def _by_roles(self, rest: ir.Stmt) -> list[ir.Stmt]:
        """The loop of the consumers, and the concurrent one of the producer.

        The memory of a ring may be reused afterwards only if the ring is not filled again, and all threads have left
        it.
        """
        begin, end, earlier = self._continued()
        step = ir.Var(self.loop.loop_var.name, "int32")
        stage, phase = mbarriers.stage_of(earlier + step, self.stages)
        used = [mbarriers.wait(self.full, stage, phase), *self._used(rest, step, stage), *self._release(stage)]
        free = [sync()] if self.done is None else []
        return [loading(self._loading()), *begin, self._loop(step, used), *end, *free]

    def _loading(self) -> ir.Stmt:
        begin, end, earlier = self._continued()
        step = ir.Var(self.loop.loop_var.name, "int32")
        stage, phase = mbarriers.stage_of(earlier + step, self.stages)
        body = [mbarriers.wait(self.empty, stage, 1 - phase), self._issue(step, stage, WARP)]
        return tir.sequence([*begin, self._loop(step, body), *end])

    def _release(self, stage: Any) -> list[ir.Stmt]:
        """Each warp signals the producers of this stage that it has used it: lane i signals program i."""
        lane = self.cluster.thread % WARP
        everyone = tir.evaluate(tir.call(tl.SYNC_WARP, dtype="void"))
        if not self.is_shared:
            return [everyone, ir.IfThenElse(lane < 1, mbarriers.arrive(self.empty, stage), None)]
        arrive = tir.evaluate(tir.call(tl.ARRIVE_CLUSTER_BARRIER, ir.BufferLoad(self.empty, [stage]), lane))
        return [everyone, ir.IfThenElse(lane < self.cluster.size, arrive, None)]

    # -- all threads do both -----------------------------------------------------------------------------------------

    def _by_all_threads(self, rest: ir.Stmt) -> list[ir.Stmt]:
        """The first loads, and the loop, in which a stage is filled again when all have used it."""
        cluster, step = self.cluster, ir.Var(self.loop.loop_var.name, "int32")
        begin, end, earlier = self._continued()
        if begin:  # All programs have used what was loaded last time.
            begin.insert(0, cluster.barrier())
        threads = cluster.launch.thread_count
        first = [
            self._if_any(ir.IntImm("int32", n), self._issue(n, (earlier + n) % self.stages, threads))
            for n in range(self.stages)
        ]
        stage, phase = mbarriers.stage_of(earlier + step, self.stages)
        used = self._used(rest, step, stage)
        following = step + self.stages
        refill = [*self._until_empty(stage, phase), self._issue(following, stage, threads)]
        after = [sync(), *self._notify_first(stage), self._if_any(following, tir.sequence(refill))]
        return [*begin, *first, self._loop(step, [mbarriers.wait(self.full, stage, phase), *used, *after]), *end]

    def _if_any(self, step: Any, stmt: ir.Stmt) -> ir.Stmt:
        """`stmt` if the loop has that iteration."""
        there = ir.simplify(step < self.extent, {}) if isinstance(self.extent, ir.PrimExpr) else step < self.extent
        return stmt if ir.constant(there) == 1 else ir.IfThenElse(there, stmt, None)

    def _notify_first(self, stage: Any) -> list[ir.Stmt]:
        """This program has used a stage: signal the first program, which loads it for all."""
        if self.empty is None:
            return []
        arrive = tir.call(tl.ARRIVE_CLUSTER_BARRIER, ir.BufferLoad(self.empty, [stage]), 0)
        return [one_thread(self.cluster.launch, tir.evaluate(arrive))]

    def _until_empty(self, stage: Any, phase: Any) -> list[ir.Stmt]:
        if self.empty is None:
            return []
        return [ir.IfThenElse(self.cluster.rank < 1, mbarriers.wait(self.empty, stage, phase), None)]

    # -- pieces of both ----------------------------------------------------------------------------------------------

    def _continued(self) -> tuple[list[ir.Stmt], list[ir.Stmt], Any]:
        """The statements before and after a loop that runs several times, and the number of loads before the loop."""
        if self.done is None:
            return [], [], ir.IntImm("int32", 0)
        earlier = ir.Var("earlier", "int32")
        bound = ir.Bind(earlier, ir.BufferLoad(self.done, [0]))
        positive = tir.evaluate(tir.call(tl.ASSUME, earlier >= 0, dtype="bool"))
        return [bound, positive], [self.cluster.assign(self.done, earlier + self.extent)], earlier

    def _loop(self, step: ir.Var, body: list[ir.Stmt]) -> ir.For:
        return ir.For(step, ir.IntImm("int32", 0), self.extent, ir.ForKind.SERIAL, tir.sequence(body))

    def _used(self, rest: ir.Stmt, step: Any, stage: Any) -> list[ir.Stmt]:
        """The use of a stage's tiles in an iteration."""
        cluster = self.cluster
        for tile, part in self.whole.items():
            cluster.shards[tile] = replace(part, local=self.rings[tile], stage=stage)
        cluster.loops += 1
        used = cluster.statements(ir.substitute(rest, {self.loop.loop_var: self.begin + step}))
        cluster.loops -= 1
        cluster.shards.update(self.whole)
        return used

    def _issue(self, step: Any, stage: Any, threads: int) -> ir.Stmt:
        """One of `threads` loads an iteration's tiles into a stage, which is full when all their bytes are there."""
        full = ir.BufferLoad(self.full, [stage])
        copies = [self._copy(load, step, stage, full) for load in self.loads]
        elected = tir.call(tl.ELECT, threads, dtype="bool")
        return tir.sequence([*copies, ir.IfThenElse(elected, mbarriers.arrive(self.full, stage), None)])

    def _copy(self, load: RingLoad, step: Any, stage: Any, full: ir.BufferLoad) -> ir.Stmt:
        cluster, part, ring = self.cluster, self.whole[load.tile], self.rings[load.tile]
        at = {self.loop.loop_var: self.begin + step}
        begins = [cluster.expr(ir.substitute(b, at)) for b in load.begins]
        extents = list(load.extents)
        notes: dict[str, Any] = {"barrier": full, "is_tma_copy": 1}
        if part.dim is None:
            notes["cluster_mask"] = (1 << cluster.size) - 1
        else:
            axis = part.dim - (len(ring.shape) - 1)
            begins[axis], extents[axis] = begins[axis] + cluster.rank * part.share, part.share
        source = tir.region(load.source, begins, extents, "r")
        inner = [ir.constant(n) for n in ring.shape[1:]]
        target = tir.region(ring, [stage, *[0] * len(inner)], [1, *inner], "w")
        return tir.tile_call("tma_copy", source, target, **notes)
