# SPDX-License-Identifier: MIT
"""Loops and branches around phases: executed by the host, which reads their conditions in device memory.

Loops and branches without device-side conditions are unrolled when they are bound to a call. The others are bound when
the stream reaches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.running.phases import Part
from tilescale.backends.cuda.running.steps import Call, Step, Work, run
from tilescale.errors import Location
from tilescale.program.formulas import one

if TYPE_CHECKING:
    from tilescale.backends.cuda.running.program_context import Owner


class HostValue:
    """An expression of the program that the host computes in a call."""

    def __init__(self, own: Owner, expr: ir.PrimExpr, where: Location | None):
        self._own = own
        self._reads: list[tuple[ir.Var, Part]] = []
        self._expr = tir.rewrite(ir.Evaluate(expr), enter=self._read).value
        if self._reads:
            own.reads_at = where

    def _read(self, node: Any) -> ir.Var | None:
        if not isinstance(node, ir.BufferLoad):
            return None
        var = ir.Var(f"{node.buffer.name}_element", str(node.dtype))
        self._reads.append((var, Part(self._own, node)))
        return var

    @property
    def is_known(self) -> bool:
        """Whether it does not depend on device memory."""
        return not self._reads

    def __call__(self, call: Call) -> int:
        """Its value at the stream's present position. Waits for the device if it reads device memory.

        Raises:
            WaitTimeoutError, OutOfBoundsError, RankMismatchError, RankFailedError: as waiting for the device does.
        """
        if self._reads:
            if self._own.queue is not None:
                self._own.queue.flush()
            self._own.synchronize()
        for var, part in self._reads:
            call.variables[var] = part.local(call).item()
        return call.evaluate(self._expr)


def loop(own: Owner, stmt: ir.For, body: Step, where: Location | None) -> Step:
    """A counted loop."""
    begin, extent = HostValue(own, stmt.min, where), HostValue(own, stmt.extent, where)
    var = one(stmt.loop_var)

    def rounds(call: Call) -> list[Work]:
        first = begin(call)
        launches: list[Work] = []
        for value in range(first, first + extent(call)):
            call.variables[var] = value
            launches += body(call)
        return launches

    return rounds if begin.is_known and extent.is_known else _when_reached(rounds)


def loop_while(own: Owner, stmt: ir.While, body: Step, where: Location | None) -> Step:
    """A loop with a condition."""
    condition = HostValue(own, stmt.condition, where)

    def bind(call: Call) -> list[Work]:
        at = call.later()

        def launch() -> None:
            while condition(at):
                run(body(at))

        return [launch]

    return bind


def branch(own: Owner, stmt: ir.IfThenElse, bodies: Sequence[Step], where: Location | None) -> Step:
    """One of two branches, or none."""
    condition = HostValue(own, stmt.condition, where)

    def taken(call: Call) -> list[Work]:
        if condition(call):
            return bodies[0](call)
        return bodies[1](call) if len(bodies) > 1 else []

    return taken if condition.is_known else _when_reached(taken)


def _when_reached(step: Step) -> Step:
    """A step that is bound when the stream has reached it."""

    def bind(call: Call) -> list[Work]:
        at = call.later()
        return [lambda: run(step(at))]

    return bind
