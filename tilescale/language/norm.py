# SPDX-License-Identifier: MIT
"""The all-reduce at the end of a transformer block: followed by a residual and RMSNorm or LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tilelang_core import ir, trace
from tilescale.errors import ShapeError, UsageError
from tilescale.language.checks import check_alike
from tilescale.language.collective import check_whole_tensors, entered, region_of
from tilescale.language.context import Context, extents_of, here
from tilescale.program.model import bytes_of
from tilescale.program.norm import GROUP, PACKED_TYPE, packed_words
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
    sqrt(mean(out ** 2) + eps). Valid in a device phase. On GPUs one kernel does all of it, by short
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
            Or int32 of one dimension, for "group" with powers of two: their exponents (UE8M0), as DeepGEMM takes them.
            A word has four groups of a row. Words of adjacent rows are adjacent, and those of the next four groups
            begin at the next multiple of four words.
        scaling: the elements that share a scale.
        power_of_two: whether scales that are written are rounded up to powers of two, as E8M0 has them.

    Raises:
        ShapeError: tensors that do not fit x; a row that is longer.
        PhaseError: where programs execute.
        CollectiveNotReachedError, NoPathError, UsageError: as for `T.allreduce`; another type, impl or scaling; tensors
            that do not go together.
    """
    tiles = {"weight": weight, "normed": normed, "residual": residual, "quantized": quantized, "scales": scales}
    notes = {"offset": float(weight_offset), "scaling": scaling, "power": 1 if power_of_two else None}
    return _normalised(Context("T.allreduce_rms_norm"), x, out, tiles, eps, impl, notes)


def allreduce_layer_norm(
    x: Any,
    weight: Any,
    bias: Any,
    normed: Any,
    out: Any,
    residual: Any = None,
    eps: float = 1e-5,
    impl: str | None = None,
) -> ir.Call:
    """Sum x over the units and add the residual into `out`; `normed` gets the rows of `out` after LayerNorm.

    As `T.allreduce_rms_norm` with the norm (out - mean(out)) * weight / sqrt(var(out) + eps) + bias (arXiv:1607.06450),
    where the variance is the mean of the squared differences.

    Args:
        x, weight, normed, out, residual, impl: as there; `normed` is required.
        bias: (columns,), the same on all units; None for zeros.
        eps: is added to the variance.

    Raises:
        ShapeError, PhaseError, CollectiveNotReachedError, NoPathError, UsageError: as there.
    """
    tiles = {"weight": weight, "bias": bias, "normed": normed, "residual": residual}
    notes = {"offset": 0.0, "scaling": None, "power": None, "centered": 1}
    return _normalised(Context("T.allreduce_layer_norm"), x, out, tiles, eps, impl, notes)


def _normalised(
    context: Context, x: Any, out: Any, given: dict[str, Any], eps: float, impl: str | None, notes: dict[str, Any]
) -> ir.Call:
    check_whole_tensors(context)
    scaling = notes["scaling"]
    written = {"normed", "quantized", *(() if scaling == "tensor" else ("scales",))}
    source, target = region_of(context, x, "r"), region_of(context, out, "w")
    tiles = {
        name: region_of(context, tile, "w" if name in written else "r")
        for name, tile in given.items()
        if tile is not None
    }
    shape, dtype = extents_of(source), str(ir.region_parts(source)[0].dtype)
    _check_choices(context.name, tiles, dtype, impl, scaling)
    groups: Sequence[Any] = [*shape[:-1], -(-shape[-1] // GROUP)] if scaling == "group" else shape[:-1]
    scales: Sequence[Any] = [1] if scaling == "tensor" else groups
    wanted: dict[str, Sequence[Any]] = {"weight": shape[-1:], "bias": shape[-1:], "scales": scales}
    if "scales" in tiles and _type(tiles["scales"]) == PACKED_TYPE:
        wanted["scales"] = _packed_shape(context.name, extents_of(tiles["scales"]), shape, notes)
    for name, region in {"out": target, **tiles}.items():
        if name not in ("quantized", "scales"):
            check_alike(context, source, region, "a collective")
        _check_shape(context.name, name, region, wanted.get(name, shape))
    if (bytes_of(shape[-1:], dtype) or 0) > ROW_BYTES:
        raise ShapeError(
            f"{context.name} of rows of {shape[-1]} {dtype}",
            hint=f"a row has at most {ROW_BYTES} bytes: use T.allreduce(x, out=y), and normalise y in a program",
            where=here(),
        )
    numbers = {name: ir.FloatImm("float32", float(n)) for name, n in (("eps", eps), ("offset", notes.pop("offset")))}
    named: dict[str, Any] = {"level": entered(context, None).name, "op": "sum", "impl": impl, "norm": " ".join(tiles)}
    return trace.call(ALLREDUCE, source, target, *tiles.values(), **named, **numbers, **notes)


def _check_choices(what: str, tiles: dict[str, Any], dtype: str, impl: str | None, scaling: str | None) -> None:
    quantizes = "quantized" in tiles
    served = QUANTIZED if quantizes else DTYPES
    if dtype not in served:
        what += ", quantized," if quantizes else ""
        raise UsageError(f"{what} of {dtype}", hint=f"supported: {', '.join(served)}", where=here())
    if impl not in (None, *ALGORITHMS):
        raise UsageError(f"{what} by impl={impl!r}", hint=f"it has {', '.join(ALGORITHMS)}", where=here())
    if scaling not in (None, *SCALINGS):
        raise UsageError(f"scaling is {scaling!r}", hint=f"supported: {', '.join(SCALINGS)}", where=here())
    if not quantizes == ("scales" in tiles) == (scaling is not None) or not {"normed", "quantized"} & tiles.keys():
        raise UsageError(
            f"{what} has {', '.join(tiles)}, scaling={scaling!r}",
            hint="quantized, scales and scaling go together; without them it writes normed",
            where=here(),
        )
    for name, kinds in ("quantized", ("float8_e4m3",)), ("scales", ("float32", PACKED_TYPE)):
        found = _type(tiles[name]) if name in tiles else kinds[0]
        if not found.startswith(kinds):
            raise UsageError(f"{name} is {found}", hint=f"supported: {', '.join(kinds)}", where=here())


def _packed_shape(what: str, found: Sequence[Any], shape: Sequence[Any], notes: dict[str, Any]) -> Sequence[Any]:
    """The shape that packed scales must have; theirs, of one dimension, if rows are counted at launch."""
    if notes["scaling"] != "group" or not notes["power"]:
        raise UsageError(
            f"{what}: scales is {PACKED_TYPE}, scaling={notes['scaling']!r}, power_of_two={bool(notes['power'])}",
            hint='packed scales are of scaling="group" with power_of_two=True',
            where=here(),
        )
    sizes = ir.constants(shape)
    if sizes is None:
        return found if len(found) == 1 else ["words"]
    return [packed_words(math.prod(sizes[:-1]), sizes[-1])]


def _type(region: ir.Call) -> str:
    return str(ir.region_parts(region)[0].dtype)


def _check_shape(what: str, name: str, region: ir.Call, wanted: Sequence[Any]) -> None:
    if [str(n) for n in extents_of(region)] != [str(n) for n in wanted]:
        raise ShapeError(
            f"{what}: {name} has shape {tuple(extents_of(region))}",
            hint=f"of this x it has {tuple(wanted)}",
            where=here(),
        )
