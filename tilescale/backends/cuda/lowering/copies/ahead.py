# SPDX-License-Identifier: MIT
"""Copies from peers that threads that load make ahead of their use: bulk copies, of which several are under way."""

from __future__ import annotations

from tilelang_core import ir
from tilescale.backends.cuda.lowering.copies.tma import MECHANISM
from tilescale.backends.cuda.lowering.markers import AHEAD, by_nvshmem
from tilescale.backends.cuda.lowering.phase import Phase
from tilescale.errors import UnsupportedError


def ahead(phase: Phase, call: ir.Call) -> ir.Call | None:
    """A copy from a peer as a bulk copy that runs ahead; None if there is none, or another mechanism is asked for."""
    if by_nvshmem(call) or ir.attribute(call, "impl") not in (None, MECHANISM):
        return None
    notes = {**dict(call.annotations), "impl": ir.StringImm(MECHANISM), AHEAD: ir.IntImm("int32", 1)}
    made = ir.Call(call.dtype, call.op, list(call.args), notes)
    try:
        phase.choice(made)
    except UnsupportedError:
        return None
    return made
