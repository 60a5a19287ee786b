# SPDX-License-Identifier: MIT
"""Copies between devices by loads and stores of all threads."""

from __future__ import annotations

from tilelang_core import ir
from tilescale.backends.cuda.lowering.copies.remote import RemoteCopy
from tilescale.backends.cuda.lowering.devices import DeviceStage
from tilescale.backends.cuda.lowering.registry import lowers
from tilescale.program import ops

MECHANISM = "lsu"


@lowers(ops.COPY.name, impl=MECHANISM)
def _copy(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    return RemoteCopy.of(stage, call).made("copy", disable_tma=1)
