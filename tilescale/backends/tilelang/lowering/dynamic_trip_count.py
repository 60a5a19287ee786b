# SPDX-License-Identifier: MIT
"""Pipelined loops of dynamic trip count, on machines without bulk copies.

Why: there a thread waits until at most a number of its copy groups are in flight. For the last iterations of such a
loop stock TileLang 0.1.15 expresses this number by a variable, for which it then cannot generate text. Before: a loop
that loads several iterations ahead, or whose tiles are used by several of its statements. After: it loads one iteration
ahead. Loops in which each iteration waits once, and the last one for everything, are unchanged.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.statements import flat, is_load, is_pipelined, tiles_named

_NOTHING = tir.sequence([])


def shortened(phase: Phase) -> ir.Stmt:
    """A phase's statements with loops for which its machine's TileLang can generate text."""
    if phase.target.machine.has("tma"):
        return phase.stmt

    def leave(node: Any) -> Any:
        if not is_pipelined(node) or ir.constant(node.extent) is not None or _waits_once(node):
            return None
        notes = {**dict(node.annotations), tl.STAGES: ir.IntImm("int32", 1)}
        return tir.relooped(node, annotations=notes)

    return tir.rewrite(phase.stmt, leave=leave)


def _waits_once(loop: ir.For) -> bool:
    """Whether an iteration waits once, with only the next iteration's loads in flight."""
    body = flat(loop.body)
    loads = [stmt for stmt in body if is_load(stmt)]
    loaded = {tile for load in loads for tile in tiles_named(load, besides=_NOTHING)}
    users = [stmt for stmt in body if not is_load(stmt) and loaded & tiles_named(stmt, besides=_NOTHING)]
    return ir.integer(loop.annotations[tl.STAGES]) <= 2 and len(users) <= 1
