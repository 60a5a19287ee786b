# SPDX-License-Identifier: MIT
"""Equal programs and equal devices are recorded and simulated once; results are the same."""

import pytest

import tilescale
import tilescale.language as T
from tests.emulator.timing import H200, derived
from tilescale.backends.emulator.execute import grid
from tilescale.backends.emulator.record import equivalence, instrumentation
from tilescale.timing import replay
from tilescale.timing.timeline import Copies

M, N, K = 1000, 1100, 640
"""Extents of GEMMs that leave tails; their operands fit into no cache of the machine below."""


def gemm(devices: int):
    """Warpgroups share the inner extent; tiles at the edges stick out; the result is summed over the devices."""

    @T.prim_func
    def program(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(device=devices, block=(T.ceildiv(N, 128), T.ceildiv(M, 64)), threads=256) as (bx, by):
            with T.Scale("block"):
                a = T.alloc((64, 64), "bfloat16", level="l1")
                b = T.alloc((64, 128), "bfloat16", level="l1")
                c = T.alloc((64, 128), "float32", level="l0")
                row = by * 64
                with T.Scale("warpgroup"):
                    T.clear(T.view(c, layout=T.Replica))
                for k in T.Pipelined(K // 64, num_stages=3):
                    T.copy(A[row, k * 64], a)
                    T.copy(B[k * 64, bx * 128], b)
                    with T.Scale("warpgroup"):
                        T.gemm(T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow), T.view(c, layout=T.Replica))
                with T.Scale("warpgroup"):
                    T.allreduce(T.view(c, layout=T.Replica))
                T.copy(c, C[row, bx * 128])
            with T.Scale("device"):
                T.allreduce(C)

    return program


def causal(devices: int):
    """The number of tiles that a block reads follows from its number along one axis, a branch from the loop around
    phases.
    """

    @T.prim_func
    def program(X: T.Tensor((16, 1024, 64), "float32"), Y: T.Tensor((16, 1024, 64), "float32")):
        with T.Kernel(device=devices, block=(8, 16), threads=128) as (bx, by):
            for turn in T.serial(3):
                with T.Scale("block"):
                    tile = T.alloc((128, 64), "float32", level="l0")
                    for k in T.serial(bx + 1):
                        T.copy(X[by, k * 128, 0], tile)
                        for i, j in T.Parallel(128, 64):
                            tile[i, j] = T.exp(tile[i, j])
                    if turn < 2:
                        T.copy(tile, Y[by, bx * 128, 0])
                with T.Scale("device"):
                    T.barrier()

    return program


def by_rank(devices: int):
    """Devices do different work: the first has more to do."""

    @T.prim_func
    def program(X: T.Tensor((64, 4096), "float32")):
        with T.Kernel(device=devices, block=64, threads=128) as bx:
            with T.Scale("block"):
                tile = T.alloc((1, 4096), "float32", level="l0")
                with T.Scale("device") as (rank, _):
                    for _ in T.serial(T.if_then_else(rank == 0, 9, 3)):
                        T.copy(X[bx, 0], tile)
            with T.Scale("device"):
                T.barrier()

    return program


def numbered(devices: int):
    """Blocks that differ by their rank, by a variable of their threads, and by the start of a view."""

    @T.prim_func
    def program(X: T.Tensor((64, 4096), "float32"), total: T.Tensor((64,), "float32")):
        with T.Kernel(device=devices, block=64, threads=128) as bx:
            with T.Scale("block") as (rank, _):
                tile = T.alloc((1, 4096), "float32", level="l0")
                turns = T.alloc_var("int32", init=0)
                turns = bx // 32
                for _ in T.serial(turns + 1):
                    T.copy(X[rank, 0], tile)
                T.atomic_add(total[bx], 1.0)

    return program


def synchronized(devices: int):
    """Warpgroups of a block exchange tiles; after that the blocks of a device wait for each other."""

    @T.prim_func
    def program(X: T.Tensor((64, 64, 64), "float32")):
        with T.Kernel(device=devices, block=64, threads=256) as bx:
            with T.Scale("block"):
                c = T.alloc((64, 64), "float32", level="l0")
                with T.Scale("warpgroup"):
                    T.clear(T.view(c, layout=T.Replica))
                    T.allreduce(T.view(c, layout=T.Replica))
                T.copy(c, X[bx, 0, 0])
            with T.Scale("device"):
                T.barrier()
            with T.Scale("block"):
                again = T.alloc((64, 64), "float32", level="l0")
                T.copy(X[bx, 0, 0], again)
                T.sync_grid()

    return program


def spans(timeline):
    every = ((s.row, s.engine, s.begin_s, s.end_s, s.name, s.unit, s.nbytes, s.flops, s.where) for s in timeline.spans)
    return sorted(every, key=lambda span: span[:5])


def uses(timeline):
    return sorted((use.unit, use.resource, use.busy_s, use.kind) for use in timeline.uses)


def found(program, machine):
    report = tilescale.emulate(program, machine=machine, data=False)
    return report.activity, report.timeline


@pytest.mark.parametrize("program", [gemm, causal, by_rank, numbered])
def test_taking_over_steps_changes_nothing(program, tmp_path, monkeypatch):
    machine = derived(tmp_path, "memory:\n  l2: {cache_capacity: 512 KiB}\n")
    quick_activity, quick = found(program(2), machine)
    monkeypatch.setattr(instrumentation, "equivalence", lambda *_: None)
    activity, each = found(program(2), machine)
    assert quick_activity == activity
    assert quick.end_s == pytest.approx(each.end_s, rel=1e-9)
    for mine, wanted in zip(uses(quick), uses(each), strict=True):
        assert mine == (*wanted[:2], pytest.approx(wanted[2], rel=1e-9), wanted[3])
    assert len(quick.spans) == len(each.spans)
    for mine, wanted in zip(spans(quick), spans(each), strict=True):
        assert mine[4:] == wanted[4:] and mine[2:4] == pytest.approx(wanted[2:4], rel=1e-9)


def test_few_programs_run_for_all(monkeypatch):
    """142 of 144 tiles lie inside or stick out at one of two edges, and the cache has a tile or not."""
    started = []
    start = grid.Grid.start
    monkeypatch.setattr(grid.Grid, "start", lambda self, *args: started.append(1) or start(self, *args))
    report = tilescale.emulate(gemm(8), machine=H200, data=False)
    assert [account.programs for account in report.activity] == [9 * 16] * 8
    assert len(started) < 16


@pytest.mark.parametrize("program, same", [(gemm, True), (causal, True), (synchronized, True), (by_rank, False)])
def test_devices_in_lockstep_are_simulated_once(program, same, monkeypatch):
    _, quick = found(program(4), H200)
    assert isinstance(quick.spans, Copies) == same
    monkeypatch.setattr(replay, "in_lockstep", lambda _: None)
    _, each = found(program(4), H200)
    assert not isinstance(each.spans, Copies)
    assert quick.end_s == each.end_s and quick.rows == each.rows == 4
    assert spans(quick) == spans(each) and uses(quick) == uses(each)
    assert [(w.name, w.seconds, w.count) for w in quick.waits] == [(w.name, w.seconds, w.count) for w in each.waits]
    assert [s.name for s in quick.critical_path] == [s.name for s in each.critical_path]
    for span in quick.spans:
        assert span.cause is None or quick.spans[span.cause].row == span.row or not same


def test_a_device_that_finds_another_cache_does_not_take_over(monkeypatch):
    """One device reads the tensor first: only its second grid finds it in the cache."""

    def program(first: int):
        @T.prim_func
        def twice(X: T.Tensor((64, 4096), "float32")):
            with T.Kernel(device=2, block=64, threads=128) as bx:
                with T.Scale("block"):
                    tile = T.alloc((1, 4096), "float32", level="l0")
                    with T.Scale("device") as (rank, _):
                        if rank >= first:
                            T.copy(X[bx, 0], tile)
                with T.Scale("device"):
                    T.barrier()
                with T.Scale("block"):
                    again = T.alloc((1, 4096), "float32", level="l0")
                    T.copy(X[bx, 0], again)

        return twice

    written = []
    run = equivalence.GridPrograms.run
    monkeypatch.setattr(equivalence.GridPrograms, "run", lambda self: written.append(1) or run(self))
    # The first grid asks for its rank, so both devices write down their own.
    for first, grids in (0, 3), (1, 4):
        written.clear()
        tilescale.emulate(program(first), machine=H200, data=False)
        assert len(written) == grids


def test_a_device_takes_over_the_cache_of_a_grid_at_its_end(tmp_path, monkeypatch):
    """The device that is run continues with its next grids, which use the cache, before others take over the first."""

    @T.prim_func
    def program(X: T.Tensor((64, 4096), "float32"), Y: T.Tensor((640, 4096), "float32")):
        with T.Kernel(device=2, block=64, threads=128) as bx:
            with T.Scale("block"):
                tile = T.alloc((1, 4096), "float32", level="l0")
                T.copy(X[bx, 0], tile)
        with T.Kernel(device=2, block=64, threads=128) as bx:
            with T.Scale("block"):
                tile = T.alloc((1, 4096), "float32", level="l0")
                T.copy(X[bx, 0], tile)
                for i in T.serial(10):
                    T.copy(Y[bx * 10 + i, 0], tile)
        with T.Kernel(device=2, block=64, threads=128) as bx:
            with T.Scale("block"):
                tile = T.alloc((1, 4096), "float32", level="l0")
                T.copy(X[bx, 0], tile)

    started = []
    start = grid.Grid.start
    monkeypatch.setattr(grid.Grid, "start", lambda self, *args: started.append(1) or start(self, *args))
    found(program, derived(tmp_path, "memory:\n  l2: {cache_capacity: 1100 KiB}\n"))
    assert len(started) == 3  # one program of each grid, on one device


def test_a_unit_that_represents_all_is_as_busy_as_each():
    """Sums of tiles are stored in the memory of every device: none counts twice, and no other device is there."""

    @T.prim_func
    def program(X: T.Tensor((8, 64, 256), "float32")):
        with T.Kernel(device=4, block=8, threads=128) as block:
            with T.Scale("block"):
                tile = T.alloc((64, 256), "float32", level="l1")
                T.copy(X[block, 0, 0], tile)
                with T.Scale("device"):
                    T.allreduce(tile)
                T.copy(tile, X[block, 0, 0])

    timeline = tilescale.emulate(program, machine=H200, data=False).timeline
    assert isinstance(timeline.spans, Copies)
    busy = {use.unit: use.busy_s for use in timeline.uses if use.resource == "l2"}
    assert list(busy) == [f"device {number}" for number in range(4)] and len(set(busy.values())) == 1
    assert timeline.bound.seconds <= timeline.end_s
