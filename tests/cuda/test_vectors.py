# SPDX-License-Identifier: MIT
"""Vectors that threads copy from registers to tensors are one store each."""

import pytest

from tests.cuda.support import source
from tilescale.backends.tilelang.lowering.text_rewrites import whole_vectors
from tilescale.ops import row_exchange

TEXT = """extern "C" __global__ void __launch_bounds__(256, 1) rows_kernel(int* __restrict__ R, const int* X, int n) {{
  int rows[32];
  __shared__ int tile[32];
  {store}
}}
"""
KEPT = [
    "*(int4*)(rows + 4) = *(int4*)(X + n);",
    "*(int4*)(R + n) = *(int4*)(X + n);",
    "*(int4*)(R + n) = *(int4*)(tile + 4);",
    "*(int4*)(R + n) = make_int4(0, 0, 0, 0);",
]


def rewritten(store: str) -> str:
    return whole_vectors(TEXT.format(store=store))


@pytest.mark.parametrize("vector", ["int4", "uint2", "float4"])
def test_arrays_in_registers(vector: str):
    store = f"*({vector}*)(R + (n * 4)) = *({vector}*)(rows + (n * 4));"
    whole = f"tilescale::store_whole(({vector}*)(R + (n * 4)), *({vector}*)(rows + (n * 4)));"
    assert rewritten(store) == TEXT.format(store=whole)
    assert rewritten(whole) == TEXT.format(store=whole)


@pytest.mark.parametrize("store", KEPT)
def test_other_stores_stay(store: str):
    assert rewritten(store) == TEXT.format(store=store)


def test_rows_are_stored_by_whole_vectors():
    text = source(row_exchange.scatter_program(2, 512, 2))
    assert text.count("tilescale::store_whole((int4*)(inbox_peers + ") == 1
    assert text.count("tilescale::store_whole((int4*)(R + ") == 2, "a row and its copy"
