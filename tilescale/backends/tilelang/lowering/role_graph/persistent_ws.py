# SPDX-License-Identifier: MIT
"""Warp specialization around a persistent loop: a producer warpgroup for all iterations, consumers, and epilogue warps
that exchange or store the consumers' results.

Why: inside another loop stock TileLang branches between its producer and the others in each iteration, which leaves no
point where registers could be reallocated: GEMMs of 8192 x 8192 x 3584 take 9 % longer on an H200 than with roles
around the outer loop. Before: a function whose programs go through one serial loop with one pipelined loop in it, the
waits of its producer in place. After: the same statements under names, with a schedule of roles. Declines other
functions, which keep TileLang's own roles.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, role_schedule, tl
from tilelang_core import rewrite as tir
from tilelang_core.role_schedule import Duties
from tilescale.backends.base import generator
from tilescale.backends.tilelang.lowering.markers import is_gate
from tilescale.backends.tilelang.lowering.role_graph.epilogue import is_in_epilogue_role
from tilescale.backends.tilelang.lowering.role_graph.graph import COMPUTE, LOAD, Channel, RoleGraph
from tilescale.backends.tilelang.lowering.statements import flat, is_fill, is_load, is_pipelined, loads_registers
from tilescale.backends.tilelang.ptx import WARPGROUP, most_threads
from tilescale.hda import Machine

ITERATIONS, STEPS = "iterations", "steps"
"""Names of the outer and of the pipelined loop."""

_KNOWN = (tl.COPY, tl.ASYNC_COPY, tl.TMA_COPY, tl.FILL, tl.GEMM, *tl.ATOMICS_ON_TILES)
"""Tile operations that take no shared memory of their own, as reductions do."""

_ALIGNMENT = 1024
"""Bytes at a multiple of which a tile begins; barriers take less."""


@dataclass(frozen=True)
class _AroundLoop:
    """The statements of a list, one of which is or has the pipelined loop."""

    before: list[ir.Stmt]
    loop: ir.For
    after: list[ir.Stmt]

    @classmethod
    def of(cls, stmt: ir.Stmt) -> _AroundLoop | None:
        """None: there is not one such loop, or more than scalars and what sets registers is before it."""
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
    launch = _AroundLoop.of(role_schedule.statements(func))
    iteration = _AroundLoop.of(launch.loop.body) if launch is not None and not is_pipelined(launch.loop) else None
    if launch is None or iteration is None or not is_pipelined(iteration.loop) or graph.roles[0].threads % WARPGROUP:
        return None
    if not all(map(_is_scalar, launch.before)):
        return None
    if graph.roles[0].threads + 2 * WARPGROUP > most_threads(machine):
        return None
    # Roles run side by side, so no tile takes the place of another.
    room = machine.capacity(machine.layer_for("shared").name)
    if _bytes(func, graph.channels[0]) > room or ir.contains(role_schedule.statements(func), _may_need_more):
        return None
    made = _with_roles(func, launch, iteration, graph)
    return made if role_schedule.can_be_made(made, generator(machine).target(machine)) else None


def _bytes(func: ir.PrimFunc, loaded: Channel) -> int:
    """Shared memory of a program's tiles, with pipelined ones and their barriers, in bytes."""
    sizes = [
        -(-math.prod(ir.integer(n) for n in tile.shape) * ir.bits(str(tile.dtype)) // 8 // _ALIGNMENT) * _ALIGNMENT
        * (loaded.depth if tile in loaded.tiles else 1)
        for tile in role_schedule.tiles(func)
        if ir.scope_kind(tile) == "shared"
    ]  # fmt: skip
    return sum(sizes) + _ALIGNMENT


def _with_roles(func: ir.PrimFunc, launch: _AroundLoop, iteration: _AroundLoop, graph: RoleGraph) -> ir.PrimFunc:
    epilogue = [s for s in iteration.after if is_in_epilogue_role(s)]
    rest, exchange = _together([s for s in iteration.after if s not in epilogue]), _together([s.body for s in epilogue])
    roles = {role.name for role in graph.roles}
    names, (steps, *results) = _Names(), [c for c in graph.channels if c.consumer in roles]
    body = names.given(flat(iteration.loop.body), lambda s: "wait" if _waits(s) else "load" if is_load(s) else "step")
    before = names.given(iteration.before, lambda s: "" if _is_scalar(s) else "begin")
    after = [*names.given(rest, lambda _: "rest"), *names.given(exchange, lambda _: "exchange")]
    end = names.given(_together(launch.after), lambda _: "end")
    inside: dict[str, list[Any]] = {COMPUTE: names["rest"]}
    for channel in results:
        inside = {COMPUTE: channel.filled(names["rest"]), channel.consumer: channel.taken(names["exchange"])}
    loops: dict[str, Duties] = {
        STEPS: {COMPUTE: steps.taken(names["step"]), LOAD: steps.filled([*names["wait"], *names["load"]])},
        ITERATIONS: {**inside, COMPUTE: [*names["begin"], STEPS, *inside[COMPUTE]], LOAD: [STEPS]},
    }
    whole: Duties = {**{role.name: [ITERATIONS] for role in graph.roles}, COMPUTE: [ITERATIONS, *names["end"]]}
    inner = role_schedule.named(tir.relooped(iteration.loop, body=tir.sequence(body)), STEPS)
    outer = role_schedule.named(tir.relooped(launch.loop, body=tir.sequence([*before, inner, *after])), ITERATIONS)
    return role_schedule.scheduled(
        func, tir.sequence([*launch.before, outer, *end]), graph.roles, [steps, *results], whole, loops
    )


class _Names(defaultdict[str, list[str]]):
    def __init__(self) -> None:
        super().__init__(list)

    def given(self, stmts: Sequence[ir.Stmt], what: Callable[[ir.Stmt], str]) -> list[ir.Stmt]:
        """The statements under new names, those that do nothing of interest as they are."""
        return [role_schedule.named(stmt, self._new(does)) if (does := what(stmt)) else stmt for stmt in stmts]

    def _new(self, what: str) -> str:
        self[what].append(f"{what}{len(self[what])}")
        return self[what][-1]


def _together(stmts: Sequence[ir.Stmt]) -> list[ir.Stmt]:
    """Statements as one; its copies into shared memory are complete when its threads continue, as no wait for them
    follows."""
    if not stmts:
        return []

    def leave(node: ir.Node) -> Any:
        is_copy = isinstance(node, ir.Evaluate) and is_load(node)
        return tir.evaluate(role_schedule.without_bulk_loads(node.value)) if is_copy else None

    return [tir.rewrite(tir.sequence(stmts), leave=leave)]


def _may_need_more(node: ir.Node) -> bool:
    return str(ir.op_name(node)).startswith(tl.TILE_OPERATIONS) and ir.op_name(node) not in _KNOWN


def _is_scalar(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, ir.Bind) and ir.is_pure(stmt.value)


def _is_of_registers(stmt: ir.Stmt) -> bool:
    return _is_scalar(stmt) or is_fill(stmt) or loads_registers(stmt)


def _waits(stmt: ir.Stmt) -> bool:
    return ir.contains(stmt, is_gate)
