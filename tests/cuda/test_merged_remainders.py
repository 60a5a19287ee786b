# SPDX-License-Identifier: MIT
"""Indices with several remainders of sums keep their values where stock TileLang flattens buffers."""

import re
from typing import Any

import pytest
import tilelang.transform
from hypothesis import given
from hypothesis import strategies as st
from tvm import IRModule, tirx
from tvm.arith import Analyzer
from tvm.tirx.stmt_functor import post_order_visit, substitute

import tilescale.language as T
from tests.cuda.support import source
from tilelang_core import merged_remainders
from tilelang_core.ir import same
from tilelang_core.merged_remainders import with_kept_remainders

EXTENT, PARTS = 24, 5


def storing(index: Any) -> tirx.PrimFunc:
    """Stores at `index(i)` for all i, an index for each dimension of a tensor of (EXTENT, PARTS)."""
    i, handle = tirx.Var("i", "int32"), tirx.Var("handle", "handle")
    out = tirx.decl_buffer((EXTENT, PARTS), "int32", "out")
    loop = tirx.For(i, 0, EXTENT * PARTS, tirx.ForKind.SERIAL, tirx.BufferStore(out, tirx.const(1, "int32"), index(i)))
    return tirx.PrimFunc([handle], loop, buffer_map={handle: out}).with_attr("global_symbol", "main")


def offsets(func: tirx.PrimFunc) -> list[int]:
    """Indices of the stores of a function of `storing`, in order."""
    flat = tilelang.transform.FlattenBuffer()(IRModule({"main": func}))["main"]
    stores: list[tirx.BufferStore] = []
    post_order_visit(flat.body, lambda node: stores.append(node) if isinstance(node, tirx.BufferStore) else None)
    (index,) = stores[0].indices
    at = lambda i: substitute(index, {flat.body.loop_var: tirx.const(i, "int32")})  # noqa: E731
    return [int(Analyzer().simplify(at(i))) for i in range(EXTENT * PARTS)]


def shifted(row: int, column: int) -> Any:
    return lambda i: [(i // PARTS + row) % EXTENT, (i % PARTS + column) % PARTS]


def expected(row: int, column: int) -> list[int]:
    return [(i // PARTS + row) % EXTENT * PARTS + (i % PARTS + column) % PARTS for i in range(EXTENT * PARTS)]


@given(st.integers(0, EXTENT), st.integers(0, PARTS))
def test_they_keep_their_values(row: int, column: int):
    assert offsets(with_kept_remainders(storing(shifted(row, column)))) == expected(row, column)


def test_stock_still_gets_them_wrong():
    """When this fails, `tilelang_core/merged_remainders.py` can be removed."""
    assert offsets(storing(shifted(12, 3))) != expected(12, 3)


def test_the_same_index_of_several_statements_is_simplified_once(monkeypatch: pytest.MonkeyPatch):
    one, other = (storing(shifted(row, 3)).body for row in (12, 7))
    twice = storing(shifted(12, 3)).with_body(tirx.SeqStmt([one, one, other]))
    stock, found = merged_remainders.iter_map_simplify, list[str]()

    def simplified(indices: Any, *options: Any) -> Any:
        found.append(str(indices))
        return stock(indices, *options)

    monkeypatch.setattr(merged_remainders, "iter_map_simplify", simplified)
    first, again, _ = with_kept_remainders(twice).body.seq
    assert same(first, again) and not same(first, one)
    assert len(set(found)) == len(found)


def test_an_index_for_which_the_simplifier_divides_by_zero_keeps_its_value():
    def swapped(i: Any) -> Any:
        return [i // PARTS, i + (i % 3 + 1) % 3 - i % 3]

    wanted = [i // PARTS * PARTS + i + (i % 3 + 1) % 3 - i % 3 for i in range(EXTENT * PARTS)]
    assert offsets(with_kept_remainders(storing(swapped))) == wanted


def test_an_index_divided_by_a_size_that_may_be_zero_stays_as_it_is():
    odd = tirx.Var("n", "int32") % 2
    func = storing(lambda i: [(i + 3) // odd % EXTENT, i % PARTS])
    assert with_kept_remainders(func).same_as(func)


def test_an_index_without_a_point_to_compare_at_is_written_opaquely():
    n = tirx.Var("n", "int32")
    func = storing(lambda i: [(i + 3) // (n % 2 * (1 - n % 2)) % EXTENT, i % PARTS])
    assert not with_kept_remainders(func).same_as(func)


def test_a_function_that_stock_gets_right_stays_as_it_is():
    func = storing(lambda i: [i // PARTS, (i % PARTS + 3) % PARTS])
    assert with_kept_remainders(func).same_as(func)


@pytest.mark.parametrize("row", range(8))
def test_a_row_of_a_swizzled_tile_is_read_where_it_was_stored(row: int):
    @T.prim_func
    def picked(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32"),
               D: T.Tensor((64,), "float16")):  # fmt: skip
        with T.Kernel(device=1, block=1, threads=128):
            with T.Scale("block"):
                a, b = T.alloc((64, 64), "float16", level="l1"), T.alloc((64, 64), "float16", level="l1")
                c = T.alloc((64, 64), "float32", level="l0")
                T.copy(A, a)
                T.copy(B, b)
                T.clear(c)
                T.gemm(a, b, c)
                T.copy(c, C)
                for j in T.Parallel(64):
                    D[j] = a[row, j]

    line = next(line for line in source(picked).splitlines() if re.match(r"\s*D\[", line))
    here, there = re.fullmatch(r"\s*D\[(.*)\] = \(\(half_t\*\)a\)\[(.*)\];", line).groups()
    read = {}
    for thread in range(64):
        at = lambda text, thread=thread: eval(text.replace("((int)threadIdx.x)", str(thread)))  # noqa: E731
        read[at(here)] = at(there)
    # 128-byte swizzle: bits 3 to 5 of a column are exchanged by those of the row.
    assert read == {j: row * 64 + (j ^ (row % 8) << 3) for j in range(64)}
