# SPDX-License-Identifier: MIT
"""The grids around a collective: the producer of its source, and the consumers of its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.chunks import RowChunks, flag
from tilescale.passes.overlap.legality import stands_alone, uses_after
from tilescale.passes.overlap.partition import Partition
from tilescale.passes.overlap.rewriter import LaunchRewriter
from tilescale.passes.overlap.tile_order import stairs
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.model import DevicePhase, GridPhase, Launch, location

Count = Callable[[Any, Any], Any]
"""A number that a chunk of a part has."""


def maker_of(root: ir.Var, mine: ProgramStep, graph: Dependence, what: str) -> GridPhase:
    """The grid that makes the tensor that a collective begins with, `what` in words. Raises Declined: there is no such
    grid, or another statement touches its result before the collective does."""
    earlier = graph.steps[: mine.number]
    before = [s for s in earlier if any(a.root.same_as(root) for a in s.effects.accesses)]
    last = before[-1] if before else None
    if last is None or not isinstance(last.phase, GridPhase) or last.launch is not mine.launch:
        raise Declined(f"no grid makes {what}", location((last or mine).stmt))
    assert mine.launch is not None
    if not stands_alone(last.phase, mine.launch):
        raise Declined(f"the grid that makes {what} is in a loop or a branch", location(last.stmt))
    if not any(a.root.same_as(root) for s in before if s.phase is last.phase for a in s.effects.writes):
        raise Declined(f"the grid before only reads {what}", location(last.stmt))
    return last.phase


def counted(use: TensorUse, chunks: RowChunks, uses: AccessMaps, level: str) -> Count:
    """Number of programs, and of their iterations, that touch a chunk. Raises Declined: it is another number on each
    unit."""
    tiles = use.tiles
    if uses.symbolic:
        if tiles is None or use.loops or chunks.span(use, uses, level) != (1, True):
            raise Declined("how many tiles a chunk has is known at launch only", location(use.stmts[0]))
        return lambda part, chunk: tiles.count(chunks.count(chunk))
    found = []
    for rank in range(chunks.of.parts):
        counts = np.zeros(chunks.shape[0] * chunks.each + 1, int)
        for begin, end, runs in uses.values(use, uses.ranks(level, rank)):
            first, last = chunks.number(begin)[runs], chunks.number(end - 1)[runs]
            np.add.at(counts, first[first <= last], 1)
            np.add.at(counts, last[first <= last] + 1, -1)
        found.append(np.cumsum(counts)[:-1])
    if use.is_all and use.named:
        raise uses.unknown(use)
    if any((other != found[0]).any() for other in found):
        raise Declined("each unit makes other tiles", location(use.stmts[0]))
    if (found[0] == 0).any():
        raise Declined("no tile makes some of the rows", location(use.stmts[0]))
    numbers = [int(n) for n in found[0]]
    return lambda part, chunk: stairs(part * chunks.each + chunk, range(len(numbers)), numbers)


def counting(
    maker: TensorUse,
    chunks: RowChunks,
    uses: AccessMaps,
    level: str,
    rewriter: LaunchRewriter,
    last: ir.Stmt | None = None,
) -> Callable[[Any, Any], tuple[ir.Call, Any]]:
    """Let the tiles of a producer grid signal the chunks that they touch, after their last statement on these, or after
    `last` in its place. Returns the flag of a chunk, and its value when all tiles are done."""
    done = rewriter.alloc_flags(f"{chunks.of.buffer.name}_done", chunks.shape)
    count, stmt = counted(maker, chunks, uses, level), maker.stmts[-1]
    signals = [tir.at(s, stmt) for s in chunks.counts(maker, uses, level, done)]
    rewriter.statements.append((stmt, tir.sequence([stmt if last is None else last, *signals])))
    return lambda part, chunk: (flag(done, part, chunk), count(part, chunk))


def readers_of(
    root: ir.Var, mine: ProgramStep, graph: Dependence, uses: AccessMaps, rows: Partition
) -> tuple[TensorUse, ...]:
    """The uses of the result, one for each grid that reads it."""
    steps = uses_after(root, mine, graph)
    phases: list[GridPhase] = []
    for step in steps:
        if isinstance(step.phase, DevicePhase) or step.phase is None:
            raise Declined("its result is used outside of a grid", location(step.stmt))
        if step.phase not in phases:
            phases.append(step.phase)
    if not phases:
        raise Declined("no grid reads its result", location(mine.stmt))
    assert mine.launch is not None
    return tuple(_reader(uses, phase, mine.launch, rows) for phase in phases)


def _reader(uses: AccessMaps, phase: GridPhase, launch: Launch, rows: Partition) -> TensorUse:
    """The use by a grid that reads: where indices in memory determine its rows, its tiles look them up, if they can.
    Raises Declined: they cannot, and may read all rows."""
    use = uses.find(phase, launch, rows)
    if not use.named:
        return use
    looking = uses.find(phase, launch, rows, looks_up=True)
    if not looking.is_all:
        return looking
    if use.is_all:
        raise uses.unknown(use)
    return use


def check_some(use: TensorUse, rows: Partition, uses: AccessMaps, level: str) -> None:
    """Raise Declined if every tile of a grid needs all rows: there is nothing to begin with."""
    if use.looks_up or uses.symbolic:  # then this was seen with likely extents
        return
    touched = uses.by_rank(use, level)
    if all((((begin <= 0) & (end >= rows.total)) | ~runs).all() for begin, end, runs in touched):
        raise Declined("every tile reads all rows", location(use.stmts[0]))
