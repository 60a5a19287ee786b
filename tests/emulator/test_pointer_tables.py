# SPDX-License-Identifier: MIT
"""Tables of pointers: tensors that a program makes of addresses in memory."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import line_of
from tests.emulator.support import blank, values
from tests.kernels.base import cuda_texts
from tilescale.errors import NoDataError, OutOfBoundsError, RaceError

SIZES = (5, 8, 3)


def table(tensors):
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def doubled(T):
    """Groups of different sizes; each program has one."""
    groups = len(SIZES)

    @T.prim_func
    def program(
        inputs: T.Tensor((groups,), T.ptr), outputs: T.Tensor((groups,), T.ptr), sizes: T.Tensor((groups,), "int32")
    ):
        with T.Kernel(groups, threads=32) as g:
            n = sizes[g]
            X = T.make_tensor(inputs[g], (n, 4), "float32")
            Y = T.make_tensor(outputs[g], (n, 4), "float32")
            tile = T.alloc_shared((8, 4), "float32")
            T.copy(X[0:8, 0:4], tile)
            for i, j in T.Parallel(8, 4):
                if i < n:
                    Y[i, j] = 2 * tile[i, j]

    return program


def test_each_group_has_tensors_of_its_own():
    xs, ys = [values(g, n, 4) for g, n in enumerate(SIZES)], [blank(n, 4) for n in SIZES]
    report = tilescale.emulate(doubled(T), [table(xs), table(ys), torch.tensor(SIZES, dtype=torch.int32)])
    assert all(torch.equal(y, 2 * x) for x, y in zip(xs, ys, strict=True)) and report.time_us > 0


def test_their_text_is_that_of_tilelang():
    ours, stock = cuda_texts(doubled, "sm_90a")
    assert ours == stock


def test_views_strides_and_other_types():
    @T.prim_func
    def program(pointers: T.Tensor((2,), T.ptr), Y: T.Tensor((4, 3), "float16")):
        with T.Kernel(1, threads=32):
            X = T.make_tensor(pointers[0], (4, 3), "float16", strides=(1, 4))
            T.copy(X, Y)
            Z = T.make_tensor(pointers[1], (4,), "int32")
            T.clear(Z)

    x, z, y = values(0, 5, 4, dtype="float16"), torch.ones(8, dtype=torch.int32), blank(4, 3, dtype="float16")
    tilescale.emulate(program, [table([x[1:], z[2:]]), y])
    assert torch.equal(y, x[1:4].T) and z.tolist() == [1, 1, 0, 0, 0, 0, 1, 1]


def single(rows):
    @T.prim_func
    def program(pointers: T.Tensor((1,), T.ptr), Y: T.Tensor((rows,), "float32")):
        with T.Kernel(1, threads=32):
            X = T.make_tensor(pointers[0], (rows,), "float32")  # address
            T.copy(X, Y)  # use

    return program


def test_addresses_of_no_tensor_and_of_too_small_ones():
    x = values(0, 8)
    for pointers in ([0], [x.data_ptr() + 8 * 4]):
        with pytest.raises(OutOfBoundsError, match="there is no tensor at the address 0x") as caught:
            tilescale.emulate(single(4), [torch.tensor(pointers), blank(4)])
        assert line_of("address") in {where.line for where in caught.value.where}
    with pytest.raises(OutOfBoundsError, match=r"X of shape \(6,\) takes 24 bytes, its tensor has 16") as caught:
        tilescale.emulate(single(6), [table([x[4:]]), blank(6)])
    assert line_of("use") in {where.line for where in caught.value.where}
    with pytest.raises(NoDataError):
        tilescale.emulate(single(4), data=False)


def test_races_through_pointers():
    @T.prim_func
    def program(pointers: T.Tensor((2,), T.ptr)):
        with T.Kernel(2, threads=32) as b:
            X = T.make_tensor(pointers[b], (4,), "float32")
            T.fill(X, b)  # both

    together, apart = torch.zeros(4), torch.zeros(8)
    tilescale.emulate(program, [table([apart, apart[4:]])])
    assert apart.tolist() == [0] * 4 + [1] * 4
    with pytest.raises(RaceError) as caught:
        tilescale.emulate(program, [table([together, together])])
    assert {where.line for where in caught.value.where} == {line_of("both")}
