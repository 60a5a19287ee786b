# SPDX-License-Identifier: MIT
"""`T.atomic_add` at another unit, and `T.invoke_one`: one thread acts, and all threads of its unit have the result."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, overload

from tilelang_core import ir, stock, trace
from tilescale.errors import PhaseError, UsageError, one
from tilescale.hda import Level
from tilescale.language.checks import check_alike, check_impl, check_path, check_peer, check_whole_warps, scope_kind
from tilescale.language.context import Context, here
from tilescale.language.copy import check_extents
from tilescale.program.ops import ALL_OPS, ATOMIC_ADD, INVOKE_ONE, ORDERS

ADDED_DTYPES = ("int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
"""Types that hardware adds atomically in the memory of another device."""

TILE_MECHANISMS = ("lsu", "tma")
"""Mechanisms that add a tile."""


@overload
def atomic_add(
    target: Any, value: Any, /, *, dst: Any, return_prev: bool = False, memory_order: str | None = None,
    impl: str | None = None,
) -> Any: ...  # fmt: skip


@overload
def atomic_add(dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False) -> Any: ...


@overload
def atomic_add(*args: Any, **kwargs: Any) -> Any: ...


def atomic_add(*args: Any, **kwargs: Any) -> Any:
    """Add to memory atomically; with `dst=` in addition to two positional operands, to memory of another unit.

    `T.atomic_add(target, value)` is TileLang's, with all its keywords, and is atomic within one device.
    `T.atomic_add(counter[0], 1, dst=peer)` adds a number to an element of the peer, once for the executing unit, or
    once for each element of a `T.Parallel` loop. `T.atomic_add(Y[i, 0], tile, dst=peer)` adds a tile to the peer's Y,
    element by element. Both are atomic among all devices. The addition is visible to the peer after a signal or a
    barrier, as for a put.

    Args:
        dst: rank of the far side among the units of the innermost scale's level; the unit's own rank is allowed.
        return_prev: return the element's previous value (a fetch-add); all threads of the unit have the value.
        memory_order: "relaxed" (default), "acquire", "release" or "acq_rel", of an element.
        impl: of a tile, "lsu" (default), element by element, or "tma", `cp.reduce.async.bulk`, whose atomicity the PTX
            ISA guarantees within one device.

    Raises:
        PeerOutOfRangeError: a constant peer that the launch does not have.
        NoPathError: no network connects the units.
        PhaseError: in a phase of units that run no programs, or units that are not devices.
        ShapeError: tiles of different extents.
        UsageError: memory on chip, a type without atomic addition, `return_prev` of a tile, an unknown order, or a
            condition around it that only some threads of a warp take.
    """
    if len(args) != 2 or "dst" not in kwargs:
        return stock.atomic_add(*args, **kwargs)
    return _at_peer(Context("T.atomic_add"), *args, **_checked(kwargs))


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    known = ("dst", "return_prev", "memory_order", "impl")
    if unknown := sorted(given.keys() - set(known)):
        raise UsageError(
            f"T.atomic_add(dst=) takes no {', '.join(unknown)}",
            hint=f"it takes {', '.join(known)}",
            where=here(),
        )
    return given


def _at_peer(
    context: Context,
    target: Any,
    value: Any,
    *,
    dst: Any,
    return_prev: bool = False,
    memory_order: str | None = None,
    impl: str | None = None,
) -> Any:
    level, order = context.selected(), memory_order or "relaxed"
    _check_units(context, level)
    check_peer(context, level, dst)
    check_whole_warps(context)
    is_of_tiles = isinstance(value, ir.Buffer | ir.BufferRegion)
    added, region = trace.copy_regions(value, target) if is_of_tiles else (None, _element(target))
    buffer = ir.region_parts(region)[0]
    _check_memory(buffer)
    network = check_path(context, level, buffer)
    if is_of_tiles:
        _check_tile(buffer.name, return_prev, order, impl)
        check_impl(network, impl)
        check_alike(context, added, region, "an atomic addition")
        check_extents(context, added, region)
    else:
        added = _number(value, buffer, order, impl)
    previous = trace.variable(f"{buffer.name}_before", buffer.dtype) if return_prev else None
    results = [trace.tile_region(previous[0], "w")] if previous is not None else []
    call = trace.call(ATOMIC_ADD, region, added, dst, *results, level=level.name, order=order, impl=impl)
    return call if previous is None else emitted(call, previous)


def emitted(call: ir.Call, result: ir.Buffer) -> ir.BufferLoad:
    """The result of an operation that becomes a statement of the trace; `result` is the variable that gets it."""
    trace.emit(call)
    return result[0]


def _check_units(context: Context, level: Level) -> None:
    if context.in_unit_phase or context.executing.kind == "cluster":
        raise PhaseError(
            f"T.atomic_add(dst=) where {one(context.executing.name)} executes: threads of programs add",
            hint=f"write it inside T.Scale({context.program.name!r})",
            where=here(),
        )
    if level.kind != "unit":
        raise UsageError(
            f"T.atomic_add(dst=) of level {level.name!r}: units of this level share their device's memory",
            hint="leave dst out, and add to device or shared memory: T.atomic_add(X[i], value)",
            where=here(),
        )


def _element(target: Any) -> ir.Call:
    if not isinstance(target, ir.BufferLoad):
        raise UsageError(
            f"T.atomic_add(dst=) of a number to {target}: a number is added to one element",
            hint="write T.atomic_add(X[i], value, dst=peer); a tile is added to a slice",
            where=here(),
        )
    return trace.tile_region(target, "rw")


def _check_memory(buffer: ir.Buffer) -> None:
    if scope_kind(buffer) != "global":
        raise UsageError(
            f"T.atomic_add(dst=) to {buffer.name!r}, a tile on chip",
            hint='add to device memory: a parameter, or T.alloc(shape, dtype, level="l2")',
            where=here(),
        )
    if str(buffer.dtype) not in ADDED_DTYPES:
        raise UsageError(
            f"T.atomic_add(dst=) to {buffer.name!r}: {buffer.dtype} has no atomic addition between devices",
            hint=f"supported: {', '.join(ADDED_DTYPES)}",
            where=here(),
        )


def _check_tile(name: str, return_prev: bool, order: str, impl: str | None) -> None:
    if return_prev or order != "relaxed":
        raise UsageError(
            f"T.atomic_add of a tile to {name!r}: {'return_prev' if return_prev else 'memory_order'}= is for an "
            "element",
            hint="leave it out; T.signal after it publishes the sum",
            where=here(),
        )
    if impl not in (None, *TILE_MECHANISMS):
        raise UsageError(
            f"T.atomic_add(impl={impl!r}): a tile is added by {' or '.join(TILE_MECHANISMS)}",
            hint="leave impl out",
            where=here(),
        )


def _number(value: Any, buffer: ir.Buffer, order: str, impl: str | None) -> ir.PrimExpr:
    """The operand of an element's addition, in the element's type."""
    dtype = str(buffer.dtype)
    if impl is not None or order not in ORDERS:
        raise UsageError(
            f"T.atomic_add({f'impl={impl!r}' if impl is not None else f'memory_order={order!r}'}) to an element of "
            f"{buffer.name!r}",
            hint=f"leave it out; an order is one of {', '.join(ORDERS)}",
            where=here(),
        )
    is_integer = isinstance(value, Integral) or isinstance(value, ir.PrimExpr) and "int" in value.dtype
    if not isinstance(value, Real | ir.PrimExpr) or "int" in dtype and not is_integer:
        raise UsageError(
            f"T.atomic_add of {value} to {buffer.name!r}, whose elements are {dtype}",
            hint="add a number of that type",
            where=here(),
        )
    if isinstance(value, ir.PrimExpr):
        return value if str(value.dtype) == dtype else ir.Cast(dtype, value)
    if isinstance(value, Integral) and "int" in dtype:
        return ir.IntImm(dtype, int(value))
    return ir.FloatImm(dtype, float(value))


# -- one thread for all ------------------------------------------------------------------------------------------------


def invoke_one(value: Any) -> Any:
    """One thread of the executing unit evaluates an expression, and all threads of the unit have its value.

    `ticket = T.invoke_one(T.atomic_add(counter[0], 1, return_prev=True))` draws one ticket for a block, where
    TileLang's call alone draws one for each thread. Earlier writes of the unit are visible to that thread, and writes
    that the thread acquired (`memory_order="acq_rel"`) are visible to all afterwards.

    Args:
        value: an expression: a load, an atomic operation, arithmetic on these. One without a value, such as
            `T.atomic_add(counter[0], 1)`, is executed once.

    Returns:
        The value, the same for all threads of the unit; nothing for an expression without one.

    Raises:
        PhaseError: in a phase of units that run no threads.
        UsageError: no expression, or a condition around it that only some threads of a warp take.
    """
    context = Context("T.invoke_one")
    if context.in_unit_phase or context.executing.kind == "cluster":
        raise PhaseError(
            f"T.invoke_one where {one(context.executing.name)} executes, which has no threads of its own",
            hint=f"write it inside T.Scale({context.program.name!r})",
            where=here(),
        )
    if not isinstance(value, ir.PrimExpr) or ir.op_name(value) in ALL_OPS:
        raise UsageError(
            f"T.invoke_one({value}): one thread evaluates an expression",
            hint="write T.invoke_one(T.atomic_add(counter[0], 1, return_prev=True)); T.signal, T.wait and "
            "T.atomic_add(dst=) are executed once for the unit anyway",
            where=here(),
        )
    check_whole_warps(context)
    if str(value.dtype) in ("handle", "void", ""):
        return trace.call(INVOKE_ONE, value)
    result = trace.variable("of_one", value.dtype)
    return emitted(trace.call(INVOKE_ONE, value, trace.tile_region(result[0], "w")), result)
