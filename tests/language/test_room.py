# SPDX-License-Identifier: MIT
"""Tiles in shared memory that do not fit together, and tiles that take each other's place."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import program as taken_apart
from tilescale.errors import AllocationTooLargeError

HALF = (128, 256)
"""128 KiB in float32; a program on an H200 has 227 KiB."""


def test_tiles_that_are_needed_together_must_fit():
    @T.prim_func
    def swap(X: T.Tensor((256, 512), "float32")):
        with T.Kernel(2, threads=128) as bx:
            left = T.alloc_shared(HALF, "float32")
            right = T.alloc_shared(HALF, "float32")
            T.copy(X[bx * 128, 0], left)
            T.copy(X[bx * 128, 256], right)
            T.copy(left, X[bx * 128, 256])
            T.copy(right, X[bx * 128, 0])

    with pytest.raises(AllocationTooLargeError) as error:
        tilescale.emulate(swap, [torch.zeros(256, 512)])
    assert "256 KiB of shared memory, h200-sxm-8 has 227 KiB" in error.value.message
    assert "'left' 128 KiB, 'right' 128 KiB" in error.value.message
    lines = [(w.what, w.line - error.value.where[1].line) for w in error.value.where]
    assert lines == [("all are needed here", 3), ("declared", 0), ("declared", 1)]


def test_tiles_that_follow_one_another_take_the_same_place():
    @T.prim_func
    def double(X: T.Tensor((256, 512), "float32")):
        with T.Kernel(2, threads=128) as bx:
            left = T.alloc_shared(HALF, "float32")
            right = T.alloc_shared(HALF, "float32")
            T.copy(X[bx * 128, 0], left)
            for i, j in T.Parallel(*HALF):
                left[i, j] = left[i, j] * 2
            T.copy(left, X[bx * 128, 0])
            T.copy(X[bx * 128, 256], right)
            T.copy(right, X[bx * 128, 0])

    x = torch.randn(256, 512)
    expected = x[:, 256:].clone()
    tilescale.emulate(double, [x])
    assert torch.equal(x[:, :256], expected)


def sum_of_tiles(level: str):
    """Each unit of a level has a tile of 96 KiB."""

    @T.prim_func
    def f(X: T.Tensor((256, 96), "float32")):
        with T.Kernel(1, threads=384):
            with T.Scale(level) as (rank, size):
                tile = T.alloc((256, 96), "float32", level="l1")
                T.copy(X, tile)
                T.copy(tile, X)

    return f


def test_every_unit_that_owns_a_tile_has_one():
    taken_apart(sum_of_tiles("block"), "h200-sxm-8")
    with pytest.raises(AllocationTooLargeError, match="288 KiB .*'tile' 288 KiB"):
        taken_apart(sum_of_tiles("warpgroup"), "h200-sxm-8")


def test_programs_of_a_cluster_hold_a_share_each():
    def of_a_cluster(programs: int):
        @T.prim_func
        def f(X: T.Tensor((256, 256), "float32")):
            with T.Kernel(cta_cluster=programs, block=programs, threads=128):
                with T.Scale("cta_cluster"):
                    left = T.alloc((256, 256), "float32", level="l1")
                    right = T.alloc((256, 256), "float32", level="l1")
                    T.copy(X, left)
                    T.copy(X, right)
                    T.copy(left, X)
                    T.copy(right, X)

        return f

    taken_apart(of_a_cluster(4), "h200-sxm-8")
    with pytest.raises(AllocationTooLargeError, match="'left' 128 KiB, 'right' 128 KiB"):
        taken_apart(of_a_cluster(2), "h200-sxm-8")


def product(stages: int):
    """Tiles of 32 KiB each, for a step of a GEMM."""

    @T.prim_func
    def f(A: T.Tensor((128, 512), "bfloat16"), B: T.Tensor((512, 128), "bfloat16"), C: T.Tensor((128, 128), "float32")):
        with T.Kernel(1, threads=256):
            a = T.alloc_shared((128, 128), "bfloat16")
            b = T.alloc_shared((128, 128), "bfloat16")
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=stages):
                T.copy(A[0, k * 128], a)
                T.copy(B[k * 128, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    return f


def test_a_pipelined_loop_has_a_tile_for_each_stage():
    taken_apart(product(3), "h200-sxm-8")
    with pytest.raises(AllocationTooLargeError) as error:
        taken_apart(product(4), "h200-sxm-8")
    assert "take 256 KiB of shared memory" in error.value.message
    assert "'a' 4 x 32 KiB, 'b' 4 x 32 KiB" in error.value.message
    assert "fewer pipeline stages" in error.value.hint
    lines = [(w.what, w.line - error.value.where[1].line) for w in error.value.where]
    assert lines == [("all are needed here", 4), ("declared", 0), ("declared", 1)]


def test_arms_of_a_branch_take_the_same_place():
    """Each arm holds 3 x 64 KiB for its loop, and the 64 KiB of its result after it; on GPUs each is a grid."""

    @T.prim_func
    def f(A: T.Tensor((2, 128, 256), "float16"), C: T.Tensor((2, 128, 256), "float16")):
        with T.Kernel(device=2, block=2, threads=256) as bx:
            with T.Scale("block"):
                a = T.alloc((128, 256), "float16", level="l1")
                c = T.alloc((128, 256), "float32", level="l0")
                out = T.alloc((128, 256), "float16", level="l1")
                T.clear(c)
                if bx == 0:
                    for _ in T.Pipelined(4, num_stages=3):
                        T.copy(A[0, 0, 0], a)
                        for i, j in T.Parallel(128, 256):
                            c[i, j] += a[i, j]
                    T.copy(c, out)
                    T.copy(out, C[0, 0, 0])
                else:
                    for _ in T.Pipelined(4, num_stages=3):
                        T.copy(A[1, 0, 0], a)
                        for i, j in T.Parallel(128, 256):
                            c[i, j] -= a[i, j]
                    T.copy(c, out)
                    T.copy(out, C[1, 0, 0])

    tensors = [[torch.randn(2, 128, 256).half(), torch.empty(2, 128, 256).half()] for _ in range(2)]
    tilescale.emulate(f, tensors)
    for x, result in tensors:
        assert torch.equal(result, x * torch.tensor([4.0, -4.0]).view(2, 1, 1))
