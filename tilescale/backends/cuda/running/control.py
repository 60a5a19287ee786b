# SPDX-License-Identifier: MIT
"""Loops and branches around phases: executed by the host, which reads their conditions in device memory.

Loops and branches without device-side conditions are unrolled when they are bound to a call. The others are bound when
the stream reaches them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilelang_core.formulas import formula, one
from tilescale.backends.cuda.running.phases import TensorRegion
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import CallStep, ProgramCall, StreamWork, run
from tilescale.errors import Location


class HostValue:
    """An expression of the program that the host computes in a call."""

    def __init__(self, context: ProgramContext, expr: ir.PrimExpr, where: Location | None):
        self._context = context
        self._reads: list[tuple[ir.Var, TensorRegion]] = []
        self._value = formula(tir.rewrite(ir.Evaluate(expr), enter=self._read).value)
        if self._reads:
            context.reads_at = where

    def _read(self, node: ir.Node) -> ir.Var | None:
        if not isinstance(node, ir.BufferLoad):
            return None
        var = ir.Var(f"{node.buffer.name}_element", str(node.dtype))
        self._reads.append((var, TensorRegion(self._context, node)))
        return var

    @property
    def is_known(self) -> bool:
        """Whether it does not depend on device memory."""
        return not self._reads

    def __call__(self, call: ProgramCall) -> int:
        """Its value at the stream's present position. Waits for the device if it reads device memory. Raises
        WaitTimeoutError, OutOfBoundsError, RankMismatchError, RankFailedError: as waiting for the device does."""
        if self._reads:
            if self._context.queue is not None:
                self._context.queue.flush()
            self._context.synchronize()
        for var, part in self._reads:
            call.variables[var] = part.local(call).item()
        return call.evaluate(self._value)


def loop(context: ProgramContext, stmt: ir.For, body: CallStep, where: Location | None) -> CallStep:
    """A counted loop."""
    begin, extent = HostValue(context, stmt.min, where), HostValue(context, stmt.extent, where)
    var = one(stmt.loop_var)

    def rounds(call: ProgramCall) -> list[StreamWork]:
        first = begin(call)
        launches: list[StreamWork] = []
        for value in range(first, first + extent(call)):
            call.variables[var] = value
            launches += body(call)
        return launches

    return rounds if begin.is_known and extent.is_known else _when_reached(rounds)


def loop_while(context: ProgramContext, stmt: ir.While, body: CallStep, where: Location | None) -> CallStep:
    """A loop with a condition."""
    condition = HostValue(context, stmt.condition, where)

    def bind(call: ProgramCall) -> list[StreamWork]:
        at = call.later()

        def launch() -> None:
            while condition(at):
                run(body(at))

        return [launch]

    return bind


def branch(
    context: ProgramContext, stmt: ir.IfThenElse, bodies: Sequence[CallStep], where: Location | None
) -> CallStep:
    """One of two branches, or none."""
    condition = HostValue(context, stmt.condition, where)

    def taken(call: ProgramCall) -> list[StreamWork]:
        if condition(call):
            return bodies[0](call)
        return bodies[1](call) if len(bodies) > 1 else []

    return taken if condition.is_known else _when_reached(taken)


def _when_reached(step: CallStep) -> CallStep:
    """A step that is bound when the stream has reached it."""

    def bind(call: ProgramCall) -> list[StreamWork]:
        at = call.later()
        return [lambda: run(step(at))]

    return bind
