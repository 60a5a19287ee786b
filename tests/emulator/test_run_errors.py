# SPDX-License-Identifier: MIT
"""Mistakes that show when a program runs, or when its arguments are bound: texts, lines, and remaining state."""

import inspect
import signal
import threading

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import blank, check_alive, values
from tilelang_core.ir import Op
from tilescale.errors import (
    ArgumentError,
    LaunchError,
    OutOfBoundsError,
    PeerOutOfRangeError,
    RankMismatchError,
    ShapeError,
    UnsupportedError,
    UsageError,
)


def flags(n=1):
    return torch.zeros(n, dtype=torch.int32)


def line_of(marker):
    """File and line of this test module of a comment."""
    lines, _ = inspect.getsourcelines(inspect.getmodule(line_of))
    (number,) = [i for i, text in enumerate(lines, start=1) if text.rstrip().endswith(f"# {marker}")]
    return f"{__file__}:{number}"


def failure(error, program, args, *marks, machine=None):
    """Text of the error in which a run ends; it names the marked lines in this order, and no state is left."""
    threads = torch.get_num_threads()
    with pytest.raises(error) as caught:
        tilescale.emulate(program, args, machine=machine)
    text = str(caught.value)
    places = [text.index(line_of(mark)) for mark in marks]
    assert places == sorted(places)
    assert torch.get_num_threads() == threads
    check_alive()
    return text


# -- out of bounds -----------------------------------------------------------------------------------------------------


def test_a_tile_slice_outside_shared_memory():
    @T.prim_func
    def program(X: T.Tensor((64, 8), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((32, 8), "float32")  # 32 rows
            for k in T.serial(n):
                T.copy(X[k * 16, 0], tile[k * 16 : k * 16 + 16, 0:8])  # third step

    text = failure(OutOfBoundsError, program, [values(1, 64, 8), 3], "third step", "32 rows")
    assert "tile[32:48, 0:8] is outside the buffer, whose shape is (32, 8)" in text
    assert "only accesses to device memory are cut off" in text


@pytest.mark.parametrize("scope", ["alloc_shared", "alloc_fragment", "alloc_local"])
@pytest.mark.parametrize("access", ["load", "store"])
def test_an_element_outside_a_tile(scope, access):
    @T.prim_func
    def load(X: T.Tensor((16,), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            tile = getattr(T, scope)((8,), "float32")
            T.fill(tile, 0)
            X[0] = tile[n - 9]

    @T.prim_func
    def store(X: T.Tensor((16,), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            tile = getattr(T, scope)((8,), "float32")
            for i in T.serial(n):
                tile[i] = X[i]

    program, n, found = (load, 8, "tile[-1]") if access == "load" else (store, 9, "tile[8]")
    text = failure(OutOfBoundsError, program, [values(1, 16), n])
    assert found in text and "shape is (8,)" in text and "declared" in text


def test_one_thread_outside_a_tile():
    @T.prim_func
    def program(X: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((32,), "int32")  # for half the threads
            if tx < 40:
                tile[tx] = X[tx]  # by 40

    text = failure(OutOfBoundsError, program, [flags(64)], "by 40", "for half the threads")
    assert "tile[32]" in text


def test_an_atomic_outside_a_tile():
    @T.prim_func
    def program(X: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            counts = T.alloc_shared((4,), "int32")
            T.clear(counts)
            T.atomic_add(counts[X[tx]], 1)  # bin

    text = failure(OutOfBoundsError, program, [torch.arange(64, dtype=torch.int32) // 15], "bin")
    assert "counts[4]" in text


def test_a_barrier_that_does_not_exist():
    @T.prim_func
    def program(X: T.Tensor((1,), "int32"), i: T.int32):
        with T.Kernel(1, threads=32):
            ready = T.alloc_barrier([32, 32])  # two
            T.barrier_arrive(ready[i])  # third

    text = failure(OutOfBoundsError, program, [flags(), 2], "third", "two")
    assert "ready[2]" in text


def test_a_failed_assertion():
    # T.device_assert itself traces to nothing where TileLang finds no CUDA toolkit.
    device_assert = Op.get("tl.device_assert_with_msg")

    @T.prim_func
    def program(X: T.Tensor((1,), "int32"), n: T.int32):
        with T.Kernel(2, threads=32) as b:
            if b == 1:
                T.call_intrin("void", device_assert, n > 3, "n is too small")  # asserts

    tilescale.emulate(program, [flags(), 4])
    text = failure(UsageError, program, [flags(), 3], "asserts")
    assert "block 1: the program's assertion failed: n is too small" in text


def test_a_flag_that_does_not_exist():
    @T.prim_func
    def wait(F: T.Tensor((2,), "int32"), i: T.int32):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device"):
                T.wait(F[i], ">=", 0)  # waits

    @T.prim_func
    def signal(F: T.Tensor((2,), "int32"), i: T.int32):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device") as (rank, _):
                T.signal(F[i], dst=1 - rank)  # signals

    for program, mark in ((wait, "waits"), (signal, "signals")):
        text = failure(OutOfBoundsError, program, [[flags(2), 5], [flags(2), 5]], mark)
        assert "F[5" in text and "(2,)" in text


def test_a_copy_to_a_peer_outside_its_tile():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(cta_cluster=2, block=2, threads=32):
            with T.Scale("block") as (rank, _):
                mine = T.alloc((4,), "float32")
                theirs = T.alloc((8,), "float32")  # eight
                T.copy(X, mine)
                T.copy(mine, theirs[n : n + 4], dst=1 - rank)  # over the end

    text = failure(OutOfBoundsError, program, [values(1, 4), 5], "over the end", "eight")
    assert "theirs[5:9]" in text


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_collectives_in_another_order():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), Y: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, threads=32):
            with T.Scale("device"):
                if Y[0] == 0:
                    T.allreduce(X)  # sum
                else:
                    T.broadcast(X)  # root

    args = [[values(r, 4), torch.tensor([int(r == 2)], dtype=torch.int32)] for r in range(3)]
    text = failure(RankMismatchError, program, args, "root", "sum")
    assert "device 2 calls T.broadcast where device 0 calls T.allreduce" in text


def test_tiles_of_different_shapes_meet():
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), rows: T.int32):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device"):
                T.allreduce(X[0:rows])  # rows

    text = failure(RankMismatchError, program, [[values(r, 8), 4 + r] for r in range(2)], "rows")
    assert "rank 0 brings tiles [(4,)], rank 1 brings [(5,)]" in text


def test_ranks_that_disagree_about_an_extent():
    n = T.dynamic("n")

    @T.prim_func
    def program(X: T.Tensor((n,), "float32")):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device"):
                T.allreduce(X)

    text = failure(RankMismatchError, program, [[values(0, 4)], [values(1, 5)]])
    assert "n = 4 on rank 0" in text and "5 on rank 1" in text


@pytest.mark.parametrize("side", ["dst", "src"])
def test_a_computed_peer_that_does_not_exist(side):
    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(device=3, threads=32):
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, **{side: rank + 1})  # no wrap

    text = failure(PeerOutOfRangeError, program, [[values(r, 4), blank(4)] for r in range(3)], "no wrap")
    assert "device 2 names peer 3 of level 'device': the launch has ranks 0 to 2" in text
    assert "% size" in text


def test_a_computed_root_that_does_not_exist():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), root: T.int32):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device"):
                T.broadcast(X, root=root)  # root 2

    failure(PeerOutOfRangeError, program, [[values(r, 4), 2] for r in range(2)], "root 2")


def test_a_tile_operation_on_which_threads_disagree():
    @T.prim_func
    def program(X: T.Tensor((64, 4), "float32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((4,), "float32")
            T.copy(X[tx, 0], tile)  # each its own row

    text = failure(UsageError, program, [values(1, 64, 4)], "each its own row")
    assert "where a tile begins differs between threads" in text and "0 and 1" in text


def test_a_copy_between_different_extents_that_trace_time_cannot_see():
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), n: T.int32):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device") as (rank, _):
                T.copy(X[0:n], X[4:8], dst=1 - rank)  # three to four

    failure(ShapeError, program, [[values(r, 8), 3] for r in range(2)], "three to four")


# -- what the emulator does not run ------------------------------------------------------------------------------------


def test_an_unknown_function_is_named_with_its_line():
    @T.prim_func
    def program(X: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            X[0] = T.call_extern("float32", "mystery", X[1])  # extern

    text = failure(UnsupportedError, program, [values(1, 8)], "extern")
    assert "mystery" in text or "call_extern" in text


def test_a_tile_of_single_threads_is_named_with_its_line():
    @T.prim_func
    def program(X: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            with T.Scale("thread") as (rank, _):
                own = T.alloc((1,), "float32", level="l0")
                own[0] = X[rank]  # one for each thread

    assert "'own'" in failure(UnsupportedError, program, [values(1, 32)], "one for each thread")


def test_a_variable_of_a_device_phase_is_named_with_its_line():
    @T.prim_func
    def program(X: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device"):
                sum = T.alloc_var("float32")
                sum = X[0] + X[1]  # a sum of devices
                X[2] = sum

    assert "'sum'" in failure(UnsupportedError, program, [[values(r, 8)] for r in range(2)], "a sum of devices")


# -- arguments and launches --------------------------------------------------------------------------------------------


def two_devices():
    @T.prim_func
    def program(X: T.Tensor((4, 6), "float32"), n: T.int32):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device"):
                T.allreduce(X)

    return program


@pytest.mark.parametrize(
    ("change", "found", "hint"),
    [
        (lambda a: a[:1], "1 argument given", "it takes 2: X, n"),
        (lambda a: [*a, 1], "3 arguments given", "it takes 2: X, n"),
        (lambda a: [a[0].double(), 1], "float64", "float32"),
        (lambda a: [a[0].reshape(24), 1], "shape (24,)", "(4, 6)"),
        (lambda a: [a[0][:3], 1], "shape (3, 6)", "(4, 6)"),
        (lambda a: [a[0].numpy(), 1], "ndarray", "torch.Tensor"),
        (lambda a: [a[0], "one"], "'n' is str", "number"),
        (lambda a: [a[0], a[0]], "'n' is Tensor", "number"),
        (lambda a: [torch.empty(4, 6, device="meta"), 1], "meta", "CPU"),
    ],
    ids=["too few", "too many", "type", "rank", "shape", "numpy", "text", "tensor for a number", "elsewhere"],
)
def test_arguments_that_do_not_fit(change, found, hint):
    args = [[values(0, 4, 6), 1], change([values(1, 4, 6), 1])]
    text = failure(ArgumentError, two_devices(), args)
    assert "arguments of device 1" in text and found in text and hint in text


def test_a_tensor_where_lists_of_them_are_expected():
    assert "given as one Tensor" in failure(ArgumentError, two_devices(), values(0, 4, 6))


def test_a_shard_of_the_wrong_size():
    @T.prim_func
    def program(X: T.Tensor((8, 6), "float32")):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device"):
                mine = T.view(X, layout=T.FullRow)
                T.fill(mine, 0)

    text = failure(ArgumentError, program, [[values(0, 4, 6)], [values(1, 8, 6)]])
    assert "'X' has shape (8, 6)" in text and "its shard" in text and "(4, 6)" in text


@pytest.mark.parametrize("units", [0, 1, 3])
def test_arguments_for_another_number_of_devices(units):
    text = failure(LaunchError, two_devices(), [[values(r, 4, 6), 1] for r in range(units)])
    assert "the launch has 2 devices" in text and f"the arguments are for {units}" in text


def test_more_devices_than_the_machine_has():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32")):
        with T.Kernel(device=T.ALL, threads=32):
            with T.Scale("device"):
                T.allreduce(X)

    text = failure(LaunchError, program, [[values(r, 4)] for r in range(9)])
    assert "9 units of level 'device'" in text and "8" in text
    text = failure(LaunchError, program, [[values(r, 4)] for r in range(3)], machine="rtx4090-pcie-2")
    assert "3 units" in text


def test_no_devices_at_all():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32")):
        with T.Kernel(device=T.ALL, threads=32):
            with T.Scale("device"):
                T.allreduce(X)

    failure(LaunchError, program, [])


def test_a_program_that_fits_no_processor():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=1056):
            X[0] = 1

    text = failure(LaunchError, program, [values(1, 4)])
    assert "1056 threads" in text and "does not fit" in text


# -- state after an error
# ------------------------------------------------------------------------------------------------


def test_errors_inside_coroutines_leave_no_thread_setting_and_no_numpy_state():
    before = torch.get_num_threads(), np.geterr()
    torch.set_num_threads(2)
    try:

        @T.prim_func
        def program(X: T.Tensor((4,), "int32")):
            with T.Kernel(4, threads=64) as b:
                tile = T.alloc_shared((2,), "int32")
                T.fill(tile, 0)
                X[b] = tile[b]

        with pytest.raises(OutOfBoundsError):
            tilescale.emulate(program, [flags(4)])
        assert torch.get_num_threads() == 2
        assert np.geterr() == before[1]
    finally:
        torch.set_num_threads(before[0])


def test_ctrl_c_ends_a_run():
    @T.prim_func
    def program(X: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=2, threads=32):
            with T.Scale("block"):
                for _ in T.serial(100_000_000):
                    X[0] = 1

    # A test run in the background of a shell has SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            tilescale.emulate(program, [[flags(4)], [flags(4)]])
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    check_alive()
