# SPDX-License-Identifier: MIT
"""The mbarriers of a ring of tiles (PTX ISA, mbarrier): a full and an empty one for each stage, whose phases alternate.

A producer waits for the phase before the one that it fills, so its first wait for an empty stage returns at once.
"""

from __future__ import annotations

from typing import TypeAlias

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir

Number: TypeAlias = ir.PrimExpr | int
"""A stage index or a parity."""


def stage_of(iteration: Number, stages: int) -> tuple[Number, Number]:
    """The stage of an iteration, and the parity of the phase that its mbarriers complete in it."""
    return iteration % stages, iteration // stages % 2


def wait(barrier: ir.Buffer, stage: Number, parity: Number) -> ir.Stmt:
    """Wait for the phase of a parity."""
    return tir.evaluate(tir.call(tl.WAIT_BARRIER_PARITY, ir.BufferLoad(barrier, [stage]), parity))


def arrive(barrier: ir.Buffer, stage: Number) -> ir.Stmt:
    """Arrive at the current phase."""
    return tir.evaluate(tir.call(tl.ARRIVE_BARRIER, ir.BufferLoad(barrier, [stage])))
