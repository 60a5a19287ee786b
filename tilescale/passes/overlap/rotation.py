# SPDX-License-Identifier: MIT
"""Rotate loops whose iterations begin with a shift, so that each iteration begins with its grids.

Why: the shift of the next iteration may overlap with the grids of an iteration. Before: a loop of a shift and grids.
After: the shift of the first iteration, awaited; then a loop of grids and, except in the last iteration, the shift of
the next one. No order changes. Loops with other contents stay.
"""

from __future__ import annotations

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.passes.overlap.access_maps import AccessMaps
from tilescale.passes.overlap.chunks import flag, put, wait
from tilescale.passes.overlap.legality import ShiftSite
from tilescale.passes.overlap.loop_context import LoopContext, grids_of
from tilescale.passes.overlap.rewriter import LaunchRewriter
from tilescale.program.model import Control, DevicePhase, Sequence, location


def grids_first(site: ShiftSite, uses: AccessMaps) -> ir.PrimFunc | None:
    """The program with such a loop rotated; None where the shift is not in a loop. Raises Declined: as
    `LoopContext.of`."""
    context = LoopContext.of(site.phase, site.launch, location(site.stmt))
    if context.grids or not context.loops or not any(grids_of(part) for part in context.behind):
        return None
    if any(grids_of(part) is None for part in context.behind) or not context.is_first:
        return None
    loop = context.loops[-1]
    rewriter = LaunchRewriter(uses.program, site.launch, uses.machine)
    target = ir.region_parts(site.made[0].target)[0].name.removesuffix("_view")
    here = rewriter.alloc_flags(f"{target}_first", (len(site.stmts), *context.extents[:-1]))
    var = loop.stmt.loop_var
    following = ir.simplify(var + 1, {})
    first, later = ({var: value} for value in (ir.IntImm("int32", 0), following))
    begun = context.elsewhere(_awaited(site, context, here))
    every = context.elsewhere(tir.sequence(context.stmts))
    again = ir.IfThenElse(following < loop.stmt.extent, ir.substitute(every, later), None)
    body = Sequence((*context.before, *context.behind, DevicePhase(tir.renamed(again))))
    rewriter.phases.append((loop, (DevicePhase(ir.substitute(begun, first)), Control(loop.stmt, (body,)))))
    return rewriter.apply()


def _awaited(site: ShiftSite, context: LoopContext, here: ir.Buffer) -> ir.Stmt:
    """The phase's statements, with its copies started and awaited at once."""
    found: list[ir.Stmt] = []
    for stmt in context.stmts:
        number = next((i for i, copied in enumerate(site.stmts) if copied.same_as(stmt)), None)
        if number is None:
            found.append(stmt)
            continue
        made, arrived = site.made[number], flag(here, number, *context.variables[:-1])
        found.append(tir.at(put(made.level, made.source, made.target, made.peer, arrived), stmt))
        if number == len(site.stmts) - 1:
            found += [tir.at(wait(here, i, *context.variables[:-1]), stmt) for i in range(len(site.stmts))]
    return tir.sequence(found)
