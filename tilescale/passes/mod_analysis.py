# SPDX-License-Identifier: MIT
"""Parameters that a program may write: only these are sent back from the rank that emulated it, and can have races.
Also the tensors that peers write, and the flags that they do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from tilelang_core import ir
from tilescale.program.effects import names_of, statements
from tilescale.program.model import Program
from tilescale.program.operations import Signal, Wait, operation

Found = TypeVar("Found")


def _once(find: Callable[[Program], Found]) -> Callable[[Program], Found]:
    """Keep the result with the program, also on disk: several parts of a build ask for it."""
    name = f"{find.__module__}.{find.__name__}"

    @wraps(find)
    def of(program: Program) -> Found:
        kept = vars(program)
        if name not in kept:
            kept[name] = find(program)
        return kept[name]

    return of


@_once
def written_parameters(program: Program) -> frozenset[int]:
    """Positions of the parameters that are written, or whose elements are handed to an operation by address."""
    names = names_of(program)
    written = {access.root for stmt, _, _ in statements(program.body) for access in names.effects(stmt).writes}
    return frozenset(i for i, p in enumerate(program.parameters) if p.buffer is not None and p.buffer.data in written)


@_once
def written_by_peers(program: Program) -> frozenset[str]:
    """Names of the tensors and tiles that other units write, flags included."""
    names = names_of(program)
    found: set[ir.Var] = set()
    for stmt, _, _ in statements(program.body):
        effects = names.effects(stmt)
        found.update(access.root for access in effects.writes if access.at is not None)
        found.update(release.flag.root for release in effects.releases)
    return frozenset(names.homes[root].name for root in found if root in names.homes)


def device_flags(program: Program) -> frozenset[ir.Var]:
    """Workspaces of flags that only units of their own device signal, and wait for: at the scope of the device."""
    names = names_of(program)
    found: set[ir.Var] = set()
    others = {p.buffer.data for p in program.parameters if p.buffer is not None}
    for stmt, _, _ in statements(program.body):
        effects = names.effects(stmt)
        is_local = isinstance(operation(stmt.value), Signal | Wait) if isinstance(stmt, ir.Evaluate) else False
        found.update(effects.flags)
        others.update(a.root for a in effects.accesses if a.at is not None or not is_local)
    return frozenset(found - others)
