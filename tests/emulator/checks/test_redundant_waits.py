# SPDX-License-Identifier: MIT
"""Waits that no access needs are told, and none that some access needs."""

import itertools

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import line_of, tensors


def told(program, args, **options):
    """The lines of the waits that a run says nobody needs."""
    return {where.line for _, where in tilescale.emulate(program, args, time=False, **options).redundant_waits}


def test_a_second_wait_for_the_same_and_one_behind_a_barrier():
    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8, 8), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=F[0])
                T.wait(F[0], ">=", 1)
                T.wait(F[0], ">=", 1)  # again
                T.signal(F[1], dst=1 - rank)
                T.barrier()
                T.wait(F[1], ">=", 1)  # behind a barrier
                T.copy(Y, X)

    report = tilescale.emulate(program, tensors(2, (8, 8), (8, 8), (2,)))
    assert {where.line for _, where in report.redundant_waits} == {line_of("again"), line_of("behind a barrier")}
    again = f"redundant wait for F: no access of this run needs it  test_redundant_waits.py:{line_of('again')}"
    assert again in str(report).splitlines() and again in report._repr_html_()


def exchange(arrives, reads):
    """Neighbours tell each other of what they have put, and read it then or not."""

    @T.prim_func
    def program(X: T.Tensor((8, 1), "float32"), Y: T.Tensor((8, 1), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                if arrives:
                    T.copy(X, Y, dst=1 - rank)
                T.signal(F[0], dst=1 - rank)
                T.wait(F[0], ">=", 1)  # arrived
                if reads:
                    T.copy(Y, X)

    return program


def test_a_wait_is_needed_by_who_reads_and_by_the_caller():
    for arrives, reads in itertools.product((True, False), repeat=2):
        assert told(exchange(arrives, reads), tensors(2, (8, 1), (8, 1), (2,))) == (
            set() if arrives else {line_of("arrived")}
        ), (arrives, reads)


def test_a_wait_of_whoever_signals_too():
    """Device 2 looks for one signal of two. That device 0 has put is known only since device 1 waits for it."""

    @T.prim_func
    def program(X: T.Tensor((8, 1), "float32"), Y: T.Tensor((8, 1), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                if rank == 0:
                    T.copy(X, Y, dst=2)
                    T.signal(F[0], dst=2)
                    T.signal(F[1], dst=1)
                if rank == 1:
                    T.wait(F[1], ">=", 1)
                    T.signal(F[0], dst=2)
                if rank == 2:
                    T.wait(F[0], ">=", 1)
                    T.copy(Y, X)

    assert not told(program, tensors(3, (8, 1), (8, 1), (2,)))


def test_a_flag_that_is_set_back():
    """The order of two updates of a flag is kept by a wait, though no data is."""

    @T.prim_func
    def program(F: T.Tensor((1,), "int32"), G: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                if rank == 0:
                    T.signal(F[0], dst=1)
                if rank == 1:
                    T.wait(F[0], ">=", 1)  # kept
                    T.signal(F[0], 0, op="set")

    assert not told(program, tensors(2, (1,), (1,)))


def test_on_one_device_nothing_is_said():
    """There all is done when a device comes to a wait for its peers."""

    @T.prim_func
    def program(X: T.Tensor((8, 1), "float32"), F: T.Tensor((1,), "int32"), device: T.int32):
        with T.Kernel(device=T.ALL, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.signal(F[0], dst=(rank + 1) % size)
            with T.Scale("device"):
                T.wait(F[0], ">=", 1)

    assert told(program, [[*given, 0] for given in tensors(2, (8, 1), (1,))])
    assert not told(program, [[*tensors(1, (8, 1), (1,))[0], 0]])
