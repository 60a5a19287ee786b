# SPDX-License-Identifier: MIT
"""Copy queues in simulated time: concurrent with later phases, one operation after the other, a separate lane."""

import json

import pytest

import tilescale
import tilescale.language as T
from tests.emulator.timing import H200, derived, seconds
from tilescale.errors import NoPathError

NVLINK = H200.network("device")
ENGINE = next(m for m in NVLINK.mechanisms if m.started_by == "host")
MIB = 1 << 20


def product_beside(chunks: int, products: int, waits: bool = False):
    """Chunks of 16 MiB go to the next device while blocks multiply; with `waits`, blocks then wait for the last one."""

    @T.prim_func
    def program(X: T.Tensor((chunks, 4 * MIB), "float32"), Y: T.Tensor((chunks, 4 * MIB), "float32")):
        with T.Kernel(device=2, block=4, threads=128):
            arrived = T.alloc_flags((chunks,))
            with T.Scale("device") as (rank, _):
                for i in T.serial(chunks):
                    T.copy(X[i, :], Y[i, :], dst=1 - rank, signal=arrived[i])
            with T.Scale("block"):
                a = T.alloc((128, 128), "float16", level="l1")
                c = T.alloc((128, 128), "float32", level="l0")
                for _ in T.serial(products):
                    T.gemm(a, a, c)
                if waits:
                    T.wait(arrived[chunks - 1], ">=", 1)

    return program


def spans_of(program, engine: str):
    timeline = tilescale.emulate(program, data=False).timeline
    return [span for span in timeline.spans if span.row == 0 and span.engine == engine]


def test_copies_run_beside_the_programs_that_follow():
    """Together they take hardly more than the longer of the two."""
    copies, products = seconds(product_beside(4, 1)), seconds(product_beside(1, 400))
    assert min(copies, products) > 1e-4
    both = seconds(product_beside(4, 400, waits=True))
    assert max(copies, products) <= both < max(copies, products) + 0.2 * min(copies, products)


def test_a_queue_takes_one_after_the_other_at_the_rate_of_its_engine():
    spans = spans_of(product_beside(3, 1), "copy queue")
    moves = [span for span in spans if span.kind == "transfer"]
    assert [span.name for span in moves] == ["put"] * 3 and all(span.nbytes == 16 * MIB for span in moves)
    assert all(b.begin_s >= a.end_s for a, b in zip(moves, moves[1:], strict=False))
    for span in moves:
        assert span.seconds == pytest.approx(16 * MIB / ENGINE.put + NVLINK.latency, rel=0.02)
    assert moves[0].begin_s == pytest.approx(ENGINE.startup), "the start-up of the others is over by then"
    assert [span.name for span in spans if span.kind == "sync"] == ["start-up"]


def test_a_queue_that_waited_for_a_flag_starts_up_again():
    """Measured on two H200: a reduce-scatter of few rows with its GEMM takes three start-ups longer than the GEMM."""

    @T.prim_func
    def program(X: T.Tensor((4 * MIB,), "float32"), Y: T.Tensor((4 * MIB,), "float32")):
        with T.Kernel(device=2, block=4, threads=128):
            done, arrived = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0], after=(done[0], ">=", 4))
            with T.Scale("block"):
                a = T.alloc((128, 128), "float16", level="l1")
                c = T.alloc((128, 128), "float32", level="l0")
                for _ in T.serial(100):
                    T.gemm(a, a, c)
                T.signal(done[0])
                T.wait(arrived[0], ">=", 1)

    waiting, starting, moving = spans_of(program, "copy queue")
    assert (waiting.kind, waiting.name) == ("wait", "wait for done")
    assert starting.seconds == pytest.approx(ENGINE.startup) and moving.begin_s == starting.end_s


def test_it_starts_up_for_each_flag_that_it_looks_at():
    """Also where the flag was raised while the queue sent: measured reduce-scatters take a start-up for each chunk."""

    @T.prim_func
    def program(X: T.Tensor((2, 4 * MIB), "float32"), Y: T.Tensor((2, 4 * MIB), "float32")):
        with T.Kernel(device=2, block=4, threads=128):
            done, arrived = T.alloc_flags(2), T.alloc_flags(2)
            with T.Scale("device") as (rank, _):
                for i in T.serial(2):
                    T.copy(X[i, :], Y[i, :], dst=1 - rank, signal=arrived[i], after=(done[i], ">=", 4))
            with T.Scale("block"):
                T.signal(done[0])
                T.signal(done[1])

    *_, first, starting, second = (span for span in spans_of(program, "copy queue") if span.kind != "wait")
    assert (first.name, second.name) == ("put", "put") and starting.begin_s == pytest.approx(first.end_s)
    assert starting.seconds == pytest.approx(ENGINE.startup) and second.begin_s == starting.end_s


def test_the_fork_and_the_join_of_a_queue_are_not_hidden():
    """Whether the grids or the queue end last."""
    for products in (1, 400):
        timeline = tilescale.emulate(product_beside(1, products), data=False).timeline
        join, other = (span for span in timeline.spans if span.name == "fork and join")
        assert join.seconds == other.seconds == pytest.approx(2 * ENGINE.startup)
        others = [span for span in timeline.spans if span.name != join.name and "signal" not in span.engine]
        assert join.begin_s == max(span.end_s for span in others)
        assert join.end_s == timeline.end_s


def gathered(world: int, rows: int, in_place: bool):
    @T.prim_func
    def program(X: T.Tensor((rows, 4096), "float32"), Y: T.Tensor((world, rows, 4096), "float32")):
        with T.Kernel(device=world, threads=128):
            arrived = T.alloc_flags((world, 2))
            with T.Scale("device") as (rank, size):
                if in_place:
                    T.all_gather(Y[rank, 0:rows, :], Y, signal=arrived, chunk=rows // 2)
                else:
                    T.all_gather(X, Y, signal=arrived, chunk=rows // 2)
                T.wait(arrived[(rank + 1) % size, 1], ">=", 1)

    return program


def test_a_gather_sends_to_the_next_rank_first_and_ends_with_the_last_chunk():
    world, rows = 4, 1024
    timeline = tilescale.emulate(gathered(world, rows, True), data=False).timeline
    moves = [s for s in timeline.spans if s.row == 0 and s.engine == "copy queue" and s.kind == "transfer"]
    assert len(moves) == 2 * (world - 1)
    signals = [s for s in timeline.spans if s.row == 0 and s.engine == "copy queue signals"]
    assert len(signals) == 2 * world, "the own flags too"
    last = timeline.critical_path[-1]
    assert any(span.engine == "copy queue" for span in timeline.critical_path)
    assert last.end_s == pytest.approx(timeline.end_s)
    total = (world - 1) * rows * 4096 * 4
    starts = ENGINE.startup + ENGINE.fork_and_join
    assert timeline.end_s == pytest.approx(total / ENGINE.put + starts + 7 * NVLINK.latency, rel=0.05)


def test_a_gather_in_place_copies_nothing_on_the_device():
    copied, in_place = seconds(gathered(1, 4096, False)), seconds(gathered(1, 4096, True))
    assert in_place < 5e-6 < copied


def test_the_trace_has_a_lane_for_the_queue(tmp_path):
    path = tmp_path / "run.json"
    tilescale.emulate(product_beside(2, 10), data=False).trace(path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert "copy queue" in lanes
    units = {e["args"]["unit"] for e in events if e["ph"] == "X" and e["name"] == "put"}
    assert units == {"device 0, copy queue", "device 1, copy queue"}


def test_a_queue_that_waits_for_work_is_no_wait_of_the_program():
    timeline = tilescale.emulate(product_beside(1, 10), data=False).timeline
    assert not timeline.waits


# -- machines ----------------------------------------------------------------------------------------------------------


def put(impl: str | None = None):
    @T.prim_func
    def program(X: T.Tensor((1024,), "float32"), Y: T.Tensor((1024,), "float32")):
        with T.Kernel(device=2, threads=32):
            arrived = T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0], impl=impl)
                T.wait(arrived[0], ">=", 1)

    return program


def test_a_network_without_an_engine_of_its_own(tmp_path):
    """Mechanisms are found by the unit that starts them, not by their names."""
    renamed = derived(tmp_path, "networks: {nvlink: {mechanisms: {copy_engine: {started_by: program}}}}\n")
    with tilescale.use_machine(renamed):
        with pytest.raises(NoPathError, match="offers only what programs start: tma, lsu, copy_engine, nvshmem"):
            put()
        assert seconds(put("lsu"), machine=renamed) > 0, "what is asked for is taken"


def test_a_way_over_several_networks():
    """Devices of two nodes are 16 in one launch; between nodes the host starts messages, no copy engine reaches."""
    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def program(X: T.Tensor((1024,), "float32"), Y: T.Tensor((1024,), "float32")):
            with T.Kernel(device=16, threads=32):
                arrived = T.alloc_flags(1)
                with T.Scale("device") as (rank, size):
                    T.copy(X, Y, dst=(rank + 8) % size, signal=arrived[0])

        report = tilescale.emulate(program, data=False, machine="h200-sxm-8x4")
        message = tilescale.current_machine().network("node").mechanism("nccl")
    assert report.time_us >= 1e6 * message.seconds(4096) > 15
