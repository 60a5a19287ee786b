# SPDX-License-Identifier: MIT
"""Give a persistent loop's roles to warps that keep them: a warpgroup that loads for all turns, those that compute, and
those that exchange or store what these have computed.

Why: inside another loop stock TileLang branches between its producer and the others in each turn, which leaves no place
where registers could be handed over: products of 8192 x 8192 x 3584 take 9 % longer on an H200 than with roles around
the outer loop. Before: a function whose programs go through one serial loop with one pipelined loop in it, the waits of
its producer in place. After: the same statements under names, with a schedule that says who executes which. Declines
what does not look like that; TileLang's own roles then stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, schedule, tl
from tilelang_core import rewrite as tir
from tilelang_core.schedule import Duties
from tilescale.backends.cuda.lowering.markers import is_gate
from tilescale.backends.cuda.lowering.role_graph.epilogue import is_beside
from tilescale.backends.cuda.lowering.role_graph.graph import COMPUTE, LOAD, Channel, RoleGraph
from tilescale.backends.cuda.lowering.statements import flat, is_fill, is_load, is_pipelined, loads_registers
from tilescale.backends.cuda.ptx import WARPGROUP, most_threads
from tilescale.backends.cuda.target import target_for
from tilescale.hda import Machine

TURNS, STEPS = "turns", "steps"
"""Names of the outer and of the pipelined loop."""

_KNOWN = (tl.COPY, tl.ASYNC_COPY, tl.TMA_COPY, tl.FILL, tl.GEMM, *tl.ATOMICS_ON_TILES)
"""Tile operations that take no shared memory of their own, as reductions do."""

_ALIGNMENT = 1024
"""Bytes at a multiple of which a tile begins; barriers take less."""


@dataclass(frozen=True)
class _Around:
    """The statements of a list, one of which is or has the pipelined loop."""

    before: list[ir.Stmt]
    loop: ir.For
    after: list[ir.Stmt]

    @classmethod
    def of(cls, stmt: ir.Stmt) -> _Around | None:
        """None: there is not one such loop, or more than scalars and what sets registers stands before it."""
        stmts = flat(stmt)
        found = [i for i, s in enumerate(stmts) if ir.contains(s, is_pipelined)]
        if len(found) != 1:
            return None
        (at,) = found
        before, loop = stmts[:at], stmts[at]
        if not isinstance(loop, ir.For) or loop.kind != ir.ForKind.SERIAL:
            return None
        return cls(before, loop, stmts[at + 1 :]) if all(map(_is_of_registers, before)) else None


def scheduled(func: ir.PrimFunc, graph: RoleGraph, machine: Machine) -> ir.PrimFunc | None:
    """A function with a schedule of its persistent loop's roles; None if it has no such loop, or cannot have one.

    Args:
        func: a lowered phase.
        graph: the roles.
    """
    launch = _Around.of(schedule.statements(func))
    turn = _Around.of(launch.loop.body) if launch is not None and not is_pipelined(launch.loop) else None
    if launch is None or turn is None or not is_pipelined(turn.loop) or graph.roles[0].threads % WARPGROUP:
        return None
    if not all(map(_is_scalar, launch.before)):
        return None
    if graph.roles[0].threads + 2 * WARPGROUP > most_threads(machine):
        return None
    # Roles run side by side, so no tile takes the place of another.
    room = machine.capacity(machine.layer_for("shared").name)
    if _bytes(func, graph.channels[0]) > room or ir.contains(schedule.statements(func), _may_need_more):
        return None
    made = _with_roles(func, launch, turn, graph)
    return made if schedule.can_be_made(made, target_for(machine)) else None


def _bytes(func: ir.PrimFunc, loaded: Channel) -> int:
    """What the tiles of a program take in shared memory, with those that are loaded ahead and their barriers."""
    sizes = [
        -(-math.prod(ir.integer(n) for n in tile.shape) * ir.bits(str(tile.dtype)) // 8 // _ALIGNMENT) * _ALIGNMENT
        * (loaded.depth if tile in loaded.tiles else 1)
        for tile in schedule.tiles(func)
        if ir.scope_kind(tile) == "shared"
    ]  # fmt: skip
    return sum(sizes) + _ALIGNMENT


def _with_roles(func: ir.PrimFunc, launch: _Around, turn: _Around, graph: RoleGraph) -> ir.PrimFunc:
    body = flat(turn.loop.body)
    gates, loads = [s for s in body if _waits(s)], [s for s in body if is_load(s)]
    computes = [s for s in body if not _waits(s) and not is_load(s)]
    begin, end = [s for s in turn.before if not _is_scalar(s)], _together(launch.after)
    beside = [s for s in turn.after if is_beside(s)]
    rest, exchange = _together([s for s in turn.after if s not in beside]), _together([s.body for s in beside])
    names, (steps, *results) = _Names(), graph.channels
    waited, loaded, stepped = names.of("wait", gates), names.of("load", loads), names.of("step", computes)
    ended, exchanged = names.of("rest", rest), names.of("exchange", exchange)
    inside: dict[str, list[Any]] = {COMPUTE: ended, LOAD: []}
    for channel in results:
        inside |= {COMPUTE: channel.filled(ended), channel.consumer: channel.taken(exchanged)}
    loops: dict[str, Duties] = {
        STEPS: {COMPUTE: steps.taken(stepped), LOAD: steps.filled([*waited, *loaded])},
        TURNS: {**inside, COMPUTE: [*names.of("begin", begin), STEPS, *inside[COMPUTE]], LOAD: [STEPS]},
    }
    whole: Duties = {**{role.name: [TURNS] for role in graph.roles}, COMPUTE: [TURNS, *names.of("end", end)]}
    inner = schedule.named(_around(turn.loop, names.named(body)), STEPS)
    outer = schedule.named(_around(launch.loop, names.named([*turn.before, inner, *rest, *exchange])), TURNS)
    stmt = tir.sequence(names.named([*launch.before, outer, *end]))
    return schedule.scheduled(func, stmt, graph.roles, graph.channels, whole, loops)


class _Names:
    """Names of statements in a schedule."""

    def __init__(self) -> None:
        self._known: list[tuple[ir.Stmt, str]] = []

    def of(self, what: str, stmts: Sequence[ir.Stmt]) -> list[str]:
        """New names for statements."""
        made = [f"{what}{number}" for number in range(len(stmts))]
        self._known += zip(stmts, made, strict=True)
        return made

    def named(self, stmts: Sequence[ir.Stmt]) -> list[ir.Stmt]:
        """The statements, those that have a name under it."""
        return [next((schedule.named(s, name) for s, name in self._known if s.same_as(stmt)), stmt) for stmt in stmts]


def _together(stmts: Sequence[ir.Stmt]) -> list[ir.Stmt]:
    """Statements as one; its copies into shared memory are over when its threads go on, as nobody waits for them."""
    if not stmts:
        return []

    def leave(node: Any) -> Any:
        is_copy = isinstance(node, ir.Evaluate) and is_load(node)
        return tir.evaluate(schedule.without_bulk_loads(node.value)) if is_copy else None

    return [tir.rewrite(tir.sequence(stmts), leave=leave)]


def _around(loop: ir.For, body: Sequence[ir.Stmt]) -> ir.For:
    made = ir.For(
        loop.loop_var, loop.min, loop.extent, loop.kind, tir.sequence(body), loop.thread_binding, loop.annotations
    )
    return tir.at(made, loop)


def _may_need_more(node: Any) -> bool:
    return str(ir.op_name(node)).startswith(tl.TILE_OPERATIONS) and ir.op_name(node) not in _KNOWN


def _is_scalar(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, ir.Bind) and ir.is_pure(stmt.value)


def _is_of_registers(stmt: ir.Stmt) -> bool:
    return _is_scalar(stmt) or is_fill(stmt) or loads_registers(stmt)


def _waits(stmt: ir.Stmt) -> bool:
    return ir.contains(stmt, is_gate)
