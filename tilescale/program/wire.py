# SPDX-License-Identifier: MIT
"""Collectives that send floats in a narrower type than they have."""

from __future__ import annotations

WIRE = "float8_e4m3fn"
"""The type that there is. All floats of a line have one scale, a power of two."""

WIDE = ("float32", "float16", "bfloat16")
"""Types of the floats."""

BIAS, FRACTION, INFINITY = 127, 23, 0x7F800000
"""Of float32: that of the exponent, bits of the fraction, and the bits of infinity."""

LARGEST, LEAST = 0x43E00000, (BIAS - 117) << FRACTION
"""The bits of 448, the largest number of the type, and of 2^-117, the least that the largest magnitude of a line is
taken to be: its scale and one over it are normal numbers."""

UNIT_BYTES = 16
"""Parts of an all-reduce are multiples of them."""

LINE_THREADS, EIGHT = 8, 8
"""Threads that store a line. Each one stores two times eight floats; the last thread stores the scale in place of the
second ones."""


def line_floats(threads: int = LINE_THREADS) -> int:
    """Floats of a line, consecutive ones of a part."""
    return EIGHT * (2 * threads - 1)


def last_of(dtype: str) -> int:
    """The bits of 1.75 times a type's largest power of two: a larger magnitude, with its scale, could be rounded to the
    next power, which the type does not have."""
    return 0x47600000 if dtype == "float16" else 0x7F600000
