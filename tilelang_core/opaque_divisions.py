# SPDX-License-Identifier: MIT
"""Quotients and remainders in forms that TVM's simplifiers leave as they are: truncated divisions and masks.

The simplifiers know floor division, and rewrite sums and nests of it. Where they do that wrongly, a division in such a
form keeps its value. (From shifts, and quotients by masks, TileLang derives wrong bounds of threads.)
"""

from __future__ import annotations

from tvm import tirx
from tvm.arith import Analyzer

__all__ = ["opaque_quotient", "opaque_remainder", "shift"]

_FAR = 1 << 20
"""Numbers below its negative are not moved: they could leave int32."""


def shift(a: tirx.PrimExpr, divisor: int, analyzer: Analyzer) -> int | None:
    """The least number of divisors that make `a` non-negative when they are added; None if no bound is known."""
    least = analyzer.const_int_bound(a).min_value
    return max(-(least // divisor), 0) if least > -_FAR else None


def opaque_quotient(a: tirx.PrimExpr, divisor: int, moved: int | None) -> tirx.PrimExpr:
    """`a // divisor` for a positive divisor; `moved` is `shift` of `a`."""
    by = tirx.const(divisor, a.dtype)
    if moved is None:
        return tirx.truncdiv(a - _truncated_remainder(a, by), by)
    return tirx.truncdiv(a + moved * divisor, by) - moved if moved else tirx.truncdiv(a, by)


def opaque_remainder(a: tirx.PrimExpr, divisor: int, moved: int | None) -> tirx.PrimExpr:
    """`a % divisor`, likewise."""
    by = tirx.const(divisor, a.dtype)
    if moved is None:
        is_mask = divisor & (divisor - 1) == 0
        return tirx.bitwise_and(a, tirx.const(divisor - 1, a.dtype)) if is_mask else _truncated_remainder(a, by)
    return tirx.truncmod(a + moved * divisor, by) if moved else tirx.truncmod(a, by)


def _truncated_remainder(a: tirx.PrimExpr, by: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.truncmod(tirx.truncmod(a, by) + by, by)
