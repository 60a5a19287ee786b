# SPDX-License-Identifier: MIT
"""Waits of a phase, and whether those who load ahead may make them earlier than the program does."""

from __future__ import annotations

from tilelang_core import ir
from tilescale.program import ops
from tilescale.program.dependence import Dependence
from tilescale.program.effects import Effects, Release
from tilescale.program.operations import Wait

_LASTING = (">=", ">")
"""Comparisons with a flag that hold on while it only grows."""


def waits_in(stmt: ir.Stmt) -> list[ir.Call]:
    """The calls of `T.wait` in a statement."""
    found: list[ir.Call] = []
    ir.walk(stmt, lambda node: found.append(node) if ir.op_name(node) == ops.WAIT.name else None)
    return found


def flag_of(wait: ir.Call) -> ir.Buffer:
    """The tensor of flags that a wait looks at."""
    return ir.region_parts(Wait.of(wait).flag)[0]


def is_lasting(order: Dependence, wait: ir.Call, effects: Effects) -> bool:
    """Whether a wait may be made earlier than in the order of a phase: what it finds is then still what it waits for.

    Args:
        effects: of all that the phase does.
    """
    flag = order.names.root(flag_of(wait).data)
    grown = [release.flag for release in effects.releases if _adds(release)]
    updates = [access for access in effects.writes if access.root.same_as(flag)]
    others = [access for access in updates if not any(access is added for added in grown)]
    return not (effects.opaque or others) and (not updates or Wait.of(wait).compare in _LASTING)


def _adds(release: Release) -> bool:
    is_growing = release.value is None or ir.proves(ir.GE(release.value, 0), {})
    return release.op == "add" and is_growing
