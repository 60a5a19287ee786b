# SPDX-License-Identifier: MIT
"""Find out what orders the loads of a pipelined loop beside tiles, and who waits for it when a loader issues them.

Why: a loader runs beside the program, so what the program waits for does not hold its loads back. Before: the loads and
waits in the body of a loop, and what the program waits for in front of it. After: the waits of the body are the
loader's, each in front of the loads that it orders, and units go on when the tiles are there; so are those right in
front of the loop, in its first iteration. For what else stands in front of it units wait as ever, and say so to the
loader when they come to the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tilelang_core import ir
from tilescale.backends.cuda.lowering.groups.distribution import accesses
from tilescale.backends.cuda.lowering.groups.loads import Load
from tilescale.backends.cuda.lowering.waits import flag_of, waits_in
from tilescale.program.dependence import Dependence

Step: TypeAlias = "Load | ir.Stmt"
"""A load, or a wait."""


def waits_of(steps: Iterable[Step]) -> list[ir.Call]:
    """The calls of `T.wait` among some steps."""
    return [call for step in steps if isinstance(step, ir.Stmt) for call in waits_in(step)]


@dataclass(frozen=True)
class Gates:
    """What orders the loads of one loop.

    Attributes:
        order: what stays in order in the program.
        steps: its loads and waits, in the order of the program.
    """

    order: Dependence
    steps: Sequence[Step]

    @property
    def waits(self) -> list[ir.Call]:
        """The waits that the loader makes."""
        return waits_of(self.steps)

    def ordered(self) -> tuple[Step, ...]:
        """The steps in the order in which the loader makes them: loads first that no wait in front of them orders."""
        early: list[Step] = []
        late: list[Step] = []
        passed: list[ir.Call] = []
        for step in self.steps:
            if isinstance(step, ir.Stmt):
                passed += waits_in(step)
            free = isinstance(step, Load) and not self._orders(passed, _read_by(step.call))
            (early if free else late).append(step)
        return (*early, *late)

    def wait_for(self, calls: Iterable[ir.Call]) -> bool:
        """Whether loads, or what the waits read, have to stay behind other waits, barriers or collectives."""
        nodes = [step.call if isinstance(step, Load) else step for step in self.steps]
        flags = {flag_of(wait).data for wait in self.waits}
        return self._orders(calls, {data for node in nodes for data in _read_by(node)} | flags)

    def _orders(self, calls: Iterable[ir.Call], read: set[ir.Var]) -> bool:
        names = self.order.names
        seen = {data for data in read if names.shared(names.root(data))}
        return any(self.order.gates(call, data) for call in calls for data in seen)


def _read_by(node: Any) -> set[ir.Var]:
    return {buffer.data for buffer, _, writes in accesses(node) if not writes}
