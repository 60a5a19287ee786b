# SPDX-License-Identifier: MIT
"""Expressions and tile arguments as source text of the language."""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.scalars import pointed
from tilescale.errors import UnsupportedError

_BINARY = {
    ir.Add: ("+", 5), ir.Sub: ("-", 5), ir.Mul: ("*", 6), ir.Div: ("/", 6), ir.FloorDiv: ("//", 6),
    ir.FloorMod: ("%", 6), ir.EQ: ("==", 4), ir.NE: ("!=", 4), ir.LT: ("<", 4), ir.LE: ("<=", 4), ir.GT: (">", 4),
    ir.GE: (">=", 4),
}  # fmt: skip
"""Operators, and how closely they bind, as Python has them."""

_FUNCTIONS = {ir.Min: "min", ir.Max: "max", ir.And: "And", ir.Or: "Or"}
"""Functions of two values of `tilescale.language`."""

_CALLS = frozenset(("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "fabs", "if_then_else"))
"""TVM's functions that `tilescale.language` has under the same name, with the same arguments."""

_NO_NUMBERS = ("inf", "-inf", "nan")
_SIGN, _ATOM = 7, 9


def quoted(text: Any) -> str:
    return f'"{text}"'


class Expressions:
    """The text of expressions; each variable and buffer has a unique name."""

    def __init__(self, taken: Sequence[str]):
        self._names: dict[ir.Var, str] = {}
        self._taken = {*taken, *keyword.kwlist}

    def name(self, var: ir.Var, wanted: str | None = None) -> str:
        """The name of a variable, or of a buffer by its data; `wanted`, or its own, if it is free."""
        if var not in self._names:
            base = (wanted or str(var.name)).removesuffix("_view")
            number = 0
            while (found := f"{base}_{number}" if number else base) in self._taken:
                number += 1
            self._taken.add(found)
            self._names[var] = found
        return self._names[var]

    def value(self, expr: ir.PrimExpr, binds: int = 0) -> str:
        """An expression, in brackets where the enclosing operator binds more closely."""
        text, own = self._text(expr)
        return f"({text})" if own < binds else text

    def values(self, exprs: Sequence[Any]) -> str:
        """Several, with commas between."""
        return ", ".join(map(self.value, exprs))

    def shape(self, extents: Sequence[Any]) -> str:
        """A tuple."""
        return f"({self.values(extents)}{',' if len(extents) == 1 else ''})"

    def region(self, region: Any) -> str:
        """A tile argument: a whole buffer, a slice of one, or an element."""
        if isinstance(region, ir.BufferLoad):
            return self.value(region)
        buffer, begins, extents = ir.region_parts(region)
        name = self.name(buffer.data)
        if self._is_whole(region):
            return name
        return f"{name}[{', '.join(map(self._slice, begins, extents, buffer.shape))}]"

    def pair(self, source: Any, target: Any) -> str:
        """Two tile arguments of which one says how large both are, where it is a whole buffer."""
        texts = [self.region(source), self.region(target)]
        for i, (one, other) in enumerate(((source, target), (target, source))):
            if not self._is_whole(one) and self._is_whole(other) and _sized_by(one, other):
                texts[i] = self.element(one)
        return ", ".join(texts)

    def element(self, region: Any) -> str:
        """The first element of a tile argument, as flags are given."""
        buffer, begins, _ = ir.region_parts(region)
        return f"{self.name(buffer.data)}[{self.values(begins)}]"

    def flags(self, region: Any) -> str:
        """The flags of a wait: an element, or a slice."""
        buffer, begins, extents = ir.region_parts(region)
        if all(ir.constant(n) == 1 for n in extents):
            return self.element(region)
        return f"{self.name(buffer.data)}[{', '.join(map(self._slice, begins, extents, buffer.shape))}]"

    def _is_whole(self, region: Any) -> bool:
        if isinstance(region, ir.BufferLoad):
            return False
        buffer, begins, extents = ir.region_parts(region)
        return all(ir.constant(b) == 0 for b in begins) and list(map(str, extents)) == list(map(str, buffer.shape))

    def _slice(self, begin: Any, extent: Any, whole: Any) -> str:
        if ir.constant(begin) == 0 and str(extent) == str(whole):
            return ":"
        if ir.constant(extent) == 1:
            return self.value(begin)
        end = ir.constant(begin + extent)
        return f"{self.value(begin)} : {end if end is not None else self.value(begin + extent)}"

    def _text(self, expr: ir.PrimExpr) -> tuple[str, int]:
        if isinstance(expr, ir.Var):
            return self.name(expr), _ATOM
        if isinstance(expr, int):
            return str(expr), _ATOM if expr >= 0 else _SIGN
        if isinstance(expr, ir.IntImm | ir.FloatImm):
            return self._number(expr)
        if isinstance(expr, ir.BufferLoad):
            return f"{self.name(expr.buffer.data)}[{self.values(expr.indices)}]", _ATOM
        if type(expr) in _BINARY:
            sign, own = _BINARY[type(expr)]
            return f"{self.value(expr.a, own)} {sign} {self.value(expr.b, own + 1)}", own
        if type(expr) in _FUNCTIONS:
            return f"T.{_FUNCTIONS[type(expr)]}({self.values([expr.a, expr.b])})", _ATOM
        if isinstance(expr, ir.Not):
            return f"T.Not({self.value(expr.a)})", _ATOM
        if isinstance(expr, ir.Select):
            return f"T.Select({self.values([expr.condition, expr.true_value, expr.false_value])})", _ATOM
        if isinstance(expr, ir.Cast):
            return f"T.cast({self.value(expr.value)}, {quoted(expr.dtype)})", _ATOM
        short = (ir.op_name(expr) or "").rpartition(".")[2]
        if short in _CALLS:
            return f"T.{short}({self.values(expr.args)})", _ATOM
        if ir.op_name(expr) == tl.ELECT:
            return f"T.shuffle_elect({self.values(expr.args)})", _ATOM
        raise UnsupportedError(f"{expr} has no source text", hint="print kernel.ir, in TileLang's notation")

    def _number(self, expr: ir.PrimExpr) -> tuple[str, int]:
        if str(expr.dtype) == "bool":
            return str(bool(expr.value)), _ATOM
        text = repr(expr.value)
        if str(expr.dtype) in ("int32", "float32") and text not in _NO_NUMBERS:
            return text, _ATOM if expr.value >= 0 else _SIGN
        kind = str(expr.dtype)
        return f"T.{kind}({text if text not in _NO_NUMBERS else quoted(text)})", _ATOM


def _sized_by(region: Any, tile: Any) -> bool:
    """Whether a region has the extents of a tile, after leading ones."""
    if isinstance(region, ir.BufferLoad):
        return False
    extents, shape = (list(map(str, ir.region_parts(r)[2])) for r in (region, tile))
    lead = len(extents) - len(shape)
    return lead >= 0 and extents == ["1"] * lead + shape


def as_written(expr: ir.PrimExpr) -> str:
    """An expression as the user wrote it: variables by their names, atomic loads by their elements."""

    def named(node: ir.Node) -> Any:
        if isinstance(node, ir.BufferLoad) and node.buffer.scope() == ir.VARIABLE:
            return ir.Var(node.buffer.name, str(node.dtype))
        if ir.op_name(node) == tl.atomic("load"):
            return pointed(ir.loaded_element(node))
        return None

    return str(tir.rewrite(tir.evaluate(expr), leave=named).value)
