# SPDX-License-Identifier: MIT
"""Collectives whose floats travel as float8, in lines with a scale each: their results for all units."""

from __future__ import annotations

import numpy as np

from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.numerics import numpy_dtype
from tilescale.program.wire import (
    BIAS,
    FRACTION,
    INFINITY,
    LARGEST,
    LEAST,
    UNIT_BYTES,
    WIRE,
    last_of,
    line_floats,
)

FLOAT8 = numpy_dtype(WIRE)


def all_gather(given: list[np.ndarray], axis: int) -> list[np.ndarray]:
    """All tiles, rounded, joined along an axis."""
    whole = np.concatenate([_sent(x).astype(x.dtype) for x in given], axis)
    return [whole] * len(given)


def reduce_scatter(given: list[np.ndarray], axis: int) -> list[np.ndarray]:
    """Each unit's part of the sum, to which the others' contributions are rounded."""
    parts = [np.split(x, len(given), axis) for x in given]
    columns = enumerate(zip(*parts, strict=True))
    return [numerics.convert(_sum(list(column), unit), given[0].dtype) for unit, column in columns]


def allreduce(given: list[np.ndarray], axis: int) -> list[np.ndarray]:
    """The sum, of parts that are rounded again."""
    dtype, flat = given[0].dtype, [x.reshape(-1) for x in given]
    units = -(-given[0].nbytes // UNIT_BYTES)
    step = -(-units // len(given)) * UNIT_BYTES // dtype.itemsize
    sums = [
        _sent(numerics.convert(_sum([x[unit * step : (unit + 1) * step] for x in flat], unit), dtype))
        for unit in range(len(given))
    ]
    return [numerics.convert(np.concatenate(sums), dtype).reshape(given[0].shape)] * len(given)


def _sum(parts: list[np.ndarray], unit: int) -> np.ndarray:
    """A unit's sum in float32, in the order of units; its own part is exact."""
    total = np.zeros(parts[0].shape, np.float32)
    for other, part in enumerate(parts):
        total = total + (part.astype(np.float32) if other == unit else _sent(part))
    return total


def _sent(part: np.ndarray) -> np.ndarray:
    """A part as other units receive it, in float32."""
    wide, flat = line_floats(), part.reshape(-1).astype(np.float32)
    lines = np.pad(flat, (0, -flat.size % wide)).reshape(-1, wide)
    top = np.abs(lines).view(np.int32).max(1, initial=0, keepdims=True)
    exponent = ((np.maximum(top, LEAST) - LARGEST - 1) >> FRACTION) + 1
    scale, inverse = (((BIAS + sign * exponent) << FRACTION).astype(np.int32).view(np.float32) for sign in (1, -1))
    end = np.where((top > last_of(part.dtype.name)) & (top < INFINITY), scale, np.float32(np.inf)) * np.float32(240)
    q = numerics.convert(np.clip(lines, -end, end) * inverse, FLOAT8).astype(np.float32)
    return (q * np.where(top < INFINITY, scale, np.float32(np.nan))).reshape(-1)[: flat.size].reshape(part.shape)
