# SPDX-License-Identifier: MIT
"""Pipelined loops whose loads depend on registers that the loop sets: serial loops.

Why: TileLang 0.1.15 issues the loads of later iterations ahead, with the values that registers have then. With warp
specialisation the producer does not even see what the other threads set.

Before: `for k in T.Pipelined(n): T.copy(A[at, k * 64], x); ...; at += 1`, with `at` from `T.alloc_var`. After: the same
loop with no stages. A loop where an expression has a name, as `at = table[k]`, stays pipelined: each role evaluates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from tilelang_core import ir, tl
from tilelang_core.accesses import accesses_in, accesses_of
from tilelang_core.rewrite import relooped, rewritten


def with_serial_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it has such loops one whose loops of that kind have no stages."""

    def leave(node: Any) -> Any:
        if not ir.is_pipelined(node) or not _depends(node.body):
            return None
        return relooped(node, annotations={key: value for key, value in node.annotations.items() if key != tl.STAGES})

    return rewritten(func, leave)


def _depends(body: tirx.Stmt) -> bool:
    """Whether a load in a loop depends on registers that the loop sets, but not for that load alone."""
    names = {stmt.var: stmt.value for stmt in ir.statements(body) if isinstance(stmt, tirx.Bind)}
    needed = _needed(body, names)
    return bool(needed) and any(access.writes and access.buffer.data in needed for access in accesses_in(body))


def _needed(stmt: tirx.Stmt, names: Mapping[tirx.Var, tirx.PrimExpr]) -> set[tirx.Var]:
    """Data of the registers that loads in a statement depend on; `names` are those of expressions."""
    if isinstance(stmt, _TOGETHER) or isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.PARALLEL:
        if not _loads(stmt):
            return set()
        own = {access.buffer.data for access in accesses_in(stmt) if access.writes}
        return {data for inner in ir.statements(stmt) for data in _read(inner, names)} - own
    needed = {data for inner in ir.children(stmt) for data in _needed(inner, names)}
    decides = isinstance(stmt, tirx.IfThenElse | tirx.For) and any(map(_loads, ir.statements(stmt)))
    return needed | _read(stmt, names) if decides else needed


_TOGETHER = tirx.Evaluate | tirx.BufferStore


def _loads(stmt: tirx.Stmt) -> bool:
    """Whether a statement loads from global memory into shared memory."""
    accesses = accesses_in(stmt)
    is_read = any(access.reads and ir.scope_kind(access.buffer) == "global" for access in accesses)
    return is_read and any(access.writes and ir.scope_kind(access.buffer) == "shared" for access in accesses)


def _read(stmt: tirx.Stmt, names: Mapping[tirx.Var, tirx.PrimExpr]) -> set[tirx.Var]:
    """Data of the registers that a statement itself reads, or an expression whose name it uses."""
    found: set[tirx.Var] = set()
    left: list[Any] = [stmt]
    known: set[tirx.Var] = set()
    while left:
        node = left.pop()
        accesses = accesses_of(node, lambda name: False).accesses
        found |= {each.buffer.data for each in accesses if each.reads and ir.scope_kind(each.buffer) == "fragment"}
        used = ir.uses(node) if isinstance(node, tirx.Stmt) else ir.variables(node)
        left += [names[name] for name in used if name in names and name not in known]
        known.update(used)
    return found
