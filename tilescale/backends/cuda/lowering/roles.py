# SPDX-License-Identifier: MIT
"""The roles of a grid phase's statements: what the producer executes, and what the threads that compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilelang_core import ir, specialise
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.deferred import Kept
from tilescale.backends.cuda.lowering.markers import BY_PRODUCER_FUNCTION

LOADING, POLLING = 24, 40
"""Registers of a producer's thread, and of one that waits: of 24 it would spill some."""


@dataclass(frozen=True)
class Roles:
    """A phase whose statements have their roles.

    Attributes:
        stmt: the phase, waits moved to what they gate.
        specialised: whether its loop gets a producer.
        gates, loads: how many waits, and how many loads, stand in the loop.
        ahead, pulled: tensors, of this device and of peers, that the producer loads before what others wait for.
        elects: whether one thread, the same each time, issues all bulk stores.
        kept: what signals are kept back until the next turn of the loop around, by number.
        tiles: what is allocated on chip beyond the program's own tiles.
        beside: whether others end a turn while those who compute do so in the next one.
        early: whether those who compute load registers before the loop; TileLang's producer would, too.
        notes: for people.
    """

    stmt: ir.Stmt = field(default_factory=lambda: tir.sequence([]))
    specialised: bool = False
    gates: int = 0
    loads: int = 0
    ahead: frozenset[ir.Var] = frozenset()
    pulled: frozenset[ir.Var] = frozenset()
    elects: bool = False
    kept: tuple[Kept, ...] = ()
    tiles: tuple[ir.Buffer, ...] = ()
    beside: bool = False
    early: bool = False
    notes: tuple[str, ...] = ()


def fits(roles: Roles, func: ir.PrimFunc, target: dict[str, str]) -> bool:
    """Whether stock TileLang puts all loads and gates of the lowered phase's loop into its producer, and only those."""
    found = specialise.branches(func, target)
    if found is None:
        return False
    counts = [[count(branch, what) for what in (specialise.is_load, is_gate)] for branch in found]
    return counts == [[roles.loads, roles.gates], [0, 0]]


def count(stmt: ir.Stmt, what: Callable[[Any], bool]) -> int:
    """How many nodes are so."""
    found: list[Any] = []
    ir.walk(stmt, lambda n: found.append(n) if what(n) else None)
    return len(found)


def is_gate(node: Any) -> bool:
    """Whether a node is a wait of a lowered phase that a producer makes for its loads."""
    return (tir.extern_name(node) or "").startswith(f"{BY_PRODUCER_FUNCTION}<")


def declined(stmt: ir.Stmt, reason: str) -> Roles:
    """A phase in one role, and why."""
    return Roles(stmt, notes=(f"T.Pipelined without a producer: {reason}",))
