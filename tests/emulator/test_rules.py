# SPDX-License-Identifier: MIT
"""Programs that TileLang refuses to compile: the emulator refuses them too, with the line."""

import inspect

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import source
from tests.emulator.support import blank
from tilescale.errors import UsageError


def refused(program, tensor, hint="rule of TileLang"):
    """The text of the error, which names the line of the program that ends in "# here"."""
    with pytest.raises(UsageError) as caught:
        tilescale.emulate(program, [tensor])
    lines, first = inspect.getsourcelines(inspect.currentframe().f_back.f_code)
    (number,) = [i for i, line in enumerate(lines, start=first) if line.rstrip().endswith("# here")]
    assert f"{__file__}:{number}" in str(caught.value) and hint in caught.value.hint
    return caught.value.message


def test_a_parallel_loop_inside_another_but_not_directly():
    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(device=1, block=1, threads=32):
            for k in T.serial(2):
                for i in T.Parallel(4):  # here
                    if i > k:
                        for j in T.Parallel(8):
                            Y[i, j] = 1

    text = refused(program, blank(4, 8))
    assert "nested parallel loops are not allowed" in text


def test_a_tile_operation_in_a_parallel_loop():
    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((8,), "float32")
            for i in T.Parallel(4):  # here
                T.copy(Y[i, 0], tile)

    text = refused(program, blank(4, 8))
    assert "only elementwise operations" in text and "tl.tileop.copy" in text and "ir.Op" not in text


def test_a_pipelined_loop_in_a_parallel_loop():
    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):  # here
                for j in T.Pipelined(8, num_stages=2):
                    Y[i, j] = 1

    assert "pipelined loop cannot be nested" in refused(program, blank(4, 8))


def test_a_parallel_index_of_thread_private_memory():
    @T.prim_func
    def program(Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            mine = T.alloc_local((4,), "float32")
            for i in T.Parallel(4):  # here
                mine[i] = 1
                Y[i] = mine[i]

    assert "'mine'" in refused(program, blank(4)).replace("`", "'")


@pytest.mark.parametrize(("b", "is_served"), [("bfloat16", False), ("float16", True)])
def test_a_product_of_two_types(b, is_served):
    @T.prim_func
    def program(C: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=32):
            left, right = T.alloc_shared((16, 16), "float16"), T.alloc_shared((16, 16), b)
            T.clear(left)
            T.clear(right)
            T.gemm(left, right, C, clear_accum=True)  # here

    if is_served:
        tilescale.emulate(program, [blank(16, 16)])
    else:
        assert refused(program, blank(16, 16), "one type") == "T.gemm of float16 and bfloat16"


def test_programs_of_devices_are_refused_before_a_back_end_sees_them():
    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            for i in T.Parallel(4):
                for k in T.serial(2):
                    for j in T.Parallel(4):
                        Y[i, 4 * k + j] = 1

    with pytest.raises(UsageError, match="nested parallel loops are not allowed"):
        source(program)


def test_parallel_loops_directly_inside_each_other_are_one():
    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                for j in T.Parallel(8):
                    Y[i, j] = 8 * i + j

    args = [blank(4, 8)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == torch.arange(32).reshape(4, 8).tolist()
