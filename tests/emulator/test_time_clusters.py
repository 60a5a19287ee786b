# SPDX-License-Identifier: MIT
"""Simulated time of clusters that execute as one unit: each block does its share, and loads run ahead."""

import math
from collections import Counter

import pytest

import tilescale
import tilescale.language as T
from tests.emulator.timing import H200, product, seconds
from tilescale.passes.pipeline import analyse
from tilescale.program.shares import held_whole

DEPTH = 64


def multiplied(m: int, n: int, k: int, blocks: int = 2, stages: int = 4, along: str = "rows"):
    """Each block has 128 x 256 of a cluster's tile; blocks lie along the rows of the result, or its columns."""
    high, wide = (128 * blocks, 256) if along == "rows" else (128, 256 * blocks)
    layout = T.FullRow if along == "rows" else T.FullCol

    @T.prim_func
    def program(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), C: T.Tensor((m, n), "float16")):
        with T.Kernel(cta_cluster=blocks, block=(m // high * blocks, n // wide), threads=256) as (bx, by):
            with T.Scale("cta_cluster"):
                a = T.alloc((high, DEPTH), "float16", level="l1")
                b = T.alloc((DEPTH, wide), "float16", level="l1")
                c = T.alloc((high, wide), "float32", level="l0")
                row, column = bx // blocks * high, by * wide
                T.clear(c)
                for i in T.Pipelined(k // DEPTH, num_stages=stages):
                    with T.Scale("block") as (rank, _):
                        T.copy(A[row + rank * (high // blocks), i * DEPTH], T.view(a, layout=T.FullRow))
                        T.copy(B[i * DEPTH + rank * (DEPTH // blocks), column], T.view(b, layout=T.FullRow))
                    T.gemm(a, b, c)
                with T.Scale("block") as (rank, _):
                    part = T.view(c, layout=layout)
                    if along == "rows":
                        T.copy(part, C[row + rank * 128, column])
                    else:
                        T.copy(part, C[row, column + rank * 256])

    return program


def timeline(program):
    return tilescale.emulate(program, machine=H200, data=False).timeline


def busy(found, resource: str) -> float:
    return sum(use.busy_s for use in found.uses if use.resource == resource)


@pytest.mark.parametrize("blocks", [2, 4])
def test_a_cluster_multiplies_as_fast_as_its_blocks_would(blocks: int):
    m, n, k = 128 * 132, 256 * blocks, 2048
    alone = seconds(product(m, n, k, stages=4, depth=DEPTH))
    assert seconds(multiplied(m, n, k, blocks)) == pytest.approx(alone, rel=0.05)


def test_every_block_does_its_share():
    m, n, k = 512, 256, 1024
    spans = [span for span in timeline(multiplied(m, n, k)).spans if span.name == "gemm"]
    flops = Counter()
    for span in spans:
        flops[span.engine] += span.flops
    assert len(flops) == 4 and set(flops.values()) == {2 * m * n * k // 4}


def test_what_all_blocks_need_is_read_once_for_them():
    """Memory sends a tile of B once for all blocks of its cluster; each of them writes it to its shared memory."""
    m, n, k = 512, 256, 1024
    clusters, blocks = timeline(multiplied(m, n, k)), timeline(product(m, n, k, stages=4, depth=DEPTH))
    tile_a, tile_b, result = m * k * 2, k * n * 2, m * n * 2
    cache = H200.layer_for("global").cache_bandwidth
    assert busy(blocks, "l2 cache") == pytest.approx((tile_a + 4 * tile_b + result) / cache)
    assert busy(clusters, "l2 cache") == pytest.approx((tile_a + 2 * tile_b + result) / cache)
    assert busy(clusters, "l1") == pytest.approx(busy(blocks, "l1"))


def test_loads_run_ahead_of_the_products():
    m, n, k = 256, 256, 8192
    ahead, in_turns = (seconds(multiplied(m, n, k, stages=stages)) for stages in (4, 1))
    flops = 2 * 128 * 256 * k
    compute = flops / (H200.rate("block", "tensor", "float16", sustained=True))
    assert ahead == pytest.approx(compute, rel=0.1)
    assert in_turns > 1.5 * compute


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_one_operand_lies_in_every_block(along: str):
    func = multiplied(512, 512, 128, along=along)
    program = analyse(func, H200)
    (launch,) = program.launches
    names = {buffer.data: buffer.name for buffer in launch.buffers}
    assert {names[data] for data in held_whole(H200, launch)} == {"b" if along == "rows" else "a"}


def test_a_pair_holds_half_of_both_operands():
    machine = tilescale.Machine.load("b200-sxm-8")
    (launch,) = analyse(multiplied(512, 512, 128), machine).launches
    assert not held_whole(machine, launch)


def test_blocks_wait_for_the_slowest_of_their_cluster():
    """Outside of pipelined loops, a cluster goes on when all of its blocks have come."""

    @T.prim_func
    def program(X: T.Tensor((4, 1024, 64), "float32")):
        with T.Kernel(cta_cluster=2, block=2, threads=128):
            with T.Scale("cta_cluster"):
                tile = T.alloc((2048, 8), "float32", level="l0")
                with T.Scale("block") as (rank, _):
                    mine = T.alloc((128, 64), "float32", level="l1")
                    if rank == 0:
                        for i in T.serial(32):
                            T.copy(X[i % 4, i // 4 * 128, 0], mine)
                T.clear(tile)

    begins = {span.engine: span.begin_s for span in timeline(program).spans if span.name == "fill"}
    slow = max(span.end_s for span in timeline(program).spans if span.name == "copy")
    assert len(begins) == 2 and min(begins.values()) >= slow


def test_devices_combine_the_tile_of_a_cluster_once():
    """The link carries the tile once, however many blocks hold it."""

    def program(blocks: int):
        @T.prim_func
        def summed(X: T.Tensor((1 << 16,), "float32")):
            with T.Kernel(device=2, cta_cluster=blocks, block=blocks, threads=128):
                with T.Scale("cta_cluster"):
                    tile = T.alloc((256, 256), "float32", level="l1")
                    T.clear(tile)
                    with T.Scale("device"):
                        T.allreduce(tile)

        return summed

    two, four = (timeline(program(blocks)) for blocks in (2, 4))
    assert busy(two, "nvlink") > 0 and math.isclose(busy(two, "nvlink"), busy(four, "nvlink"))
