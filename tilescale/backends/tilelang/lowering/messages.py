# SPDX-License-Identifier: MIT
"""Copies and signals of a device phase between devices that do not share memory: messages with two ends.

Why: `T.copy(dst=)` is one device's statement, but a message needs a receive. Before: a copy or signal, under conditions
and in loops. After: a step that all devices execute at this place of the program; each evaluates, with the numbers of
every device, the sender, the data and the receiver. Declines what the host does not know of other devices: indices,
peers and conditions that are read from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilescale.backends.tilelang.lowering.host_step import HostStep
from tilescale.program import ops
from tilescale.program.operations import Copy, Rank, Signal

BranchCondition = tuple[ir.PrimExpr, bool]
"""An expression, and the value it must have."""


@dataclass(frozen=True)
class MessageStep(HostStep):
    """A copy or signal as messages.

    Attributes:
        under: the conditions under which a device executes it.
        ranks: the variables of a device's rank at a level.
    """

    under: tuple[BranchCondition, ...] = ()
    ranks: tuple[tuple[ir.Var, str], ...] = ()


def level_of(node: ir.Node) -> str | None:
    """The level between whose units a copy or signal goes; None for another node, or a local signal."""
    if ir.op_name(node) == ops.COPY.name:
        return ir.attribute(node, "level")
    return Signal.of(node).level if ir.op_name(node) == ops.SIGNAL.name else None


class PlanContext:
    """Context of the statement that is being planned."""

    def __init__(self) -> None:
        self._control: list[ir.Stmt] = []
        self._under: list[BranchCondition] = []

    @contextmanager
    def inside(self, stmt: ir.Stmt) -> Iterator[None]:
        """Inside control flow that each device evaluates for itself."""
        self._control.append(stmt)
        yield
        self._control.pop()

    @contextmanager
    def under(self, condition: BranchCondition) -> Iterator[None]:
        """Under a condition that is evaluated for each device."""
        self._under.append(condition)
        yield
        self._under.pop()

    def message(self, call: ir.Call, bound: dict[ir.Var, ir.Bind], impl: str, where: Any) -> MessageStep | str:
        """The step of a copy or signal, with `bound` values computed before; or the reason why there is none."""
        ranks = {var: Rank.of(b.value).level for var, b in bound.items() if ir.op_name(b.value) == ops.RANK.name}
        for stmt in self._control:
            for expr in [stmt.min, stmt.extent] if isinstance(stmt, ir.For) else [stmt.condition]:
                if _reads(expr) or ir.variables(_inlined(expr, bound)) & ranks.keys():
                    return "in a loop or branch that devices may take differently"
        under = tuple((_inlined(expr, bound), value) for expr, value in self._under)
        inlined = _inlined(call, bound)
        if any(_reads(expr) for expr, _ in under) or any(map(_reads, _decided(inlined))):
            return "whose index, peer or condition is read from memory"
        return MessageStep(ir.Evaluate(inlined), impl, where, under, tuple(ranks.items()))


def _inlined(expr: ir.PrimExpr, bound: dict[ir.Var, ir.Bind]) -> Any:
    """An expression with only ranks, loop variables and arguments."""
    values = {var: b.value for var, b in bound.items() if ir.op_name(b.value) != ops.RANK.name}
    while not values.keys().isdisjoint(ir.variables(expr)):
        expr = ir.substitute(expr, values)
    return expr


def _decided(call: ir.Call) -> list[Any]:
    """The expressions that decide a message's peers, data and value."""
    if ir.op_name(call) == ops.SIGNAL.name:
        signal = Signal.of(call)
        return [*_places(signal.flag), signal.peer, signal.value]
    copy = Copy.of(call)
    flag_values = [] if copy.signal is None else [*_places(copy.signal), copy.value]
    return [*_places(copy.source), *_places(copy.target), copy.peer, *flag_values]


def _places(region: ir.Call) -> list[Any]:
    _, begins, extents = ir.region_parts(region)
    return [*begins, *extents]


def _reads(expr: ir.PrimExpr) -> bool:
    return ir.reads_memory(expr) if isinstance(expr, ir.PrimExpr) else False
