# SPDX-License-Identifier: MIT
"""Indices that fall as a loop goes on keep their values where stock TileLang simplifies and flattens."""

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tilelang.transform
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tvm import IRModule, tirx
from tvm.tirx.stmt_functor import post_order_visit

import tilescale.language as T
from tests.cuda.support import source
from tilelang_core import ir
from tilelang_core.complements import with_complements
from tilelang_core.merged_remainders import with_kept_remainders

EXTENT = 6


def storing(index: Any, of_name: Any = None) -> tirx.PrimFunc:
    """Stores at `index(base, i, j)` for all i and j, where `base` is given to the function.

    With `of_name`, that number gets a name, and the index is `of_name(base, name, j)`.
    """
    base, handle = tirx.Var("base", "int32"), tirx.Var("handle", "handle")
    i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
    out = tirx.decl_buffer((4096,), "int32", "out")
    at, body = index(base, i, j), []
    if of_name is not None:
        name = tirx.Var("name", "int32")
        body.append(tirx.Bind(name, at))
        at = of_name(base, name, j)
    body.append(tirx.BufferStore(out, tirx.IntImm("int32", 1), [at]))
    inner = tirx.For(j, 0, EXTENT, tirx.ForKind.SERIAL, tirx.SeqStmt(body) if len(body) > 1 else body[0])
    loops = tirx.For(i, 0, EXTENT, tirx.ForKind.SERIAL, inner)
    func = tirx.PrimFunc([base, handle], loops, buffer_map={handle: out})
    return func.with_attr("global_symbol", "main")


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod, "Div": lambda a, b: int(a / b), "Mod": lambda a, b: a - int(a / b) * b,
    "tirx.bitwise_and": operator.and_, "tirx.bitwise_xor": operator.xor, "tirx.shift_right": operator.rshift,
    "Min": min, "Max": max,
}  # fmt: skip


def value(expr: Any, known: Mapping[Any, int]) -> int:
    """An expression's value."""
    if isinstance(expr, tirx.Var | tirx.IntImm):
        return known[expr] if isinstance(expr, tirx.Var) else int(expr.value)
    if isinstance(expr, tirx.Cast):
        return value(expr.value, known)
    if isinstance(expr, tirx.Call):
        return OPERATIONS[expr.op.name](*(value(arg, known) for arg in expr.args))
    return OPERATIONS[type(expr).__name__](value(expr.a, known), value(expr.b, known))


def indices(func: tirx.PrimFunc, base: int) -> list[int]:
    """Indices of the stores of a function of `storing`, in order, after stock's passes."""
    return flattened(tilelang.transform.Simplify()(IRModule({"main": func}))["main"], base)


def flattened(func: tirx.PrimFunc, base: int) -> list[int]:
    flat = tilelang.transform.FlattenBuffer()(IRModule({"main": func}))["main"]
    stores, loops = [], []
    post_order_visit(flat.body, lambda node: stores.append(node) if isinstance(node, tirx.BufferStore) else None)
    post_order_visit(flat.body, lambda node: loops.append(node.loop_var) if isinstance(node, tirx.For) else None)
    (index,), (j, i) = stores[0].indices, loops
    names = {}
    post_order_visit(flat.body, lambda node: names.update({node.var: node.value}) if isinstance(node, tirx.Bind) else 0)
    found = []
    for a, b in itertools.product(range(EXTENT), repeat=2):
        known = {flat.params[0]: base, i: a, j: b}
        for name, number in names.items():
            known[name] = value(number, known)
        found.append(value(index, known))
    return found


def kept(index: Any, base: int, of_name: Any = None) -> None:
    points = [(i, j, int(index(base, i, j))) for i in range(EXTENT) for j in range(EXTENT)]
    want = [number if of_name is None else int(of_name(base, number, j)) for _, j, number in points]
    simple = tilelang.transform.Simplify()(IRModule({"main": with_complements(storing(index, of_name))}))["main"]
    assert flattened(with_kept_remainders(simple), base) == want


numbers = st.integers(-3, 3)


DIVIDED: dict[str, Callable[[Any, int, int, int], Any]] = {
    "remainder": lambda dividend, divisor, scale, offset: dividend % divisor * scale,
    "quotient": lambda dividend, divisor, scale, offset: dividend // divisor * scale,
    "remainder of a quotient": lambda dividend, divisor, scale, offset: (offset - dividend // divisor) % (divisor + 1),
}


@pytest.mark.parametrize("name", DIVIDED)
@given(numbers, numbers, numbers, st.integers(0, 9), st.integers(1, 9), st.integers(1, 4), st.integers(0, 9))
def test_they_keep_their_values(
    name: str, of_base: int, of_i: int, of_j: int, offset: int, divisor: int, scale: int, base: int
):
    def index(base: Any, i: Any, j: Any) -> Any:
        return DIVIDED[name](of_base * base + of_i * i + of_j * j + offset, divisor, scale, offset)

    kept(index, base)


Expression = Callable[[Any, Any, Any], Any]
LEAVES: list[Expression] = [lambda base, i, j: base, lambda base, i, j: i, lambda base, i, j: j]


def linear(a: Expression, b: Expression, times: int, offset: int) -> Expression:
    return lambda *at: a(*at) + b(*at) * times + offset


def divided(a: Expression, divisor: int, remains: bool) -> Expression:
    return lambda *at: a(*at) % divisor if remains else a(*at) // divisor


expressions = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.builds(linear, inner, inner, numbers, st.integers(-8, 8)),
        st.builds(divided, inner, st.sampled_from([2, 3, 4, 6, 8]), st.booleans()),
    ),
    max_leaves=6,
)


@given(expressions, st.integers(0, 9))
@settings(max_examples=300)
def test_divisions_of_divisions_keep_their_values(index: Expression, base: int):
    kept(index, base)


@given(expressions, expressions, st.integers(0, 9))
@settings(max_examples=300)
def test_divisions_of_named_numbers_keep_their_values(number: Expression, of_name: Expression, base: int):
    kept(number, base, of_name)


@example(lambda base, i, j: (8 - i % 4) % 8, 1)
@example(lambda base, i, j: (4 - i // 2) % 4, 1)
@given(expressions, st.integers(-20, 20))
@settings(max_examples=300)
def test_analyses_simplify_them_to_the_same_values(index: Expression, bound: int):
    """Nothing is proved of a number that does not hold."""
    names = base, i, j = tuple(tirx.Var(name, "int32") for name in ("base", "i", "j"))
    number, ranges = index(*names), {name: (0, EXTENT) for name in names}
    simple = ir.simplify(number, ranges)
    is_less = ir.proves(number < bound, ranges)
    for values in itertools.product(range(EXTENT), repeat=3):
        known = dict(zip(names, values, strict=True))
        assert value(simple, known) == value(number, known)
        assert not is_less or value(number, known) < bound


QUOTIENTS: dict[str, Expression] = {
    "of neighbours": lambda base, i, j: j // 3 + (j + 1) // 3,
    "of a remainder": lambda base, i, j: 1 + (i % 2 - 1) // 2,
    "of a quotient": lambda base, i, j: (i + j // 4 * 2 + 1) // 4,
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_of_sums_keep_their_values(name: str):
    kept(QUOTIENTS[name], 0)


@pytest.mark.parametrize("name", QUOTIENTS)
def test_stock_still_merges_quotients_of_sums(name: str):
    """When this fails, a part of `tilelang_core/merged_remainders.py` can be removed."""
    want = [QUOTIENTS[name](0, i, j) for i in range(EXTENT) for j in range(EXTENT)]
    assert indices(storing(QUOTIENTS[name]), 0) != want


def test_an_index_that_changes_at_one_of_many_points_is_kept():
    """Its value is compared at each of them."""
    i, handle = tirx.Var("i", "int32"), tirx.Var("handle", "handle")
    out = tirx.decl_buffer((4096,), "int32", "out")
    store = tirx.BufferStore(out, tirx.IntImm("int32", 1), [i // 999 + (i + 1) // 999])
    loop = tirx.For(i, 0, 1998, tirx.ForKind.SERIAL, store)
    func = tirx.PrimFunc([handle], loop, buffer_map={handle: out})
    flat = tilelang.transform.FlattenBuffer()(IRModule({"main": with_kept_remainders(func)}))["main"]
    (index,) = flat.body.body.indices
    assert [value(index, {flat.body.loop_var: n}) for n in (997, 998, 999)] == [0, 1, 2]


def test_the_stage_of_a_ring_that_follows_from_a_number_of_tasks_keeps_its_value():
    """Blocks up to 3 have two tasks, the others one, again and again; the two stages of a ring alternate."""
    tasks = lambda base, i, j: (8 - i) // 5 + 1  # noqa: E731
    stage = lambda base, number, j: (number + j * (number + number)) % 2  # noqa: E731
    kept(tasks, 0, stage)


def test_stock_still_takes_a_factor_of_minus_one_out_of_a_division():
    """When this fails, a part of `tilelang_core.complements.py` can be removed."""
    for index in (lambda base, i, j: (8 - i // 2) % 4, lambda base, i, j: (8 - i % 4) % 8):
        want = [index(0, i, j) for i in range(EXTENT) for j in range(EXTENT)]
        assert indices(storing(index), 0) != want


def test_stock_still_gets_them_wrong():
    """When this fails, `tilelang_core.complements.py` can be removed."""
    index = lambda base, i, j: (base - i) % 3  # noqa: E731
    want = [index(1, i, 0) for i in range(EXTENT) for _ in range(EXTENT)]
    assert indices(storing(index), 1) != want


def test_whom_a_rank_waits_for_is_read_at_its_index():
    """A table of the ranks, read in the order in which they go round."""

    @T.prim_func
    def turns(counts: T.Tensor((2,), "int32"), out: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=2, threads=32) as turn:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                other = (rank + 2 - turn) % 2
                out[turn] = counts[other]

    (line,) = (line for line in source(turns).splitlines() if "= counts[" in line)
    index = line[line.index("counts[") + 7 : line.rindex("]")].replace("((int)blockIdx.x)", "turn")
    for rank in range(2):
        for turn in range(2):  # no remainders are left that C and Python have otherwise
            assert eval(index, {"turn": turn, "device_rank": rank}) == (rank - turn) % 2, index


def test_a_function_without_them_stays_as_it_is():
    func = storing(lambda base, i, j: (i + base) % 4 - j)
    assert with_complements(func).same_as(func)
