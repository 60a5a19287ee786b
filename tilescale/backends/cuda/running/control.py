# SPDX-License-Identifier: MIT
"""Loops and branches around phases: the host's, which reads in device memory what they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.running.phases import Part, Step
from tilescale.errors import Location

if TYPE_CHECKING:
    from tilescale.backends.cuda.running.execute import Call, DeviceProgram


class HostValue:
    """An expression of the program as the host computes it in a call."""

    def __init__(self, own: DeviceProgram, expr: ir.PrimExpr, where: Location):
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

    def __call__(self, call: Call) -> int:
        """Its value where the stream has come to. Waits for the device if it reads there.

        Raises:
            WaitTimeoutError, OutOfBoundsError, RankMismatchError, RankFailedError: as waiting for the device does.
        """
        if self._reads:
            self._own.synchronize()
        for var, part in self._reads:
            call.variables[var] = part.local(call).item()
        return call.evaluate(self._expr)


def loop(own: DeviceProgram, stmt: ir.For, body: Step, where: Location) -> Step:
    """A counted loop."""
    begin, extent = HostValue(own, stmt.min, where), HostValue(own, stmt.extent, where)

    def run(call: Call) -> None:
        first = begin(call)
        for value in range(first, first + extent(call)):
            call.variables[stmt.loop_var] = value
            body(call)

    return run


def loop_while(own: DeviceProgram, stmt: ir.While, body: Step, where: Location) -> Step:
    """A loop with a condition."""
    condition = HostValue(own, stmt.condition, where)

    def run(call: Call) -> None:
        while condition(call):
            body(call)

    return run


def branch(own: DeviceProgram, stmt: ir.IfThenElse, bodies: Sequence[Step], where: Location) -> Step:
    """One of two ways, or none."""
    condition = HostValue(own, stmt.condition, where)

    def run(call: Call) -> None:
        taken = condition(call)
        if taken or len(bodies) > 1:
            bodies[0 if taken else 1](call)

    return run
