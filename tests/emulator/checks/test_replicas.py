# SPDX-License-Identifier: MIT
"""Replicas that are read as a whole while the units' values differ, in a program and at its end."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import line_of
from tilescale.errors import DivergedReplicaError


def split_k(reduced, dtype="float32", reads="whole"):
    """Two warpgroups multiply half of K each; the tile is read with or without an all-reduce before."""

    @T.prim_func
    def program(A: T.Tensor((32, 64), "float16"), B: T.Tensor((64, 32), "float16"), C: T.Tensor((32, 32), dtype)):
        with T.Kernel(1, threads=256):
            a = T.alloc((32, 64), "float16", level="l1")
            b = T.alloc((64, 32), "float16", level="l1")
            c = T.alloc((32, 32), dtype, level="l0")
            T.copy(A, a)
            T.copy(B, b)
            with T.Scale("warpgroup"):
                T.clear(T.view(c, layout=T.Replica))
                T.gemm(T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow), T.view(c, layout=T.Replica))  # halves
            if reduced:
                with T.Scale("warpgroup"):
                    T.allreduce(T.view(c, layout=T.Replica))
            if reads == "element":
                C[3, 4] = c[3, 4]  # one element
            elif reads == "overwritten":
                T.clear(c)
                T.copy(c, C)
            else:
                T.copy(c, C)  # the whole

    return program


def args(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, generator=generator).half() for n in ((32, 64), (64, 32)))
    return [a, b, torch.zeros(32, 32, dtype=dtype)]


@pytest.mark.parametrize(
    ("reads", "marker", "region"), [("whole", "the whole", "c["), ("element", "one element", "c[3, 4]")]
)
def test_partial_sums_read_as_a_whole(reads, marker, region):
    given = args()
    with pytest.raises(DivergedReplicaError) as caught:
        tilescale.emulate(split_k(False, reads=reads), given)
    error = caught.value
    assert [(w.line, w.what) for w in error.where] == [
        (line_of(marker), "reads the whole here"),
        (line_of("halves"), "written differently here"),
    ]
    assert error.message.startswith(f"device 0, block 0 reads {region}")
    assert "the warpgroups hold different values of it" in error.message
    assert error.hint == 'combine the replicas before: T.allreduce(T.view(c, layout=T.Replica)) in T.Scale("warpgroup")'
    halves = [given[0][:, k : k + 32].double() @ given[1][k : k + 32].double() for k in (0, 32)]
    if reads == "element":
        shown = error.message.partition("c[3, 4] is ")[2].replace(" on warpgroup", "").replace(",", "").split()
        assert [float(shown[0]), float(shown[2])] == pytest.approx([float(h[3, 4]) for h in halves], rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_reduced_replicas_are_silent(dtype):
    given = args(getattr(torch, dtype))
    tilescale.emulate(split_k(True, dtype), given)
    expected = given[0].double() @ given[1].double()
    torch.testing.assert_close(given[2].double(), expected, rtol=1e-2, atol=2e-2)


def test_a_tile_that_is_written_anew_is_one_again():
    given = args()
    tilescale.emulate(split_k(False, reads="overwritten"), given)
    assert not given[2].any()


def test_replicas_that_are_not_read_as_a_whole_may_differ():
    @T.prim_func
    def program(Y: T.Tensor((2, 8), "int32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc((8,), "int32", level="l0")
            with T.Scale("warpgroup") as (wg, _):
                T.fill(T.view(tile, layout=T.Replica), wg)
            with T.Scale("warpgroup") as (wg, _):
                T.copy(T.view(tile, layout=T.Replica), Y[wg, 0])

    y = torch.zeros(2, 8, dtype=torch.int32)
    tilescale.emulate(program, [y])
    assert y[:, 0].tolist() == [0, 1]


def whole(devices, reduced, order=None):
    """A parameter that each device should end with the same sum of."""

    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8, 8), "float32")):
        with T.Kernel(device=devices, block=1, threads=64):
            with T.Scale("device"):
                Y_dev = T.view(Y, layout=T.Replica)  # the view
            with T.Scale("block"):
                T.copy(X, Y_dev)
            if reduced:
                with T.Scale("device"):
                    T.allreduce(Y_dev)

    return program


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_devices_that_end_with_different_replicas(devices):
    def given():
        return [[torch.full((8, 8), float(r)), torch.zeros(8, 8)] for r in range(devices)]

    with pytest.raises(DivergedReplicaError) as caught:
        tilescale.emulate(whole(devices, False), given())
    error = caught.value
    assert error.message == (
        "the devices end with different values of Y[0:8, 0:8], of which each should hold the same: "
        "Y[0, 0] is 0.0 on device 0, 1.0 on device 1"
    )
    assert [w.line for w in error.where] == [line_of("the view")]
    tilescale.emulate(whole(devices, True), given())
    tilescale.emulate(whole(devices, False), given(), check=("races", "uninitialized"))


@pytest.mark.parametrize("devices", [2, 5])
def test_devices_that_were_given_different_replicas(devices):
    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8, 8), "float32")):
        with T.Kernel(device=devices, block=1, threads=64):
            with T.Scale("device"):
                X_dev = T.view(X, layout=T.Replica)  # the input's view
            T.copy(X_dev, Y)

    def given(last):
        x = torch.arange(64.0).reshape(8, 8)
        args = [[x.clone(), torch.zeros(8, 8)] for _ in range(devices)]
        args[-1][0][2, 3:5] = last
        return args

    with pytest.raises(DivergedReplicaError) as caught:
        tilescale.emulate(program, given(-1.0))
    assert caught.value.message == (
        "the devices were given different values of X[2, 3:5], of which each should hold the same: "
        f"X[2, 3] is 19.0 on device 0, -1.0 on device {devices - 1}"
    )
    assert "pass the same values on every device" in caught.value.hint
    assert [w.line for w in caught.value.where] == [line_of("the input's view")]
    tilescale.emulate(program, given(torch.tensor([19.0, 20.0])))


def test_sums_in_another_order_are_the_same():
    """Each device adds up the same numbers, starting with its own: the results differ by rounding."""

    @T.prim_func
    def program(X: T.Tensor((4, 64), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(device=4, block=1, threads=64):
            with T.Scale("device"):
                Y_dev = T.view(Y, layout=T.Replica)
            total = T.alloc_fragment((64,), "float32")
            T.clear(total)
            for step in T.serial(4):
                for i in T.Parallel(64):
                    total[i] += X[(T.rank("device") + step) % 4, i]
            T.copy(total, Y_dev)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=generator) * 1000
    given = [[x.clone(), torch.zeros(64)] for _ in range(4)]
    tilescale.emulate(program, given)
    assert not torch.equal(given[0][1], given[1][1])
