# SPDX-License-Identifier: MIT
"""Persistent loops: a program computes one tile after the other, and roles overlap what neighbouring iterations do.

The producer loads for the next tile while the epilogue of the last one runs. The end of an iteration, from its first
collective between devices on, or the stores and signals that end it, is an epilogue role where nothing forbids that: it
overlaps with the computation of the next tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import TileCopy
from tilescale.hda import Machine
from tilescale.program import ops
from tilescale.program.effects import ProgramNames
from tilescale.program.footprint import stages_of
from tilescale.program.operations import Copy, operation

ROLES = "warp-specialization"
"""The capability of machines whose programs have roles."""


@dataclass(frozen=True)
class LoopIteration:
    """One iteration of a persistent loop. `after`: the statements after the pipelined loop that compute the tile;
    `epilogue`: those that follow them."""

    after: tuple[ir.Stmt, ...]
    epilogue: tuple[ir.Stmt, ...]


def iteration_of(loop: ir.For, machine: Machine, names: ProgramNames) -> LoopIteration | None:
    """The iteration of a persistent loop; None of other loops."""
    if not machine.has(ROLES) or loop.kind != ir.ForKind.SERIAL or stages_of(loop):
        return None
    stmts = list(_flat(loop.body, machine))
    pipelined = [i for i, stmt in enumerate(stmts) if stages_of(stmt)]
    around = [stmt for stmt in stmts if not stages_of(stmt)]
    if len(pipelined) != 1 or any(ir.contains(stmt, lambda node: stages_of(node) > 0) for stmt in around):
        return None
    (at,) = pipelined
    after = stmts[at + 1 :]
    begin = _epilogue(after, machine)
    first, rest = after[:begin], after[begin:]
    if not _may_overlap([*stmts[: at + 1], *first], rest, names):
        return LoopIteration(tuple(after), ())
    return LoopIteration(tuple(first), tuple(rest))


def _flat(stmt: ir.Stmt, machine: Machine) -> Iterator[ir.Stmt]:
    """Statements one after the other, also those in scales that only name coarser units."""
    if isinstance(stmt, ir.SeqStmt):
        for inner in stmt.seq:
            yield from _flat(inner, machine)
    elif isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == ops.SCALE and _is_coarse(stmt, machine):
        yield from _flat(stmt.body, machine)
    else:
        yield stmt


def _is_coarse(scale: ir.AttrStmt, machine: Machine) -> bool:
    return machine.level(str(scale.value.value)).kind == "unit"


def _epilogue(stmts: Sequence[ir.Stmt], machine: Machine) -> int:
    """Index of the first statement of the epilogue role."""
    for number, stmt in enumerate(stmts):
        if ir.contains(stmt, lambda node: ir.op_name(node) in ops.COLLECTIVES and _crosses(node, machine)):
            return number
    begin = len(stmts)
    while begin and _is_sent(stmts[begin - 1]):
        begin -= 1
    return begin


def _crosses(call: ir.Call, machine: Machine) -> bool:
    """Whether units that own tensors take part in a collective."""
    level = ir.attribute(call, "level")
    return level is not None and machine.level(level).kind == "unit"


def _is_sent(stmt: ir.Stmt) -> bool:
    """Whether a statement is a store of a tile in shared memory, or a signal."""
    if not isinstance(stmt, ir.Evaluate):
        return False
    name, ours = ir.op_name(stmt.value), operation(stmt.value)
    if name == tl.COPY:
        copy = TileCopy.of(stmt.value)
        return _scope(copy.source) == "shared" and _scope(copy.target) == "global"
    if isinstance(ours, Copy):
        return ours.to_peer and _scope(ours.near) == "shared"
    return name == ops.SIGNAL.name


def _scope(region: Any) -> str:
    return ir.scope_kind(ir.region_parts(region)[0])


def _may_overlap(computing: Sequence[ir.Stmt], epilogue: Sequence[ir.Stmt], names: ProgramNames) -> bool:
    """Whether an epilogue may run after the computation of the next tile."""
    if not epilogue:
        return False
    before, after = (names.all_effects(tir.sequence(list(stmts))) for stmts in (computing, epilogue))
    if before.opaque or after.opaque or (after.synchronizes and before.orders):
        return False
    written = {access.root for access in after.writes if access.at is None and not access.atomic}
    return not any(access.root in written and names.shared(access.root) for access in before.reads)
