# SPDX-License-Identifier: MIT
"""Find out which sums of two units are only stored, so that each unit needs but its half of them.

Why: two accumulators of usual size are combined through shared memory; the whole sum on both units costs a second
exchange, and one of them then stores all of it. Before: a phase in which units combine a tile that they hold as
copies, and the program copies it to memory. After: the tiles of which nothing else is asked; collectives.py leaves each
unit its half of the columns, shares.py stores it. Nothing is rewritten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tilelang_core import ir, tiles, tl
from tilescale.backends.tilelang.lowering.groups.distribution import accesses, is_fragment
from tilescale.backends.tilelang.lowering.groups.state import GroupStage
from tilescale.program import ops
from tilescale.program.operations import Collective

SLOTS_BELOW = 32 * 1024
"""Bytes of all units' tiles above which an all-reduce does not use slots for all of them: two tiles of accumulators of
usual size would take all of shared memory."""

COLUMNS = 8
"""Of a matrix instruction's result that a thread holds elements of: halves fall apart between such groups."""


def only_stored(stage: GroupStage) -> set[ir.Var]:
    """Data variables of the tiles whose sums a phase only stores."""
    found: set[ir.Var] = set()
    statements = list(_flat(stage.phase.stmt, False))
    for number, (stmt, repeated) in enumerate(statements):
        tile = None if repeated else _combined(stage, stmt)
        if tile is not None and all(_is_store(stage, other, tile) for other, _ in statements[number + 1 :]):
            found.add(tile.data)
    return found


def has_halves(stage: GroupStage, tile: ir.Buffer) -> bool:
    """Whether a large tile that two units hold copies of falls apart into halves of its columns."""
    held, shape = stage.distributions.of(tile), ir.constants(tile.shape)
    if shape is None or len(shape) < 2 or not is_fragment(tile):
        return False
    if held is None or held.axis is not None or held.count != 2:
        return False
    size = 2 * math.prod(shape) * ir.bits(str(tile.dtype)) // 8
    return size > SLOTS_BELOW and shape[-1] % (2 * COLUMNS) == 0


def _combined(stage: GroupStage, stmt: ir.Stmt) -> ir.Buffer | None:
    """The tile behind the whole of which a statement combines."""
    call = stmt.value if isinstance(stmt, ir.Evaluate) else None
    if ir.op_name(call) != ops.ALLREDUCE.name or Collective.of(call).combine is not None:
        return None
    buffer, _, extents = ir.region_parts(Collective.of(call).target)
    tile = stage.tile(stage.distributions.base(buffer))
    whole = tile is not None and [ir.constant(n) for n in extents] == [ir.constant(n) for n in tile.shape]
    return tile if whole and has_halves(stage, tile) else None


def _is_store(stage: GroupStage, stmt: ir.Stmt, tile: ir.Buffer) -> bool:
    """Whether a statement copies all of a tile to memory, or does not name it."""
    named = [buffer for buffer, _, _ in accesses(stmt) if stage.distributions.base(buffer).same_as(tile.data)]
    if not named:
        return True
    call: Any = stmt.value if isinstance(stmt, ir.Evaluate) else None
    if ir.op_name(call) != tl.COPY or not all(buffer.same_as(tile) for buffer in named):
        return False
    copy = tiles.TileCopy.of(call)
    (source, _, extents), (target, _, others) = (ir.region_parts(region) for region in (copy.source, copy.target))
    whole = [ir.constant(n) for n in extents] == [ir.constant(n) for n in tile.shape]
    return source.same_as(tile) and whole and target.scope() == "global" and ir.constant(others[-1]) != 1


def _flat(stmt: ir.Stmt, repeated: bool) -> Iterator[tuple[ir.Stmt, bool]]:
    """The statements without others in them, in order, and whether control flow is around them."""
    nested = list(ir.children(stmt))
    if not nested:
        yield stmt, repeated
    for inner in nested:
        yield from _flat(inner, repeated or not isinstance(stmt, ir.SeqStmt | ir.AttrStmt))
