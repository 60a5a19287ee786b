# SPDX-License-Identifier: MIT
"""`T.Kernel`: extents by level name, T.ALL, and the error of a launch that is too large."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.hda.conftest import SMALL
from tilescale.errors import LaunchError, LevelNotLaunchedError, UnknownLevelError, UsageError
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse

H200 = Machine.load("h200-sxm-8")


def launch_of(func, machine: Machine = H200):
    (launch,) = analyse(func, machine).launches
    return launch


def numbers(extents) -> dict[str, int]:
    return {name: int(extent) for name, extent in extents}


def test_levels_by_name():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=4, cta_cluster=2, block=(6, 3), threads=256) as (bx, by):
            A[bx] = by

    launch = launch_of(f)
    assert numbers(launch.extents) == {"device": 4}
    assert ([int(n) for n in launch.grid], launch.threads, launch.cluster) == ([6, 3], (256, 1, 1), (2, 1, 1))


def test_grid_as_in_tilelang_beside_a_level():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(4, 2, device=2, threads=128) as (bx, by):
            A[bx] = by

    launch = launch_of(f)
    assert (numbers(launch.extents), [int(n) for n in launch.grid]) == ({"device": 2}, [4, 2])


def test_a_coarse_level_brings_those_below():
    with tilescale.use_machine("h200-sxm-8x4") as machine:

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(node=2, block=4, threads=128) as bx:
                A[bx] = T.size("device") + T.size("node")

    assert list(numbers(launch_of(f, machine).extents).items()) == [("node", 2), ("device", 1)]


def test_threads_by_a_level_of_threads():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(4, warpgroup=2) as bx:
            A[bx] = 1

    assert launch_of(f).thread_count == 256


def test_threads_and_a_level_of_threads_that_agree():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(4, warp=2, threads=(32, 2)) as bx:
            A[bx] = 1

    assert launch_of(f).threads == (32, 2, 1)


def test_threads_left_out_are_those_of_tilelang():
    @T.prim_func
    def f(A: T.Tensor((256,), "float32")):
        with T.Kernel(device=2, block=2) as bx:
            with T.Scale("warpgroup") as (_, wgs):
                A[bx] = wgs

    assert launch_of(f).threads == (128, 1, 1)
    units = [[torch.zeros(256)] for _ in range(2)]
    tilescale.emulate(f, units)
    assert [unit[0][:3].tolist() for unit in units] == [[1, 1, 0]] * 2


def test_a_launch_without_a_grid_is_one_program():
    @T.prim_func
    def f(A: T.Tensor((2,), "float32")):
        with T.Kernel(device=2, threads=32) as bx:
            A[bx] = T.size("block")

    units = [[torch.zeros(2)] for _ in range(2)]
    tilescale.emulate(f, units)
    assert units[1][0].tolist() == [1, 0]


@pytest.mark.parametrize("units", [1, 3, 8])
def test_all_is_the_size_of_the_job(units: int):
    @T.prim_func
    def f(A: T.Tensor((2,), "int32")):
        with T.Kernel(device=T.ALL, block=1, threads=32):
            with T.Scale("device") as rank, size:
                A[0] = rank
                A[1] = size

    args = [[torch.zeros(2, dtype=torch.int32)] for _ in range(units)]
    tilescale.emulate(f, args)
    assert [a[0].tolist() for a in args] == [[rank, units] for rank in range(units)]


def test_all_in_two_launches_is_one_number():
    @T.prim_func
    def f(A: T.Tensor((2,), "int32")):
        with T.Kernel(device=T.ALL, block=1, threads=32):
            A[0] = T.size("device")
        with T.Kernel(device=T.ALL, block=1, threads=32):
            A[1] = T.size("device")

    args = [[torch.zeros(2, dtype=torch.int32)] for _ in range(3)]
    tilescale.emulate(f, args)
    assert args[2][0].tolist() == [3, 3]
    assert repr(T.ALL) == "T.ALL"


def test_dynamic_grids():
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(device=2, block=T.ceildiv(n, 64), threads=64) as bx:
            with T.Scale("block") as block, blocks:
                with T.Scale("warp") as warp, warps:
                    for i in T.Parallel(32):
                        B[bx * 64 + warp * 32 + i] = A[bx * 64 + warp * 32 + i] * blocks + block

    a, units = torch.randn(192), [torch.zeros(192) for _ in range(2)]
    tilescale.emulate(f, [[a, b] for b in units])
    torch.testing.assert_close(units[1], a * 3 + torch.arange(192) // 64)


def test_a_machine_whose_programs_own_the_tensors():
    with tilescale.use_machine("wafer-mesh"):

        @T.prim_func
        def f(A: T.Tensor((4,), "float32")):
            with T.Kernel(core=(3, 2)) as (x, y):
                with T.Scale("core") as rank, size:
                    A[0] = rank
                    A[1] = size

    args = [[torch.zeros(4)] for _ in range(6)]
    tilescale.emulate(f, args, machine="wafer-mesh")
    assert [a[0][:2].tolist() for a in args] == [[rank, 6] for rank in range(6)]


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_unknown_level(mistake):
    with mistake(UnknownLevelError, "no level 'gpu'", "thread, warp, warpgroup, block, cta_cluster, device, node"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(gpu=4, block=2, threads=128) as bx:  # <-
                A[bx] = 1


def test_two_grids(mistake):
    with mistake(LaunchError, "the grid is given twice", "(4,)", "block=2", "keep one of the two"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(4, device=2, block=2, threads=128) as bx:  # <-
                A[bx] = 1


def test_two_clusters(mistake):
    with mistake(LaunchError, "the cluster is given twice", "cta_cluster=4"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(8, cta_cluster=4, cluster_dims=2, threads=128) as bx:  # <-
                A[bx] = 1


@pytest.mark.parametrize("extent", [16, (4, 4)])
def test_cluster_too_large(mistake, extent):
    with mistake(LaunchError, f"cta_cluster={extent}", "at most 8 programs"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=2, cta_cluster=extent, block=16, threads=128) as bx:  # <-
                A[bx] = 1


@pytest.mark.parametrize(("cluster", "grid"), [(2, 3), ((2, 2), 4), (4, (2, 4))])
def test_a_grid_that_does_not_divide_into_clusters(mistake, cluster, grid):
    with mistake(LaunchError, "does not divide into clusters", "the grid counts all programs"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=2, cta_cluster=cluster, block=grid, threads=128):  # <-
                A[0] = 1


@pytest.mark.parametrize("level", ["device", "cta_cluster", "block"])
def test_a_truth_value_is_no_extent(mistake, level):
    """TileLang makes one of `grid or 4`."""
    with mistake(LaunchError, f"{level}=True", "positive number"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(threads=128, **{level: True}):  # <-
                A[0] = 1


def test_more_devices_than_the_machine(mistake):
    with mistake(LaunchError, "16 units of level 'device'", "machine 'h200-sxm-8' has 8", "at most 8"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=16, block=2, threads=128) as bx:  # <-
                A[bx] = 1


def test_more_devices_than_a_node(mistake):
    with tilescale.use_machine("h200-sxm-8x4"), mistake(LaunchError, "16 units of level 'device'", "'node' has 8"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=16, node=2, block=2, threads=128) as bx:  # <-
                A[bx] = 1


@pytest.fixture
def dies(tmp_path: Path) -> Iterator[Machine]:
    """Chips of two dies with one memory: tensors are a chip's."""
    path = tmp_path / "dies.yaml"
    path.write_text(SMALL.replace("  chip:\n", "  die:\n    kind: unit\n    count: 2\n  chip:\n", 1))
    with tilescale.use_machine(path) as machine:
        yield machine


def test_units_that_own_no_tensors_are_no_level_of_a_launch(mistake, dies: Machine):
    with mistake(LaunchError, "die=2: units of 'die' own no tensors", "leave it out: programs of a chip run on each"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(chip=2, die=2, core=8) as i:  # <-
                A[i] = 1


def test_units_that_own_no_tensors_have_no_number(mistake, dies: Machine):
    with mistake(LevelNotLaunchedError, "'die' is not part of this launch", "programs run on any of them: name 'core'"):

        @T.prim_func
        def f(A: T.Tensor((8,), "int32")):
            with T.Kernel(chip=2, core=8) as i, T.Scale("core"):
                A[i] = T.rank("die")  # <-


def test_programs_run_on_all_units_that_own_no_tensors(dies: Machine):
    @T.prim_func
    def f(A: T.Tensor((8,), "int32")):
        with T.Kernel(chip=2, core=8) as i:
            A[i] = i

    per_chip = [[torch.zeros(8, dtype=torch.int32)] for _ in range(2)]
    tilescale.emulate(f, per_chip, machine=dies)
    assert all(a.tolist() == list(range(8)) for (a,) in per_chip) and dies.count("core", "chip") == 8


def test_more_programs_than_a_machine_that_runs_each_at_once(mistake):
    with tilescale.use_machine("wafer-mesh"), mistake(LaunchError, "1000000 units of level 'core'", "has 753972"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(core=(1000, 1000), wafer=1) as (x, y):  # <-
                A[x] = 1


@pytest.mark.parametrize("extent", [0, -1, 2.5, "two", None])
@pytest.mark.parametrize("level", ["device", "warpgroup", "block", "cta_cluster"])
def test_an_extent_that_is_no_number(mistake, level: str, extent):
    with mistake(LaunchError, f"{level}={extent!r}", "positive number"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(**{level: extent}) as bx:  # <-
                A[bx] = 1


@pytest.mark.parametrize("threads", [0, -128, 128.0, "128", (), (128, 0), (1, 1, 1, 32)])
def test_threads_that_are_no_number(mistake, threads):
    with mistake(LaunchError, f"threads={threads!r}", "a positive number of threads"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=2, block=1, threads=threads):  # <-
                A[0] = 1


@pytest.mark.parametrize("levels", [{}, {"device": 2}])
def test_a_launch_inside_another(mistake, levels):
    with mistake(UsageError, "T.Kernel inside another T.Kernel", "one after the other"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=2, block=1, threads=32):
                with T.Kernel(1, threads=32, **levels):  # <-
                    A[0] = 1


def test_threads_and_a_level_of_threads_that_disagree(mistake):
    with mistake(LaunchError, "warpgroup=2 means 256 threads, but threads=128"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(8, warpgroup=2, threads=128) as bx:  # <-
                A[bx] = 1


def test_outside_a_function():
    with pytest.raises(UsageError, match=r"T.Kernel was called outside a traced function"):
        T.Kernel(device=4)


def test_all_for_two_levels():
    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(node=T.ALL, device=T.ALL, block=2, threads=128) as bx:
                A[bx] = 1

    with pytest.raises(LaunchError, match="all T.ALL"):
        tilescale.emulate(f, [[torch.zeros(8)]] * 4, machine="h200-sxm-8x4")


def test_parameters_with_one_annotation_are_tensors_of_their_own():
    row = T.Tensor((64,), "float32")

    @T.prim_func
    def program(X: row, Y: row, Z: row):
        with T.Kernel(device=1, block=1, threads=64), T.Scale("block"):
            for i in T.Parallel(64):
                Y[i] = X[i] + 1
            for i in T.Parallel(64):
                Z[i] = Y[i] + X[i]

    x, y, z = torch.full((64,), 2.0), torch.zeros(64), torch.zeros(64)
    tilescale.emulate(program, [[x, y, z]])
    assert x.eq(2).all() and y.eq(3).all() and z.eq(5).all()
