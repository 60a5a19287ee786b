# SPDX-License-Identifier: MIT
"""Quantities with units: text of a machine description to SI numbers, and numbers back to text.

Sizes are exact integers of bytes; everything else is a float in bytes/s, s, Hz or operations/s. `B` is a byte and `b`
a bit, `K`/`M`/`G` are powers of ten and `Ki`/`Mi`/`Gi` powers of two. Quantities per clock ("128 B/clock",
"4096 op/clock", "33 clock") need the clock they count.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

EXAMPLES = {
    "size": '"228 KiB"',
    "bandwidth": '"900 GB/s"',
    "time": '"1.2 us"',
    "clock": '"1.98 GHz"',
    "rate": '"989 TFLOP/s"',
}
"""The kinds of quantity, each with an example that `parse` accepts."""

MOST_BYTES = 1 << 63
"""Limit of bytes; larger numbers are mistakes, and not floats."""

_DIGITS = 400

_DTYPE = re.compile(
    r"bfloat16|tfloat32|float(16|32|64)|float8_(e4m3|e5m2|e3m4|e8m0)(fn|fnuz|fnu)?|float6_(e2m3|e3m2)(fn)?"
    r"|float4_e2m1(fn)?|u?int(1|2|4|8|16|32|64)|bool"
)
DTYPES = "float16, bfloat16, tfloat32, float8_e4m3, float4_e2m1, int8, ..."
"""Data types that a description may name, for messages."""

_DECIMAL = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}
_SMALL = {"": 0, "m": -3, "u": -6, "µ": -6, "n": -9, "p": -12}
_PREFIX = "(?P<prefix>[kKMGTPE]|[KMGTP]i|)"
_CLOCK = "(clock|clk|cycles?)"

_NUMBER = re.compile(r"\s*(?P<number>[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?)\s*(?P<unit>\S.*?)?\s*")
_UNITS = {
    "size": re.compile(_PREFIX + "B"),
    "bandwidth": re.compile(_PREFIX + f"(?P<what>B|b|bit)/(s|(?P<clock>{_CLOCK}))"),
    "time": re.compile(f"(?P<small>[munpµ]?)s|(?P<clock>{_CLOCK}s?)"),
    "clock": re.compile(_PREFIX + "Hz"),
    "rate": re.compile(_PREFIX + f"((FL)?OPS|(op|(FL)?OP)/(s|(?P<clock>{_CLOCK})))"),
}


def parse(text: object, kind: str, clock: float | None = None) -> float | int:
    """The value of `text` in SI units; an int for "size". Raises ValueError: not a number with a unit of that kind, not
    a whole number of bytes, a rate of zero, or a quantity per clock without a clock.

    Args:
        text: a number and its unit, e.g. "228 KiB".
        kind: a key of `EXAMPLES`.
        clock: Hz, for quantities per clock; None where there is no clock to count.
    """
    expected = f"a {kind} with its unit such as {EXAMPLES[kind]}"
    found = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    unit = _UNITS[kind].fullmatch(found["unit"] or "") if found else None
    if found is None or unit is None:
        raise ValueError(f"expected {expected}")
    if len(found["number"]) > _DIGITS:
        raise ValueError(f"expected {expected}, of at most {_DIGITS} digits")
    value = Fraction(found["number"]) * _scale(unit)
    parts = unit.groupdict()
    if parts.get("clock"):
        if clock is None:
            raise ValueError(f"expected {expected}: a quantity per clock needs a `clock` on the program level")
        ticks = Fraction(clock)
        value = value / ticks if kind == "time" else value * ticks
    if kind == "size":
        if value.denominator != 1:
            raise ValueError(f"expected {expected} that is a whole number of bytes")
        if value >= MOST_BYTES:
            raise ValueError(f"expected {expected}, below 2**63 bytes")
        return int(value)
    if not value and kind != "time":
        raise ValueError(f"expected {expected} above 0")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"expected {expected}, below 1e308") from None


def is_dtype(name: str) -> bool:
    """Whether a machine may have a rate for a data type of this name."""
    return _DTYPE.fullmatch(name) is not None


def _scale(unit: re.Match[str]) -> Fraction:
    parts = unit.groupdict()
    bits = Fraction(1, 8) if parts.get("what") in ("b", "bit") else Fraction(1)
    if "small" in parts:
        return Fraction(1, 10 ** -_SMALL[parts["small"] or ""])
    prefix = parts["prefix"]
    return bits * (1 << _BINARY[prefix] if prefix in _BINARY else 10 ** _DECIMAL[prefix])


def format_bytes(size: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1: "228 KiB", "140.4 GiB"."""
    for prefix, power in reversed(_BINARY.items()):
        if size >= 2**power:
            return f"{_digits(size / 2**power)} {prefix}B"
    return f"{_digits(size)} B"


def format_bandwidth(bandwidth: float) -> str:
    """Bytes per second in the largest decimal unit that leaves at least 1: "450 GB/s"."""
    return _decimal(bandwidth, "B/s")


def format_count(count: object, noun: str) -> str:
    """A number of things, or an expression for one: "1 unit", "3 units", "n units"."""
    return f"{count} {noun}{'' if str(count) == '1' else 's'}"


def format_rate(rate: float) -> str:
    """Operations per second: "989.4 TOP/s"."""
    return _decimal(rate, "OP/s")


def format_time(seconds: float) -> str:
    """Seconds in the unit that leaves at least 1: "1.2 us"."""
    for prefix, power in _SMALL.items():
        if prefix != "µ" and seconds >= 10.0**power * (1 - 1e-12):
            return f"{_digits(seconds / 10.0**power)} {prefix}s"
    return f"{_digits(seconds * 1e12)} ps" if seconds else "0 s"


def _decimal(value: float, unit: str) -> str:
    if value == float("inf"):
        return f"unlimited {unit}"
    prefixes: list[tuple[str, int]] = [(p, n) for p, n in _DECIMAL.items() if p != "K"]
    # 999.99 would print as 1000 of the smaller unit.
    fits: Callable[[int], bool] = lambda power: value >= 10.0**power * 0.99995  # noqa: E731
    prefix, power = next(((p, n) for p, n in reversed(prefixes) if fits(n)), ("", 0))
    return f"{_digits(value / 10.0**power)} {prefix}{unit}"


def _digits(value: float) -> str:
    """Four significant digits, no trailing zeros, no exponent below ten thousand."""
    return f"{value:.4g}" if value < 9999.5 else f"{value:.0f}"
