# SPDX-License-Identifier: MIT
"""The all-reduce at the end of a transformer block: followed by a residual and RMSNorm (arXiv:1910.07467)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang_core import ir, trace
from tilescale.errors import ShapeError, UsageError
from tilescale.language.checks import check_alike
from tilescale.language.collective import check_whole_tensors, entered, region_of
from tilescale.language.context import Context, extents_of, here
from tilescale.program.model import bytes_of
from tilescale.program.norm import GROUP
from tilescale.program.ops import ALLREDUCE

ROW_BYTES = 32 << 10
"""Largest number of bytes of a row: they stay in the registers of a cluster."""

ALGORITHMS = ("one_shot", "two_shot")
DTYPES = ("float32", "float16", "bfloat16")
QUANTIZED = ("float16", "bfloat16")
"""Types that may be quantized after the norm."""

SCALINGS = ("tensor", "row", "group")


def allreduce_rms_norm(
    x: Any,
    weight: Any,
    normed: Any,
    out: Any,
    residual: Any = None,
    eps: float = 1e-6,
    impl: str | None = None,
    *,
    weight_offset: float = 0.0,
    quantized: Any = None,
    scales: Any = None,
    scaling: str | None = None,
    power_of_two: bool = False,
) -> ir.Call:
    """Sum x over the units and add the residual into `out`; `normed` gets the rows of `out`, normalised.

    The sum is rounded, `out` is rounded, and the norm is that of the rounded rows: out * (weight + weight_offset) /
    sqrt(mean(out ** 2) + eps). Valid in a phase of units that own tensors. On GPUs one kernel does all of it, by short
    messages: intended for few rows.

    Args:
        x: (..., columns) of this unit, float32, float16 or bfloat16; a row has at most 32 KiB.
        weight: (columns,), the same on all units.
        normed, out: like x; `out` may be x or the residual itself. `normed` may be None where something is quantized.
        residual: like x, the same on all units; None for zeros.
        eps: is added to the mean of the squares.
        impl: "one_shot" or "two_shot"; left out, the machine model chooses.
        weight_offset: 1 for Gemma's norm.
        quantized: (..., columns), float8_e4m3fn: the normalised rows over their scales, of x of 16 bits. None for
            nothing.
        scales: float32. (1,), which is given, where `scaling` is "tensor"; (...,) for "row" and (..., columns / 128,
            rounded up) for "group", which are written: the largest magnitude of a row, or of 128 columns, over 448.
        scaling: the elements that share a scale.
        power_of_two: whether scales that are written are rounded up to powers of two, as E8M0 has them.

    Raises:
        ShapeError: tensors that do not fit x; a row that is longer.
        PhaseError: where programs execute.
        CollectiveNotReachedError, NoPathError, UsageError: as for `T.allreduce`; another type, impl or scaling; tensors
            that do not go together.
    """
    context = Context("T.allreduce_rms_norm")
    check_whole_tensors(context)
    access = {"weight": "r", "normed": "w", "residual": "r", "quantized": "w"}
    access["scales"] = "r" if scaling == "tensor" else "w"
    source, target = region_of(context, x, "r"), region_of(context, out, "w")
    given = {"weight": weight, "normed": normed, "residual": residual, "quantized": quantized, "scales": scales}
    tiles = {name: region_of(context, tile, access[name]) for name, tile in given.items() if tile is not None}
    shape, dtype = extents_of(source), str(ir.region_parts(source)[0].dtype)
    _check_choices(tiles, dtype, impl, scaling)
    groups = [*shape[:-1], -(-shape[-1] // GROUP)] if scaling == "group" else shape[:-1]
    wanted = {"weight": shape[-1:], "scales": [1] if scaling == "tensor" else groups}
    for name, region in {"out": target, **tiles}.items():
        if name not in ("quantized", "scales"):
            check_alike(context, source, region, "a collective")
        _check_shape(name, region, wanted.get(name, shape))
    if (bytes_of(shape[-1:], dtype) or 0) > ROW_BYTES:
        raise ShapeError(
            f"T.allreduce_rms_norm of rows of {shape[-1]} {dtype}",
            hint=f"a row has at most {ROW_BYTES} bytes: use T.allreduce(x, out=y), and normalise y in a program",
            where=here(),
        )
    level = entered(context, None)
    numbers = {"eps": ir.FloatImm("float32", float(eps)), "offset": ir.FloatImm("float32", float(weight_offset))}
    notes = {"level": level.name, "op": "sum", "impl": impl, "norm": " ".join(tiles), **numbers}
    notes.update(scaling=scaling, power=1 if power_of_two else None)
    return trace.call(ALLREDUCE, source, target, *tiles.values(), **notes)


def _check_choices(tiles: dict[str, Any], dtype: str, impl: str | None, scaling: str | None) -> None:
    """Raise UsageError for unsupported choices."""
    quantizes = "quantized" in tiles
    served = QUANTIZED if quantizes else DTYPES
    if dtype not in served:
        what = "T.allreduce_rms_norm, quantized," if quantizes else "T.allreduce_rms_norm"
        raise UsageError(f"{what} of {dtype}", hint=f"supported: {', '.join(served)}", where=here())
    if impl not in (None, *ALGORITHMS):
        raise UsageError(f"T.allreduce_rms_norm by impl={impl!r}", hint=f"it has {', '.join(ALGORITHMS)}", where=here())
    if scaling not in (None, *SCALINGS):
        raise UsageError(f"scaling is {scaling!r}", hint=f"supported: {', '.join(SCALINGS)}", where=here())
    if not quantizes == ("scales" in tiles) == (scaling is not None) or not {"normed", "quantized"} & tiles.keys():
        raise UsageError(
            f"T.allreduce_rms_norm has {', '.join(tiles)}, scaling={scaling!r}",
            hint="quantized, scales and scaling go together; without them it writes normed",
            where=here(),
        )
    for name, kind in ("quantized", "float8_e4m3"), ("scales", "float32"):
        found = str(ir.region_parts(tiles[name])[0].dtype) if name in tiles else kind
        if not found.startswith(kind):
            raise UsageError(f"{name} is {found}", hint=f"supported: {kind}", where=here())


def _check_shape(name: str, region: ir.Call, wanted: Sequence[Any]) -> None:
    if [str(n) for n in extents_of(region)] != [str(n) for n in wanted]:
        raise ShapeError(
            f"T.allreduce_rms_norm: {name} has shape {tuple(extents_of(region))}",
            hint=f"of this x it has {tuple(wanted)}",
            where=here(),
        )
