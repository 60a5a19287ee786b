# SPDX-License-Identifier: MIT
"""The all-reduce that ends a block of a transformer: with a residual and RMSNorm (arXiv:1910.07467) behind it."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir, trace
from tilescale.errors import ShapeError, UsageError
from tilescale.language.checks import check_alike
from tilescale.language.collective import check_whole_tensors, entered, region_of
from tilescale.language.context import Context, extents_of, here
from tilescale.program.model import bytes_of
from tilescale.program.ops import ALLREDUCE

ROW_BYTES = 32 << 10
"""Bytes of a row at most: so many stay in the registers of a block."""

ALGORITHMS = ("one_shot", "two_shot")
DTYPES = ("float32", "float16", "bfloat16")


def allreduce_rms_norm(
    x: Any, weight: Any, normed: Any, out: Any, residual: Any = None, eps: float = 1e-6, impl: str | None = None
) -> ir.Call:
    """Sum x over the units and add the residual into `out`; `normed` gets the rows of `out`, normalised.

    The sum is rounded, `out` is rounded, and the norm is that of the rounded rows: out * weight / sqrt(mean(out ** 2) +
    eps). It stands in a phase of units that own tensors. On GPUs one kernel does all of it, by short messages: it is
    for few rows.

    Args:
        x: (..., columns) of this unit, float32, float16 or bfloat16; a row has at most 32 KiB.
        weight: (columns,), the same on all units.
        normed, out: like x; `out` may be x or the residual itself.
        residual: like x, the same on all units; None for zeros.
        eps: is added to the mean of the squares.
        impl: "one_shot" or "two_shot"; left out, the machine model chooses.

    Raises:
        ShapeError: tensors that do not fit x; a row that is longer.
        PhaseError: where programs execute.
        CollectiveNotReachedError, NoPathError, UsageError: as for `T.allreduce`; another type or impl.
    """
    context = Context("T.allreduce_rms_norm")
    check_whole_tensors(context)
    like = [region_of(context, tile, access) for tile, access in ((x, "r"), (out, "w"), (normed, "w"))]
    more = [] if residual is None else [region_of(context, residual, "r")]
    scale = region_of(context, weight, "r")
    shape, dtype = extents_of(like[0]), str(ir.region_parts(like[0])[0].dtype)
    if dtype not in DTYPES:
        raise UsageError(f"T.allreduce_rms_norm of {dtype}", hint=f"supported: {', '.join(DTYPES)}", where=here())
    if impl not in (None, *ALGORITHMS):
        raise UsageError(f"T.allreduce_rms_norm by impl={impl!r}", hint=f"it has {', '.join(ALGORITHMS)}", where=here())
    for region in (*like[1:], *more, scale):
        check_alike(context, like[0], region, "a collective")
    for region, wanted in (*((r, shape) for r in (*like[1:], *more)), (scale, shape[-1:])):
        if [str(n) for n in extents_of(region)] != [str(n) for n in wanted]:
            raise ShapeError(
                f"T.allreduce_rms_norm of {tuple(shape)} with {tuple(extents_of(region))}",
                hint="out, normed and the residual have the shape of x, the weight has that of a row",
                where=here(),
            )
    if (bytes_of(shape[-1:], dtype) or 0) > ROW_BYTES:
        raise ShapeError(
            f"T.allreduce_rms_norm of rows of {shape[-1]} {dtype}",
            hint=f"a row has at most {ROW_BYTES} bytes: use T.allreduce(x, out=y), and normalise y in a program",
            where=here(),
        )
    source, target, rows = like
    level, number = entered(context, None), ir.FloatImm("float32", float(eps))
    notes = {"level": level.name, "op": "sum", "eps": number, "impl": impl}
    return trace.call(ALLREDUCE, source, target, scale, rows, *more, **notes)
