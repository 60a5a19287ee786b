# SPDX-License-Identifier: MIT
"""What TMA loads in front of a loop has landed behind it, however often the loop is gone through."""

import re
from typing import Any

import pytest
import tilelang
from tilelang.backend.target import determine_target

import tilescale.language as T
from tilelang_core.compile import generate
from tilelang_core.landing import with_waits_ahead

TARGET = {"kind": "cuda", "arch": "sm_90a"}
WAIT = r"mbarrier\[4\]\.wait\(0\);"


def product(rows: Any) -> Any:
    """A tile of A times as many tiles of B as there are, possibly none."""
    n, m = rows or T.dynamic("n"), T.dynamic("m")

    @T.prim_func
    def made(A: T.Tensor((m, 64), "bfloat16"), B: T.Tensor((n, 64), "bfloat16"), C: T.Tensor((m, 64), "float32")):
        with T.Kernel(T.ceildiv(m, 64), threads=128) as bx:
            a, b = (T.alloc_shared((64, 64), "bfloat16") for _ in range(2))
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A[bx * 64, 0], a)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(n, 64), num_stages=2):
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[bx * 64, 0])

    return made


def of_stock(func: Any) -> str:
    target = determine_target(TARGET, return_object=True)
    with target:
        return tilelang.lower(func, target=target).kernel_source


def test_a_block_whose_loop_has_no_step_waits_too():
    text = generate(product(None), TARGET).text
    assert re.search(WAIT + r"\n *for \(int k_1 = 0; k_1 < \(\(n \+ 63\) >> 6\)", text)
    assert len(re.findall(WAIT, text)) == 1 and "== 0)" not in text


def test_stock_still_waits_in_the_first_step_alone():
    stock = of_stock(product(None))
    assert re.search(r"if \(k_1 == 0\) \{\n *" + WAIT, stock), "mended upstream: landing.py is not needed any more"
    assert with_waits_ahead(stock) == generate(product(None), TARGET).text


def test_a_loop_of_a_known_extent_is_left_as_it_is():
    text = generate(product(256), TARGET).text
    assert text == of_stock(product(256)) and re.search(r"if \(k_1 == 0\) \{\n *" + WAIT, text)


ALONE = "if (k == 0) {\n  mbarrier[4].wait(0);\n}\n"


@pytest.mark.parametrize("text", ["", ALONE, "for (int k = 0; k < n; ++k) {\n}\n"])
def test_other_texts_stay(text: str):
    assert with_waits_ahead(text) == text


def test_each_wait_goes_in_front_of_its_own_loop():
    loop = "{0}for (int {1} = 0; {1} < n; ++{1}) {{\n{0}  if ({1} == 0) {{\n{0}    mbarrier[{2}].wait(0);\n{0}  }}\n"
    waited = "{0}mbarrier[{2}].wait(0);\n{0}for (int {1} = 0; {1} < n; ++{1}) {{\n"
    places = (("", "i", 1), ("  ", "j", 2))
    end = "  }\n}\n"
    assert with_waits_ahead("".join(loop.format(*at) for at in places) + end) == (
        "".join(waited.format(*at) for at in places) + end
    )
