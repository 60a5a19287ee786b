# SPDX-License-Identifier: MIT
"""Quotients and remainders in forms that TVM's simplifiers leave as they are: masks and truncated divisions.

The simplifiers know floor division, and rewrite sums and nests of it. Where they do that wrongly, a division in one of
these forms keeps its value.
"""

from __future__ import annotations

from tvm import tirx

__all__ = ["opaque_quotient", "opaque_remainder"]


def opaque_quotient(a: tirx.PrimExpr, divisor: int) -> tirx.PrimExpr:
    """`a // divisor` for a positive divisor; not by bits, of which bounds of threads are derived wrongly."""
    by = tirx.const(divisor, a.dtype)
    return tirx.truncdiv(a - _truncated_remainder(a, by), by)


def opaque_remainder(a: tirx.PrimExpr, divisor: int, *, is_positive: bool = False) -> tirx.PrimExpr:
    """`a % divisor` for a positive divisor; `is_positive`: `a` is known not to be negative."""
    by = tirx.const(divisor, a.dtype)
    if divisor & (divisor - 1) == 0:
        return tirx.bitwise_and(a, tirx.const(divisor - 1, a.dtype))
    return tirx.truncmod(a, by) if is_positive else _truncated_remainder(a, by)


def _truncated_remainder(a: tirx.PrimExpr, by: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.truncmod(tirx.truncmod(a, by) + by, by)
