# SPDX-License-Identifier: MIT
"""Collectives over the units of the current level.

Executed by a program inside `T.Scale("device")`, a collective combines the tiles of the programs with the same index on
every device; executed in a device-level phase, whole tensors. Semantics follow MPI's operations of the same names.
"max" and "min" of floats keep a NaN of any unit, as in PyTorch; the libraries that `impl=` names drop it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tilelang_core import ir, stock, trace
from tilelang_core.cases import TooManyCasesError, by_cases
from tilescale.errors import PhaseError, ShapeError, UsageError, one
from tilescale.hda import Level
from tilescale.hda.units import format_count
from tilescale.language.asynchronous import check_parts, check_queue, flags_of
from tilescale.language.checks import (
    check_algorithm,
    check_alike,
    check_connected,
    check_impl,
    check_path,
    check_peer,
    check_reached,
    check_reduction,
    check_same,
)
from tilescale.language.context import Context, extents_of, here, plain
from tilescale.program.asynchronous import owns_a_queue, part_of
from tilescale.program.ops import (
    ALL_GATHER,
    ALL_TO_ALL,
    ALLREDUCE,
    BROADCAST,
    COMBINE,
    REDUCE_SCATTER,
)
from tilescale.program.wire import WIDE, WIRE

P = ParamSpec("P")
R = TypeVar("R")


def _done_in_order(collective: Callable[P, R]) -> Callable[P, R]:
    """Reject options of a copy queue for a collective that no copy queue executes."""

    @functools.wraps(collective)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        asked = [f"{key}=" for key in ("signal", "chunk") if kwargs.get(key) is not None]
        if asked:
            raise UsageError(
                f"T.{collective.__name__}({', '.join(asked)}): of the collectives only T.all_gather and "
                "T.all_to_all can be started",
                hint=f"leave {' and '.join(asked)} out: it is done before what follows; or write it with "
                "T.copy(dst=, signal=)",
                where=here(),
            )
        return collective(*args, **kwargs)

    return call


@_done_in_order
def allreduce(
    *tiles: Any,
    op: str | None = None,
    fn: Callable | None = None,
    out: Any = None,
    impl: str | None = None,
    wire: str | None = None,
) -> ir.Call:
    """Combine tiles over the units of the level, in place or into `out`: afterwards every unit has the result.

    Args:
        tiles: one tile; with `fn`, several that belong together. Later tiles may have fewer dimensions: they then
            speak of the leading ones (a log-sum for each row).
        op: "sum" (default), "max", "min" or "prod". A NaN of any unit stays in a maximum and a minimum; with
            impl="nccl" it is dropped.
        fn: an associative combination of two units' elements, `fn((a1, a2), (b1, b2)) -> (c1, c2)` with scalars; for
            a single tile `fn(a, b) -> c`. It may use `and`, `or`, `not`, `if` and chained comparisons.
        out: of one tensor, in a device phase and without `fn`: the result, of the same shape and
            type. The tensor is then unchanged.
        impl: an algorithm that docs/collectives.md has for it, e.g. "one_shot", "ring" or "nccl"; left out, the machine
            model chooses.
        wire: with `out`, "float8_e4m3fn": floats are sent in this type, and sums, by impl="two_shot". 120 consecutive
            floats of a unit's part share a scale, a power of two. All units get the same bits.

    Raises:
        CollectiveNotReachedError: a condition around it differs between the units.
        NoPathError: no network connects the units.
        ShapeError: with `fn`, tiles that do not belong together; an `out` of another shape.
        PhaseError: `out` where programs execute.
        UsageError: several tiles without `fn`, `op` or `out` together with `fn`, an unknown op, an impl
            that there is not at this level; `wire` of integers, of another op than "sum", or without `out`.
    """
    context = Context("T.allreduce")
    alone = op is not None or out is not None
    if fn is not None and alone or fn is None and len(tiles) != 1 or not tiles:
        raise UsageError(
            f"T.allreduce of {len(tiles)} tiles with op={op!r}, fn={'given' if fn else None}, "
            f"out={'given' if out is not None else None}",
            hint="T.allreduce(x, op='sum') for one tile, T.allreduce(x, y, fn=combine) for several",
            where=here(),
        )
    if out is not None:
        return _allreduce_into(context, tiles[0], out, check_reduction(op or "sum"), impl, wire)
    if wire is not None:
        raise UsageError(f"{context.name}(wire={wire!r}) in place", hint="T.allreduce(x, out=y, wire=)", where=here())
    regions = [region_of(context, tile, "rw") for tile in tiles]
    level = entered(context, impl)
    if fn is None:
        return trace.call(ALLREDUCE, *regions, level=level.name, op=check_reduction(op or "sum"), impl=impl)
    _check_leading(regions)
    return trace.call(ALLREDUCE, *regions, _combine(fn, regions), level=level.name, impl=impl)


def _allreduce_into(context: Context, src: Any, out: Any, op: str, impl: str | None, wire: str | None) -> ir.Call:
    """An all-reduce from one whole tensor to another."""
    regions = _from_to(context, src, out)
    check_whole_tensors(context)
    a, b = map(extents_of, regions)
    if [str(n) for n in a] != [str(n) for n in b]:
        raise ShapeError(
            f"T.allreduce of {tuple(a)} with an out of {tuple(b)}", hint="both have the same shape", where=here()
        )
    impl = _check_wire(context, wire, regions[0], impl, "two_shot", op)
    return trace.call(ALLREDUCE, *regions, level=entered(context, impl).name, op=op, impl=impl, wire=wire)


@_done_in_order
def reduce_scatter(
    src: Any, dst: Any, op: str = "sum", dim: int = 0, impl: str | None = None, wire: str | None = None
) -> ir.Call:
    """Combine `src` over the units and leave each its share: dst of rank r is part r, along `dim`, of the result.

    Args:
        src, dst: tiles of one type whose shapes agree but for `dim`, where src has size times the extent of dst.
        op: "sum", "max", "min" or "prod", as for `T.allreduce`.
        impl: an algorithm, e.g. "direct", "ring" or "nccl".
        wire: as for `T.allreduce`, of whole tensors, by impl="direct". This unit's contribution is exact.

    Raises:
        ShapeError: the shapes do not fit.
        CollectiveNotReachedError, NoPathError, UsageError: as for `T.allreduce`.
        PhaseError: `wire` where programs execute.
    """
    context = Context("T.reduce_scatter")
    regions = _from_to(context, src, dst)
    impl = _check_wire(context, wire, regions[0], impl, "direct", op)
    level = entered(context, impl)
    axis = _check_parts(context, level, dim, whole=regions[0], part=regions[1])
    notes: dict[str, Any] = {"level": level.name, "op": check_reduction(op), "dim": axis, "impl": impl, "wire": wire}
    return trace.call(REDUCE_SCATTER, *regions, **notes)


def all_gather(
    src: Any,
    dst: Any = None,
    dim: int = 0,
    impl: str | None = None,
    signal: Any = None,
    chunk: int | None = None,
    wire: str | None = None,
) -> ir.Call:
    """Join the units' tiles: afterwards dst, on every unit, has part r from rank r along `dim`.

    With `signal`, in a device phase, the gather is only *started*, as a `T.copy` with a signal is:
    each unit's copy queue sends its part to all, the next rank first, and only waits for the flags show which parts
    have arrived. Parts of shape (rows, ...) lie one after the other in dst (size * rows, ...), or in separate slots of
    dst (size, rows, ...); with another `dim`, "rows" are its slices along that one. src may be the unit's own part of
    dst, which then is not copied.

    Args:
        src: this unit's part.
        dst: the result, of the same type. Left out, `src` is a `T.view` inside a program, and the tile behind it
            becomes whole for all its units.
        impl: an algorithm, e.g. "direct", "copy_engine" or "nccl"; with `signal` a mechanism of the network, as for
            `T.copy`.
        signal: integers (size, chunks) in device memory, or such a slice, flags[i, ...]: [r, c] of a unit grows by 1
            when chunk c of rank r's part has arrived there, this unit's part included.
        chunk: with `signal`, rows of a chunk; the last one may have fewer. Left out, a part is one chunk.
        wire: without `signal`, as for `T.allreduce`, of whole tensors, by impl="direct".

    Raises:
        ShapeError: the shapes do not fit.
        PhaseError: `signal` or `wire` where programs execute.
        CollectiveNotReachedError, NoPathError, UsageError: as for `T.allreduce`; `chunk` without `signal`, or flags
            that are not a tensor.
    """
    if wire is not None and (signal is not None or dst is None):
        raise UsageError(
            f"T.all_gather(wire={wire!r}) {'without dst' if dst is None else 'with signal'}",
            hint="T.all_gather(part, whole, wire=)",
            where=here(),
        )
    if signal is not None or chunk is not None:
        return _started(Context("T.all_gather"), ALL_GATHER, src, dst, dim, impl, signal, chunk)
    context = Context("T.all_gather")
    if dst is None:
        regions = [region_of(context, src, "rw")]
        level = entered(context, impl)
        if level.kind != "thread_group":
            raise UsageError(
                f"T.all_gather at level {level.name!r} needs a dst: its units share no memory",
                hint="T.all_gather(part, whole)",
                where=here(),
            )
        return trace.call(ALL_GATHER, *regions, level=level.name, impl=impl)
    regions = _from_to(context, src, dst)
    impl = _check_wire(context, wire, regions[0], impl, "direct")
    level = entered(context, impl)
    axis = _check_parts(context, level, dim, whole=regions[1], part=regions[0])
    return trace.call(ALL_GATHER, *regions, level=level.name, dim=axis, impl=impl, wire=wire)


def _started(
    context: Context, operation: Any, src: Any, dst: Any, dim: int, impl: str | None, signal: Any, chunk: int | None
) -> ir.Call:
    """A collective that the copy queues of its units make."""
    if signal is None or dst is None:
        raise UsageError(
            f"{context.name}({'signal' if dst is None else 'chunk'}=) without {'dst' if dst is None else 'signal'}",
            hint=f"{context.name}(src, dst, signal=flags, chunk=rows), with flags = T.alloc_flags((size, chunks))",
            where=here(),
        )
    source, target = region_of(context, src, "r"), region_of(context, dst, "w")
    level = context.selected()
    check_reached(context, level)
    parts = check_parts(context, level, source, target, dim, chunk)
    network = check_path(context, level, ir.region_parts(target)[0])
    check_impl(network, impl)
    check_queue(context, network, impl)
    part, notes = extents_of(source), dict[str, Any]()
    if operation is ALL_TO_ALL:
        part, notes = part_of(part, context.extent(level), parts.lead), {"slots": parts.slots}
    flags = flags_of(context, level, signal, plain(part[parts.rows]), chunk)
    notes |= {"level": level.name, "dim": parts.lead, "impl": impl, "chunk": chunk}
    return trace.call(operation, source, target, flags, **notes)


def all_to_all(
    src: Any, dst: Any, dim: int = 0, impl: str | None = None, signal: Any = None, chunk: int | None = None
) -> ir.Call:
    """Part j of src, along `dim`, goes to rank j, where it becomes part (my rank) of dst.

    With `signal`, in a device phase, it is only *started*, as `T.all_gather` is: each unit's copy
    queue sends its parts, the next rank's first. In tensors (size, rows, ...) a part has the rows of one slot; with
    another `dim` "rows" are its slices along that one.

    Args:
        src, dst: tiles of the same shape and type, whose extent along `dim` divides among the units.
        impl: an algorithm, e.g. "direct", "copy_engine" or "nccl"; with `signal` a mechanism of the network, as for
            `T.copy`.
        signal: integers (size, chunks) in device memory, or such a slice, flags[i, ...]: [r, c] of a unit grows by 1
            when chunk c of what rank r has for it has arrived there, its own part included.
        chunk: with `signal`, rows of a chunk; the last one may have fewer. Left out, a part is one chunk.

    Raises:
        ShapeError: the shapes do not fit.
        PhaseError: `signal` where programs execute.
        CollectiveNotReachedError, NoPathError, UsageError: as for `T.all_gather`; with `signal` a dst that is src.
    """
    if signal is not None or chunk is not None:
        return _started(Context("T.all_to_all"), ALL_TO_ALL, src, dst, dim, impl, signal, chunk)
    context = Context("T.all_to_all")
    regions = _from_to(context, src, dst)
    level = entered(context, impl)
    a, b = (extents_of(r) for r in regions)
    axis = _axis(context, dim, a)
    size = context.extent(level)
    uneven = isinstance(a[axis], int) and isinstance(size, int) and a[axis] % size
    if [str(n) for n in a] != [str(n) for n in b] or uneven:
        raise ShapeError(
            f"T.all_to_all over {format_count(size, 'unit')} from {tuple(a)} to {tuple(b)} along dimension {axis}",
            hint="both tiles have the same shape, and that dimension is a multiple of the number of units",
            where=here(),
        )
    return trace.call(ALL_TO_ALL, *regions, level=level.name, dim=axis, impl=impl)


@_done_in_order
def broadcast(*args: Any, **kwargs: Any) -> Any:
    """Give every unit the root's tile: `T.broadcast(x, root=0, impl=None)`.

    With an expression as first argument it is TIR's vector broadcast.

    Args:
        x: a tile; changed in place on all units but the root.
        root: rank of the level, the same on all units.
        impl: an algorithm, e.g. "direct", "tree" or "nccl".

    Raises:
        PeerOutOfRangeError: a constant root that the launch does not have.
        CollectiveNotReachedError, NoPathError, UsageError: as for `T.allreduce`; a root that differs between units.
    """
    if args and isinstance(args[0], ir.Buffer | ir.BufferRegion):
        return _broadcast_tile(*args, **kwargs)
    return stock.broadcast(*args, **kwargs)


def _broadcast_tile(x: Any, root: Any = 0, impl: str | None = None) -> ir.Call:
    context = Context("T.broadcast")
    region = region_of(context, x, "rw")
    level = entered(context, impl)
    check_peer(context, level, root)
    check_same(context, level, root)
    return trace.call(BROADCAST, region, root, level=level.name, impl=impl)


def region_of(context: Context, tile: Any, access: str) -> ir.Call:
    named = trace.definition(tile) if isinstance(tile, ir.Var) else None
    tile = tile if named is None else named
    if not isinstance(tile, ir.Buffer | ir.BufferRegion | ir.BufferLoad):
        raise UsageError(
            f"{context.name} works on tiles, got {tile!r}",
            hint="pass a tensor, a tile, or a slice of one",
            where=here(),
        )
    return trace.tile_region(tile, access)


def _from_to(context: Context, src: Any, dst: Any) -> list[ir.Call]:
    source, target = region_of(context, src, "r"), region_of(context, dst, "w")
    check_alike(context, source, target, "a collective")
    return [source, target]


def entered(context: Context, impl: str | None) -> Level:
    level = context.selected()
    check_reached(context, level)
    check_algorithm(context, level, impl)
    if level.kind == "unit":
        check_connected(context, level)
    return level


def check_whole_tensors(context: Context) -> None:
    """Raise PhaseError where programs execute."""
    if owns_a_queue(context.executing, context.machine):
        return
    owner = context.machine.tensor_level.name
    raise PhaseError(
        f"{context.name} where {one(context.executing.name)} executes: {one(owner)} exchanges whole tensors",
        hint=f"write it inside T.Scale({owner!r}), outside of T.Scale({context.program.name!r})",
        where=here(),
    )


def _check_wire(
    context: Context, wire: str | None, source: ir.Call, impl: str | None, only: str, op: str = "sum"
) -> str | None:
    """The algorithm of a collective that sends floats as `wire`; `impl` where it sends them as they are."""
    if wire is None:
        return impl
    check_whole_tensors(context)
    dtype = str(ir.region_parts(source)[0].dtype)
    if wire != WIRE or op != "sum" or dtype not in WIDE or impl not in (None, only):
        raise UsageError(
            f"{context.name} of {dtype}, op={op!r}, impl={impl!r}, wire={wire!r}",
            hint=f"supported: wire={WIRE!r} of {', '.join(WIDE)}, with op='sum' and impl={only!r}",
            where=here(),
        )
    return only


def _axis(context: Context, dim: int, shape: list[Any]) -> int:
    axis = dim + len(shape) if dim < 0 else dim
    if not 0 <= axis < len(shape):
        raise ShapeError(
            f"{context.name}(dim={dim}) of a tile with {len(shape)} dimensions",
            hint="choose a dimension that the tile has",
            where=here(),
        )
    return axis


def _check_parts(context: Context, level: Level, dim: int, *, whole: ir.Call, part: ir.Call) -> int:
    a, b = extents_of(whole), extents_of(part)
    axis = _axis(context, dim, a)
    size = context.extent(level)
    if len(a) == len(b) and all(isinstance(n, int) for n in (*a, *b, size)):
        wanted = [n // size if i == axis else n for i, n in enumerate(a)]
        if wanted == b and a[axis] % size == 0:
            return axis
    elif len(a) == len(b):
        return axis
    raise ShapeError(
        f"{context.name} over {format_count(size, 'unit')}: the whole is {tuple(a)}, a part {tuple(b)}, along "
        f"dimension {axis}",
        hint=f"the whole has {size} times the part's extent in dimension {axis} and agrees in all others",
        where=here(),
    )


def _check_leading(regions: list[ir.Call]) -> None:
    first, *others = [extents_of(r) for r in regions]
    for shape in others:
        if [str(n) for n in shape] != [str(n) for n in first[: len(shape)]]:
            raise ShapeError(
                f"T.allreduce(fn=): tiles {tuple(first)} and {tuple(shape)} do not belong together",
                hint="each later tile has the leading dimensions of the first",
                where=here(),
            )


def _combine(fn: Callable, regions: list[ir.Call]) -> ir.Call:
    """The user's combination, traced once on scalar variables."""
    types = [ir.region_parts(r)[0].dtype for r in regions]
    left, right = ([ir.Var(f"{side}{i}", t) for i, t in enumerate(types)] for side in "ab")

    def combined() -> tuple[Any, ...]:
        result = fn(left[0], right[0]) if len(types) == 1 else fn(tuple(left), tuple(right))
        results = tuple(result) if isinstance(result, tuple | list) else (result,)
        if len(results) != len(types):
            raise UsageError(
                f"T.allreduce(fn=): the function returned {len(results)} values for {len(types)} tiles",
                hint="return one value for each tile",
                where=here(),
            )
        return tuple(map(stock.cast, results, types))

    try:
        results = by_cases(combined)
    except TooManyCasesError as error:
        raise UsageError(
            f"T.allreduce(fn=): the function asks for {error} on one way through it",
            hint="combine conditions without Python's `and`, `or` and `if`: T.if_then_else, T.And, T.Or",
            where=here(),
        ) from None
    return trace.call(COMBINE, *left, *right, *results)
