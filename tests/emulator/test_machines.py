# SPDX-License-Identifier: MIT
"""Machines other than GPUs: cores that own their tensors on a mesh, vaults of chips with programs of one thread."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import assert_rounded, assert_same, blank, values, wide


@pytest.fixture
def wafer():
    with tilescale.use_machine("wafer-mesh"):
        yield "wafer-mesh"


@pytest.fixture
def stacked():
    with tilescale.use_machine("stacked-3d"):
        yield "stacked-3d"


def test_cores_shift_their_tensors_to_their_neighbours(wafer):
    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(core=(4, 4)) as (x, y):
            with T.Scale("core") as (rank, size):
                T.copy(X, Y, dst=(rank + 1) % size)
                T.barrier()

    args = [[values(r, 4), blank(4)] for r in range(16)]
    tilescale.emulate(program, args, machine=wafer)
    for r, (_, y) in enumerate(args):
        assert_same(y, args[r - 1][0])


def test_on_chip_tiles_of_neighbouring_cores(wafer):
    """Send each core's value to the cores right of it and below it, through on-chip tiles."""
    n = 4

    @T.prim_func
    def program(X: T.Tensor((1,), "int32"), Y: T.Tensor((3,), "int32")):
        with T.Kernel(core=(n, n)) as (x, y):
            with T.Scale("core") as (rank, _):
                mine = T.alloc((1,), "int32", level="l0")
                left = T.alloc((1,), "int32", level="l0")
                above = T.alloc((1,), "int32", level="l0")
                mine[0] = X[0]
                T.barrier()
                T.copy(mine, left, dst=y * n + (x + 1) % n)
                T.copy(mine, above, dst=(y + 1) % n * n + x)
                T.barrier()
                Y[0] = left[0]
                Y[1] = above[0]
                Y[2] = rank

    args = [[torch.tensor([r], dtype=torch.int32), blank(3, dtype="int32")] for r in range(n * n)]
    tilescale.emulate(program, args, machine=wafer)
    for r, (_, found) in enumerate(args):
        y, x = divmod(r, n)
        assert found.tolist() == [y * n + (x - 1) % n, (y - 1) % n * n + x, r]


@pytest.mark.parametrize("side", [2, 3])
def test_cannons_product_on_a_mesh_of_cores(wafer, side):
    """Every core holds one block of A, B and C; A's move left, B's move up, after the initial skew of the arguments."""
    tile = 4

    @T.prim_func
    def program(
        A: T.Tensor((tile, tile), "float32"), B: T.Tensor((tile, tile), "float32"), C: T.Tensor((tile, tile), "float32")
    ):
        with T.Kernel(core=(side, side)) as (x, y):
            with T.Scale("core"):
                nexts = T.alloc((2, tile, tile), "float32", level="l0")
                for _ in T.serial(side):
                    T.gemm(A, B, C)
                    T.copy(A, nexts[0, 0:tile, 0:tile], dst=y * side + (x + side - 1) % side)
                    T.copy(B, nexts[1, 0:tile, 0:tile], dst=(y + side - 1) % side * side + x)
                    T.barrier()
                    T.copy(nexts[0, 0:tile, 0:tile], A)
                    T.copy(nexts[1, 0:tile, 0:tile], B)
                    T.barrier()

    a, b = values(1, side, side, tile, tile), values(2, side, side, tile, tile)
    args = []
    for y in range(side):
        for x in range(side):
            args.append([a[y, (x + y) % side].clone(), b[(x + y) % side, x].clone(), torch.zeros(tile, tile)])
    tilescale.emulate(program, args, machine=wafer)
    expected = torch.einsum("yktu,kxuv->yxtv", a.double(), b.double())
    for r, (_, _, c) in enumerate(args):
        torch.testing.assert_close(c.double(), expected[divmod(r, side)], rtol=1e-5, atol=1e-5)


def test_collectives_over_all_cores(wafer):
    @T.prim_func
    def program(X: T.Tensor((18,), "float32"), P: T.Tensor((2,), "float32"), W: T.Tensor((18,), "float32")):
        with T.Kernel(core=(3, 3)):
            with T.Scale("core"):
                T.reduce_scatter(X, P)
                T.all_gather(P, W)

    sources = [values(r, 18) for r in range(9)]
    args = [[x.clone(), blank(2), blank(18)] for x in sources]
    tilescale.emulate(program, args, machine=wafer)
    total = sum(wide(x) for x in sources)
    for r, (_, part, whole) in enumerate(args):
        assert_rounded(part, total.chunk(9)[r], work=1e-5)
        assert_rounded(whole, total, work=1e-5)


@pytest.mark.parametrize(("chips", "vaults"), [(1, 5), (2, 4), (4, 3)])
def test_vaults_of_chips(stacked, chips, vaults):
    """A sum over the vaults of a chip, a put from chip to chip, and programs of one thread."""
    n = 8

    @T.prim_func
    def program(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32"), R: T.Tensor((2,), "int32")):
        with T.Kernel(chip=chips, vault=vaults, core=4) as b:
            with T.Scale("core"):
                tile = T.alloc((2,), "float32", level="l1")
                T.copy(X[b * 2], tile)
                with T.Scale("vault") as (vault, _):
                    T.allreduce(tile)
                    if b == 0:
                        R[0] = vault
                with T.Scale("chip") as (chip, size):
                    T.copy(tile, Y[b * 2], dst=(chip + 1) % size)
                    if b == 0:
                        R[1] = chip

    sources = [values(r, n) for r in range(chips * vaults)]
    args = [[x.clone(), blank(n), blank(2, dtype="int32")] for x in sources]
    tilescale.emulate(program, args, machine=stacked)
    for number, (_, y, ranks) in enumerate(args):
        chip, vault = divmod(number, vaults)
        before = (chip - 1) % chips
        assert_rounded(y, sum(wide(x) for x in sources[before * vaults : (before + 1) * vaults]))
        assert ranks.tolist() == [vault, chip]


def test_one_program_runs_on_two_machines():
    """A program traced for one machine is traced again for another."""

    @T.prim_func
    def program(X: T.Tensor((4,), "float32")):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device"):
                T.allreduce(X)

    for machine in ("h200-sxm-8", "mi300x-8", "gb200-nvl72"):
        args = [[values(r, 4)] for r in range(2)]
        expected = wide(args[0][0]) + wide(args[1][0])
        report = tilescale.emulate(program, args, machine=machine)
        assert report.machine.name == machine
        for (x,) in args:
            assert_rounded(x, expected)


def test_64_devices():
    with tilescale.use_machine("gb200-nvl72"):

        @T.prim_func
        def program(X: T.Tensor((64, 4), "float32"), Y: T.Tensor((64, 4), "float32")):
            with T.Kernel(device=64, block=4, threads=32) as b:
                with T.Scale("block"):
                    tile = T.alloc((16, 4), "float32", level="l0")
                    T.copy(X[b * 16, 0], tile)
                    with T.Scale("device"):
                        T.allreduce(tile)
                    T.copy(tile, Y[b * 16, 0])

    sources = [values(r, 64, 4) for r in range(64)]
    args = [[x.clone(), blank(64, 4)] for x in sources]
    tilescale.emulate(program, args, machine="gb200-nvl72")
    total = sum(wide(x) for x in sources)
    for _, y in args:
        assert_rounded(y, total, work=1e-5)
