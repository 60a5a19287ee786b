# SPDX-License-Identifier: MIT
"""Copies between programs of a cluster, through distributed shared memory."""

from __future__ import annotations

from tilelang_core import ir, trace
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.clusters.collectives import tile_of
from tilescale.backends.tilelang.lowering.clusters.unit import MEMBER, ClusterUnit
from tilescale.backends.tilelang.lowering.markers import sync
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.program import ops
from tilescale.program.operations import Copy

MECHANISM = "dsmem"


@lowers(ops.COPY.name, MEMBER, MECHANISM)
def _copy(cluster: ClusterUnit, call: ir.Call) -> ir.Stmt:
    asked = Copy.of(call)
    to_peer = asked.to_peer
    source, target = tile_of(cluster, asked.source), tile_of(cluster, asked.target)
    near, far = (source, target) if to_peer else (target, source)
    peer = cluster.expr(asked.peer)
    cluster.reach(far.buffer)
    cluster.notes.append(f"T.copy({'dst' if to_peer else 'src'}=) of {far.name}: distributed shared memory")
    # Other threads have written the source, or are still reading the target.
    steps = [sync(), cluster.move(near, far, peer, put=to_peer), sync()]
    # The peer may not have started yet, and must not exit before this.
    cluster.has_barriers = True
    if asked.signal is not None:
        steps.append(tir.evaluate(trace.call(ops.SIGNAL, asked.signal, asked.value, op=asked.op)))
    return tir.sequence(steps)
