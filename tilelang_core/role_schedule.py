# SPDX-License-Identifier: MIT
"""Stock TileLang's schedules of roles (`WSSchedule`): the statements of each role, and the waits between roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tilelang.language.annotations import WSID
from tilelang.language.warp_specialize import WSPipeline, WSRole, WSSchedule, WSScope, WSSync
from tvm import tirx
from tvm.tirx import stmt_functor

from tilelang_core import tl
from tilelang_core.ir import instances, op_name
from tilelang_core.rewrite import relooped
from tilelang_core.specialise import made_roles

_KEY = "tl.ws_schedule"
_BLOCK = "tilelang_root"
_WARP = 32


Duties: TypeAlias = Mapping[str, Sequence[Any]]
"""Statements of a loop, or of the whole launch, by role: names of statements in order, and parts of transfers."""


@dataclass(frozen=True)
class Role:
    """Warps with separate duties. `registers`: of each of its threads; 0 if unspecified."""

    name: str
    threads: int
    registers: int = 0


@dataclass(frozen=True)
class RoleTransfer:
    """Tiles that one role fills in each iteration of a loop, and another one consumes. `depth`: how many times the
    tiles are there."""

    name: str
    tiles: Sequence[tirx.Buffer]
    depth: int

    def filled(self, names: Sequence[str]) -> list[Any]:
        """Statements that fill the tiles, once these are free."""
        return [WSSync.producer_acquire(self.name), *names, WSSync.producer_commit(self.name)]

    def taken(self, names: Sequence[str]) -> list[Any]:
        """Statements that consume the tiles, once these are filled."""
        return [WSSync.consumer_wait(self.name), *names, WSSync.consumer_release(self.name)]


def named(stmt: tirx.Stmt, name: str) -> tirx.Stmt:
    """A statement under the name by which a schedule calls it."""
    note = {WSID: tirx.StringImm(name)}
    if isinstance(stmt, tirx.Evaluate) and str(op_name(stmt.value)).startswith(tl.TILE_OPERATIONS):
        return tirx.Evaluate(_noted(stmt.value, note))
    if isinstance(stmt, tirx.For):
        return relooped(stmt, annotations={**dict(stmt.annotations), **note})
    return tirx.AttrStmt(None, WSID, tirx.StringImm(name), stmt)


def without_bulk_loads(copy: tirx.Call) -> tirx.Call:
    """A synchronous copy by its threads: it is complete when they continue."""
    return _noted(copy, {"disable_tma": tirx.IntImm("bool", 1)})


def _noted(call: tirx.Call, notes: Mapping[str, Any]) -> tirx.Call:
    return tirx.Call(call.dtype, call.op, list(call.args), {**dict(call.annotations), **notes})


def statements(func: tirx.PrimFunc) -> tirx.Stmt:
    """Statements of each program of a function's launch."""
    return _root(func).body


def tiles(func: tirx.PrimFunc) -> list[tirx.Buffer]:
    """Buffers that each program of a function's launch allocates."""
    return list(_root(func).alloc_buffers)


def _root(func: tirx.PrimFunc) -> tirx.SBlock:
    return next(block for block in instances(func.body, tirx.SBlock) if block.name_hint == _BLOCK)


def scheduled(
    func: tirx.PrimFunc,
    body: tirx.Stmt,
    roles: Sequence[Role],
    transfers: Sequence[RoleTransfer],
    launch: Duties,
    loops: Mapping[str, Duties],
) -> tirx.PrimFunc:
    """A function whose programs execute `body` in roles, whose threads follow one another.

    Args:
        launch: the duties around the loops.
        loops: those in each named loop.
    """
    made, warps = [], 0
    for role in roles:
        last = warps + role.threads // _WARP
        made.append(WSRole(role.name, warps_lo=warps, warps_hi=last, max_nreg=role.registers))
        warps = last
    pipelines = [WSPipeline(t.name, list(t.tiles), t.depth) for t in transfers]
    scopes = [WSScope(name, _lists(duties)) for name, duties in {WSScope.ROOT: launch, **loops}.items()]
    schedule = WSSchedule(warps, made, pipelines, scopes)

    def leave(node: Any) -> Any:
        if node.name_hint != _BLOCK:
            return None
        notes = {**dict(node.annotations), _KEY: schedule}
        given = node.iter_vars, node.reads, node.writes, node.name_hint, body, node.init
        return tirx.SBlock(*given, node.alloc_buffers, node.match_buffers, notes)

    return func.with_body(stmt_functor.ir_transform(func.body, None, leave, ["tirx.SBlock"]))


@dataclass(frozen=True)
class RoleSchedule:
    """A function's schedule, to look at.

    Attributes:
        roles: their names.
        root, loops: the duties of each role around the loops, and in each: names, and (kind, transfer) where it
            synchronizes; kinds are "acquire", "commit", "wait" and "release".
        named: the statements.
    """

    roles: Sequence[str]
    root: Duties
    loops: Mapping[str, Duties]
    named: Mapping[str, tirx.Stmt]


def plan(func: tirx.PrimFunc) -> RoleSchedule:
    """The schedule of a function; one without roles if it has none."""
    made, names = _root(func).annotations.get(_KEY), dict[str, tirx.Stmt]()
    if made is None:
        return RoleSchedule((), {}, {}, {})

    def visit(node: Any) -> None:
        notes = node.value.annotations if isinstance(node, tirx.Evaluate) else getattr(node, "annotations", {})
        if isinstance(node, tirx.AttrStmt) and str(node.attr_key) == WSID:
            names[str(node.value.value)] = node.body
        elif isinstance(node, tirx.For | tirx.Evaluate) and notes and WSID in notes:
            names[str(getattr(notes[WSID], "value", notes[WSID]))] = node

    stmt_functor.post_order_visit(func.body, visit)
    duties = {str(scope.id): {str(k): list(map(_step, v)) for k, v in scope.bodies.items()} for scope in made.scopes}
    root = duties.pop(WSScope.ROOT)
    return RoleSchedule([str(role.name) for role in made.roles], root, duties, names)


def _step(step: Any) -> Any:
    if not isinstance(step, WSSync):
        return str(step.id)
    kinds = ("producer_acquire", "producer_commit", "consumer_wait", "consumer_release")
    kind = next(k for k in kinds if getattr(WSSync, k)(step.pipeline).kind == step.kind)
    return kind.split("_")[1], str(step.pipeline)


def _lists(duties: Duties) -> dict[str, list[Any]]:
    return {role: list(given) for role, given in duties.items() if given}


def can_be_made(func: tirx.PrimFunc, target: Any) -> bool:
    """Whether stock TileLang makes the roles of a function that has a schedule."""
    try:
        made_roles(func, target, "MaterializeWSSchedule")
    except RuntimeError:  # the class of TVM's check failures
        return False
    return True
