# SPDX-License-Identifier: MIT
"""Operations that a unit that owns tensors starts on its copy queue: checks of `T.copy(signal=)`,
`T.all_gather(signal=)` and `T.all_to_all(signal=)`."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from tilelang_core import ir, trace
from tilescale.errors import NoPathError, PhaseError, ShapeError, UsageError, one
from tilescale.hda import Level, Network
from tilescale.hda.units import format_count
from tilescale.language.checks import check_alike, expanded
from tilescale.language.context import Context, extents_of, here, plain
from tilescale.language.signal import check_comparison, flag_region, flag_value, flags_region
from tilescale.program.asynchronous import PartLayout, owns_a_queue, part_of
from tilescale.program.ops import RANK


def check_queue(context: Context, network: Network | None, impl: str | None) -> None:
    """Check that an engine executes a started operation. Raises NoPathError: no mechanism of the network moves data
    while no program runs."""
    if network is None or impl is not None or any(m.started_by == "host" and m.put for m in network.mechanisms):
        return
    offered = ", ".join(m.name for m in network.mechanisms)
    raise NoPathError(
        f"{context.name}(signal=) of {one(context.executing.name)} runs concurrently with its programs, and "
        f"{network.name!r} of {context.machine.name!r} offers only what programs start: {offered}",
        hint=f"copy from inside T.Scale({context.program.name!r}), or name one of these with impl=",
        where=here(),
    )


def after_of(
    context: Context, after: Any, impl: str | None, network: Network | None
) -> tuple[list[ir.PrimExpr], str]:
    """Parse `after=` into [flag, value] and the comparison. Raises UsageError: not (flag, comparison, value); not in a
    device phase; a mechanism that programs start."""
    if not owns_a_queue(context.executing, context.machine):
        raise UsageError(
            f"T.copy(after=) where {one(context.executing.name)} executes: only copies that a "
            f"{context.machine.tensor_level.name} starts wait for a flag themselves",
            hint="write T.wait(flag, compare, value) before the copy",
            where=here(),
        )
    mechanism = network.mechanism(impl) if network is not None and impl is not None else None
    if mechanism is not None and mechanism.started_by != "host":
        raise UsageError(
            f"T.copy(after=, impl={impl!r}): {impl} is started by programs, which would wait in each other's place",
            hint="leave impl out",
            where=here(),
        )
    if not isinstance(after, tuple | list) or len(after) != 3:
        raise UsageError(
            f"T.copy(after={after!r}): what a copy waits for is a flag, a comparison and a value",
            hint='write after=(flags[i], ">=", value)',
            where=here(),
        )
    flag, compare, value = after
    return [flag_region(flag), flag_value(value)], check_comparison("after=(flag, {}, value)", compare)


def check_fixed(context: Context, regions: Sequence[ir.Call], values: Sequence[Any] = ()) -> None:
    """Raise UsageError for an operand that is read from memory: operands of a queue are fixed when it is started."""
    for region in regions:
        _, begins, extents = ir.region_parts(region)
        values = [*values, *begins, *extents]
    for value in values:
        if isinstance(value, ir.PrimExpr) and not ir.is_pure(value):
            raise UsageError(
                f"{context.name}(signal=): {value} is read from memory, and a copy that is only started runs later",
                hint="read it before, into a name of its own, and use that",
                where=here(),
            )


# -- collectives -------------------------------------------------------------------------------------------------------


def check_parts(context: Context, level: Level, source: ir.Call, target: ir.Call, dim: int, chunk: Any) -> PartLayout:
    """Check the tensors of a started collective, and return the layout of its parts.

    Raises:
        PhaseError: not in a device phase.
        ShapeError: parts that do not make the whole, or a dimension that they do not have.
        UsageError: a chunk that is not a positive number, different types, a result that overlaps the source.
    """
    if not owns_a_queue(context.executing, context.machine):
        owner = context.machine.tensor_level.name
        raise PhaseError(
            f"{context.name}(signal=) where {one(context.executing.name)} executes: "
            f"{one(owner)} exchanges whole tensors",
            hint=f"write it inside T.Scale({owner!r}), before T.Scale({context.program.name!r})",
            where=here(),
        )
    if chunk is not None and not (isinstance(chunk, Integral) and int(chunk) >= 1):
        raise UsageError(
            f"{context.name}(chunk={chunk!r}): a chunk is a positive number of rows",
            hint="leave chunk out, and there is one flag for each rank",
            where=here(),
        )
    check_fixed(context, [source, target])
    check_alike(context, source, target, "a copy engine")
    part, whole = extents_of(source), extents_of(target)
    axis = dim + len(whole) if dim < 0 else dim
    if not 0 <= axis < len(part):
        raise ShapeError(
            f"{context.name}(signal=, dim={dim}) of a tensor with {len(part)} dimensions",
            hint="choose a dimension that the tensor has",
            where=here(),
        )
    check = _check_gather if context.name == "T.all_gather" else _check_exchange
    return check(context, level, source, target, axis)


def _check_gather(context: Context, level: Level, source: ir.Call, target: ir.Call, axis: int) -> PartLayout:
    part, whole = extents_of(source), extents_of(target)
    parts, size = PartLayout.of(part, whole, axis), context.extent(level)
    wanted = parts.whole(part, size)
    if not _may_be(whole, wanted):
        raise ShapeError(
            f"T.all_gather(signal=) over {format_count(size, 'unit')}: the whole is {tuple(whole)}, a part "
            f"{tuple(part)}, along dimension {axis}",
            hint=f"parts lie side by side along dimension {parts.lead}: the whole of such parts is "
            f"{tuple(map(plain, wanted))}",
            where=here(),
        )
    _check_own(level, parts, source, target)
    return parts


def _check_exchange(context: Context, level: Level, source: ir.Call, target: ir.Call, axis: int) -> PartLayout:
    a, b = extents_of(source), extents_of(target)
    size = context.extent(level)
    left = ir.constant(ir.int_node(a[axis]) % ir.int_node(size))
    if not _may_be(a, b) or left not in (0, None):
        raise ShapeError(
            f"T.all_to_all(signal=) over {format_count(size, 'unit')} from {tuple(a)} to {tuple(b)} along "
            f"dimension {axis}",
            hint=f"parts lie side by side along dimension {axis}, a multiple of {size}, and both have the same shape",
            where=here(),
        )
    if ir.region_parts(source)[0].data == ir.region_parts(target)[0].data:
        raise UsageError(
            f"T.all_to_all(signal=) of {ir.region_parts(source)[0].name!r} in its own place: what the others send "
            "overwrites what is not sent yet",
            hint="give the result a tensor of its own",
            where=here(),
        )
    return PartLayout.of(part_of(a, size, axis), a, axis)


def _check_own(level: Level, parts: PartLayout, source: ir.Call, target: ir.Call) -> None:
    """Raise UsageError if a part of the target itself is gathered that is not this unit's part."""
    (buffer, mine, part), (other, whole, _) = ir.region_parts(source), ir.region_parts(target)
    if buffer.data != other.data:
        return
    rank = trace.call(RANK, level.name, dtype="int32")
    offsets = parts.in_whole(rank, part[parts.rows], 0)
    wanted = [b + (offsets[i] if i < len(offsets) else 0) for i, b in enumerate(whole)]
    if any(ir.constant(expanded(a - b)) != 0 for a, b in zip(mine, wanted, strict=True)):
        raise UsageError(
            f"T.all_gather of a part of {buffer.name!r} into {buffer.name!r} itself, where it is not this unit's own",
            hint=f"in place the part lies where the result has it: {_own(buffer.name, parts, part)}",
            where=here(),
        )


def _own(name: str, parts: PartLayout, part: list[Any]) -> str:
    rows = part[parts.rows]
    joined = ["rank", f"0:{rows}"] if parts.slots else [f"rank * {rows} : (rank + 1) * {rows}"]
    return f"{name}[{', '.join([*[':'] * parts.lead, *joined, *[':'] * (len(part) - parts.rows - 1)])}]"


def flags_of(context: Context, level: Level, flags: Any, rows: Any, chunk: int | None) -> ir.Call:
    """The flags of a started collective as an argument: a tensor, or its slice at an index, `flags[i, ...]`.

    Raises:
        UsageError: not integers in device memory, or an index that is read from memory.
        ShapeError: not (size, chunks).
    """
    if not isinstance(flags, ir.Buffer | ir.BufferRegion):
        raise UsageError(
            f"{context.name}(signal={flags}): its flags are a tensor, one for each chunk of each rank",
            hint="flags = T.alloc_flags((size, chunks))",
            where=here(),
        )
    region = flags_region(flags[...] if isinstance(flags, ir.Buffer) else flags)
    check_fixed(context, [region])
    size, found = context.extent(level), extents_of(region)
    chunks = 1 if chunk is None else plain((rows + chunk - 1) // chunk)
    if not _may_be(found, [*[1] * (len(found) - 2), size, chunks]):
        name = ir.region_parts(region)[0].name
        of = f"{rows} rows in chunks of {chunk}" if chunk is not None else "whole parts"
        raise ShapeError(
            f"{context.name}(signal={name}): the flags are {tuple(found)}, one for each chunk of each rank are "
            f"({size}, {chunks}): {format_count(size, 'unit')}, {of}",
            hint=f"flags = T.alloc_flags(({size}, {chunks}))",
            where=here(),
        )
    return region


def _may_be(found: list[Any], wanted: list[Any]) -> bool:
    """Whether shapes agree, as far as they are known."""
    known = ((ir.constant(a), ir.constant(b)) for a, b in zip(found, wanted, strict=False))
    return len(found) == len(wanted) and all(None in pair or pair[0] == pair[1] for pair in known)
