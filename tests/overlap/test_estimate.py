# SPDX-License-Identifier: MIT
"""Estimates of overlapped programs: what tiles take that wait for their rows, and how near they are to a simulation."""

from __future__ import annotations

import heapq
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.ladder import NUMBERED, load
from tests.overlap.support import H200, overlapped
from tests.overlap.test_drawn_estimates import reduction, simulated
from tilescale.passes.overlap.estimate import RowTransport, reduced
from tilescale.passes.overlap.rewrite import overlap
from tilescale.passes.overlap.tile_cost import TileWork, last
from tilescale.tuning import programs


@settings(max_examples=20, deadline=None)
@given(
    tiles=st.integers(1, 40),
    at_once=st.integers(1, 12),
    ready=st.lists(st.integers(0, 30), min_size=1, max_size=9).map(sorted),
)
def test_tiles_take_the_places_that_become_free_in_order(tiles: int, at_once: int, ready: list[int]):
    places, ends = [0] * at_once, []
    for tile in range(tiles):
        here = ready[max(n for n in range(len(ready)) if n == 0 or n * tiles < (tile + 1) * len(ready))]
        ends.append(max(heapq.heappop(places), here) + 5)
        heapq.heappush(places, ends[-1])
    assert TileWork(tiles, 5, at_once).done(ready).tolist() == ends


def test_a_chunk_is_made_with_the_last_tile_that_it_spans():
    work = TileWork(tiles=6, tile=1.0, at_once=2)
    assert work.seconds == 3 and work.made(3).tolist() == [1, 2, 3]
    assert work.made(4).tolist() == [work.done()[last(i, 4, 6)] for i in range(4)] == [1, 2, 3, 3]


def test_tiles_that_read_share_the_bandwidth_of_the_memory():
    """Those of a last wave that is not full have more each; those that wait leave it to the others."""
    work = TileWork(tiles=6, tile=1.0, at_once=4, streamed=2.0)
    assert work.seconds == 12 and work.done().tolist() == [8, 8, 8, 8, 12, 12]
    halves = TileWork(tiles=4, tile=1.0, at_once=4, streamed=2.0)
    assert halves.done([0.0, 3.0]).tolist() == [4, 4, 8, 8] and halves.done([0.0, 9.0]).tolist() == [4, 4, 13, 13]
    assert halves.done([0.0, 20.0]).tolist() == [4, 4, 24, 24]


def test_the_memory_bounds_full_waves_and_arithmetic_the_last_one():
    work = TileWork(tiles=6, tile=3.0, at_once=4, streamed=1.0)
    assert work.seconds == 7 and work.done().tolist() == [4, 4, 4, 4, 7, 7]
    shared = TileWork(tiles=6, tile=1.0, at_once=2, streamed=1.0, each=2)
    assert shared.done().tolist() == [4, 4, 4, 4, 6, 6] and replace(shared, tile=3.0).done()[-1] == 9


def test_tiles_that_share_a_place_are_done_together():
    """Those that wait for rows leave its arithmetic to the others."""
    work = TileWork(tiles=10, tile=1.0, at_once=2, waits=0.5, each=2)
    assert work.seconds == 6.5 and work.done().tolist() == [2.5] * 4 + [5] * 4 + [6.5] * 2
    assert work.done([0.0, 20.0])[:5].tolist() == [2.5] * 4 + [4]
    assert work.done([0.0] * 2 + [20.0] * 8)[:4].tolist() == [1.5] * 2 + [21.5] * 2


def test_tiles_that_wait_for_a_sum_keep_their_places():
    """The next ones begin when they end; nothing is computed again then."""
    work = TileWork(tiles=6, tile=1.0, at_once=1, each=2)
    assert work.done(until=[0.0, 9.0, 9.0]).tolist() == [2, 2, 9, 9, 11, 11]


def test_a_last_chunk_has_the_remainder():
    network = H200.network("device")
    engine = network.mechanism("copy_engine")
    travel = RowTransport(network, engine, parts=2, height=1024, row_bytes=1 << 14, local=1e-12)
    assert travel.cut(1024) == [1024] and travel.cut(768) == [768, 256]
    assert list(travel.chunks(128)) == [128, 256, 384, 512, 1024]
    ends = [reduced(travel, chunk, TileWork(2, 1e-6, 2), everywhere=True, behind=False) for chunk in (1024, 768)]
    assert ends[1] - ends[0] == pytest.approx(2 * (engine.startup + network.latency), rel=0.1)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("chunk", [256, 1024])
def test_a_grid_behind_adds_up_when_all_is_made_and_its_chunks_leave_late(everywhere: bool, chunk: int):
    network = H200.network("device")
    travel = RowTransport(
        network, network.mechanism("copy_engine"), parts=2, height=1024, row_bytes=1 << 14, local=1e-12
    )
    work = TileWork(tiles=512, tile=2e-5, at_once=128)
    ends = [reduced(travel, chunk, work, everywhere=everywhere, behind=behind) for behind in (False, True)]
    assert work.seconds < ends[0] and (ends[0] <= ends[1] if everywhere else ends[0] < ends[1])
    assert ends[1] >= work.seconds + travel.adding(1024) + everywhere * travel.sending(chunk)


@pytest.mark.parametrize("parts", [2, 8])
def test_programs_that_send_keep_their_places(parts: int):
    """Half or seven eighths of the tiles are sent. With either sender the link bounds the time."""
    network = H200.network("device")
    by_tiles = RowTransport(
        network, network.mechanism("lsu"), parts, 8192 // parts, 1 << 14, local=1e-12, by_tiles=True
    )
    work = TileWork(tiles=2048, tile=2e-5, at_once=128)
    sent = (parts - 1) / parts * (8192 << 14)
    ends = reduced(by_tiles, 128, work, everywhere=False, behind=False)
    assert ends == pytest.approx(work.seconds + by_tiles.queue.seconds(round(sent), starts=0), rel=0.1)


def gather_then_multiply(devices: int, size: int) -> Any:
    """Tiles of 128 x 256 of a GEMM with a gathered matrix."""

    @T.prim_func
    def f(
        A: T.Tensor((size, size), "bfloat16"),
        B: T.Tensor((size, size), "bfloat16"),
        C: T.Tensor((size, size), "bfloat16"),
    ):
        with T.Kernel(device=devices, block=(size // devices // 256, size // 128), threads=256) as (bx, by):
            whole = T.alloc((size, size), "bfloat16", level="l2")
            with T.Scale("device"):
                B_dev, C_dev = T.view(B, layout=T.FullCol), T.view(C, layout=T.FullCol)
                T.all_gather(T.view(A, layout=T.FullRow), whole)
            with T.Scale("block"):
                a = T.alloc((128, 64), "bfloat16", level="l1")
                b = T.alloc((64, 256), "bfloat16", level="l1")
                c = T.alloc((128, 256), "float32", level="l0")
                T.clear(c)
                for k in T.Pipelined(size // 64, num_stages=3):
                    T.copy(whole[by * 128, k * 64], a)
                    T.copy(B_dev[k * 64, bx * 256], b)
                    T.gemm(a, b, c)
                T.copy(c, C_dev[by * 128, bx * 256])

    return f


def test_overlapped_layers_over_eight_devices_are_near_the_bound():
    """Simulated times of `benchmarks/overlap_bound.py` exceed the longer part by at most a tenth and one tile."""
    rows = json.loads((Path(__file__).parents[2] / "benchmarks/results/overlap_bound.json").read_text())["rows"]
    assert {(r["work"].count("scatter"), r["shape"][0]) for r in rows} == {
        (scatter, m) for scatter in (0, 1) for m in (4096, 8192)
    }
    for r in rows:
        assert r["devices"] == 8 and 28672 // 8 in r["shape"]
        assert r["overlapped"] <= 1.1 * max(r["product"], r["collective"]) + r["tile"]


@pytest.mark.parametrize(("number", "size", "devices"), [(7, 2048, 2), (7, 4096, 4), (15, 4096, 4), (6, 4096, 4)])
def test_what_small_tiles_carry_through_the_cache_is_estimated(number: int, size: int, devices: int):
    """Tiles of 64 x 64 load each operand once for each tile of the other: more than half of their time."""
    func = load(NUMBERED[number]).phases(devices, size, size, size)
    (move,) = overlap(func, H200)[1].moves
    in_order = tilescale.emulate(func, data=False, machine=H200).time_us
    assert move.in_order_s is not None and move.in_order_s * 1e6 == pytest.approx(in_order, rel=0.05)


def test_a_device_reads_its_shard_and_not_the_whole_matrix():
    """Few tiles of eight devices, which stream their operands."""
    func = reduction(8, 128, 4608, 8 * 1024, 64, 128, 4, scatters=True)
    (move,) = overlap(func, H200)[1].moves
    assert move.in_order_s is not None
    assert move.in_order_s * 1e6 == pytest.approx(simulated(func), rel=0.1)


def test_a_grid_of_few_tiles_gains_nothing_and_the_estimate_knows():
    """All tiles are resident: those whose rows come last take as long as the whole grid."""
    func = gather_then_multiply(4, 4096)
    changed, schedule = overlapped(func)
    (move,) = schedule.moves
    assert move.in_order_s is not None and move.overlapped_s is not None
    in_order, beside = (tilescale.emulate(f, data=False, machine=H200).time_us for f in (func, changed))
    assert in_order < beside and move.in_order_s < move.overlapped_s
    assert move.in_order_s * 1e6 == pytest.approx(in_order, rel=0.1)
    assert move.overlapped_s * 1e6 == pytest.approx(beside, rel=0.1)


@pytest.mark.parametrize(("number", "devices", "carrier"), [(7, 2, "queue"), (15, 4, "tiles")])
def test_queues_and_programs_that_send_take_the_simulated_time(number: int, devices: int, carrier: str | None):
    """Fork and join of the queue are a quarter of the first; sums of an all-reduce are sent like its parts."""
    changed, schedule = overlapped(load(NUMBERED[number]).phases(devices, 2048, 2048, 2048), carrier=carrier)
    (move,) = schedule.moves
    assert move.overlapped_s is not None
    simulated = tilescale.emulate(changed, data=False, machine=H200).time_us
    assert move.overlapped_s * 1e6 == pytest.approx(simulated, rel=0.06)


def test_what_a_queue_makes_slower_stays_in_order():
    func = programs.gather_and_gemm(H200, 2, (4096, 2048, 2048))
    (move,) = overlap(func, H200)[1].moves
    changed, _ = overlapped(func)
    in_order, beside = (tilescale.emulate(f, data=False, machine=H200).time_us for f in (func, changed))
    assert not move.overlapped and in_order < beside
