# SPDX-License-Identifier: MIT
"""Misuse that can be seen while tracing: peers that do not exist, copies no network carries, collectives some miss."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir, trace
from tilescale.errors import CollectiveNotReachedError, NoPathError, PeerOutOfRangeError, UsageError
from tilescale.hda import Level, Network
from tilescale.language.context import Context, here
from tilescale.program.ops import ALGORITHMS, RANK


def check_peer(context: Context, level: Level, peer: Any) -> None:
    """Raise PeerOutOfRangeError for a constant peer that the launch does not have."""
    value, extent = ir.constant(peer), context.extent(level)
    if value is not None and isinstance(extent, int) and not 0 <= value < extent:
        raise PeerOutOfRangeError(
            f"peer {value} of level {level.name!r}: the launch has units 0 to {extent - 1}",
            hint="wrap it round: (rank + 1) % size",
            where=here(),
        )


def check_path(context: Context, level: Level, buffer: ir.Buffer) -> Network | None:
    """The network that carries a tile of `buffer` between siblings of `level`; None inside one program.

    Raises:
        NoPathError: nothing connects them, or not the memory layer where the tile lies.
    """
    machine = context.machine
    if level.kind == "lanes":
        return None
    parent = context.parent(level)
    network = machine.network(level.name, parent.name if parent else None)
    scope = scope_kind(buffer)
    owner = machine.layer_for(scope)
    if network is None:
        raise NoPathError(
            f"no network of {machine.name!r} connects units of level {level.name!r}"
            + (f" within one {parent.name!r}" if parent else ""),
            hint=_reachable(context),
            where=here(),
        )
    tensor_or_above = scope == "global" and not context.finer(level, machine.tensor_level)
    if network.reaches != owner.name and not tensor_or_above:
        raise NoPathError(
            f"{buffer.name!r} lies in layer {owner.name!r} ({owner.title}), which network {network.name!r} between units "
            f"of level {level.name!r} does not reach; it reaches {network.reaches!r}",
            hint=_reachable(context),
            where=here(),
        )
    return network


def _reachable(context: Context) -> str:
    lines = [f"{n.name} connects {n.level} within {n.within}, layer {n.reaches}" for n in context.machine.networks]
    return "networks of this machine: " + "; ".join(lines)


def scope_kind(buffer: ir.Buffer) -> str:
    """Which kind of memory a TileLang buffer lies in: fragment, shared or global."""
    scope = buffer.scope()
    if scope.startswith("local"):
        return "fragment"
    return "shared" if scope.startswith("shared") else "global"


def check_impl(network: Network | None, impl: str | None) -> None:
    """Raise UsageError for a copy implementation that the network does not offer."""
    offered = [m.name for m in network.mechanisms] if network else []
    if impl is not None and impl not in offered:
        raise UsageError(
            f"impl={impl!r} is not a mechanism of this path"
            + (f" ({network.name}), which offers {', '.join(offered)}" if network else " inside one program"),
            hint="leave impl out, or choose one that the path offers",
            where=here(),
        )


def check_algorithm(operation: str, impl: str | None) -> None:
    """Raise UsageError for an unknown implementation of a collective."""
    if impl is not None and impl not in ALGORITHMS[operation]:
        short = operation.removeprefix("tilescale.")
        raise UsageError(
            f"impl={impl!r}: T.{short} has {', '.join(ALGORITHMS[operation])}",
            hint="leave impl out, or choose one of these",
            where=here(),
        )


def check_reached(context: Context, level: Level, name: str) -> None:
    """Raise CollectiveNotReachedError if a condition around the current statement tells siblings of `level` apart."""
    for condition in trace.conditions():
        blame = _rank_in(condition, level, context)
        if blame is not None:
            raise CollectiveNotReachedError(
                f"T.{name} at level {level.name!r} is under a condition on {blame}, so not all units reach it: {condition}",
                hint=f"move T.{name} out of the condition, or make the condition the same on every {level.name}",
                where=here(),
            )


def _rank_in(expr: Any, level: Level, context: Context) -> str | None:
    """What in `expr` differs between siblings of `level`, if anything that is known to."""
    threads = set(context.frame.get_thread_bindings()) if level.kind == "lanes" else set()
    programs = set(context.frame.get_block_bindings()) if level.kind == "program" else set()
    todo, seen = list(_parts(expr)), set()
    while todo:
        node = todo.pop()
        if ir.op_name(node) == RANK.name and node.args[0].value == level.name:
            return f"the rank of level {level.name!r}"
        if isinstance(node, ir.Var) and node not in seen:
            seen.add(node)
            if node in threads:
                return f"the thread index {node}"
            if node in programs:
                return f"the program index {node}"
            bound = trace.definition(node)
            todo += _parts(bound) if bound is not None else []
    return None


def _parts(expr: Any) -> list[Any]:
    nodes: list[Any] = []
    if isinstance(expr, ir.PrimExpr):
        ir.walk(expr, nodes.append)
    return nodes
