# SPDX-License-Identifier: MIT
"""External functions that are run by Python functions which stand in for them."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import assert_same, blank, values
from tests.kernels.base import cuda_texts
from tilescale.backends.emulator.operations import stand_ins
from tilescale.errors import (
    NoDataError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
    UnsupportedError,
    UsageError,
)

SATURATING_ADD = "static __device__ unsigned char saturating_add(int a, int b) { return min(a + b, 255); }"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Registrations of a test are removed after it."""
    monkeypatch.setattr(stand_ins, "_STAND_INS", {})


def saturated(T):
    @T.prim_func
    def program(X: T.Tensor((8,), "int32"), Y: T.Tensor((8,), "uint8"), n: T.int32):
        with T.Kernel(2, threads=4, prelude=SATURATING_ADD) as b:
            t = T.get_thread_binding()
            if b * 4 + t < n:
                Y[b * 4 + t] = T.call_extern("uint8", "saturating_add", X[b * 4 + t], 200)

    return program


def test_its_text_is_that_of_tilelang():
    ours, stock = cuda_texts(saturated, "sm_90a")
    assert ours == stock and SATURATING_ADD in ours


def test_a_function_of_numbers_is_called_for_each_thread():
    calls = []

    @tilescale.stand_in("saturating_add")
    def saturating_add(a, b):
        calls.append(int(a))
        return min(a + b, 255)

    args = [torch.arange(0, 80, 10, dtype=torch.int32), torch.zeros(8, dtype=torch.uint8), 7]
    tilescale.emulate(saturated(T), args, machine="h100-sxm-8")
    assert args[1].tolist() == [200, 210, 220, 230, 240, 250, 255, 0]
    assert sorted(calls) == list(range(0, 70, 10))


def test_what_nobody_stands_in_for_is_refused_with_what_to_write():
    args = [torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.uint8), 8]
    with pytest.raises(UnsupportedError, match=r'stand_in\("saturating_add"\)') as error:
        tilescale.emulate(saturated(T), args, machine="h100-sxm-8")
    assert "T.call_extern" in str(error.value)


def test_a_run_without_data_knows_nothing_of_its_value():
    tilescale.stand_in("pick")(lambda x: 0)

    @T.prim_func
    def program(X: T.Tensor((8,), "int32"), Y: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=4):
            for _ in T.serial(T.call_extern("int32", "pick", X[0])):
                Y[0] = 1

    with pytest.raises(NoDataError, match="pick"):
        tilescale.emulate(program, data=False, machine="h100-sxm-8")


@T.prim_func
def norms(X: T.Tensor((8, 16), "float32"), Y: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=8):
        t = T.get_thread_binding()
        tile = T.alloc_shared((8, 16), "float32")
        mine = T.alloc_local((1,), "float32")
        T.copy(X, tile)
        T.call_extern("handle", "norm", T.access_ptr(mine[0], "w"), T.access_ptr(tile[t, 4], "r", 12), t)
        Y[t] = mine[0]


def test_pointers_are_arrays_that_begin_at_their_element():
    @tilescale.stand_in("norm")
    def norm(out, row, number):
        assert row.shape == (12,)
        out[0] = (row[:number] ** 2).sum()

    args = [values(1, 8, 16), blank(8)]
    tilescale.emulate(norms, args, machine="h100-sxm-8")
    expected = [float((args[0][i, 4 : 4 + i] ** 2).sum()) for i in range(8)]
    torch.testing.assert_close(args[1], torch.tensor(expected))


def store(write: bool):
    """Two blocks that hand the same element to a function, which writes it or reads it."""
    mode = "w" if write else "r"

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((2,), "float32")):
        with T.Kernel(2, threads=1) as b:
            T.call_extern("handle", "touch", T.access_ptr(X[3], mode, 2), T.access_ptr(Y[b], "w"))

    return program


def test_the_checks_see_what_declared_pointers_do():
    @tilescale.stand_in("touch")
    def touch(given, out):
        out[0] = 5

    args = [values(1, 8), blank(2)]
    tilescale.emulate(store(False), args, machine="h100-sxm-8")
    assert_same(args[1], torch.tensor([5.0, 5.0]))
    with pytest.raises(RaceError, match=r"X\[3:5\]"):
        tilescale.emulate(store(True), args, machine="h100-sxm-8")


def test_what_a_function_reads_must_be_written_and_inside():
    tilescale.stand_in("take")(lambda given: given[0])

    def program(first: int, writes: bool):
        @T.prim_func
        def program(Y: T.Tensor((4,), "float32")):
            with T.Kernel(1, threads=1):
                tile = T.alloc_shared((4,), "float32")
                if writes:
                    T.clear(tile)
                Y[0] = T.call_extern("float32", "take", T.access_ptr(tile[first], "r"))

        return program

    with pytest.raises(UninitializedReadError, match="tile"):
        tilescale.emulate(program(0, False), [blank(4)], machine="h100-sxm-8")
    with pytest.raises(OutOfBoundsError, match="tile"):
        tilescale.emulate(program(4, True), [blank(4)], machine="h100-sxm-8")


def test_a_stand_in_without_a_name():
    with pytest.raises(UsageError, match="of type function") as caught:

        @tilescale.stand_in
        def saturating_add(a, b): ...

    assert '@tilescale.stand_in("saturating_add")' in caught.value.hint


def test_a_function_that_returns_nothing_is_a_statement():
    @tilescale.stand_in("doubled")
    def doubled(values):
        values[0] *= 2

    @T.prim_func
    def statement(X: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            T.call_extern("float32", "doubled", T.access_ptr(X[1], "rw"))

    @T.prim_func
    def value(X: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=1):
            X[0] = T.call_extern("float32", "doubled", T.access_ptr(X[1], "rw"))

    x = torch.ones(4)
    tilescale.emulate(statement, [x], check="none")
    assert x[1] == 2**32
    with pytest.raises(UsageError, match="the stand-in for 'doubled' failed: TypeError: it returned None"):
        tilescale.emulate(value, [x])
