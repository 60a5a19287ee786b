# SPDX-License-Identifier: MIT
"""The stage of clusters: what the programs of a cluster do together, each of them for its part.

Before: a phase of a launch with clusters: regions that a cluster executes as one unit, operations between its programs.
After: statements of one program, with what it needs of its peers through distributed shared memory. Launches without
clusters pass as they are.
"""

from __future__ import annotations

from dataclasses import replace

from tilescale.backends.tilelang.lowering.clusters import collectives, tile_operations  # noqa: F401 - they register rules
from tilescale.backends.tilelang.lowering.clusters.loads import pipelined
from tilescale.backends.tilelang.lowering.clusters.unit import ClusterUnit
from tilescale.backends.tilelang.lowering.copies import dsmem  # noqa: F401 - likewise
from tilescale.backends.tilelang.lowering.phase import Phase


def lower(phase: Phase) -> Phase:
    """A phase in which no cluster is named any more.

    Raises:
        UnsupportedError: something that has no lowering, with its line.
    """
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
