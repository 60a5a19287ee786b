# SPDX-License-Identifier: MIT
"""`T.copy` to and from another unit."""

from __future__ import annotations

from typing import Any, overload

from tilelang_core import ir, stock, tl, trace
from tilelang_core import rewrite as tir
from tilescale.errors import ShapeError, UsageError
from tilescale.language.asynchronous import after_of, check_fixed, check_queue
from tilescale.language.checks import (
    check_alike,
    check_impl,
    check_path,
    check_peer,
    check_whole_warps,
    expanded,
)
from tilescale.language.context import Context, extents_of, here, shape_of
from tilescale.language.signal import check_signal_op, flag_region, flag_value
from tilescale.program.asynchronous import owns_a_queue
from tilescale.program.ops import COPY

_OURS = ("dst", "src", "signal", "value", "op", "after", "impl")


@overload
def copy(
    source: Any, target: Any, /, *, dst: Any, signal: Any = None, value: Any = None, op: str | None = None,
    after: tuple[Any, str, Any] | None = None, impl: str | None = None,
) -> ir.Call: ...  # fmt: skip


@overload
def copy(source: Any, target: Any, /, *, src: Any, impl: str | None = None) -> ir.Call: ...


@overload
def copy(source: Any, target: Any, /, **kwargs: Any) -> Any: ...


def copy(*args: Any, **kwargs: Any) -> Any:
    """Copy a tile; with `dst=` or `src=` in addition to two positional tiles, to or from another unit of the current
    level.

    `T.copy(src, dst)` is TileLang's, with all its keywords. `T.copy(tile, X[i, j], dst=peer)` writes the peer's X,
    `T.copy(X[i, j], tile, src=peer)` reads it. A copy returns when its source may be reused; its writes are visible to
    the peer after a signal or a barrier.

    In a device phase, inside T.Scale("device"), a copy with `signal=` is only *started*: the unit's
    copy queue executes it concurrently with the following statements, after all operations that the unit has started
    before. Only a wait for the flag shows that it has arrived, and until then its source must not be written. The call
    ends after it.

    Args:
        dst, src: rank of the far side among the units of the innermost scale's level; at most one of them.
        signal: a flag element of the peer that is updated after the data has arrived (a put with signal).
        value, op: the update of the flag (default: add 1), as in `T.signal`.
        after: (flag, comparison, value), for a copy that is started: it waits until the sender's own flag compares
            true, as in `T.wait`, and sees the writes published with it. Operations started later wait too.
        impl: a mechanism that the path offers ("tma", "lsu", "copy_engine", "dsmem", "rdma", "nvshmem", ...); left out,
            the machine model chooses. "nvshmem" needs NVSHMEM's heap, and is taken unasked only between devices that
            share no memory.

    Raises:
        PeerOutOfRangeError: a constant peer that the launch does not have.
        NoPathError: no network of the machine connects the units, or none reaches the layer of the tile; or no
            mechanism of it moves started copies.
        ShapeError: tiles of different extents; two whole buffers of different shapes.
        UsageError: both `dst` and `src`, an `impl` that the path does not offer, `after` of a copy that is not started,
            or tensors of different types in one that is.
    """
    if len(args) == 2 and kwargs.keys() <= set(_OURS):
        _check_whole(*args)
    if len(args) != 2 or not kwargs.keys() & set(_OURS):
        return _local(stock.copy(*args, **kwargs))
    context = Context("T.copy")
    _check_keywords(kwargs)
    return _remote(context, *args, **kwargs)


def _check_keywords(given: dict[str, Any]) -> None:
    if unknown := sorted(given.keys() - set(_OURS)):
        raise UsageError(
            f"T.copy to or from another unit takes no {', '.join(unknown)}",
            hint=f"it takes {', '.join(_OURS)}",
            where=here(),
        )
    sides = [side for side in ("dst", "src") if given.get(side) is not None]
    if len(sides) != 1:
        used = ", ".join(f"{key}=" for key in given)
        raise UsageError(
            f"T.copy({used}) takes one far side, dst= or src=; here are {len(sides)}",
            hint="one side of a copy is local: T.copy(tile, X, dst=peer) writes, T.copy(X, tile, src=peer) reads",
            where=here(),
        )
    of_flag = [key for key in ("signal", "value", "op", "after") if given.get(key) is not None]
    if of_flag and (sides == ["src"] or "signal" not in of_flag):
        raise UsageError(
            f"T.copy({sides[0]}=, {', '.join(f'{key}=' for key in of_flag)}): only a flag of the unit that data is "
            "sent to can be signalled",
            hint="T.copy(tile, X, dst=peer, signal=flags[i]); after a copy with src= use T.signal",
            where=here(),
        )


def _remote(
    context: Context,
    source: Any,
    target: Any,
    *,
    dst: Any = None,
    src: Any = None,
    signal: Any = None,
    value: Any = None,
    op: str | None = None,
    after: Any = None,
    impl: str | None = None,
) -> ir.Call:
    level = context.selected()
    far, peer = ("dst", dst) if src is None else ("src", src)
    regions = _with_same_rows(*trace.copy_regions(source, target))
    buffer = ir.region_parts(regions[0 if far == "src" else 1])[0]
    check_peer(context, level, peer)
    check_whole_warps(context)
    network = check_path(context, level, buffer)
    check_impl(network, impl)
    check_extents(context, *regions)
    if signal is None:
        return trace.call(COPY, *regions, peer, level=level.name, far=far, impl=impl)
    op = op or "add"
    check_signal_op(op)
    flag, amount = flag_region(signal), flag_value(1 if value is None else value)
    waited, compare = after_of(context, after, impl, network) if after is not None else ([], None)
    if owns_a_queue(context.executing, context.machine):
        check_queue(context, network, impl)
        check_alike(context, *regions, "a copy engine")
        check_fixed(context, [*regions, flag, *waited[:1]], [peer, amount, *waited[1:]])
    return trace.call(
        COPY, *regions, peer, flag, amount, *waited, level=level.name, far=far, impl=impl, op=op, after=compare
    )


def _local(made: Any) -> Any:
    """A copy of TileLang's in a program of units: one side may have as many rows as memory says."""
    if not trace.state().get("scales") or ir.op_name(made) != tl.COPY:
        return made
    return tir.recall(made, ir.with_regions(made, *_with_same_rows(*ir.regions_of_copy(made))))


def _of_memory(extent: Any) -> bool:
    """Whether an extent depends on memory, or on variables: it is known when the copy is executed."""
    return ir.reads_memory(expanded(extent))


def _with_same_rows(source: ir.Call, target: ir.Call) -> tuple[ir.Call, ir.Call]:
    """Regions of a copy: extents that memory says hold for the side whose extents are numbers."""
    sides = [list(ir.region_parts(region)[2]) for region in (source, target)]
    axes = [[axis for axis, n in enumerate(side) if ir.constant(n) != 1] for side in sides]
    if len(axes[0]) != len(axes[1]):
        return source, target
    for a, b in zip(*axes, strict=True):
        if _of_memory(sides[0][a]) and ir.constant(sides[1][b]) is not None:
            sides[1][b] = sides[0][a]
        elif _of_memory(sides[1][b]) and ir.constant(sides[0][a]) is not None:
            sides[0][a] = sides[1][b]
    return tir.resized(source, sides[0]), tir.resized(target, sides[1])


def _check_whole(source: Any, target: Any) -> None:
    """Check that two whole buffers have the same shape; TileLang reports it too, but without the line."""
    if not (isinstance(source, ir.Buffer) and isinstance(target, ir.Buffer)):
        return
    a, b = shape_of(source), shape_of(target)
    if all(isinstance(n, int) for n in a + b) and a != b:
        raise ShapeError(
            f"T.copy of the whole of {source.name!r} {tuple(a)} to the whole of {target.name!r} {tuple(b)}",
            hint="say where the smaller one lies in the larger one: T.copy(X[row, column], tile)",
            where=here(),
        )


def check_extents(context: Context, source: ir.Call, target: ir.Call) -> None:
    """Raise ShapeError for tiles whose known extents differ in more than dimensions of one element."""
    a, b = extents_of(source), extents_of(target)
    trim_a, trim_b = ([n for n in shape if n != 1] for shape in (a, b))
    constant = all(isinstance(n, int) for n in trim_a + trim_b)
    if constant and trim_a != trim_b:
        raise ShapeError(
            f"{context.name} between tiles of different extents: {tuple(a)} and {tuple(b)}",
            hint="slice both to the same extents",
            where=here(),
        )
