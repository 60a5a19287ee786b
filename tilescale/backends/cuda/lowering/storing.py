# SPDX-License-Identifier: MIT
"""Give the stores that end a turn of a persistent loop, and the signals that tell of them, to threads of their own.

Why: a signal is sent when what it tells of has arrived, by a release at system scope, which waits for all that was
written before it; in threads that compute, the tensor cores wait with it: in float8, 4 % of a product of 8192 x 8192 x
3584 on an H200. Before: a loop whose turns compute a tile, copy it out of shared memory and signal that. After: the
same, the copies and signals marked as what threads beside the others execute, while these compute the next tile. Who
waits for a signal waits for no other turn, so none of them is later than it was. Without signals nothing is gained over
copies that complete during the next turn (deferred.py), and this declines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.deferred import is_sent
from tilescale.backends.cuda.lowering.exchanging import Ending, Split, beside
from tilescale.backends.cuda.lowering.statements import flat, reads_memory
from tilescale.passes.declined import Declined
from tilescale.program import ops
from tilescale.program.dependence import Dependence
from tilescale.program.operations import Copy

THREADS = 64
"""Threads of who stores: half a warpgroup, the other half loads. One of them issues the stores and signals."""


def stored(phase: ir.Stmt, loop: ir.For, last: Sequence[ir.Stmt], order: Dependence, end: int) -> Ending:
    """The last statements of a loop's turn, the stores and signals at their end marked; as they are if that cannot be.

    Args:
        phase: all that a program executes.
        loop: its loop.
        last: what stands in a turn after the tile has been computed.
        end: the number of all threads, of which those that store are the last.
    """
    first, rest = _parts(last)
    rest = _with_scalars(rest, first)
    if not any(ir.contains(stmt, _signals) for stmt in rest):
        return Ending(list(last))
    try:
        _check_scalars(first, rest)
        Split(phase, loop, last, first, rest, order).check_data()
    except Declined:
        return Ending(list(last))
    note = "stores that end a turn, and their signals: threads of their own, while the others compute the next tile"
    return Ending([*first, beside(end - THREADS, THREADS, tir.sequence(rest))], (), note, THREADS)


def _parts(stmts: Sequence[ir.Stmt]) -> tuple[list[ir.Stmt], list[ir.Stmt]]:
    """Statements, and the stores and signals that end them, in branches too."""
    first, rest = list(stmts), list[ir.Stmt]()
    while first and is_sent(first[-1]):
        rest.insert(0, first.pop())
    if not first or not isinstance(first[-1], ir.IfThenElse) or _reads(first[-1].condition):
        return first, rest
    branch = first.pop()
    arms = [_parts(flat(arm)) if arm is not None else ([], []) for arm in (branch.then_case, branch.else_case)]
    before, ends = (_branch(branch, *(arm[i] for arm in arms)) for i in (0, 1))
    if before:
        return [*first, *before], [*ends, *rest]
    first, others = _parts(first)
    return first, [*others, *ends, *rest]


def _reads(condition: ir.PrimExpr) -> bool:
    """Whether a condition reads memory: who computes and who stores could find other values there."""
    return ir.contains(condition, lambda n: isinstance(n, ir.BufferLoad))


def _branch(branch: ir.IfThenElse, then_case: list[ir.Stmt], else_case: list[ir.Stmt]) -> list[ir.Stmt]:
    """A branch with other arms; nothing if both are empty."""
    condition, arms = branch.condition, [tir.sequence(then_case), tir.sequence(else_case) if else_case else None]
    if not then_case:
        condition, arms = ir.Not(condition), [tir.sequence(else_case), None]
    return [tir.at(ir.IfThenElse(condition, *arms), branch)] if then_case or else_case else []


def _signals(node: Any) -> bool:
    return ir.op_name(node) == ops.SIGNAL.name or (
        ir.op_name(node) == ops.COPY.name and Copy.of(node).signal is not None
    )


def _with_scalars(rest: Sequence[ir.Stmt], first: Sequence[ir.Stmt]) -> list[ir.Stmt]:
    """Statements in which the scalars that are set before them stand as what they are."""
    known: dict[ir.Var, ir.PrimExpr] = {}
    for stmt in first:
        if isinstance(stmt, ir.Bind) and not reads_memory(stmt):
            known[stmt.var] = ir.substitute(stmt.value, known)
    return [ir.substitute(stmt, known) for stmt in rest]


def _check_scalars(first: Sequence[ir.Stmt], rest: Sequence[ir.Stmt]) -> None:
    bound = {s.var for stmt in first for s in ir.statements(stmt) if isinstance(s, ir.Bind)}
    used: list[ir.Var] = []
    for stmt in rest:
        ir.walk(stmt, lambda n: used.append(n) if isinstance(n, ir.Var) else None)
    if bound & set(used):
        raise Declined("who stores the tile uses what is known only when it has been computed")
