# SPDX-License-Identifier: MIT
"""Simulated time of roles: what ends an iteration of a persistent loop, and loads, overlap with the next tile."""

import pytest

import tilescale
import tilescale.language as T
from tests.emulator.timing import H200, derived, seconds

BLOCKS, DEPTH = 132, 64


def summed(turns: int, k: int = 4096, reads_sum: bool = False):
    """Each block multiplies and sums a tile of two devices in each iteration; the next one may read the last sum."""
    rows = turns * BLOCKS * 128

    @T.prim_func
    def program(
        A: T.Tensor((128, k), "bfloat16"), B: T.Tensor((k, 256), "bfloat16"), C: T.Tensor((rows, k), "bfloat16")
    ):
        with T.Kernel(device=2, block=BLOCKS, threads=256) as block:
            with T.Scale("block"):
                a = T.alloc((128, DEPTH), "bfloat16", level="l1")
                b = T.alloc((DEPTH, 256), "bfloat16", level="l1")
                c = T.alloc((128, 256), "float32", level="l0")
                out = T.alloc((128, 256), "bfloat16", level="l1")
                with T.Scale("device"):
                    for turn in T.serial(turns):
                        row = (block + turn * BLOCKS) * 128
                        T.clear(c)
                        for i in T.Pipelined(k // DEPTH, num_stages=3):
                            if reads_sum:
                                T.copy(C[row, i * DEPTH], a)
                            else:
                                T.copy(A[0, i * DEPTH], a)
                            T.copy(B[i * DEPTH, 0], b)
                            T.gemm(a, b, c)
                        T.copy(c, out)
                        T.allreduce(out)
                        T.copy(out, C[row, 0])

    return program


def test_tiles_are_summed_while_the_next_ones_are_computed():
    one, four = (seconds(summed(turns)) for turns in (1, 4))
    compute = 2 * 128 * 256 * 4096 / H200.rate("block", "tensor", "bfloat16", sustained=True)
    assert one > 1.5 * compute
    assert four - one == pytest.approx(3 * compute, rel=0.1)


def test_iterations_that_need_the_last_sum_wait_for_it():
    one, four = (seconds(summed(turns, reads_sum=True)) for turns in (1, 4))
    assert four > 3.5 * one


def test_machines_without_roles_end_an_iteration_first(tmp_path):
    machine = derived(tmp_path, "levels:\n  block: {capabilities: [tma, mbarrier, async-copy]}\n")
    assert seconds(summed(4), machine=machine) > 1.2 * seconds(summed(4))


def test_an_epilogue_is_a_role_of_its_block():
    spans = tilescale.emulate(summed(2, 1024), machine=H200, data=False).timeline.spans
    engines = {span.name: span.engine for span in spans if span.engine.startswith("block 7/")}
    assert engines["gemm"] == "block 7/0" and engines["allreduce (one_shot)"] == "block 7/1"


def stored(turns: int):
    """Each block multiplies a tile and stores it in each iteration; all iterations are alike."""

    @T.prim_func
    def program(
        A: T.Tensor((128, 1024), "bfloat16"), B: T.Tensor((1024, 256), "bfloat16"),
        C: T.Tensor((turns * BLOCKS, 128, 256), "bfloat16"),
    ):  # fmt: skip
        with T.Kernel(BLOCKS, threads=256) as block:
            a = T.alloc_shared((128, DEPTH), "bfloat16")
            b = T.alloc_shared((DEPTH, 256), "bfloat16")
            c = T.alloc_fragment((128, 256), "float32")
            out = T.alloc_shared((128, 256), "bfloat16")
            for turn in T.serial(turns):
                T.clear(c)
                for i in T.Pipelined(1024 // DEPTH, num_stages=3):
                    T.copy(A[0, i * DEPTH], a)
                    T.copy(B[i * DEPTH, 0], b)
                    T.gemm(a, b, c)
                T.copy(c, out)
                T.copy(out, C[block + turn * BLOCKS, 0, 0])

    return program


def test_each_iteration_of_a_persistent_loop_takes_its_time():
    report = tilescale.emulate(stored(5), machine=H200, data=False)
    total = 5 * BLOCKS * 2 * 128 * 256 * 1024
    assert sum(span.flops for span in report.timeline.spans) == total
    assert report.time_us * 1e-6 > total / BLOCKS / H200.rate("block", "tensor", "bfloat16", sustained=True)


def decoded(groups: bool, stages: int = 1):
    """Tiles of which there is one buffer; two warpgroups share the work and synchronize in each iteration, or none."""
    steps = 64

    @T.prim_func
    def program(KV: T.Tensor((BLOCKS, steps * 128, 512), "float16")):
        with T.Kernel(BLOCKS, threads=256) as block:
            with T.Scale("block"):
                q = T.alloc((64, 512), "float16", level="l1")
                kv = T.alloc((128, 512), "float16", level="l1")
                scores = T.alloc((64, 128), "float32", level="l0")
                for k in T.Pipelined(steps, num_stages=stages):
                    T.copy(KV[block, k * 128, 0], kv)
                    if groups:
                        with T.Scale("warpgroup"):
                            mine = T.view(scores, layout=T.FullCol)
                            T.gemm(q, T.view(kv, layout=T.FullRow), mine, transpose_B=True)
                            T.barrier()
                    else:
                        T.gemm(q, kv, scores, transpose_B=True)

    return program


def test_groups_hand_over_a_single_buffer_part_by_part():
    """While one half of the tile is multiplied, the other half of the next one arrives."""
    compute = 64 * 2 * 64 * 512 * 128 / H200.rate("block", "tensor", "float16", sustained=True)
    whole, by_parts = seconds(decoded(False)), seconds(decoded(True))
    assert compute < by_parts < 0.8 * whole
