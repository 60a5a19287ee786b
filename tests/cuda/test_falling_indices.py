# SPDX-License-Identifier: MIT
"""Indices that fall as a loop goes on keep their values where stock TileLang flattens buffers."""

from typing import Any

import tilelang.transform
from hypothesis import given
from hypothesis import strategies as st
from tvm import IRModule, tirx
from tvm.arith import Analyzer
from tvm.tirx.stmt_functor import post_order_visit, substitute

import tilescale.language as T
from tests.cuda.support import source
from tilelang_core.decreasing_index import with_rising_dividends

EXTENT = 6


def storing(index: Any) -> tirx.PrimFunc:
    """Stores at `index(base, i, j)` for all i and j, where `base` is given to the function."""
    base, handle = tirx.Var("base", "int32"), tirx.Var("handle", "handle")
    i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
    out = tirx.decl_buffer((4096,), "int32", "out")
    store = tirx.BufferStore(out, tirx.IntImm("int32", 1), [index(base, i, j)])
    loops = tirx.For(i, 0, EXTENT, tirx.ForKind.SERIAL, tirx.For(j, 0, EXTENT, tirx.ForKind.SERIAL, store))
    func = tirx.PrimFunc([base, handle], loops, buffer_map={handle: out})
    return func.with_attr("global_symbol", "main")


def indices(func: tirx.PrimFunc, base: int) -> list[int]:
    """Indices of the stores of a function of `storing`, in order, after stock's passes."""
    simple = tilelang.transform.Simplify()(IRModule({"main": func}))
    flat = tilelang.transform.FlattenBuffer()(simple)["main"]
    stores, loops = [], []
    post_order_visit(flat.body, lambda node: stores.append(node) if isinstance(node, tirx.BufferStore) else None)
    post_order_visit(flat.body, lambda node: loops.append(node.loop_var) if isinstance(node, tirx.For) else None)
    (index,), (j, i) = stores[0].indices, loops
    given = {flat.params[0]: base}
    number = lambda *at: substitute(index, {k: tirx.const(v, "int32") for k, v in (given | dict(at)).items()})  # noqa: E731
    return [int(Analyzer().simplify(number((i, a), (j, b)))) for a in range(EXTENT) for b in range(EXTENT)]


def kept(index: Any, base: int) -> None:
    want = [index(base, i, j) for i in range(EXTENT) for j in range(EXTENT)]
    assert indices(with_rising_dividends(storing(index)), base) == want


numbers = st.integers(-3, 3)


@given(numbers, numbers, numbers, st.integers(0, 9), st.integers(1, 9), st.integers(1, 4), st.integers(0, 9))
def test_they_keep_their_values(of_base: int, of_i: int, of_j: int, offset: int, divisor: int, scale: int, base: int):
    def dividend(base: Any, i: Any, j: Any) -> Any:
        return of_base * base + of_i * i + of_j * j + offset

    kept(lambda *at: dividend(*at) % divisor * scale, base)
    kept(lambda *at: dividend(*at) // divisor * scale, base)
    kept(lambda *at: (offset - dividend(*at) // divisor) % (divisor + 1), base)


def test_stock_still_gets_them_wrong():
    """When this fails, `tilelang_core/decreasing_index.py` can be removed."""
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
    func = storing(lambda base, i, j: (i - base) % 4 + j)
    assert with_rising_dividends(func).same_as(func)
