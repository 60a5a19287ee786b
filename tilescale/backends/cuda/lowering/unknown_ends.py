# SPDX-License-Identifier: MIT
"""Pipelined loops whose number of steps is not known, on machines without bulk copies.

Why: there a thread waits until at most so many groups of its copies are under way, and how many that are in the last
steps of such a loop stock TileLang 0.1.15 says in terms of a variable, of which it then cannot make text. Before: a
loop that loads ahead by several steps, or whose tiles are needed by several of its statements. After: it loads one
step ahead. Leaves loops as they are of which each step waits once, and the last one for everything.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir, specialise
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.phase import Phase
from tilescale.backends.cuda.lowering.statements import flat, is_load, is_pipelined, tiles_named

_NOTHING = tir.sequence([])


def shortened(phase: Phase) -> ir.Stmt:
    """A phase's statements with loops that its machine's TileLang has text for."""
    if phase.target.machine.has("tma"):
        return phase.stmt

    def leave(node: Any) -> Any:
        if not is_pipelined(node) or ir.constant(node.extent) is not None or _waits_once(node):
            return None
        notes = {**dict(node.annotations), specialise.STAGES: ir.IntImm("int32", 1)}
        made = ir.For(node.loop_var, node.min, node.extent, node.kind, node.body, node.thread_binding, notes)
        return tir.at(made, node)

    return tir.rewrite(phase.stmt, leave=leave)


def _waits_once(loop: ir.For) -> bool:
    """Whether a step waits once, and the step behind it is the only one that is loaded meanwhile."""
    body = flat(loop.body)
    loads = [stmt for stmt in body if is_load(stmt)]
    loaded = {tile for load in loads for tile in tiles_named(load, besides=_NOTHING)}
    users = [stmt for stmt in body if not is_load(stmt) and loaded & tiles_named(stmt, besides=_NOTHING)]
    return ir.integer(loop.annotations[specialise.STAGES]) <= 2 and len(users) <= 1
