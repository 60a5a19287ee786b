# SPDX-License-Identifier: MIT
"""Expressions as Python functions: what TVM makes of them with numbers in the place of variables."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import tilescale.language as T
from tilelang_core import ir
from tilelang_core.formulas import formula
from tilescale.program.extents import evaluate

NAMES = ("m", "n", "rank")
VARIABLES = [ir.Var(name, "int32") for name in NAMES]
numbers = st.integers(-9, 9)
leaves = st.sampled_from(VARIABLES) | numbers.map(lambda n: ir.IntImm("int32", n))


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    two = st.tuples(inner, inner)
    kinds = (ir.Add, ir.Sub, ir.Mul, ir.FloorDiv, ir.FloorMod, ir.Min, ir.Max)
    compared = (ir.EQ, ir.NE, ir.LT, ir.LE, ir.GT, ir.GE)

    def chosen(condition: Any, pair: tuple[Any, Any]) -> Any:
        return T.if_then_else(condition, *pair)

    conditions = st.builds(lambda kind, pair: kind(*pair), st.sampled_from(compared), two)
    both = st.builds(lambda kind, a, b: kind(a, b), st.sampled_from((ir.And, ir.Or)), conditions, conditions)
    return (
        st.builds(lambda kind, pair: kind(*pair), st.sampled_from(kinds), two)
        | st.builds(chosen, conditions | both | conditions.map(ir.Not), two)
        | inner.map(lambda a: ir.Cast("int64", a)).map(lambda a: ir.Cast("int32", a))
    )


@settings(max_examples=60, deadline=None)
@given(st.recursive(leaves, combined, max_leaves=8), st.tuples(numbers, numbers, numbers))
def test_a_formula_has_the_value_that_tvm_finds(expr: Any, values: tuple[int, ...]):
    known = dict(zip(VARIABLES, values, strict=True))
    found = formula(expr).value(known)
    zero = {var: ir.IntImm("int32", value) for var, value in known.items()}
    try:
        folded = ir.constant(ir.substitute(expr, zero))
    except Exception as error:  # noqa: BLE001 - TVM's own, for a division by zero
        assert "zero" in str(error) and found is None
        return
    divides = ir.contains(expr, lambda node: isinstance(node, ir.FloorDiv | ir.FloorMod))
    assert found == folded or (found is None and divides)  # by zero, in a part that TVM has left out


def test_what_is_not_known_is_nobodys_number():
    m, n, _ = VARIABLES
    assert evaluate(m + n, {m: 3}) is None and evaluate(n - n, {}) == 0
    assert formula(m + n).variables == {m, n} and formula(m // 2).divides and not formula(m * 2).divides
    x = ir.Var("x", "float32")
    assert formula(ir.Cast("int32", x)).function is None and evaluate(ir.Cast("int32", x), {x: 2.5}) == 2
