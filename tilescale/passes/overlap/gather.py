# SPDX-License-Identifier: MIT
"""An all-gather and the grids that read what it gathers.

Why: all devices wait for the whole of a tensor although each tile reads rows of one part. Before: a gather, then grids.
After: the gather is started on the copy queue, a chunk of rows at a time, each with a flag; a tile waits for the flags
of the rows that it reads; the first grid works on the own part first and then on the others in the order in which they
arrive. Declines a gather along another dimension than the first, one whose result is used outside of grids, and what
`legality.py` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilelang_core.trace import call
from tilescale.passes.overlap.edits import Edits, rank_of
from tilescale.passes.overlap.estimate import Travel, best_chunk, gathered, grid_seconds, in_order
from tilescale.passes.overlap.legality import Site, check_unwritten, uses_after
from tilescale.passes.overlap.order import Arrival, axis_of, check_order, reordered, with_order
from tilescale.passes.overlap.schedule import Declined, Move
from tilescale.passes.overlap.uses import Rows, Use, Uses
from tilescale.program.asynchronous import Parts
from tilescale.program.dependence import Dependence, Step
from tilescale.program.model import DevicePhase, GridPhase, location
from tilescale.program.ops import ALL_GATHER, WAIT

MOST_WAITS = 4
"""Chunks that a tile waits for one by one; for more it waits in a loop."""


@dataclass(frozen=True)
class _Gather:
    """A gather that is taken apart."""

    site: Site
    uses: Uses
    rows: Rows
    readers: tuple[Use, ...]

    @property
    def level(self) -> str:
        return self.site.made.level


def overlap_gather(site: Site, mine: Step, graph: Dependence, uses: Uses, move: Move) -> ir.PrimFunc:
    """The program in which a gather runs beside the grids that read it; `move` gets what was chosen.

    Raises:
        Declined: it stays as it is.
    """
    rows = _rows(site, uses)
    target, source = (uses.names.root(ir.region_parts(r)[0].data) for r in (site.made.target, site.made.source))
    check_unwritten(source, mine, graph, "what it sends")
    check_unwritten(target, mine, graph, "its result")
    gather = _Gather(site, uses, rows, _readers(target, mine, graph, uses, rows))
    chunk = _choose(gather, move)
    edits = Edits(uses.program, site.launch, uses.machine)
    flags = edits.alloc_flags(f"{rows.buffer.name}_here", (rows.parts, -(-rows.height // chunk)))
    edits.statements.append((site.stmt, tir.at(_started(site, flags, chunk), site.stmt)))
    for use in gather.readers:
        edits.before(use.stmts[0], _waits(gather, use, flags, chunk))
    _reorder(gather, edits, move)
    return edits.apply()


def _rows(site: Site, uses: Uses) -> Rows:
    """How the rows of the result are counted."""
    made = site.made
    (part, _, own), (whole, begins, extents) = ir.region_parts(made.source), ir.region_parts(made.target)
    if made.is_in_place or made.axis != 0:
        raise Declined("it does not gather along the first dimension", location(site.stmt))
    sizes = ir.constants(extents)
    if sizes is None or ir.constants(own) is None:
        raise Declined("the rows are known at launch only", location(site.stmt))
    if any(ir.constant(b) != 0 for b in begins) or sizes != ir.constants(whole.shape):
        raise Declined(f"it gathers into a part of {whole.name!r}", location(site.stmt))
    if whole.data in uses.names.views:
        raise Declined(f"it gathers into a view of {uses.names.views[whole.data].base.name!r}", location(site.stmt))
    if part.dtype != whole.dtype:
        raise Declined("a copy queue converts nothing", location(site.stmt))
    parts = uses.sizes[made.level]
    slots = Parts.of(own, extents).slots
    return Rows(whole, parts, sizes[1] if slots else sizes[0] // parts, slots)


def _readers(root: ir.Var, mine: Step, graph: Dependence, uses: Uses, rows: Rows) -> tuple[Use, ...]:
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
    return tuple(uses.find(phase, mine.launch, rows) for phase in phases)


# -- chunks and waits --------------------------------------------------------------------------------------------------


def _choose(gather: _Gather, move: Move) -> int:
    """Rows of a chunk, and what the move is estimated to take."""
    site, uses, rows = gather.site, gather.uses, gather.rows
    travel = Travel.of(site, uses, rows.parts, rows.height)
    grid = sum(grid_seconds(use.phase, use.launch, uses) for use in gather.readers)
    chunk = min(move.chunk or best_chunk(travel, _step(gather), grid, gathered), rows.height)
    move.chunk, move.beside_s = chunk, gathered(travel, chunk, grid)
    move.in_order_s = in_order(site, uses, travel, grid)
    return chunk


def _step(gather: _Gather) -> int:
    """The common divisor of the rows inside their part at which tiles of the first grid begin; 1 if only that of 0."""
    use, height = gather.readers[0], gather.rows.height
    touched = list(gather.uses.by_rank(use, gather.level))
    tile = max(int((end - begin)[runs].max(initial=1)) for begin, end, runs in touched)
    begins = np.concatenate([begin[runs] % height for begin, _, runs in touched])
    return int(np.gcd.reduce(begins)) or min(tile, height)


def _waits(gather: _Gather, use: Use, flags: ir.Buffer, chunk: int) -> Iterable[ir.Stmt]:
    """Waits for all chunks of the rows that a use reads."""
    rows, each = gather.rows, -(-gather.rows.height // chunk)
    most = 0
    for begin, end, runs in gather.uses.by_rank(use, gather.level):
        numbers = [row // rows.height * each + row % rows.height // chunk for row in (begin, end - 1)]
        most = max(most, int((numbers[1] - numbers[0])[runs].max(initial=0)) + 1)

    def place(row: Any) -> tuple[Any, Any]:
        return row // rows.height, row % rows.height // chunk

    if most <= 1:
        return [_wait(flags, *place(use.begin))]
    first, last = (part * each + piece for part, piece in (place(use.begin), place(use.end - 1)))
    if most <= MOST_WAITS:
        numbers = [first if i == 0 else ir.Min(first + i, last) for i in range(most)]
        return [_wait(flags, number // each, number % each) for number in numbers]
    turn = ir.Var("chunk", "int32")
    return [ir.For(turn, first, last - first + 1, ir.ForKind.SERIAL, _wait(flags, turn // each, turn % each))]


def _wait(flags: ir.Buffer, part: Any, piece: Any) -> ir.Stmt:
    index = [ir.simplify(ir.int_node(i), {}) for i in (part, piece)]
    flag = tir.region(flags, index, [ir.IntImm("int32", 1)] * 2, "rw")
    return tir.evaluate(call(WAIT, flag, ir.IntImm("int32", 1), compare=">="))


def _started(site: Site, flags: ir.Buffer, chunk: int) -> ir.Stmt:
    """The gather, started on the copy queue."""
    made = site.made
    whole = tir.region(flags, [ir.IntImm("int32", 0)] * 2, flags.shape, "rw")
    return tir.evaluate(call(ALL_GATHER, made.source, made.target, whole, level=made.level, dim=0, chunk=chunk))


def _reorder(gather: _Gather, edits: Edits, move: Move) -> None:
    """Put the tiles of the first grid into the order of arrival, where that can be done."""
    use = gather.readers[0]
    move.why = "each tile waits for the rows that it reads"
    if not move.ordered:
        return
    try:
        check_order(use.phase, use.launch, gather.uses.machine)
        axis = axis_of(use, gather.rows, gather.uses, gather.level)
        rank, bind = rank_of(gather.level)
        stmts, mapping = reordered(use.launch, axis, rank, Arrival())
    except Declined as reason:
        move.ordered = False
        move.why += f"; tiles as written: {reason.reason}"
        return
    changed = with_order(edits.statement(use.phase.stmt), [bind, *stmts], mapping)
    edits.phases.append((use.phase, (GridPhase(changed),)))
