# SPDX-License-Identifier: MIT
"""Stock TileLang's schedules of roles (`WSSchedule`): who executes which statement of a loop, who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tilelang.cuda.transform
from tilelang.language.annotations import WSID
from tilelang.language.warp_specialize import WSPipeline, WSRole, WSSchedule, WSScope, WSSync
from tvm import tirx
from tvm.tirx import stmt_functor

from tilelang_core import tl
from tilelang_core.ir import op_name
from tilelang_core.specialise import PRODUCER_THREADS, made_roles

__all__ = ["Duties", "can_be_made", "named", "scheduled", "statements", "tiles", "without_bulk_loads"]

_KEY = "tl.ws_schedule"
_BLOCK = "tilelang_root"
_WARP = 32


@dataclass(frozen=True)
class Duties:
    """What the two roles execute of a loop, or of the whole launch: names of statements, in order."""

    compute: Sequence[str]
    load: Sequence[str]


def named(stmt: tirx.Stmt, name: str) -> tirx.Stmt:
    """A statement under the name by which a schedule calls it."""
    note = {WSID: tirx.StringImm(name)}
    if isinstance(stmt, tirx.Evaluate) and str(op_name(stmt.value)).startswith(tl.TILE_OPERATIONS):
        return tirx.Evaluate(_noted(stmt.value, note))
    if isinstance(stmt, tirx.For):
        notes = {**dict(stmt.annotations), **note}
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, stmt.body, stmt.thread_binding, notes)
    return tirx.AttrStmt(None, WSID, tirx.StringImm(name), stmt)


def without_bulk_loads(copy: tirx.Call) -> tirx.Call:
    """A copy that its threads make by themselves: they have made it when they go on."""
    return _noted(copy, {"disable_tma": tirx.IntImm("bool", 1)})


def _noted(call: tirx.Call, notes: Mapping[str, Any]) -> tirx.Call:
    return tirx.Call(call.dtype, call.op, list(call.args), {**dict(call.annotations), **notes})


def statements(func: tirx.PrimFunc) -> tirx.Stmt:
    """What each program of a function's launch executes."""
    return _root(func).body


def tiles(func: tirx.PrimFunc) -> list[tirx.Buffer]:
    """What each program of a function's launch allocates."""
    return list(_root(func).alloc_buffers)


def _root(func: tirx.PrimFunc) -> tirx.SBlock:
    found: list[tirx.SBlock] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.SBlock) and node.name_hint == _BLOCK:
            found.append(node)

    stmt_functor.post_order_visit(func.body, visit)
    return found[0]


def scheduled(
    func: tirx.PrimFunc,
    body: tirx.Stmt,
    *,
    threads: int,
    registers: tuple[int, int],
    loaded: Sequence[tirx.Buffer],
    depth: int,
    loops: Mapping[str, Duties],
    launch: Duties,
    hands_over: str,
) -> tirx.PrimFunc:
    """A function whose programs execute `body` in two roles: threads that compute, and a warpgroup that loads.

    Args:
        threads: that compute.
        registers: of each thread that computes, and of each that loads.
        loaded, depth: what is loaded, and how many times it is there.
        loops: the duties in each named loop.
        hands_over: the loop in each turn of which loaded tiles are handed over.
    """
    first = threads // _WARP
    warps = first + PRODUCER_THREADS // _WARP
    roles = [
        WSRole("compute", warps_lo=0, warps_hi=first, max_nreg=registers[0]),
        WSRole("load", warps_lo=first, warps_hi=warps, max_nreg=registers[1]),
    ]
    scopes = [WSScope(WSScope.ROOT, {"compute": list(launch.compute), "load": list(launch.load)})]
    for name, duties in loops.items():
        given: dict[str, list[Any]] = {"compute": list(duties.compute), "load": list(duties.load)}
        if name == hands_over:
            given["load"] = [WSSync.producer_acquire("tiles"), *duties.load, WSSync.producer_commit("tiles")]
            given["compute"] = [WSSync.consumer_wait("tiles"), *duties.compute, WSSync.consumer_release("tiles")]
        scopes.append(WSScope(name, given))
    schedule = WSSchedule(warps, roles, [WSPipeline("tiles", list(loaded), depth)], scopes)

    def leave(node: Any) -> Any:
        if node.name_hint != _BLOCK:
            return None
        notes = {**dict(node.annotations), _KEY: schedule}
        given = node.iter_vars, node.reads, node.writes, node.name_hint, body, node.init
        return tirx.SBlock(*given, node.alloc_buffers, node.match_buffers, notes)

    return func.with_body(stmt_functor.ir_transform(func.body, None, leave, ["tirx.SBlock"]))


def can_be_made(func: tirx.PrimFunc, target: Any) -> bool:
    """Whether stock TileLang makes the roles of a function that has a schedule."""
    try:
        made_roles(func, target, tilelang.cuda.transform.MaterializeWSSchedule)
    except RuntimeError:  # what TVM's checks raise
        return False
    return True
