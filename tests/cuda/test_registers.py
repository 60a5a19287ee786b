# SPDX-License-Identifier: MIT
"""Sibling units' parts of a tile are one array in the text: a thread has registers for its own unit's part alone."""

import re
from typing import Any

import pytest
import tvm_ffi

import tilescale.language as T
from tests.cuda import thread_group_programs
from tests.cuda.support import bodies, source
from tests.language import programs as reference
from tilelang_core import compile as stock
from tilescale.backends.cuda.target import target_for
from tilescale.backends.tilelang.lowering.groups.registers import marks, one_array_each
from tilescale.hda import Machine

TEXT = """{marks}kernel() {{
  float acc_warpgroup0[64];
  float acc_warpgroup1[64];
  {other}
  if (threadIdx.x < 128) {{
    acc_warpgroup0[0] = 1.0f;
  }} else {{
    acc_warpgroup1[0] = acc_warpgroup10[0];
  }}
}}
"""


def joined(groups: list[list[str]], other: str = "float acc_warpgroup10[64];") -> str:
    return one_array_each(TEXT.format(marks=marks(groups), other=other))


def test_the_first_array_stands_for_all_of_its_group():
    found = joined([["acc_warpgroup0", "acc_warpgroup1"]])
    assert found.splitlines() == [
        "kernel() {",
        "  float acc_warpgroup0[64];",
        "  float acc_warpgroup10[64];",
        "  if (threadIdx.x < 128) {",
        "    acc_warpgroup0[0] = 1.0f;",
        "  } else {",
        "    acc_warpgroup0[0] = acc_warpgroup10[0];",
        "  }",
        "}",
    ]
    assert one_array_each(found) == found


@pytest.mark.parametrize(
    "other", ["half_t acc_warpgroup10[64];", "float acc_warpgroup10[32];", "float* acc_warpgroup10;"]
)
def test_arrays_that_differ_stay_apart(other: str):
    found = joined([["acc_warpgroup0", "acc_warpgroup10", "missing"]], other)
    assert found == TEXT.format(marks="", other=other)


def test_an_array_that_a_block_declares_stays_apart():
    other = "if (threadIdx.x == 0) {\n    float acc_warpgroup10[64];\n    acc_warpgroup10[0] = 2.0f;\n  }"
    found = joined([["acc_warpgroup10", "acc_warpgroup0"]], other)
    assert found == TEXT.format(marks="", other=other)


def test_accumulators_of_warpgroups_are_one_array():
    found = bodies(source(reference.tensor_parallel_gemm(4, 128, 128, 512)))
    assert re.findall(r"^  float (c_\w+)\[(\d+)\];$", found, re.MULTILINE) == [("c_warpgroup0", "192")]
    products = re.findall(r"wgmma_ss<.*\(uint32_t\*\)\((c_\w+)", found)
    assert len(products) >= 2 and set(products) == {"c_warpgroup0"}


@T.macro
def doubled(X, Y):
    """Each warpgroup doubles a tile of its own."""
    with T.Scale("warpgroup") as (wg, _):
        tile = T.alloc((64, 64), "float32", level="l0")
        T.copy(X[wg, 0, 0], tile)
        for i, j in T.Parallel(64, 64):
            tile[i, j] = tile[i, j] * 2
        T.copy(tile, Y[wg, 0, 0])


def test_a_name_that_the_user_has_given_too_is_left_alone():
    """The stock compiler chooses which of two arrays of a name the text then means."""

    @T.prim_func
    def apart(X: T.Tensor((2, 64, 64), "float32"), Y: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(1, threads=256):
            other = T.alloc((64, 64), "float32", level="l0")
            T.copy(X[0, 0, 0], other)
            doubled(X, Y)
            T.copy(other, Y[0, 0, 0])

    @T.prim_func
    def namesakes(X: T.Tensor((2, 64, 64), "float32"), Y: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(1, threads=256):
            tile_warpgroup1 = T.alloc((64, 64), "float32", level="l0")
            T.copy(X[0, 0, 0], tile_warpgroup1)
            doubled(X, Y)
            T.copy(tile_warpgroup1, Y[0, 0, 0])

    arrays = [re.findall(r"^  float (\w+)\[\d+\];$", bodies(source(func)), re.MULTILINE) for func in (apart, namesakes)]
    assert sorted(arrays[0]) == ["other", "tile_warpgroup0"]
    assert len(arrays[1]) == 3


def test_what_was_registered_for_texts_before_is_asked_first_and_stays():
    hook, seen = "tilelang_callback_cuda_postproc", []
    assert tvm_ffi.get_global_func(hook, allow_missing=True) is None

    def note(text: str, target: Any) -> str:
        seen.append(text)
        return f"// noted\n{text}"

    tvm_ffi.register_global_func(hook, f=note)
    try:
        text = source(thread_group_programs.roles())
        assert text.startswith("// noted") and "// one array: " in seen[0] and "// one array: " not in text
        tvm_ffi.get_global_func(hook)("still there", None)
        assert seen[-1] == "still there"
    finally:
        tvm_ffi.remove_global_func(hook)


def test_texts_are_as_they_come_where_nobody_rewrites_them():
    @T.prim_func
    def plain(X: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            T.fill(X, 1.0)

    target = target_for(Machine.load("h200-sxm-8"))
    as_it_is = stock.generate(plain, target).text
    assert stock.generate(plain, target, rewrites=[lambda text: text + "// end"]).text == as_it_is + "// end"
    assert stock.generate(plain, target).text == as_it_is
