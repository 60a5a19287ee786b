# SPDX-License-Identifier: MIT
"""The all-to-all of unequal parts: a number of rows for each pair of ranks (MPI_Alltoallv)."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from tilelang_core import ir, trace
from tilescale.errors import ShapeError, UsageError
from tilescale.hda import Level
from tilescale.language.collective import check_whole_tensors, entered, region_of
from tilescale.language.context import Context, extents_of, here
from tilescale.program.ops import ALL_TO_ALL_V, COUNTS


def all_to_all_v(src: Any, dst: Any, sent: Any, received: Any = None, impl: str | None = None) -> ir.Call:
    """The first sent[0] rows of src go to rank 0, the next sent[1] rows to rank 1, and so on; received rows are in dst.

    Rows from rank 0 are the first ones of dst, those from rank 1 follow; rows of dst after the last one are unchanged.
    Valid in a device phase. The counts are device-side: the host does not read them, so replays of a CUDA graph may use
    different counts (except with "nccl").

    Args:
        src, dst: tensors (rows, ...) of one type, equal but for their row count, which may differ between ranks.
        sent: number of rows for each rank: int32 (size,) in device memory, with this rank's counts; or constants of the
            program: a list of `size` counts for all ranks, or one such list for each rank.
        received: int32 (size,) in device memory, which gets the number of rows from each rank.
        impl: an algorithm that docs/collectives.md has for it, e.g. "direct" or "nccl".

    Raises:
        ShapeError: the tensors do not fit each other; or the numbers do not fit the units, or the rows that there are.
        PhaseError: where programs execute.
        CollectiveNotReachedError, NoPathError, UsageError: as for `T.all_to_all`; numbers that are not int32 in device
            memory.
        OutOfBoundsError: of the call: `sent` names more rows than src has, or a number below zero; or dst has fewer
            rows than are received. Nothing is written beyond it.
    """
    context = Context("T.all_to_all_v")
    source, target = region_of(context, src, "r"), region_of(context, dst, "w")
    check_whole_tensors(context)
    level = entered(context, impl)
    _check_rows(source, target)
    counts = _counts(context, level, sent, source, target)
    more = [] if received is None else [_numbers(context, level, "received", received, "w")]
    return trace.call(ALL_TO_ALL_V, source, target, counts, *more, level=level.name, impl=impl)


def _check_rows(source: ir.Call, target: ir.Call) -> None:
    (a, *rest), (b, *others) = extents_of(source), extents_of(target)
    types = [ir.region_parts(region)[0].dtype for region in (source, target)]
    if [str(n) for n in rest] != [str(n) for n in others] or types[0] != types[1]:
        raise ShapeError(
            f"T.all_to_all_v from ({a}, ...) of {rest} {types[0]} to ({b}, ...) of {others} {types[1]}",
            hint="both have rows of one shape and type",
            where=here(),
        )


def _counts(context: Context, level: Level, sent: Any, source: ir.Call, target: ir.Call) -> ir.Call:
    """Normalize `sent`: numbers of rows to each rank, in a tensor, or as constants of all ranks."""
    if isinstance(sent, ir.Buffer | ir.BufferRegion):
        return _numbers(context, level, "sent", sent, "r")
    size = context.extent(level)
    table = _table(sent, size) if isinstance(size, int) else None
    if table is None:
        raise ShapeError(
            f"T.all_to_all_v(sent={sent!r}) over {size} units",
            hint="sent is an int32 tensor (size,), a list of `size` numbers from 0 on, or such a list for each rank",
            where=here(),
        )
    for what, region, sums in (
        ("src", source, [sum(row) for row in table]),
        ("dst", target, [sum(column) for column in zip(*table, strict=True)]),
    ):
        rows = extents_of(region)[0]
        most = max(range(len(sums)), key=sums.__getitem__)
        if isinstance(rows, int) and sums[most] > rows:
            verb = "sends" if what == "src" else "gets"
            raise ShapeError(
                f"T.all_to_all_v: rank {most} {verb} {sums[most]} rows, {what} has {rows}",
                hint=f"give {what} as many rows as the numbers add up to",
                where=here(),
            )
    return trace.call(COUNTS, *(n for row in table for n in row))


def _table(sent: Any, size: int) -> list[list[int]] | None:
    """Numbers for each rank; None if there are not as many, or others than from 0 on."""
    if not isinstance(sent, Sequence) or isinstance(sent, str) or len(sent) != size:
        return None
    rows = [list(row) for row in sent] if all(isinstance(row, Sequence) for row in sent) else [list(sent)] * size
    right = all(len(row) == size and all(isinstance(n, Integral) and int(n) >= 0 for n in row) for row in rows)
    return [[int(n) for n in row] for row in rows] if right else None


def _numbers(context: Context, level: Level, name: str, given: Any, access: str) -> ir.Call:
    """Check a tensor with one int32 number for each rank; return its region. Raises UsageError, ShapeError."""
    region = region_of(context, given, access)
    buffer, size, found = ir.region_parts(region)[0], context.extent(level), extents_of(region)
    if buffer.scope() != "global" or buffer.dtype != "int32":
        raise UsageError(
            f"T.all_to_all_v({name}={buffer.name}): {buffer.dtype}, in {buffer.scope()}",
            hint=f"numbers of rows are int32 in device memory: {name} is a parameter or "
            'T.alloc((size,), "int32", level="l2")',
            where=here(),
        )
    if len(found) != 1 or isinstance(found[0], int) and isinstance(size, int) and found[0] != size:
        raise ShapeError(
            f"T.all_to_all_v({name}={buffer.name}): {tuple(found)} numbers for {size} ranks",
            hint=f"{name} has one number for each rank: ({size},)",
            where=here(),
        )
    return region
