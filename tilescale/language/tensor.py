# SPDX-License-Identifier: MIT
"""`T.alloc` and `T.view`: tiles in the memory layers of the machine, and the part of one that a unit holds."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from tilelang_core import ir, stock, trace
from tilescale.errors import AllocationTooLargeError, LayoutError, PhaseError, TileScaleError, UsageError
from tilescale.hda.model import MemoryLayer
from tilescale.hda.units import format_bytes
from tilescale.language.checks import checked_dtype, checked_shape, scope_kind
from tilescale.language.context import Context, here, plain, shape_of
from tilescale.program.layout import RECOGNISED, Layout, from_function
from tilescale.program.ops import OWNER, VIEW


def alloc(shape: Any, dtype: Any, level: str | None = None) -> ir.Buffer:
    """A tile of `shape` (elements) in a memory layer of the machine.

    Args:
        shape: an int or a sequence of extents.
        dtype: a TileLang data type.
        level: the layer: "l0" registers (a fragment), "l1" shared memory, "l2" device memory (a workspace that the
            runtime owns, one on every device), or any layer of the machine's description; left out, shared memory.

    Raises:
        UnknownLayerError: the machine has no such layer.
        AllocationTooLargeError: the tile is larger than the layer's capacity.
        PhaseError: an on-chip tile in a device-level phase.
        ShapeError: an extent that is negative or no integer.
        UsageError: outside a launch, an unknown data type, or a layer in which programs place no tiles.
    """
    context = Context("T.alloc")
    try:
        layer = context.machine.layer_for("shared") if level is None else context.machine.layer(level)
    except TileScaleError as error:
        raise error.at(*here()) from None
    shape, dtype = checked_shape(context, shape), checked_dtype(context, dtype)
    _check_room(context, layer, [plain(n) for n in shape], str(dtype))
    allocate = next((_ALLOCATIONS[scope] for scope in _ALLOCATIONS if scope in layer.scopes), None)
    if allocate is None:
        homes = ", ".join(m.name for m in context.machine.memory if set(m.scopes) & _ALLOCATIONS.keys())
        raise UsageError(
            f"programs place no tiles in layer {layer.name!r} ({layer.title}) of {context.machine.name!r}",
            hint=f"allocate in one of {homes}",
            where=here(),
        )
    return allocate(shape, dtype)


def _check_room(context: Context, layer: MemoryLayer, shape: list[Any], dtype: str) -> None:
    if not all(isinstance(n, int) for n in shape):
        return
    # The programs of a cluster hold its on-chip tiles together.
    programs = context.cluster if context.executing.kind == "cluster" and "global" not in layer.scopes else 1
    asked = math.prod(shape) * ir.bits(dtype) // 8
    there = context.machine.capacity(layer.name, context.threads) * programs
    if asked > there:
        raise AllocationTooLargeError(
            f"a tile {tuple(shape)} of {dtype} needs {format_bytes(asked)}; layer {layer.name!r} ({layer.title}) "
            f"of {context.machine.name!r} has {format_bytes(there)} for one tile",
            hint="make the tile smaller, or place it in a coarser layer",
            where=here(),
        )


P = ParamSpec("P")
R = TypeVar("R")


def _owned(stock_alloc: Callable[P, R]) -> Callable[P, R]:
    """An on-chip allocation that records whose it is: one for each unit that executes the statement."""
    raises = "Raises:\n    PhaseError: written in a phase of a level that runs no threads."

    @functools.wraps(stock_alloc)
    def allocate(*args: P.args, **kwargs: P.kwargs) -> R:
        buffer = stock_alloc(*args, **kwargs)
        context = Context(f"T.{stock_alloc.__name__}") if trace.launch() is not None else None
        if context is not None and context.scales:
            if context.in_unit_phase:
                raise PhaseError(
                    f"{context.name} in a phase of level {context.executing.name!r}, which runs no threads",
                    hint=f"allocate it inside T.Scale({context.program.name!r}), or in device memory with T.alloc",
                    where=here(),
                )
            trace.note_buffer(OWNER, buffer, context.executing.name)
        return buffer

    allocate.__doc__ = f"{inspect.getdoc(stock_alloc)}\n\n{raises}"
    return allocate


alloc_shared = _owned(stock.alloc_shared)
alloc_fragment = _owned(stock.alloc_fragment)
alloc_barrier = _owned(stock.alloc_barrier)

_ALLOCATIONS = {"shared": alloc_shared, "fragment": alloc_fragment, "global": stock.alloc_global}
"""Scope of memory -> how a tile is allocated in it. A layer of several scopes is used as the first of these."""


@overload
def view(buffer: Any, /, *, layout: Layout | Callable[..., Any]) -> ir.Buffer: ...


@overload
def view(src: Any, shape: Any = None, dtype: Any = None, *, layout: None = None) -> ir.Buffer: ...


def view(*args: Any, layout: Any = None, **kwargs: Any) -> ir.Buffer:
    """The part of a tile or tensor that one unit of the current level holds.

    At a level above the program a view of a kernel parameter gives the layout of the global tensor over the units; the
    caller passes each unit its shard. Without `layout` it is TileLang's reshape and data type view.

    Args:
        args: with `layout`, the buffer: a tile, a tensor, or a slice of one.
        layout: T.Replica, T.FullRow (split along the first dimension), T.FullCol (along the last), T.Shard(dim,
            block=None), or a function from indices to rank that is one of these.

    Returns:
        A buffer of the shape that one unit holds.

    Raises:
        LayoutError: a layout that is not recognised (the message lists those that are).
        ShapeError: a dimension that does not divide among the units.
        UsageError: no scale is open, other arguments together with `layout`, or a layout without its name.
    """
    if layout is None and not any(isinstance(x, Layout) for x in (*args, *kwargs.values())):
        return stock.view(*args, **kwargs)
    context = Context("T.view")
    level = context.selected()
    buffer = _only(args, kwargs)
    size = context.extent(level)
    region = trace.tile_region(buffer, "rw")
    base, _, extents = ir.region_parts(region)
    shape = [plain(n) for n in extents]
    try:
        layout = _as_layout(layout, shape, size)
        shard = layout.shard_shape(shape, size)
    except TileScaleError as error:
        raise error.at(*here()) from None
    if level.kind in ("unit", "cluster") and scope_kind(base) == "global":
        _check_whole(base, shape, level.name)
    operation = trace.call(VIEW, region, *shard, level=level.name, dim=layout.axis(len(shape)), block=layout.block)
    return trace.bind_view(base, shard, operation)


def _only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The positional or keyword buffer of `T.view(buffer, layout=)`. Raises UsageError for other arguments."""
    if not args and kwargs.keys() == {"buffer"}:
        args, kwargs = (kwargs["buffer"],), {}
    if len(args) == 1 and not kwargs and isinstance(args[0], ir.Buffer | ir.BufferRegion):
        return args[0]
    raise UsageError(
        f"T.view(layout=) takes one tile or a slice of one, got {[*args, *kwargs]}",
        hint="T.view(buffer, layout=...); reshape with a second T.view",
        where=here(),
    )


def _as_layout(layout: Any, shape: list[Any], size: Any) -> Layout:
    if isinstance(layout, Layout):
        return layout
    if callable(layout):
        return from_function(layout, shape, size)
    raise LayoutError(f"layout={layout!r} is not a layout", hint=RECOGNISED)


def _check_whole(base: ir.Buffer, shape: list[Any], level: str) -> None:
    if len(shape) != len(base.shape) or any(str(a) != str(b) for a, b in zip(shape, shape_of(base), strict=True)):
        raise UsageError(
            f"T.view of a slice of {base.name!r} at level {level!r}: there a view says how the whole tensor is laid "
            "out",
            hint="view the whole tensor and slice the view",
            where=here(),
        )
