# SPDX-License-Identifier: MIT
"""Copies between devices by bulk copies, which one thread issues.

One that is completed later, or by the thread that signals behind it, is only begun here (`completion.py`); so is a load
that a barrier in shared memory tells of.
"""

from __future__ import annotations

from tilelang_core import ir
from tilescale.backends.cuda.lowering.copies.remote import RemoteCopy
from tilescale.backends.cuda.lowering.deferred import KEPT
from tilescale.backends.cuda.lowering.devices import DeviceStage
from tilescale.backends.cuda.lowering.markers import BARRIER
from tilescale.backends.cuda.lowering.registry import lowers
from tilescale.program import ops

MECHANISM = "tma"


@lowers(ops.COPY.name, impl=MECHANISM)
def _copy(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    remote = RemoteCopy.of(stage, call)
    barrier = ir.attribute(call, BARRIER)
    if barrier is not None:
        return remote.made("tma_copy", barrier=stage.expr(barrier), is_tma_copy=1)
    is_left_open = ir.attribute(call, KEPT) is not None
    is_completed_by_signal = remote.copy.signal is not None and stage.roles.elects
    if remote.copy.to_peer and (is_left_open or is_completed_by_signal):
        return remote.made("tma_copy")
    return remote.made("copy", prefer_instruction=ir.StringImm(MECHANISM))
