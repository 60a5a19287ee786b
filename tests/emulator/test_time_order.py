# SPDX-License-Identifier: MIT
"""The clock and what orders units: overlap, waits and their causes, flags; and runs without data."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import values
from tests.emulator.timing import H200, LAUNCH, copied, product, seconds
from tilescale.errors import NoDataError, UsageError

# -- overlap, waits, signals -------------------------------------------------------------------------------------------


def sides(copies: int, products: int):
    """One half of the threads sends tiles to the next device, the other half multiplies."""

    @T.prim_func
    def program(Y: T.Tensor((128, 128), "float16"), Z: T.Tensor((128, 128), "float16")):
        with T.Kernel(device=2, block=1, threads=256):
            with T.Scale("block"):
                tile = T.alloc((128, 128), "float16", level="l1")
                a = T.alloc((128, 128), "float16", level="l1")
                c = T.alloc((128, 128), "float32", level="l0")
                with T.Scale("warpgroup") as (wg, _):
                    with T.Scale("device") as (rank, size):
                        if wg == 0:
                            for _ in T.serial(copies):
                                T.copy(tile, Y, dst=(rank + 1) % size)
                        else:
                            for _ in T.serial(products):
                                T.gemm(a, a, c)

    return program


def test_roles_side_by_side_take_the_maximum():
    send, multiply = seconds(sides(64, 0)) - LAUNCH, seconds(sides(0, 64)) - LAUNCH
    both = seconds(sides(64, 64)) - LAUNCH
    assert min(send, multiply) > 1e-5
    assert both == pytest.approx(max(send, multiply), rel=0.05)


def waiting_product(stages: int, waits: bool, halves: bool):
    """A pipelined GEMM that polls a flag in every step, and one that its warpgroups share and synchronize in.

    On two of the device's blocks: each has its full rate, for any activity of the others.
    """
    k = 1 << 12

    @T.prim_func
    def program(
        A: T.Tensor((128, k), "float16"), B: T.Tensor((k, 2 * 256), "float16"), flag: T.Tensor((1,), "int32")
    ):
        with T.Kernel(device=1, block=(2, 1), threads=256) as (bx, by):
            with T.Scale("block"):
                a = T.alloc((128, 64), "float16", level="l1")
                b = T.alloc((64, 256), "float16", level="l1")
                c = T.alloc((128, 256), "float32", level="l0")
                for ko in T.Pipelined(k // 64, num_stages=stages):
                    if waits:
                        T.wait(flag[0], ">=", 0)
                    T.copy(A[by * 128, ko * 64], a)
                    T.copy(B[ko * 64, bx * 256], b)
                    if halves:
                        with T.Scale("warpgroup"):
                            T.gemm(T.view(a, layout=T.FullRow), b, T.view(c, layout=T.FullRow))
                            if waits:
                                T.barrier()
                    else:
                        T.gemm(a, b, c)

    return program


@pytest.mark.parametrize("halves", [False, True])
def test_loads_run_ahead_in_a_pipelined_loop_that_waits_too(halves):
    multiply = 2 * 128 * 256 * (1 << 12) / H200.rate("block", "tensor", "float16", sustained=True)
    for waits in (False, True):
        alternating, ahead = (seconds(waiting_product(s, waits, halves)) - LAUNCH for s in (1, 3))
        assert ahead == pytest.approx(multiply, rel=0.1)
        assert alternating > 1.5 * multiply


def test_a_product_that_tells_a_barrier_is_written_down_step_by_step():
    """A loop whose iterations arrive at a barrier must not be taken as one: the waits count on each arrival."""

    @T.prim_func
    def program(X: T.Tensor((128, 64), "float16"), C: T.Tensor((128, 128), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((128, 64), "float16")
            b = T.alloc_shared((128, 64), "float16")
            c = T.alloc_tmem((128, 128), "float32")
            out = T.alloc_fragment((128, 128), "float32")
            done = T.alloc_barrier(1)
            T.copy(X, a)
            T.copy(X, b)
            for i in T.serial(6):
                T.tcgen05_gemm(a, b, c, transpose_B=True, mbar=done, clear_accum=(i == 0))
                T.mbarrier_wait_parity(done, i % 2)
            T.copy(c, out)
            T.copy(out, C)

    found = tilescale.emulate(program, machine="b200-sxm-8", data=False).timeline
    assert sum(span.name == "gemm" for span in found.spans) == 6


def ring(steps: int):
    """Forward on every device the tile of its neighbour, step by step."""

    @T.prim_func
    def program(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((512, 64), "float32"), flag: T.Tensor((1,), "int32")):
        with T.Kernel(device=4, block=1, threads=128):
            with T.Scale("block"):
                tile = T.alloc((64, 64), "float32")
                T.copy(X, tile)
                for step in T.serial(steps):
                    with T.Scale("device") as (rank, size):
                        T.copy(tile, Y[step * 64, 0], dst=(rank + 1) % size, signal=flag[0])
                    T.wait(flag[0], ">=", step + 1)
                    T.copy(Y[step * 64, 0], tile)

    return program


def ring_arguments() -> list:
    return [[values(r, 64, 64), torch.empty(512, 64), torch.zeros(1, dtype=torch.int32)] for r in range(4)]


def test_a_put_and_its_signal_take_two_latencies_and_the_wait_says_so():
    found = tilescale.emulate(ring(8), ring_arguments(), machine=H200).timeline
    latency = H200.network("device").latency
    (line,) = found.waits
    assert line.where.file == __file__ and "T.wait(flag[0]" in str(line.where) and line.count == 8 * 4
    # the tile's path, the flag's path
    assert line.seconds / 32 == pytest.approx(2 * latency, rel=0.05)
    assert found.end_s > 8 * 2 * latency
    kinds = [span.kind for span in found.critical_path]
    assert kinds.count("sync") == 8 and kinds[0] == "launch"


def test_a_flag_that_is_taken_back_must_come_again():
    """The consumer sets its flag to 0 after each tile: the wait for the next one does not pass at once."""
    steps = 4

    @T.prim_func
    def program(Y: T.Tensor((steps * 64, 64), "float32"), flag: T.Tensor((1,), "int32"), room: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("block"):
                tile = T.alloc((128, 128), "float16", level="l1")
                c = T.alloc((128, 128), "float32", level="l0")
                with T.Scale("device") as (rank, _):
                    for step in T.serial(steps):
                        if rank == 0:
                            T.wait(room[0], ">=", step)
                            for _ in T.serial(50):
                                T.gemm(tile, tile, c)
                            T.signal(flag[0], 1, op="set", dst=1)
                        else:
                            T.wait(flag[0], "==", 1)
                            flag[0] = 0
                            T.signal(room[0], dst=0)

    found = tilescale.emulate(program, machine=H200, data=False).timeline
    products = [span for span in found.spans if span.name == "gemm"]
    multiply = sum(span.seconds for span in products)
    waited = [line for line in found.waits if "flag" in line.name]
    assert waited[0].count == steps and waited[0].seconds > multiply
    assert found.end_s > multiply + 2 * steps * H200.network("device").latency - 1e-6


def test_a_loop_that_looks_at_memory_goes_on_when_it_was_written():
    @T.prim_func
    def program(flag: T.Tensor((1,), "int32"), out: T.Tensor((128,), "float32")):
        with T.Kernel(2, threads=128) as bx:
            a = T.alloc_shared((128, 128), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            seen = T.alloc_var("int32", init=0)
            if bx == 0:
                T.clear(a)
                T.clear(c)
                for _ in T.serial(50):
                    T.gemm(a, a, c)
                T.atomic_store(flag[0], 1, memory_order="release")
            else:
                while seen == 0:
                    seen = T.atomic_load(flag[0], memory_order="acquire")
                for i in T.Parallel(128):
                    out[i] = 1

    found = tilescale.emulate(program, [torch.zeros(1, dtype=torch.int32), torch.empty(128)], machine=H200).timeline
    product, store = (next(s for s in found.spans if s.name == name) for name in ("gemm", "elementwise"))
    assert product.seconds > 1e-5 and store.begin_s >= product.end_s
    assert "while seen == 0" in str(found.waits[0].where)


def test_a_late_device_is_what_the_others_wait_for():
    """Device 2 computes before it reaches the barrier: the path to the end goes through it."""

    @T.prim_func
    def program(X: T.Tensor((128, 128), "float16")):
        with T.Kernel(device=4, block=1, threads=128):
            with T.Scale("block"):
                a = T.alloc((128, 128), "float16", level="l1")
                c = T.alloc((128, 128), "float32", level="l0")
                with T.Scale("device") as (rank, _):
                    if rank == 2:
                        for _ in T.serial(100):
                            T.gemm(a, a, c)
                    T.barrier()

    found = tilescale.emulate(program, machine=H200, data=False).timeline
    late = next(span for span in found.spans if span.name == "gemm")
    assert late.row == 2 and late in found.critical_path
    assert sorted(span.row for span in found.spans if span.kind == "wait") == [0, 1, 3]


# -- without data ------------------------------------------------------------------------------------------------------


def test_runs_with_and_without_data_take_the_same_time():
    m, n, k = 256, 256, 512
    tensors = [values(1, m, k, dtype="float16"), values(2, k, n, dtype="float16"), values(3, m, n, dtype="float16")]
    for stages in (0, 2, 4):
        program = product(m, n, k, stages)
        before = [t.clone() for t in tensors]
        found = tilescale.emulate(program, tensors, machine=H200)
        alone = tilescale.emulate(program, [t.to("meta") for t in tensors], machine=H200, data=False)
        assert found.time_us == alone.time_us == seconds(program) * 1e6
        assert found.timeline.spans == alone.timeline.spans
        assert all(torch.equal(t, b) for t, b in zip(tensors[:2], before[:2], strict=True))
    assert tilescale.emulate(ring(3), ring_arguments(), machine=H200).time_us == seconds(ring(3)) * 1e6


def test_flags_have_values_and_arguments_stay():
    arguments = ring_arguments()
    tilescale.emulate(ring(3), arguments, machine=H200, data=False)
    assert all(int(flag) == 0 for _, _, flag in arguments)


def test_what_depends_on_data_is_an_error_with_its_line():
    @T.prim_func
    def program(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            n = X[0]
            if n > 3:
                T.fill(Y, 1.0)

    with pytest.raises(NoDataError, match="depends on the values of 'X', and this run has none") as caught:
        tilescale.emulate(program, machine=H200, data=False)
    assert "if n > 3:" in str(caught.value) and "data=False" in str(caught.value)


def test_a_ticket_is_data():
    """The result of an atomic is unknown as well."""

    @T.prim_func
    def program(counter: T.Tensor((1,), "int32"), Y: T.Tensor((4, 64), "float32")):
        with T.Kernel(4, threads=64):
            tx = T.get_thread_binding()
            if tx == 0:
                ticket = T.atomic_add(counter[0], 1, return_prev=True)
                if ticket == 3:
                    Y[ticket, 0] = 1.0

    with pytest.raises(NoDataError, match="depends on the values of 'counter'") as caught:
        tilescale.emulate(program, machine=H200, data=False)
    assert "if ticket == 3:" in str(caught.value)


def test_a_run_without_time_says_so():
    report = tilescale.emulate(copied(2), [values(1, 2, 4096), values(2, 2, 4096)], time=False)
    with pytest.raises(UsageError, match="not timed"):
        _ = report.time_us


def test_the_same_program_takes_the_same_time_always():
    first, second = (tilescale.emulate(ring(4), ring_arguments(), machine=H200).timeline for _ in range(2))
    assert first.spans == second.spans and first.uses == second.uses
