# SPDX-License-Identifier: MIT
"""Misuse that can be seen while tracing: peers that do not exist, copies no network carries, collectives some miss."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import numpy as np

from tilelang_core import ir, stock, trace
from tilelang_core.ir import scope_kind
from tilescale.collectives import FORMS, form_of, names
from tilescale.errors import (
    CollectiveNotReachedError,
    NoPathError,
    PeerOutOfRangeError,
    ShapeError,
    UsageError,
    did_you_mean,
)
from tilescale.hda import Level, Network
from tilescale.hda.route import advice_at_the_end
from tilescale.language.context import Context, here, plain
from tilescale.program.grids import GridValues, UnknownValue
from tilescale.program.operations import Rank
from tilescale.program.ops import RANK, REDUCTIONS


def checked_shape(context: Context, shape: Any) -> tuple[Any, ...]:
    """The shape of an allocation as a tuple; raises ShapeError for an extent that is negative or no integer."""
    extents = tuple(shape) if isinstance(shape, tuple | list | ir.Array) else (shape,)
    for extent in map(plain, extents):
        integer = extent.dtype.startswith(("int", "uint")) if isinstance(extent, ir.PrimExpr) else _is_extent(extent)
        if not integer:
            raise ShapeError(
                f"{context.name} of shape {shape!r}: an extent is an integer from 0 on",
                hint=f"write {context.name}((rows, columns), ...); a / b of integers is not an integer, a // b is",
                where=here(),
            )
    return extents


def _is_extent(value: Any) -> bool:
    return isinstance(value, Integral) and int(value) >= 0


def checked_dtype(context: Context, dtype: Any) -> Any:
    """A data type as TileLang has it, of its name or of torch's; raises UsageError for an unknown one."""
    try:
        return stock.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{context.name}: dtype={dtype!r} is not a data type of TileLang",
            hint='write its name or torch\'s type: "float32", "bfloat16", "int32", torch.float16',
            where=here(),
        ) from error


def check_peer(context: Context, level: Level, peer: Any) -> None:
    """Raise UsageError for a peer that is not a rank, PeerOutOfRangeError for a constant that the launch does not
    have."""
    if not isinstance(peer, Integral) and not (isinstance(peer, ir.PrimExpr) and "int" in str(peer.dtype)):
        raise UsageError(
            f"peer {peer!r} of level {level.name!r}: a peer is named by its rank",
            hint="an integer or an expression of integers: dst=(rank + 1) % size",
            where=here(),
        )
    value, extent = ir.constant(peer), context.extent(level)
    if value is not None and (value < 0 or isinstance(extent, int) and value >= extent):
        last = extent - 1 if isinstance(extent, int) else None
        there = "rank 0 alone" if last == 0 else "ranks from 0" if last is None else f"ranks 0 to {last}"
        raise PeerOutOfRangeError(
            f"peer {value} of level {level.name!r}: the launch has {there}",
            hint=_peer_advice(context, level, extent),
            where=here(),
        )


def _peer_advice(context: Context, level: Level, extent: Any) -> str:
    coarser = context.parent(level)
    if extent == 1 and coarser is not None and context.extent(coarser) != 1:
        return f"a peer is a rank of the innermost scale: write it inside `with T.Scale({coarser.name!r}):`"
    return advice_at_the_end(context.machine, level.name)


def check_connected(context: Context, level: Level) -> Network | None:
    """The network between siblings of `level`; None inside one program, or where the launch has a single unit. Raises
    NoPathError: nothing connects them."""
    extent = context.extent(level)
    if level.kind == "thread_group" or isinstance(extent, int) and extent == 1:
        return None
    machine, parent = context.machine, context.parent(level)
    network = machine.network(level.name, parent.name if parent else None)
    if network is not None and parent is None and isinstance(extent, int):
        # Without a coarser level in the launch the units may spread over several of the network's own.
        inside = machine.count(level.name, network.within)
        network = network if extent <= inside or machine.connects(level.name) else None
    if network is None:
        raise NoPathError(
            f"no network of {machine.name!r} connects units of level {level.name!r}"
            + (f" within one {parent.name!r}" if parent else f", of which the launch has {extent}"),
            hint=_reachable(context),
            where=here(),
        )
    return network


def check_path(context: Context, level: Level, buffer: ir.Buffer) -> Network | None:
    """The network that carries a tile of `buffer` between siblings of `level`; None as for `check_connected`. Raises
    NoPathError: no network connects them, or none reaches the memory layer of the tile."""
    network = check_connected(context, level)
    if network is None:
        return None
    machine, scope = context.machine, scope_kind(buffer)
    owner = machine.layer_for(scope)
    tensor_or_above = scope == "global" and not context.finer(level, machine.tensor_level)
    if network.reaches != owner.name and not tensor_or_above:
        raise NoPathError(
            f"{buffer.name!r} lies in layer {owner.name!r} ({owner.title}), which network {network.name!r} between "
            f"units of level {level.name!r} does not reach; it reaches {network.reaches!r}",
            hint=_reachable(context),
            where=here(),
        )
    return network


def _reachable(context: Context) -> str:
    lines = [
        f"{n.name} connects {n.level}" + (f" within {n.within}" if n.within else "") + f", layer {n.reaches}"
        for n in context.machine.networks
    ]
    return "networks of this machine: " + "; ".join(lines)


def check_impl(network: Network | None, impl: str | None) -> None:
    """Raise UsageError for a copy implementation that the network does not offer."""
    offered = [m.name for m in network.mechanisms] if network else []
    if impl is not None and impl not in offered:
        raise UsageError(
            f"impl={impl!r} is not a mechanism of this path"
            + (f" ({network.name}), which offers {', '.join(offered)}" if network else ", which no network carries"),
            hint=f"{did_you_mean(impl, offered)}leave impl out, or choose one that the path offers",
            where=here(),
        )


def check_algorithm(context: Context, level: Level, impl: str | None) -> None:
    """Raise UsageError for an algorithm that a collective of the level does not have."""
    if impl is None:
        return
    form = form_of(context.machine, level, not context.in_unit_phase)
    known = names(context.name.removeprefix("T."), form)
    if impl not in known:
        raise UsageError(
            f"impl={impl!r}: {context.name} at level {level.name!r} has {', '.join(known)} for {FORMS[form]}",
            hint=f"{did_you_mean(impl, known)}leave impl out, or choose one of these",
            where=here(),
        )


def check_alike(context: Context, source: ir.Call, target: ir.Call, mover: str) -> None:
    """Raise UsageError for tiles of different types, where `mover` moves their bytes."""
    a, b = (ir.region_parts(region)[0] for region in (source, target))
    if a.dtype != b.dtype:
        raise UsageError(
            f"{context.name} from {a.name!r}, {a.dtype}, to {b.name!r}, {b.dtype}: {mover} converts nothing",
            hint="give both the same type, and convert in a program",
            where=here(),
        )


def check_reduction(op: str) -> str:
    """A combining operation; raises UsageError for an unknown one."""
    if op not in REDUCTIONS:
        raise UsageError(
            f"op={op!r}: a reduction is one of {', '.join(REDUCTIONS)}", hint="choose one of these", where=here()
        )
    return op


# -- threads that act together -----------------------------------------------------------------------------------------


def check_whole_warps(context: Context) -> None:
    """Raise UsageError under a condition that some threads of a warp take and others do not.

    Threads of a program signal and wait together: one of them polls, and all see what it acquired. A condition that
    depends on more than the thread's own index is checked where it is known.
    """
    groups = [x.threads or 1 for x in context.machine.levels if x.kind == "thread_group"]
    warp = min((threads for threads in groups if threads > 1), default=1)
    number = np.arange(context.threads)
    extents, indices = context.thread_extents, context.frame.get_thread_bindings()
    steps = [math.prod(extents[:axis]) for axis in range(len(indices))]
    known = {var: number // step % n for var, step, n in zip(indices, steps, extents, strict=False)}
    for condition in trace.conditions():
        try:
            taken = np.broadcast_to(GridValues(context.threads, known).value(expanded(condition), {}), number.shape)
        except UnknownValue:
            continue
        split = [w for w in np.split(taken, range(warp, context.threads, warp)) if w.any() != w.all()]
        if split and taken.dtype == bool:
            raise UsageError(
                f"{context.name} under a condition that {int(taken.sum())} of {context.threads} threads take, which "
                f"are not whole warps: {condition}",
                hint=f"move {context.name} out of the condition: all threads of a program act together, and see what "
                "was acquired; or let whole warps take it",
                where=here(),
            )


# -- reachability of collectives ---------------------------------------------------------------------------------------


def check_reached(context: Context, level: Level) -> None:
    """Raise CollectiveNotReachedError if a condition around the current statement differs between siblings of
    `level`."""
    for condition in trace.conditions():
        blame = _blame(context, level, condition)
        if blame is not None:
            name = context.name
            raise CollectiveNotReachedError(
                f"{name} at level {level.name!r} is under a condition on {blame}, so not all units reach it: "
                f"{condition}",
                hint=f"move {name} out of the condition, or make the condition the same on every {level.name}",
                where=here(),
            )


def check_same(context: Context, level: Level, root: Any) -> None:
    """Raise UsageError for a root that differs between siblings of `level`: all of them must name the same one."""
    blame = _blame(context, level, ir.int_node(root))
    if blame is not None:
        raise UsageError(
            f"{context.name}(root={root}): the root depends on {blame}, so units name different ones",
            hint=f"name the same root on every {level.name}; what each has for the others goes by T.all_to_all",
            where=here(),
        )


def _blame(context: Context, level: Level, condition: Any) -> str | None:
    """The part of a condition that differs between siblings of `level`, if one is known to."""
    expr = expanded(condition)
    if ir.contains(expr, lambda node: ir.op_name(node) == RANK.name and Rank.of(node).level == level.name):
        return f"the rank of level {level.name!r}"
    if level.kind == "thread_group":
        used = ir.variables(expr) & set(context.frame.get_thread_bindings())
        return f"the thread index {next(iter(used))}" if used else None
    if level.kind in ("program", "cluster"):
        return _blamed_index(context, level, expr)
    return None


def expanded(expr: Any) -> Any:
    """Substitute the variables of the trace in `expr` by their bound values, recursively."""
    bound = {var: value for var in ir.variables(expr) if (value := trace.definition(var)) is not None}
    return expanded(ir.substitute(expr, bound)) if bound else expr


def _blamed_index(context: Context, level: Level, expr: Any) -> str | None:
    """The grid index on which `expr` depends such that it differs between siblings of `level`.

    An index is cluster * dim + program: siblings of the program level differ in the second part where there are
    clusters, in both where there are none, and clusters differ in the first part.
    """
    dims = context.frame.get_cluster_dims()
    for index, extent, dim in zip(context.frame.get_block_bindings(), context.grid, dims, strict=False):
        cluster, program = ir.Var(f"{index.name}_cluster", index.dtype), ir.Var(f"{index.name}_program", index.dtype)
        differs = {program} if level.kind == "program" else {cluster}
        if context.cluster == 1:
            differs = {cluster, program}
        simplified = ir.simplify(
            ir.substitute(expr, {index: cluster * dim + program}),
            {cluster: (0, extent // dim), program: (0, dim)},
        )
        if ir.variables(simplified) & differs:
            return f"the {context.program.name} index {index}"
    return None
