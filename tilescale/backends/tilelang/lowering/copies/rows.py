# SPDX-License-Identifier: MIT
"""Copies of numbers of rows that are known at run time only, local ones and those to and from peers.

Why: TileLang copies boxes of constant extents, or whole tiles. It takes the address and size of another box for
multiples of 16 bytes, and fails where an extent is a bit operation, or the box is not contiguous. Before: a copy with
such an extent. After: a loop nest over the extent of the smaller side, which skips elements beyond the copy's. So a
number beyond the tile copies the whole tile, and a negative one nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.copy_nests import nest
from tilelang_core.uneven_copies import executed
from tilescale.backends.tilelang.lowering.markers import located
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.program import ops

UNKNOWN = "unknown_extents"
"""Annotation of a copy between units: an extent is known at run time only."""


def with_known_extents(phase: Phase) -> Phase:
    """A phase whose local copies of unknown extents are loop nests; those between units are annotated."""
    bound = {stmt.var: stmt.value for stmt in ir.statements(phase.stmt) if isinstance(stmt, ir.Bind)}

    def is_loaded(expr: ir.PrimExpr) -> bool:
        if ir.reads_memory(expr):
            return True
        return any(is_loaded(bound[var]) for var in ir.variables(expr) if var in bound)

    def enter(node: ir.Node) -> ir.Stmt | None:
        call: Any = node.value if isinstance(node, ir.Evaluate) else None
        if ir.op_name(call) not in (tl.COPY, ops.COPY.name):
            return None
        is_local = ir.op_name(call) == tl.COPY
        if is_local and not any(map(is_loaded, _extents(call))):
            alike = executed(call)  # with the tile's extents, where those of the other side are unknown
            call = call if alike is None else alike
        if ir.constants(map(phase.sized, _extents(call))) is not None:
            return None
        if is_local:
            return located(nest(*ir.regions_of_copy(call)), node)
        said = {**dict(call.annotations), UNKNOWN: ir.IntImm("int32", 1)}
        return located(tir.evaluate(ir.Call(call.dtype, call.op, list(call.args), said)), node)

    return replace(phase, stmt=tir.rewrite(phase.stmt, enter=enter))


def _extents(copy: Any) -> list[ir.PrimExpr]:
    """The extents of both sides."""
    return [n for region in ir.regions_of_copy(copy) for n in ir.region_parts(region)[2]]
