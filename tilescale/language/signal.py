# SPDX-License-Identifier: MIT
"""`T.alloc_flags`, `T.signal`, `T.wait`, `T.wait_any`, `T.barrier`: order between units."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from tilelang_core import ir, stock, trace
from tilescale.errors import PhaseError, UsageError, one
from tilescale.language.checks import (
    check_connected,
    check_path,
    check_peer,
    check_reached,
    check_whole_warps,
    checked_dtype,
    checked_shape,
    scope_kind,
)
from tilescale.language.context import Context, extents_of, here
from tilescale.program.ops import BARRIER, COMPARISONS, FLAGS, SIGNAL, WAIT

_SIGNAL_OPS = ("add", "set")


def alloc_flags(shape: Any, dtype: Any = "int32") -> ir.Buffer:
    """Flags in device memory, on every unit that owns tensors, which are zero when a call of the program begins.

    They need no clearing and no barrier: a unit may signal a peer's before the peer has begun.

    Args:
        shape: an int or a sequence of extents.
        dtype: an integer type.

    Raises:
        ShapeError: an extent that is negative or no integer.
        UsageError: outside a launch, or a type that is not an integer.
    """
    context = Context("T.alloc_flags")
    shape, dtype = checked_shape(context, shape), checked_dtype(context, dtype)
    if not str(dtype).startswith(("int", "uint")):
        raise UsageError(
            f"T.alloc_flags(dtype={str(dtype)!r}): a flag is an integer", hint="leave dtype out", where=here()
        )
    flags = stock.alloc_global(shape, dtype)
    trace.note_buffer(FLAGS, flags, 1)
    return flags


def flag_region(flag: Any) -> ir.Call:
    """A flag as the argument of an operation. Raises UsageError: it is not one element of an integer tensor in device
    memory."""
    if not isinstance(flag, ir.BufferLoad):
        raise UsageError(
            f"a flag is one element of a tensor in device memory, got {flag}",
            hint="declare flags: T.alloc_flags((n,)) or T.Tensor((n,), 'int32'), and write flags[i]",
            where=here(),
        )
    if scope_kind(flag.buffer) != "global":
        raise UsageError(
            f"a flag is one element of a tensor in device memory, {flag.buffer.name!r} is a tile on chip",
            hint="make them with T.alloc_flags((n,)), or a parameter, T.Tensor((n,), 'int32')",
            where=here(),
        )
    if not str(flag.dtype).startswith(("int", "uint")):
        raise UsageError(
            f"a flag is an integer, {flag.buffer.name!r} is {flag.dtype}",
            hint="declare flags: T.Tensor((n,), 'int32')",
            where=here(),
        )
    return trace.tile_region(flag, "rw")


def flag_value(value: Any) -> ir.PrimExpr:
    """The operand of a flag's update or comparison. Raises UsageError: `value` is not an integer."""
    node = ir.int_node(int(value) if isinstance(value, Integral) else value)
    if not isinstance(node, ir.PrimExpr) or not node.dtype.startswith(("int", "uint")):
        raise UsageError(
            f"the value of a flag is an integer, got {value!r}",
            hint="write an integer or an expression of integers; a // b is one",
            where=here(),
        )
    return node


def check_signal_op(op: str) -> None:
    """Raise UsageError for an operation that updates no flag."""
    if op not in _SIGNAL_OPS:
        raise UsageError(
            f"op={op!r}: a signal is one of {', '.join(_SIGNAL_OPS)}", hint="choose one of these", where=here()
        )


def check_comparison(use: str, compare: Any) -> str:
    """A comparison; raises UsageError for an unknown one, in a `use` with a place for it."""
    if compare not in COMPARISONS:
        raise UsageError(
            f"{use.format(repr(compare))}: a comparison is one of {', '.join(COMPARISONS)}",
            hint=f"write {use.format(chr(34) + '>=' + chr(34))}",
            where=here(),
        )
    return compare


def signal(flag: Any, value: Any = 1, op: str = "add", dst: Any = None) -> ir.Call:
    """Publish everything this unit has written, then update a flag: release at the scope of the level.

    Args:
        flag: an element of an integer tensor, `flags[i]`.
        value: the number that is added or stored.
        op: "add" or "set".
        dst: whose flag, a rank of the innermost scale's level; left out, this unit's own.

    Raises:
        PeerOutOfRangeError: a constant peer that the launch does not have.
        NoPathError: no network connects the units.
        UsageError: not a flag, no integer, an unknown op, or a condition around it that only some threads of a warp
            take.
    """
    context = Context("T.signal" if dst is None else "T.signal(dst=)")
    check_whole_warps(context)
    region = flag_region(flag)
    check_signal_op(op)
    if dst is None:
        return trace.call(SIGNAL, region, flag_value(value), op=op)
    level = context.selected()
    check_peer(context, level, dst)
    check_path(context, level, flag.buffer)
    return trace.call(SIGNAL, region, flag_value(value), dst, level=level.name, op=op)


def flags_region(flags: Any) -> ir.Call:
    """One flag, or a slice of a tensor of flags, as the argument of a wait. Raises UsageError: it is neither."""
    if not isinstance(flags, ir.BufferRegion):
        return flag_region(flags)
    flag_region(flags.buffer[tuple(r.min for r in flags.region)])
    return trace.tile_region(flags, "rw")


def wait(flag: Any, compare: str, value: Any) -> ir.Call:
    """Block until `flag compare value` holds; then everything that its signaller published is visible.

    Args:
        flag: an element of an integer tensor of this unit, `flags[i]`; or a slice, `flags[0:4]`, all of whose elements
            must compare true.
        compare: "==", "!=", ">=", ">", "<=" or "<".
        value: the number that it is compared with.

    Raises:
        UsageError: not a flag, no integer, an unknown comparison, or a condition around it that only some threads of a
            warp take.
    """
    check_whole_warps(Context("T.wait"))
    check_comparison("T.wait(flag[i], {}, value)", compare)
    return trace.call(WAIT, flags_region(flag), flag_value(value), compare=compare)


def wait_any(flags: Any, compare: str, value: Any) -> ir.BufferLoad:
    """Block until `flag compare value` holds for any flag of a slice; then what that flag's signaller published is
    visible.

    The next `T.wait_any` of these flags may find the same one again: `T.signal(flags[i], 0, op="set")` resets it.

    Args:
        flags: a slice of an integer tensor of this unit along one dimension, `flags[0:4]` or `flags[row, 0:4]`.
        compare, value: as for `T.wait`.

    Returns:
        The number of the flag within the slice, from 0 on; one that compares true, where several do.

    Raises:
        PhaseError: in a phase of units that run no threads.
        UsageError: not such a slice, no integer, an unknown comparison, or a condition around it that only some
            threads of a warp take.
    """
    context = Context("T.wait_any")
    if context.in_unit_phase or context.executing.kind == "cluster":
        raise PhaseError(
            f"T.wait_any where {one(context.executing.name)} executes: threads of programs have its result",
            hint=f"write it inside T.Scale({context.program.name!r}); T.wait of a slice waits for all of its flags",
            where=here(),
        )
    check_whole_warps(context)
    check_comparison("T.wait_any(flags[0:n], {}, value)", compare)
    region = flags_region(flags)
    if sum(n != 1 for n in extents_of(region)) > 1 or not isinstance(flags, ir.BufferRegion):
        raise UsageError(
            f"T.wait_any({flags}): the flags are a slice along one dimension",
            hint="write T.wait_any(flags[0:n], compare, value); one flag is waited for by T.wait",
            where=here(),
        )
    index = trace.variable(f"{flags.buffer.name}_found", "int32")
    trace.emit(trace.call(WAIT, region, flag_value(value), trace.tile_region(index[0], "w"), compare=compare))
    return index[0]


def barrier() -> ir.Call:
    """All units of the innermost scale's level arrive before any of them continues; the writes of each are then
    visible.

    Raises:
        CollectiveNotReachedError: a condition around it differs between the units.
        NoPathError: no network connects the units.
    """
    context = Context("T.barrier")
    level = context.selected()
    check_reached(context, level)
    if level.kind == "unit":
        check_connected(context, level)
    return trace.call(BARRIER, level=level.name)
