# SPDX-License-Identifier: MIT
"""`T.copy` to and from another unit."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir, stock, trace
from tilescale.errors import ShapeError, UsageError
from tilescale.language.checks import check_impl, check_path, check_peer
from tilescale.language.context import Context, here, plain, require_builder
from tilescale.language.scale import open_level
from tilescale.language.signal import flag_region
from tilescale.program.ops import COPY


def copy(*args: Any, **kwargs: Any) -> Any:
    """Copy a tile; with `dst=` or `src=` beside two positional tiles, from or to another unit of the current level.

    `T.copy(src, dst)` is TileLang's, with all its keywords. `T.copy(tile, X[i, j], dst=peer)` writes the peer's X,
    `T.copy(X[i, j], tile, src=peer)` reads it. A copy returns when its source may be reused; what it wrote is visible
    to the peer after a signal or a barrier.

    Args:
        dst, src: rank of the far side among the units of the innermost scale's level; at most one of them.
        signal: a flag element of the peer that is updated after the data has arrived (a put with signal).
        value, op: what the flag is updated with (default: add 1), as in `T.signal`.
        impl: a mechanism that the path offers ("tma", "lsu", "copy_engine", "dsmem", "rdma", ...); left out, the
            machine model chooses.

    Raises:
        PeerOutOfRangeError: a constant peer that the launch does not have.
        NoPathError: no network of the machine connects the units, or not the layer where the tile lies.
        ShapeError: tiles of different extents.
        UsageError: both `dst` and `src`, or an `impl` that the path does not offer.
    """
    if len(args) != 2 or not {"dst", "src"} & kwargs.keys():
        return stock.copy(*args, **kwargs)
    return _remote(*args, **kwargs)


def _remote(
    source: Any,
    target: Any,
    *,
    dst: Any = None,
    src: Any = None,
    signal: Any = None,
    value: Any = 1,
    op: str = "add",
    impl: str | None = None,
) -> ir.Call:
    require_builder("T.copy")
    if (dst is None) == (src is None):
        raise UsageError("T.copy takes either dst= or src=, one rank", hint="one side of a copy is local", where=here())
    if signal is not None and src is not None:
        raise UsageError("T.copy(src=, signal=): a signal tells the unit that data has arrived", where=here())
    context = Context()
    level = open_level(context, "T.copy(dst=)" if src is None else "T.copy(src=)")
    far, peer = ("dst", dst) if src is None else ("src", src)
    regions = trace.copy_regions(source, target)
    buffer = ir.region_parts(regions[0 if far == "src" else 1])[0]
    check_peer(context, level, peer)
    check_impl(check_path(context, level, buffer), impl)
    _check_extents(*regions)
    extra = [] if signal is None else [flag_region(signal), ir.int_node(value)]
    return trace.call(
        COPY, *regions, peer, *extra, level=level.name, far=far, impl=impl, op=op if signal is not None else None
    )


def _check_extents(source: ir.Call, target: ir.Call) -> None:
    a, b = ([plain(n) for n in ir.region_parts(r)[2]] for r in (source, target))
    trim_a, trim_b = ([n for n in shape if n != 1] for shape in (a, b))
    constant = all(isinstance(n, int) for n in trim_a + trim_b)
    if constant and trim_a != trim_b:
        raise ShapeError(
            f"T.copy between tiles of different extents: {tuple(a)} and {tuple(b)}",
            hint="slice both to the same extents",
            where=here(),
        )
