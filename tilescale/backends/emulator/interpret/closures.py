# SPDX-License-Identifier: MIT
"""Closures over frames, the compiled form of statements and expressions; closures of statements know their line.

The closure of an expression returns a Python number, a numpy scalar, or an array over the frame's space.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.errors import Location, TileScaleError
from tilescale.passes.faults import NO_FAULTS, fault

Closure = Callable[[Frame], Any]


def is_step(stmt: ir.Stmt) -> bool:
    """Whether a statement is one step of its unit."""
    return isinstance(stmt, ir.Evaluate | ir.BufferStore) or (
        isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL
    )


def interruptible(closure: Closure, signals: bool) -> Closure:
    """`closure`, followed by a point where the scheduler may switch tasks."""

    def run(frame: Frame) -> Any:
        left = closure(frame)
        frame.run.scheduler.preempt(signals)
        return left

    return run


def synchronizing(closure: Closure | None) -> Closure:
    """`closure`, if any, followed by the event that the threads executing it pass a barrier."""

    def run(frame: Frame) -> Any:
        left = closure(frame) if closure is not None else None
        frame.run.synchronizes(frame)
        return left

    return run


def located(closure: Closure, where: Location | None) -> Closure:
    """`closure` that adds its statement's line to errors without one."""

    def run(frame: Frame) -> Any:
        try:
            return closure(frame)
        except TileScaleError as error:
            _locate(error, where)
            raise
        except NO_FAULTS:
            raise
        except Exception as error:
            meant = fault(error, "emulated")
            _locate(meant, where)
            raise meant from error

    return run


def _locate(error: TileScaleError, where: Location | None) -> None:
    if not error.located:
        error.located = True
        error.where = (*([where] if where else []), *(w for w in error.where if w != where))
