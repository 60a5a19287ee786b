# SPDX-License-Identifier: MIT
"""Statements on single elements, counted: arithmetic by unit and data type, bytes by kind of memory.

A multiply-add is two operations and one issue slot, so any other operation, which takes a slot of its own, counts as
two; a multiplication that an addition absorbs counts zero. Results of special functions count one each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilelang_core import ir
from tilescale.backends.emulator.numerics import element_type, lanes_of, numpy_dtype

_SUMS = (ir.Add, ir.Sub)
_ARITHMETIC = (
    ir.Add, ir.Sub, ir.Mul, ir.Div, ir.Mod, ir.FloorDiv, ir.FloorMod, ir.Min, ir.Max, ir.EQ, ir.NE, ir.LT, ir.LE,
    ir.GT, ir.GE, ir.And, ir.Or, ir.Not, ir.Select, ir.Cast,
)  # fmt: skip
_SPECIAL = (
    "exp", "exp2", "exp10", "log", "log2", "log10", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh", "sigmoid", "erf",
    "pow", "rcp", "atan", "sinh", "cosh",
)  # fmt: skip


@dataclass(frozen=True)
class Access:
    """A tensor in device memory that a statement reads or writes: `nbytes` of one element, over some of the axes."""

    buffer: ir.Buffer
    writes: bool
    axes: tuple[int, ...]
    times: int
    nbytes: int


@dataclass
class Tally:
    """The work of one point of an iteration space.

    Attributes:
        operations: (unit, data type) -> their number.
        shared: bytes to and from the memory that a program's threads share.
        accesses: accesses to device memory.
        stores: the written buffers.
    """

    operations: dict[tuple[str, str], int] = field(default_factory=dict)
    shared: int = 0
    accesses: list[Access] = field(default_factory=list)
    stores: list[ir.Buffer] = field(default_factory=list)

    def count(self, unit: str, dtype: str, times: int) -> None:
        """Count operations of a unit."""
        key = unit, element_type(dtype)
        self.operations[key] = self.operations.get(key, 0) + times * lanes_of(dtype)


def tally(stmt: ir.Stmt, axes: Mapping[ir.Var, int]) -> Tally:
    """Count a statement inside a nest of parallel loops, whose variables have the axes `axes`; serial loops inside it
    count by their trip count."""
    result = Tally()
    _statement(result, stmt, axes, 1)
    return result


def _statement(into: Tally, stmt: ir.Stmt, axes: Mapping[ir.Var, int], times: int) -> None:
    if isinstance(stmt, ir.For):
        _many(into, ir.children(stmt), axes, times * (ir.constant(stmt.extent) or 1))
        return
    if isinstance(stmt, ir.BufferStore):
        _access(into, stmt.buffer, stmt.indices, True, axes, times)
        into.stores.append(stmt.buffer)
        _value(into, stmt.value, axes, times)
    elif isinstance(stmt, ir.Bind | ir.Evaluate):
        _value(into, stmt.value, axes, times)
    elif isinstance(stmt, ir.IfThenElse):
        _value(into, stmt.condition, axes, times)
    if isinstance(stmt, ir.Stmt):
        _many(into, ir.children(stmt), axes, times)


def _many(into: Tally, statements: Iterable[ir.Stmt], axes: Mapping[ir.Var, int], times: int) -> None:
    for stmt in statements:
        _statement(into, stmt, axes, times)


def _value(into: Tally, expr: ir.PrimExpr, axes: Mapping[ir.Var, int], times: int, absorbed: bool = False) -> None:
    if isinstance(expr, ir.BufferLoad):
        _access(into, expr.buffer, expr.indices, False, axes, times)
        return
    if isinstance(expr, ir.Call):
        _call(into, expr, axes, times)
        return
    if isinstance(expr, _ARITHMETIC):
        if not absorbed:
            into.count("vector", _type(expr), 2 * times)
        absorbs = isinstance(expr, _SUMS)
        for part in _operands(expr):
            _value(into, part, axes, times, absorbs and isinstance(part, ir.Mul))
            # An addition absorbs only one multiplication.
            absorbs = absorbs and not isinstance(part, ir.Mul)


def _call(into: Tally, call: ir.Call, axes: Mapping[ir.Var, int], times: int) -> None:
    name = (ir.op_name(call) or "").rpartition(".")[2]
    if name != "if_then_else" and name.removeprefix("fast").lstrip("_") in _SPECIAL:
        into.count("special", str(call.dtype), times)
    elif not name.startswith(("region", "access_ptr", "address_of", "rank")):
        into.count("vector", str(call.dtype), 2 * times)
    for part in call.args:
        if isinstance(part, ir.PrimExpr):
            _value(into, part, axes, times)


def _operands(expr: ir.PrimExpr) -> Sequence[Any]:
    if isinstance(expr, ir.Select):
        return (expr.condition, expr.true_value, expr.false_value)
    if isinstance(expr, ir.Cast):
        return (expr.value,)
    return (expr.a,) if isinstance(expr, ir.Not) else (expr.a, expr.b)


def _type(expr: ir.PrimExpr) -> str:
    # A comparison computes in the type of its operands.
    inner = expr.a if hasattr(expr, "a") and str(expr.dtype) == "bool" else expr
    return str(inner.dtype)


def _access(
    into: Tally, buffer: ir.Buffer, indices: Sequence[Any], writes: bool, axes: Mapping[ir.Var, int], times: int
) -> None:
    lanes = max(lanes_of(str(of.dtype)) for of in (buffer, *indices))
    size = numpy_dtype(element_type(str(buffer.dtype))).itemsize * lanes
    kind = ir.scope_kind(buffer)
    if kind == "shared":
        into.shared += size * times
    elif kind == "global":
        used = {axes[var] for index in indices for var in ir.variables(index) if var in axes}
        into.accesses.append(Access(buffer, writes, tuple(sorted(used)), times, size))


def points(space: Sequence[int], axes: Sequence[int]) -> int:
    """Number of points of a space along some of its axes."""
    return math.prod(space[axis] for axis in axes)
