# SPDX-License-Identifier: MIT
"""Loops whose turns begin with a shift, so turned that each begins with its grids.

Why: the shift of the next iteration may overlap with the grids of an iteration. Before: a loop of a shift and grids.
After: the shift of the first iteration, awaited; then a loop of grids and, except in the last iteration, the shift of
the next one. No order changes. Loops with other contents stay.
"""

from __future__ import annotations

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.passes.overlap.access_maps import Uses
from tilescale.passes.overlap.chunks import flag, put, wait
from tilescale.passes.overlap.legality import Shift
from tilescale.passes.overlap.loop_context import Turns, grids_of
from tilescale.passes.overlap.rewriter import Edits
from tilescale.program.model import Control, DevicePhase, Sequence, location


def grids_first(site: Shift, uses: Uses) -> ir.PrimFunc | None:
    """The program with such a loop rotated; None where the shift is not in a loop.

    Raises:
        Declined: as `Turns.of`.
    """
    turns = Turns.of(site.phase, site.launch, location(site.stmt))
    if turns.grids or not turns.loops or not any(grids_of(part) for part in turns.behind):
        return None
    if any(grids_of(part) is None for part in turns.behind) or not turns.is_first:
        return None
    loop = turns.loops[-1]
    edits = Edits(uses.program, site.launch, uses.machine)
    target = ir.region_parts(site.made[0].target)[0].name.removesuffix("_view")
    here = edits.alloc_flags(f"{target}_first", (len(site.stmts), *turns.extents[:-1]))
    var = loop.stmt.loop_var
    following = ir.simplify(var + 1, {})
    first, later = ({var: value} for value in (ir.IntImm("int32", 0), following))
    begun = turns.elsewhere(_awaited(site, turns, here))
    every = turns.elsewhere(tir.sequence(turns.stmts))
    again = ir.IfThenElse(following < loop.stmt.extent, ir.substitute(every, later), None)
    body = Sequence((*turns.before, *turns.behind, DevicePhase(tir.renamed(again))))
    edits.phases.append((loop, (DevicePhase(ir.substitute(begun, first)), Control(loop.stmt, (body,)))))
    return edits.apply()


def _awaited(site: Shift, turns: Turns, here: ir.Buffer) -> ir.Stmt:
    """The phase's statements, with its copies started and awaited at once."""
    found: list[ir.Stmt] = []
    for stmt in turns.stmts:
        number = next((i for i, copied in enumerate(site.stmts) if copied.same_as(stmt)), None)
        if number is None:
            found.append(stmt)
            continue
        made, told = site.made[number], flag(here, number, *turns.variables[:-1])
        found.append(tir.at(put(made.level, made.source, made.target, made.peer, told), stmt))
        if number == len(site.stmts) - 1:
            found += [tir.at(wait(here, i, *turns.variables[:-1]), stmt) for i in range(len(site.stmts))]
    return tir.sequence(found)
