# SPDX-License-Identifier: MIT
"""Programs taken apart: which statements become which phases, and what phases share."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tilelang_core import ir
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Sequence

H200 = Machine.load("h200-sxm-8")


def outline(part: Part) -> list:
    """Phases in order: "device", "grid", and (kind of control flow, bodies...)."""
    if isinstance(part, Sequence):
        return [entry for inner in part.parts for entry in outline(inner)]
    if isinstance(part, Control):
        return [(type(part.stmt).__name__, *(outline(inner) for inner in part.parts))]
    if isinstance(part, Launch):
        return [("launch", *outline(part.body))]
    return ["device" if isinstance(part, DevicePhase) else "grid"]


def phases(func) -> list:
    """The outline of a program's only launch."""
    (launch,) = outline(analyse(func, H200).body)
    return list(launch[1:])


def ones(devices: int, n: int = 8) -> list[list[torch.Tensor]]:
    return [[torch.ones(n)] for _ in range(devices)]


def test_a_program_without_device_phases_is_one_grid_phase():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            tile = T.alloc((1,), "float32")
            for _ in T.serial(2):
                with T.Scale("warp"):
                    T.copy(A[bx], tile)

    assert phases(f) == ["grid"]


def test_phases_in_order():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            with T.Scale("device"):
                T.barrier()
            A[bx] = 1
            A[bx] = A[bx] + 1
            with T.Scale("device"):
                T.allreduce(A)
            with T.Scale("block"):
                A[bx] = A[bx] * 2

    assert phases(f) == ["device", "grid", "device", "grid"]
    args = ones(2)
    tilescale.emulate(f, args)
    assert args[0][0].tolist() == [8] * 4 + [2] * 4


def test_a_device_scale_inside_the_grid_is_no_phase():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            with T.Scale("block"):
                tile = T.alloc((1,), "float32")
                T.copy(A[bx], tile)
                for _ in T.serial(2):
                    with T.Scale("device"):
                        T.allreduce(tile)
                T.copy(tile, A[bx])

    assert phases(f) == ["grid"]
    args = ones(2)
    tilescale.emulate(f, args)
    assert args[0][0].tolist() == [4] * 4 + [1] * 4


def test_a_loop_around_a_grid_scale_that_selects_devices_is_no_phase():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            for _ in T.serial(bx):
                with T.Scale("block"), T.Scale("device"):
                    A[bx] = A[bx] + 1

    assert phases(f) == ["grid"]


def test_a_grid_inside_a_device_phase():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            with T.Scale("device"):
                T.barrier()
                with T.Scale("block"):
                    A[bx] = 2
                T.allreduce(A)

    assert phases(f) == ["device", "grid", "device"]


def test_control_flow_around_phases():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            for step in T.serial(3):
                with T.Scale("block"):
                    A[bx] = A[bx] + step
                if step == 1:
                    with T.Scale("device"):
                        T.allreduce(A)
                else:
                    with T.Scale("device"):
                        T.barrier()
                    A[bx] = A[bx] + 100

    assert phases(f) == [("For", ["grid", ("IfThenElse", ["device"], ["device", "grid"])])]
    args = ones(2)
    tilescale.emulate(f, args)
    # 1 + 0 + 100, then (101 + 1) on two devices, then + 2 + 100.
    assert args[1][0].tolist() == [306] * 4 + [2] * 4


def test_a_while_loop_around_phases():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32"), n: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            while n[0] > 0:
                with T.Scale("device"):
                    n[0] = n[0] - 1
                    T.barrier()
                A[bx] = A[bx] + 1

    assert phases(f) == [("While", ["device", "grid"])]
    args = [[torch.zeros(8), torch.full((1,), 3, dtype=torch.int32)] for _ in range(2)]
    tilescale.emulate(f, args)
    assert args[0][0].tolist() == [3] * 4 + [0] * 4


def test_several_launches_share_tensors():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        work = T.alloc_global((8,), "float32")
        with T.Kernel(device=2, block=8, threads=32) as bx:
            work[bx] = A[bx] * 3
        for _ in T.serial(2):
            with T.Kernel(device=2, block=4, threads=32) as bx:
                work[bx] = work[bx] + 1
                with T.Scale("device"):
                    T.allreduce(work)
        with T.Kernel(device=2, block=8, threads=32) as bx:
            A[bx] = work[bx]

    program = analyse(f, H200)
    assert outline(program.body) == [
        ("launch", "grid"), ("For", [("launch", "grid", "device")]), ("launch", "grid"),
    ]  # fmt: skip
    assert len(program.launches) == 3
    args = ones(2)
    tilescale.emulate(f, args)
    assert args[0][0].tolist() == [18] * 4 + [12] * 4


def test_a_workspace_lives_across_phases_and_loops():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=8, threads=32) as bx:
            work = T.alloc((8,), "float32", level="l2")
            with T.Scale("device"):
                T.copy(A, work)
            for _ in T.serial(2):
                work[bx] = work[bx] + 1
                with T.Scale("device"):
                    T.allreduce(work)
            A[bx] = work[bx]

    args = ones(2)
    tilescale.emulate(f, args)
    assert args[0][0].tolist() == [10] * 8


# -- values that several phases use ------------------------------------------------------------------------------------


def test_a_program_index_computed_before_a_device_phase():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            row = bx * 2
            column = row + 1
            with T.Scale("device"):
                T.barrier()
            for step in T.serial(2):
                with T.Scale("device"):
                    T.barrier()
                A[column] = A[column] + step + row

    assert phases(f) == ["grid", "device", ("For", ["device", "grid"])]
    args = ones(2)
    tilescale.emulate(f, args)
    assert args[0][0].tolist() == [1, 2, 1, 6, 1, 10, 1, 14]


def test_a_number_computed_before_a_device_phase():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32"), n: T.int32):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            steps = n * 2
            last = steps - 1
            for step in T.serial(steps):
                if step == last:
                    with T.Scale("device"):
                        T.allreduce(A[0:last])
                A[bx] = A[bx] + 1

    assert phases(f) == ["grid", "device", ("For", ["device", ("IfThenElse", ["device"]), "grid"])]
    args = [[*a, 2] for a in ones(2)]
    tilescale.emulate(f, args)
    assert args[0][0].tolist() == [9, 9, 9, 5, 1, 1, 1, 1]


def test_a_value_of_a_device_phase():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            with T.Scale("device") as rank, size:
                mine = T.view(A, layout=T.FullRow)
                next_rank = (rank + 1) % size
            mine[bx] = next_rank

    args = ones(2, 4)
    tilescale.emulate(f, args)
    assert [a[0].tolist() for a in args] == [[1] * 4, [0] * 4]


def test_a_view_of_a_workspace_computed_before_a_device_phase():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=64) as bx:
            with T.Scale("device"):
                T.barrier()
            tile = T.alloc((2,), "float32")
            with T.Scale("warp") as w, ws:
                part = T.view(tile, layout=T.FullRow)
                part[0] = w
            T.copy(tile, A[bx * 2])
            with T.Scale("device"):
                T.allreduce(A)

    args = ones(2)
    tilescale.emulate(f, args)
    assert args[1][0].tolist() == [0, 2] * 4


def test_two_tiles_of_one_name():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=8, threads=32) as bx:
            tile = T.alloc((1,), "float32")
            T.copy(A[bx], tile)
            tile[0] = tile[0] + 1
            T.copy(tile, A[bx])
            with T.Scale("device"):
                T.allreduce(A)
            tile = T.alloc((1,), "float32")
            T.copy(A[bx], tile)
            tile[0] = tile[0] * 2
            T.copy(tile, A[bx])

    args = ones(2)
    tilescale.emulate(f, args)
    assert args[0][0].tolist() == [8] * 8


# -- parameters and launches -------------------------------------------------------------------------------------------


def test_parameters_have_the_shape_that_a_unit_passes():
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((8, 6), "float32"), B: T.Tensor((n,), "float32"), C: T.Tensor((4,), "int32"), s: T.float32):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device"):
                a = T.view(A, layout=T.FullCol)
                b = T.view(B, layout=T.FullRow)
                c = T.view(C, layout=T.Replica)
                a[0, 0] = b[0] + c[0] + s

    a, b, c, s = analyse(f, H200).parameters
    assert [str(e) for p in (a, b, c) for e in p.shape] == ["8", "3", "n // 2", "4"]
    assert [p.name for p in (a, b, c, s)] == ["A", "B", "C", "s"]
    assert s.buffer is None and not s.views
    (view,) = a.views
    assert (view.level, view.layout.dim, view.where.file) == ("device", 1, __file__)
    assert c.views[0].layout.is_replica


def test_barriers_and_names():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            b = T.alloc_barrier([32, 16])
            T.barrier_arrive(b[0])
            A[0] = 1

    program = analyse(f, H200)
    (launch,) = program.launches
    assert program.name == "f" and launch.where.file == __file__
    assert [counts for _, counts in launch.barriers] == [(32, 16)]
    assert (launch.thread_count, launch.cluster_size) == (32, 1)


@pytest.mark.parametrize("kind", ["plain", "launch", "scale", "operation"])
def test_what_is_hierarchical(kind: str):
    @T.prim_func
    def plain(A: T.Tensor((8,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            A[bx] = 1

    @T.prim_func
    def launch(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=1, block=4, threads=32) as bx:
            A[bx] = 1

    @T.prim_func
    def scale(A: T.Tensor((8,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            with T.Scale("warp"):
                A[bx] = 1

    @T.prim_func
    def operation(A: T.Tensor((8,), "int32")):
        with T.Kernel(4, threads=32) as bx:
            T.signal(A[bx])

    func = {"plain": plain, "launch": launch, "scale": scale, "operation": operation}[kind]
    assert analyse(func, H200).is_hierarchical == (kind != "plain")


def test_a_replica_may_be_used_whole():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            with T.Scale("device"):
                mine = T.view(A, layout=T.Replica)
            A[bx] = mine[bx] + 1

    args = ones(2)
    tilescale.emulate(f, args)
    assert args[0][0].tolist() == [2] * 4 + [1] * 4


def test_phases_keep_their_lines():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            row = bx * 2
            with T.Scale("device"):
                T.barrier()
            A[row] = 1

    def grid_phases(part: Part) -> list[GridPhase]:
        if isinstance(part, Sequence):
            return [p for inner in part.parts for p in grid_phases(inner)]
        return [part] if isinstance(part, GridPhase) else []

    (launch,) = analyse(f, H200).launches
    *_, last = grid_phases(launch.body)
    lines = [ir.stmt_location(s)[1] for s in ir.statements(last.stmt) if not isinstance(s, ir.SeqStmt)]
    first = f.orig_func.__code__.co_firstlineno
    assert [line - first for line in lines] == [3, 6]
