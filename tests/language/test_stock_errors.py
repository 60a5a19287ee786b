# SPDX-License-Identifier: MIT
"""Errors of stock TileLang and of wrong names while a program is traced: with the user's line."""

import re
import subprocess
import sys

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import line_of
from tilescale.errors import DeadlockError, PeerOutOfRangeError, PhaseError, ShapeError, UsageError


def test_an_assertion_without_words_names_the_line():
    @T.macro
    def refused():
        raise AssertionError

    with pytest.raises(AssertionError, match=rf"TileLang does not take this: raise AssertionError \(.*{__name__}"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=32):
                refused()


def plain(A):
    for i in T.serial(8):
        A[i] = 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
def test_what_tilelang_refuses_has_the_line():
    with pytest.raises(AssertionError, match="reshape/view shape check failed") as found:

        @T.prim_func
        def f(A: T.Tensor((64, 64), "float16")):
            with T.Kernel(1, threads=128):
                T.reshape(A, (3, 3))  # refused

    (note,) = found.value.__notes__
    assert note.startswith(f"    at {__file__}:{line_of('refused')}\n        T.reshape(")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
def test_an_index_with_two_ellipses():
    with pytest.raises(IndexError, match="A: an index has at most one Ellipsis, here are 2") as found:

        @T.prim_func
        def f(A: T.Tensor((64, 64), "float16")):
            with T.Kernel(1, threads=128):
                T.clear(A[..., ...])  # twice

    assert found.value.__notes__[0].startswith(f"    at {__file__}:{line_of('twice')}\n        T.clear(")


def test_tiles_that_make_no_product():
    with pytest.raises(ShapeError, match="K shape check failed: K_A = 64, K_B = 32") as found:

        @T.prim_func
        def f(A: T.Tensor((64, 64), "float16")):
            with T.Kernel(1, threads=128):
                T.gemm(A[0:64, 0:64], A[0:32, 0:64], A)  # no product

    assert found.value.where[0].line == line_of("no product") and "transpose_B=True" in found.value.hint


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
def test_a_plain_function_with_statements_of_the_language():
    with pytest.raises(TypeError, match="not iterable") as found:

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=32):
                plain(A)

    assert "plain(A)" in found.value.__notes__[0] and "decorate it with @T.macro" in found.value.__notes__[1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
def test_a_parameter_without_a_type():
    with pytest.raises(TypeError) as found:

        @T.prim_func
        def f(A):
            with T.Kernel(1, threads=32):
                T.clear(A)

    assert "give each parameter its type" in found.value.__notes__[0]


def stored(A, rank):
    A[0] = rank


def indexed(A, rank):
    A[rank] = 1


def looped(A, rank):
    for i in T.serial(rank):
        A[i] = 1


def asked(A, rank):
    if rank:
        A[0] = 1


def told(A, rank):
    T.copy(A, A, dst=rank)


@pytest.mark.parametrize("use", [stored, indexed, looped, asked, told])
def test_a_rank_and_a_size_where_a_number_is_wanted(use):
    body = T.macro(use)
    with pytest.raises(UsageError, match="under one name") as found:

        @T.prim_func
        def f(A: T.Tensor((8,), "int32")):
            with T.Kernel(device=2, block=1, threads=32):
                with T.Scale("device") as rank:
                    body(A, rank)

    assert found.value.where and found.value.hint


def test_an_index_is_called_as_the_program_calls_it():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=1, block=(2, 2), threads=32) as (column, row):
            with T.Scale("device"):
                T.fill(A[row : row + 1], 0)

    with pytest.raises(PhaseError, match="'row' is an index of a block"):
        tilescale.emulate(f, [torch.zeros(8)])


@pytest.mark.parametrize(
    ("machine", "level", "advice"),
    [("h200-sxm-8", "device", "wrap it round"), ("wafer-mesh", "core", "units at an edge have no neighbour there")],
)
def test_a_neighbour_that_is_not_there(machine, level, advice):
    with tilescale.use_machine(machine):

        @T.prim_func
        def f(F: T.Tensor((1,), "int32")):
            with T.Kernel(2, threads=1) if level == "core" else T.Kernel(device=2, block=1, threads=32):
                with T.Scale("core" if level == "core" else "block"), T.Scale(level) as (rank, size):
                    T.signal(F[0], dst=rank + 1)

    args = [[torch.zeros(1, dtype=torch.int32)] for _ in range(2)]
    with pytest.raises(PeerOutOfRangeError, match="has ranks 0 to 1") as found:
        tilescale.emulate(f, args, machine=machine)
    assert found.value.hint.startswith(advice)


@pytest.mark.parametrize(("devices", "advice"), [(2, "innermost scale.*T.Scale.'device'."), (1, "wrap it round")])
def test_a_peer_outside_the_scale_of_its_level(devices, advice):
    with pytest.raises(PeerOutOfRangeError, match="level 'block': the launch has rank 0 alone") as found:

        @T.prim_func
        def f(X: T.Tensor((64,), "float32")):
            with T.Kernel(device=devices, block=1, threads=32), T.Scale("block"):
                tile = T.alloc((64,), "float32")
                T.copy(tile, X, dst=1)

    assert re.search(advice, found.value.hint)


def test_one_unit_waits():
    @T.prim_func
    def f(F: T.Tensor((1,), "int32")):
        with T.Kernel(device=1, block=1, threads=32):
            with T.Scale("block"), T.Scale("device"):
                T.wait(F[0], ">=", 1)

    with pytest.raises(DeadlockError, match="deadlock: 1 unit waits and no unit can make progress"):
        tilescale.emulate(f, [[torch.zeros(1, dtype=torch.int32)]])


def test_a_phase_that_is_over_before_somebody_looks():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=128):
            ready = T.alloc_barrier(1)
            if T.get_thread_binding() == 0:
                T.barrier_arrive(ready)
                T.barrier_arrive(ready)
            T.sync_threads()
            T.barrier_wait(ready, 0)  # late
            A[0] = 1

    with pytest.raises(DeadlockError, match="if the wait is for phase 0, let no thread arrive at phase 1") as found:
        tilescale.emulate(f, [torch.zeros(8)])
    assert [place.line for place in found.value.where] == [line_of("late")]


UNREADABLE = {
    "prim_func": '@T.prim_func\ndef program(X: T.Tensor((8,), "float32")):\n    pass\n',
    "prim_func with options": '@T.prim_func()\ndef program(X: T.Tensor((8,), "float32")):\n    pass\n',
    "macro": "@T.macro\ndef program(x):\n    pass\n",
    "jit": '@tilescale.jit\ndef program(X):\n    X: T.Tensor[(8,), "float32"]\n',
    "jit with options": '@tilescale.jit(machine="h100-sxm-8")\ndef program(X):\n    X: T.Tensor[(8,), "float32"]\n',
}


@pytest.mark.parametrize("source", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_program_without_a_file_is_refused_with_its_line(source):
    with pytest.raises(UsageError, match="the source of 'program' cannot be read: .* standard input") as caught:
        exec(compile(source, "<stdin>", "exec"), {"T": T, "tilescale": tilescale})
    assert [(place.file, place.line) for place in caught.value.where] == [("<stdin>", 1)]
    assert "write the program to a file" in caught.value.hint


def test_a_missing_file_that_a_program_reads_is_its_own_error():
    with pytest.raises(FileNotFoundError):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            open("/nowhere/at/all")


def test_so_is_a_jit_function_where_the_language_is_tilelangs():
    source = "import tilescale, tilelang.language as T\n@tilescale.jit\ndef f(X):\n    X: T.Tensor[(8,), 'float32']\n"
    done = subprocess.run([sys.executable, "-"], input=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "the source of 'f' cannot be read" in done.stderr
