# SPDX-License-Identifier: MIT
"""Collectives over the units of the current level.

Executed by a program inside `T.Scale("device")`, a collective combines the tiles of the programs with the same index on
every device; executed in a device-level phase, whole tensors. Semantics follow MPI's operations of the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang_core import ir, stock, trace
from tilescale.errors import ShapeError, UsageError
from tilescale.hda import Level
from tilescale.language.checks import check_algorithm, check_path, check_peer, check_reached, scope_kind
from tilescale.language.context import Context, here, plain, require_builder
from tilescale.language.scale import open_level
from tilescale.program.ops import (
    ALL_GATHER,
    ALL_TO_ALL,
    ALLREDUCE,
    BROADCAST,
    COMBINE,
    REDUCE_SCATTER,
    REDUCTIONS,
)


def allreduce(*tiles: Any, op: str | None = None, fn: Callable | None = None, impl: str | None = None) -> ir.Call:
    """Combine tiles over the units of the level, in place: afterwards every unit has the result.

    Args:
        tiles: one tile; with `fn`, several that belong together. Later tiles may have fewer dimensions: they then
            speak of the leading ones (a log-sum for each row).
        op: "sum" (default), "max", "min" or "prod".
        fn: an associative combination of two units' elements, `fn((a1, a2), (b1, b2)) -> (c1, c2)` with scalars; for
            a single tile `fn(a, b) -> c`.
        impl: "one_shot", "two_shot", "ring", "tree" or "nccl"; left out, the machine model chooses.

    Raises:
        CollectiveNotReachedError: a condition around it tells the units apart.
        UsageError: several tiles without `fn`, `op` together with `fn`, an unknown op or impl.
    """
    require_builder("T.allreduce")
    if fn is not None and op is not None or fn is None and len(tiles) != 1 or not tiles:
        raise UsageError(
            f"T.allreduce of {len(tiles)} tiles with op={op!r}, fn={'given' if fn else None}",
            hint="T.allreduce(x, op='sum') for one tile, T.allreduce(x, y, fn=combine) for several",
            where=here(),
        )
    level = _enter("allreduce", ALLREDUCE.name, tiles, impl)
    regions = [trace.tile_region(tile, "rw") for tile in tiles]
    if fn is None:
        return trace.call(ALLREDUCE, *regions, level=level.name, op=_reduction(op), impl=impl)
    _check_leading(regions)
    return trace.call(ALLREDUCE, *regions, _combine(fn, regions), level=level.name, impl=impl)


def reduce_scatter(src: Any, dst: Any, op: str = "sum", dim: int = 0, impl: str | None = None) -> ir.Call:
    """Combine `src` over the units and leave each its share: dst of rank r is part r, along `dim`, of the result.

    Args:
        src, dst: tiles whose shapes agree but for `dim`, where src has size times the extent of dst.
        op: "sum", "max", "min" or "prod".
        impl: "direct", "ring" or "nccl".

    Raises:
        ShapeError: the shapes do not fit.
        CollectiveNotReachedError, UsageError: as for `T.allreduce`.
    """
    level = _enter("reduce_scatter", REDUCE_SCATTER.name, (src, dst), impl)
    regions = trace.tile_region(src, "r"), trace.tile_region(dst, "w")
    axis = _check_parts("reduce_scatter", level, dim, whole=regions[0], part=regions[1])
    return trace.call(REDUCE_SCATTER, *regions, level=level.name, op=_reduction(op), dim=axis, impl=impl)


def all_gather(src: Any, dst: Any = None, dim: int = 0, impl: str | None = None) -> ir.Call:
    """Join the units' tiles: afterwards dst, on every unit, has part r from rank r along `dim`.

    Args:
        src: this unit's part.
        dst: where the whole goes. Left out, `src` is a `T.view` inside a program, and the tile behind it becomes whole
            for all its units.
        impl: "direct", "ring", "copy_engine" or "nccl".

    Raises:
        ShapeError: the shapes do not fit.
        CollectiveNotReachedError, UsageError: as for `T.allreduce`.
    """
    level = _enter("all_gather", ALL_GATHER.name, (src,) if dst is None else (src, dst), impl)
    if dst is None:
        if level.kind != "lanes":
            raise UsageError(
                f"T.all_gather at level {level.name!r} needs a dst: its units share no memory",
                hint="T.all_gather(part, whole)",
                where=here(),
            )
        return trace.call(ALL_GATHER, trace.tile_region(src, "rw"), level=level.name, impl=impl)
    regions = trace.tile_region(src, "r"), trace.tile_region(dst, "w")
    axis = _check_parts("all_gather", level, dim, whole=regions[1], part=regions[0])
    return trace.call(ALL_GATHER, *regions, level=level.name, dim=axis, impl=impl)


def all_to_all(src: Any, dst: Any, dim: int = 0, impl: str | None = None) -> ir.Call:
    """Part j of src, along `dim`, goes to rank j, where it becomes part (my rank) of dst.

    Args:
        src, dst: tiles of the same shape, whose extent along `dim` divides among the units.
        impl: "direct", "copy_engine" or "nccl".

    Raises:
        ShapeError: the shapes do not fit.
        CollectiveNotReachedError, UsageError: as for `T.allreduce`.
    """
    level = _enter("all_to_all", ALL_TO_ALL.name, (src, dst), impl)
    regions = trace.tile_region(src, "r"), trace.tile_region(dst, "w")
    a, b = (_extents(r) for r in regions)
    axis = _axis("all_to_all", dim, a)
    size = Context().extent(level)
    uneven = isinstance(a[axis], int) and isinstance(size, int) and a[axis] % size
    if [str(n) for n in a] != [str(n) for n in b] or uneven:
        raise ShapeError(
            f"T.all_to_all over {size} units from {tuple(a)} to {tuple(b)} along dimension {axis}",
            hint="both tiles have the same shape, and that dimension is a multiple of the number of units",
            where=here(),
        )
    return trace.call(ALL_TO_ALL, *regions, level=level.name, dim=axis, impl=impl)


def broadcast(x: Any, *args: Any, root: Any = 0, impl: str | None = None, **kwargs: Any) -> Any:
    """Give every unit the root's tile. With an expression as first argument it is TIR's vector broadcast.

    Args:
        x: a tile; changed in place on all units but the root.
        root: rank of the level, the same on all units.
        impl: "direct", "tree" or "nccl".

    Raises:
        PeerOutOfRangeError: a constant root that the launch does not have.
        CollectiveNotReachedError, UsageError: as for `T.allreduce`.
    """
    if not isinstance(x, ir.Buffer | ir.BufferRegion):
        return stock.module.broadcast(x, *args, **kwargs)
    level = _enter("broadcast", BROADCAST.name, (x,), impl)
    root = args[0] if args else root
    check_peer(Context(), level, root)
    return trace.call(BROADCAST, trace.tile_region(x, "rw"), root, level=level.name, impl=impl)


def _enter(name: str, operation: str, tiles: tuple[Any, ...], impl: str | None) -> Level:
    require_builder(f"T.{name}")
    context = Context()
    level = open_level(context, f"T.{name}")
    check_reached(context, level, name)
    check_algorithm(operation, impl)
    if level.kind == "unit":
        for tile in tiles:
            buffer = ir.region_parts(trace.tile_region(tile, "rw"))[0]
            if scope_kind(buffer) == "global":
                check_path(context, level, buffer)
    return level


def _reduction(op: str | None) -> str:
    op = op or "sum"
    if op not in REDUCTIONS:
        raise UsageError(f"op={op!r}: a reduction is one of {', '.join(REDUCTIONS)}", where=here())
    return op


def _extents(region: ir.Call) -> list[Any]:
    return [plain(n) for n in ir.region_parts(region)[2]]


def _axis(name: str, dim: int, shape: list[Any]) -> int:
    axis = dim + len(shape) if dim < 0 else dim
    if not 0 <= axis < len(shape):
        raise ShapeError(f"T.{name}(dim={dim}) of a tile with {len(shape)} dimensions", where=here())
    return axis


def _check_parts(name: str, level: Level, dim: int, *, whole: ir.Call, part: ir.Call) -> int:
    a, b = _extents(whole), _extents(part)
    axis = _axis(name, dim, a)
    size = Context().extent(level)
    if len(a) == len(b) and all(isinstance(n, int) for n in (*a, *b, size)):
        wanted = [n // size if i == axis else n for i, n in enumerate(a)]
        if wanted == b and a[axis] % size == 0:
            return axis
    elif len(a) == len(b):
        return axis
    raise ShapeError(
        f"T.{name} over {size} units: the whole is {tuple(a)}, a part {tuple(b)}, along dimension {axis}",
        hint=f"the whole has {size} times the part's extent in dimension {axis} and agrees in all others",
        where=here(),
    )


def _check_leading(regions: list[ir.Call]) -> None:
    first, *others = [_extents(r) for r in regions]
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
    result = fn(left[0], right[0]) if len(types) == 1 else fn(tuple(left), tuple(right))
    result = (result,) if len(types) == 1 else tuple(result)
    if len(result) != len(types):
        raise UsageError(
            f"T.allreduce(fn=): the function returned {len(result)} values for {len(types)} tiles", where=here()
        )
    return trace.call(COMBINE, *left, *right, *result)
