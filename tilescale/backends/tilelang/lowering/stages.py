# SPDX-License-Identifier: MIT
"""All stages from a grid phase to a kernel, in order.

Each takes a `Phase` and returns one: statements of TIR with their context. Roles come before devices, because
operations of the language have roles and calls of the prelude have none.
"""

from __future__ import annotations

from dataclasses import replace

from tilelang_core import ir
from tilescale.backends.tilelang.lowering import (  # noqa: F401 - they register their rules
    completion,
    exchange,
    hazards,
    hierarchical,
    peer_atomics,
    polling,
    signals,
)
from tilescale.backends.tilelang.lowering.call_barriers import CallBarriers, enclosed
from tilescale.backends.tilelang.lowering.clusters import stage as clusters
from tilescale.backends.tilelang.lowering.copies.rows import with_known_extents
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.dynamic_trip_count import shortened
from tilescale.backends.tilelang.lowering.groups import barriers
from tilescale.backends.tilelang.lowering.groups import stage as groups
from tilescale.backends.tilelang.lowering.kernel import LoweredKernel
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.role_graph import ring_loads, split
from tilescale.backends.tilelang.lowering.role_graph.role_assignment import without_single_trips
from tilescale.backends.tilelang.lowering.role_graph.stage import lower as in_roles
from tilescale.backends.tilelang.lowering.statements import is_of_unit
from tilescale.backends.tilelang.lowering.workspace_slots import in_slots, window


def lower(phase: Phase, rendezvous: CallBarriers | None) -> LoweredKernel:
    """A phase as a kernel; `rendezvous` has the barriers of devices in it, if there are any. Raises UnsupportedError: a
    construct without a lowering, with its line."""
    phase = ring_loads.lower(groups.lower(clusters.lower(begun(phase))))
    return in_roles(phase, lambda assigned: split.lower(barriers.lower(hazards.lower(devices(assigned, rendezvous)))))


def begun(phase: Phase) -> Phase:
    """A phase for the first stage: with numbers of units filled in, without single-trip loops."""
    made = replace(phase, stmt=without_single_trips(phase.sized(phase.stmt), phase.launch))
    made = with_known_extents(polling.bounded(replace(made, stmt=shortened(made))))
    made = replace(made, ordered=made.ordered or ir.contains(made.stmt, is_of_unit))
    return replace(made, window=window(made))


def devices(phase: Phase, rendezvous: CallBarriers | None) -> Phase:
    """A phase in which other devices appear only as memory."""
    stage = DeviceStage(phase)
    body = in_slots(stage, stage.stmt(phase.stmt))
    if rendezvous is not None:
        stage.where = phase.launch.where
        body = enclosed(stage, body, rendezvous)
    return stage.lowered(body)
