# SPDX-License-Identifier: MIT
"""Gates: the waits that order a pipelined loop's loads, in addition to its tiles, and that the producer makes.

Why: a producer runs ahead of the program, so the program's waits do not hold its loads back. Before: the loads and
waits in the body of a loop, and the waits before it. After: the waits of the body are the producer's, each before the
loads that it orders, and consumers continue when the tiles are full; so are those directly before the loop, in its
first iteration. Consumers make the other waits before the loop themselves, and signal the producer when they reach the
loop. A wait may be made earlier than in the program if its condition then still holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.groups.distribution import accesses
from tilescale.backends.tilelang.lowering.role_graph.loads import ProducerLoad
from tilescale.program import ops
from tilescale.program.dependence import Dependence
from tilescale.program.effects import Effects, Release
from tilescale.program.operations import Wait

_LASTING = (">=", ">")
"""Comparisons with a flag that hold on while it only grows."""

GatedStep: TypeAlias = "ProducerLoad | ir.Stmt"
"""A load, or a wait."""


def waits_in(stmt: ir.Stmt) -> list[ir.Call]:
    """The calls of `T.wait` in a statement."""
    return ir.nodes(stmt, lambda node: ir.op_name(node) == ops.WAIT.name)


def flag_of(wait: ir.Call) -> ir.Buffer:
    """The tensor of flags that a wait looks at."""
    return ir.region_parts(Wait.of(wait).flag)[0]


def is_lasting(order: Dependence, wait: ir.Call, effects: Effects) -> bool:
    """Whether a wait may be made earlier than in the order of a phase: what it finds is then still what it waits for.
    `effects`: of all that the phase does."""
    flag = order.names.root(flag_of(wait).data)
    grown = [release.flag for release in effects.releases if _adds(release)]
    updates = [access for access in effects.writes if access.root.same_as(flag)]
    others = [access for access in updates if not any(access is added for added in grown)]
    return not (effects.opaque or others) and (not updates or Wait.of(wait).compare in _LASTING)


def _adds(release: Release) -> bool:
    is_growing = release.value is None or ir.proves(ir.GE(release.value, 0), {})
    return release.op == "add" and is_growing


def in_first_iteration(loop: ir.For, wait: ir.Stmt) -> ir.Stmt:
    """A wait in front of a loop as a statement of its body."""
    return tir.at(ir.IfThenElse(ir.EQ(loop.loop_var, loop.min), wait, None), wait)


def waits_of(steps: Iterable[GatedStep]) -> list[ir.Call]:
    """The calls of `T.wait` among some steps."""
    return [call for step in steps if isinstance(step, ir.Stmt) for call in waits_in(step)]


@dataclass(frozen=True)
class LoadGates:
    """The gates of one loop's loads.

    Attributes:
        order: the dependences of the program.
        steps: its loads and waits, in the order of the program.
    """

    order: Dependence
    steps: Sequence[GatedStep]

    @property
    def waits(self) -> list[ir.Call]:
        return waits_of(self.steps)

    def ordered(self) -> tuple[GatedStep, ...]:
        """The steps in the order in which the loader makes them: loads first that no wait in front of them orders."""
        early: list[GatedStep] = []
        late: list[GatedStep] = []
        passed: list[ir.Call] = []
        for step in self.steps:
            if isinstance(step, ir.Stmt):
                passed += waits_in(step)
            free = isinstance(step, ProducerLoad) and not self._orders(passed, _read_by(step.call))
            (early if free else late).append(step)
        return (*early, *late)

    def wait_for(self, calls: Iterable[ir.Call]) -> bool:
        """Whether loads, or what the waits read, have to stay behind other waits, barriers or collectives."""
        nodes = [step.call if isinstance(step, ProducerLoad) else step for step in self.steps]
        flags = {flag_of(wait).data for wait in self.waits}
        return self._orders(calls, {data for node in nodes for data in _read_by(node)} | flags)

    def _orders(self, calls: Iterable[ir.Call], read: set[ir.Var]) -> bool:
        names = self.order.names
        seen = {data for data in read if names.shared(names.root(data))}
        return any(self.order.gates(call, data) for call in calls for data in seen)


def _read_by(node: ir.Call | ir.Stmt) -> set[ir.Var]:
    return {buffer.data for buffer, _, writes in accesses(node) if not writes}
