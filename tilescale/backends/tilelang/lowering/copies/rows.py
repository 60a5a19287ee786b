# SPDX-License-Identifier: MIT
"""Copies of device-side numbers of rows, local ones and those to and from peers.

Why: TileLang copies boxes of constant extents, or whole tiles. Before: a copy whose extent is loaded. After: a loop
nest over the extent of the smaller side, which skips elements beyond the loaded extent. So a number beyond the tile
copies the whole tile, and a negative one nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.markers import located
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.program import ops

LOADED = "loaded_extents"
"""Annotation of a copy between units: its extents are loaded from memory."""


def with_loaded_extents(phase: Phase) -> Phase:
    """A phase whose local copies of loaded extents are loop nests; those between units are annotated."""
    bound = {stmt.var: stmt.value for stmt in ir.statements(phase.stmt) if isinstance(stmt, ir.Bind)}

    def is_loaded(expr: ir.PrimExpr) -> bool:
        if ir.reads_memory(expr):
            return True
        return any(is_loaded(bound[var]) for var in ir.variables(expr) if var in bound)

    def enter(node: ir.Node) -> ir.Stmt | None:
        call: Any = node.value if isinstance(node, ir.Evaluate) else None
        if ir.op_name(call) not in (tl.COPY, ops.COPY.name):
            return None
        if not any(is_loaded(n) for region in ir.regions_of_copy(call) for n in ir.region_parts(region)[2]):
            return None
        if ir.op_name(call) == tl.COPY:
            return located(nest(*ir.regions_of_copy(call)), node)
        said = {**dict(call.annotations), LOADED: ir.IntImm("int32", 1)}
        return located(tir.evaluate(ir.Call(call.dtype, call.op, list(call.args), said)), node)

    return replace(phase, stmt=tir.rewrite(phase.stmt, enter=enter))


def nest(source: ir.Call, target: ir.Call) -> ir.Stmt:
    """A copy as parallel loops, which skip elements beyond its extents or either tile."""
    sides = [ir.region_parts(region) for region in (source, target)]
    axes = [[axis for axis, n in enumerate(extents) if ir.constant(n) != 1] for _, _, extents in sides]
    extents = [_known(sides[0], a, sides[1], b) for a, b in zip(*axes, strict=True)]
    loops = tir.loop_variables(extents)
    indices: list[list[Any]] = []
    guards: list[ir.PrimExpr] = []
    for (buffer, begins, counts), used in zip(sides, axes, strict=True):
        at = dict(zip(used, loops, strict=True))
        indices.append([begin + at[axis] if axis in at else begin for axis, begin in enumerate(begins)])
        for axis, loop in at.items():
            if ir.constant(counts[axis]) is None:
                guards += [ir.LT(loop, counts[axis]), ir.LT(indices[-1][axis], buffer.shape[axis])]
    (read, _, _), (written, _, _) = sides
    value: Any = ir.BufferLoad(read, indices[0])
    value = value if read.dtype == written.dtype else ir.Cast(str(written.dtype), value)
    body: ir.Stmt = ir.BufferStore(written, value, indices[1])
    for guard in reversed(guards):
        body = ir.IfThenElse(guard, body, None)
    return tir.parallel(loops, extents, body)


def _known(source: Any, a: int, target: Any, b: int) -> ir.PrimExpr:
    """The extent of a loop: that of the copy if it is a number, else the smaller side's."""
    counts = [ir.constant(side[2][axis]) for side, axis in ((source, a), (target, b))]
    rooms = [ir.constant(side[0].shape[axis]) for side, axis in ((source, a), (target, b))]
    known = [n for n in counts if n is not None] or [n for n in rooms if n is not None]
    return ir.IntImm("int32", min(known)) if known else source[2][a]
