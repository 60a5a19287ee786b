# SPDX-License-Identifier: MIT
"""Orders by waits, publication by signals, and statements that may be exchanged."""

from typing import Any

import pytest

import tilescale.language as T
from tests.program.support import H200, marked, taken_apart
from tilelang_core import ir
from tilescale.program.dependence import Dependence
from tilescale.program.effects import phases
from tilescale.program.model import GridPhase, Program

DEVICES, BLOCKS = 2, 4


def call_at(program: Program, mark: str) -> ir.Call:
    """The operation of a marked line."""
    return marked(program, mark)[0][0].value


# -- waits -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gather_and_multiply() -> Program:
    """Blocks put their rows, then wait for others' rows in a GEMM with constant weights."""

    @T.prim_func
    def f(
        A: T.Tensor((256, 64), "float32"),
        W: T.Tensor((64, 64), "float32"),
        C: T.Tensor((256, 64), "float32"),
        F: T.Tensor((BLOCKS,), "int32"),
        G: T.Tensor((BLOCKS,), "int32"),
        H: T.Tensor((BLOCKS,), "int32"),
    ):
        with T.Kernel(device=DEVICES, block=BLOCKS, threads=128) as bx:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                a, w = T.alloc((64, 64), "float32"), T.alloc((64, 64), "float32")
                c = T.alloc_fragment((64, 64), "float32")
                T.copy(A[bx * 64, 0], a)
                T.copy(a, A[bx * 64, 0], dst=1 - rank, signal=F[bx])  # <put>
                T.signal(G[bx], dst=1 - rank)  # <relay>
                T.wait(F[bx], ">=", 1)  # <rows>
                T.copy(A[bx * 64, 0], a)
                T.copy(W, w)
                T.gemm(a, w, c, clear_accum=True)
                T.copy(c, C[bx * 64, 0])
                T.wait(G[bx], ">=", 1)  # <relayed>
                T.wait(H[bx], ">=", 1)  # <from outside>

    return taken_apart(f)


def buffers(program: Program) -> dict[str, ir.Var]:
    return {p.name: p.buffer.data for p in program.parameters} | {
        b.name: b.data for launch in program.launches for b in launch.buffers
    }


def test_a_wait_orders_what_was_written_before_its_signal(gather_and_multiply: Program):
    data = buffers(gather_and_multiply)
    rows = Dependence(gather_and_multiply, H200).ordered_by(call_at(gather_and_multiply, "rows"))
    assert rows.load(data["A"]) and rows.store(data["A"])
    assert not rows.load(data["W"]), "nobody writes the weights: their loads may run ahead"
    assert not rows.load(data["C"]) and not rows.store(data["C"])
    assert not rows.store(data["w"]), "tiles on chip are the unit's own"


def test_a_flag_that_nobody_signals_orders_all_of_device_memory(gather_and_multiply: Program):
    data = buffers(gather_and_multiply)
    unknown = Dependence(gather_and_multiply, H200).ordered_by(call_at(gather_and_multiply, "from outside"))
    assert unknown.everything and unknown.load(data["W"]) and unknown.store(data["C"])
    assert not unknown.load(data["a"])


def test_what_a_signaller_had_read_must_not_be_overwritten_before_the_wait():
    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32"), free: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((64,), "float32")
                T.copy(X, tile)
                T.signal(free[0], dst=1 - rank)
                T.wait(free[0], ">=", 1)  # <wait>
                T.copy(tile, Y)

    program = taken_apart(f)
    data, ordered = buffers(program), Dependence(program, H200).ordered_by(call_at(program, "wait"))
    assert ordered.store(data["X"]) and not ordered.load(data["X"])
    assert not ordered.store(data["Y"])


def test_what_a_signaller_had_learnt_is_ordered_too():
    @T.prim_func
    def f(
        X: T.Tensor((64,), "float32"),
        Y: T.Tensor((64,), "float32"),
        first: T.Tensor((1,), "int32"),
        second: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(device=3, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((64,), "float32")
                if rank == 1:
                    T.wait(first[0], ">=", 1)
                    T.signal(second[0], dst=2)
                if rank == 2:
                    T.wait(second[0], ">=", 1)  # <wait>
                    T.copy(X, tile)
                if rank == 0:
                    T.copy(Y, tile)
                    T.copy(tile, X, dst=2)
                    T.signal(first[0], dst=1)

    program = taken_apart(f)
    ordered = Dependence(program, H200).ordered_by(call_at(program, "wait"))
    assert ordered.load(buffers(program)["X"]) and not ordered.load(buffers(program)["Y"])


def test_in_a_loop_all_of_it_comes_before():
    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((64,), "float32")
                for i in T.serial(4):
                    T.signal(F[0], dst=1 - rank)
                    T.wait(F[0], ">=", i)  # <wait>
                    T.copy(tile, X)

    program = taken_apart(f)
    assert Dependence(program, H200).ordered_by(call_at(program, "wait")).load(buffers(program)["X"])


def test_a_barrier_orders_whatever_anybody_touches():
    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32"), Z: T.Tensor((64,), "float32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"), T.Scale("device"):
                tile = T.alloc((64,), "float32")
                T.barrier()  # <barrier>
                T.copy(X, tile)
                T.copy(tile, Y)

    program = taken_apart(f)
    data, ordered = buffers(program), Dependence(program, H200).ordered_by(call_at(program, "barrier"))
    assert ordered.load(data["Y"]) and ordered.store(data["X"])
    assert not ordered.load(data["X"]) and not ordered.store(data["Z"])


def test_an_external_function_may_signal_anything():
    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"):
                T.call_extern("handle", "anything", T.address_of(F[0]))
                T.wait(F[0], ">=", 1)  # <wait>

    program = taken_apart(f)
    assert Dependence(program, H200).ordered_by(call_at(program, "wait")).everything


# -- signals -----------------------------------------------------------------------------------------------------------


def published(program: Program, mark: str) -> list[str]:
    """The marks of the copies that must be complete before a marked signal."""
    steps = Dependence(program, H200).complete_before(call_at(program, mark))
    marks = [m for m in ("to X", "to Y", "signalled") if marked(program, m)]
    return [m for m in marks if any(step.stmt.same_as(marked(program, m)[0][0]) for step in steps)]


def test_a_signal_publishes_what_those_who_wait_for_it_touch():
    @T.prim_func
    def f(
        X: T.Tensor((64,), "float32"),
        Y: T.Tensor((64,), "float32"),
        Z: T.Tensor((64,), "float32"),
        x: T.Tensor((1,), "int32"),
        y: T.Tensor((1,), "int32"),
        z: T.Tensor((1,), "int32"),
        last: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile, other = T.alloc((64,), "float32"), T.alloc((64,), "float32")
                T.copy(tile, X, dst=1 - rank)  # <to X>
                T.copy(tile, Y, dst=1 - rank)  # <to Y>
                T.copy(tile, Z, dst=1 - rank, signal=z[0])  # <signalled>
                T.signal(y[0], dst=1 - rank)  # <y>
                T.signal(x[0], dst=1 - rank)  # <x>
                T.signal(last[0], dst=1 - rank)  # <never waited for>
                T.wait(y[0], ">=", 1)
                T.copy(Y, other)
                T.wait(x[0], ">=", 1)
                T.copy(X, other)
                T.wait(z[0], ">=", 1)

    program = taken_apart(f)
    assert published(program, "signalled") == ["signalled"]
    assert published(program, "x") == ["to X"]
    assert published(program, "y") == ["to X", "to Y"], "X is read after both waits"
    assert published(program, "never waited for") == ["to X", "to Y", "signalled"]


# -- what may change places --------------------------------------------------------------------------------------------


def in_pairs(func: Any) -> dict[str, bool]:
    """For each mark that two lines have in common, whether their statements are independent."""
    program = taken_apart(func)
    graph, found = Dependence(program, H200), {}
    for mark in MARKS:
        lines = {str(stmt): (stmt, device) for stmt, device in marked(program, mark)}
        outermost = [v for v in lines.values() if not any(_inside(v[0], w[0]) for w in lines.values())]
        if len(outermost) == 2:
            (a, device), (b, _) = outermost
            found[mark] = graph.independent(a, b, on_device=device)
    return found


def _inside(inner: ir.Stmt, outer: ir.Stmt) -> bool:
    return not inner.same_as(outer) and any(s.same_as(inner) for s in ir.statements(outer))


MARKS = (
    "other tiles", "other rows", "neighbouring rows", "same rows", "rows from memory", "loops over other rows",
    "loops that overlap", "put and its source", "two puts", "weights", "behind the wait", "bound", "sync", "own signal",
    "barrier", "barrier and registers", "atomics",
)  # fmt: skip


def test_statements_that_may_change_places():
    @T.prim_func
    def f(
        X: T.Tensor((256, 64), "float32"),
        W: T.Tensor((64, 64), "float32"),
        N: T.Tensor((8,), "int32"),
        F: T.Tensor((8,), "int32"),
        G: T.Tensor((8,), "int32"),
    ):
        with T.Kernel(device=2, block=4, threads=128) as bx:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                a, b = T.alloc((64, 64), "float32"), T.alloc((64, 64), "float32")
                r = T.alloc_fragment((64,), "float32")
                T.clear(a)  # <other tiles>
                T.clear(b)  # <other tiles>
                T.copy(a[0:32, 0:64], X[bx * 64, 0])  # <other rows>
                T.copy(X[bx * 64 + 32, 0], b[0:32, 0:64])  # <other rows>
                T.copy(a[0:32, 0:64], X[bx * 64, 0])  # <neighbouring rows>
                T.copy(X[bx * 64 + 31, 0], b[0:32, 0:64])  # <neighbouring rows>
                T.clear(a[0:8, 0:64])  # <same rows>
                T.copy(a[4:12, 0:64], b[0:8, 0:64])  # <same rows>
                T.copy(a[0:1, 0:64], X[N[0], 0])  # <rows from memory>
                T.copy(X[N[0] + 1, 0], b[0:1, 0:64])  # <rows from memory>
                for i, j in T.Parallel(32, 64):  # <loops over other rows>
                    a[i, j] = 1.0
                for i, j in T.Parallel(32, 64):  # <loops over other rows>
                    b[i, j] = a[i + 32, j]
                for i, j in T.Parallel(32, 64):  # <loops that overlap>
                    a[i, j] = 1.0
                for i, j in T.Parallel(32, 64):  # <loops that overlap>
                    b[i, j] = a[i * 2, j]
                T.copy(a, X[bx * 64, 0], dst=1 - rank)  # <put and its source>
                T.clear(a)  # <put and its source>
                T.copy(a, X[bx * 64, 0], dst=1 - rank)  # <two puts>
                T.copy(b, X[bx * 64, 0], dst=1 - rank)  # <two puts>
                T.signal(F[bx], dst=1 - rank)
                T.wait(F[bx], ">=", 1)  # <weights>
                T.copy(W, b)  # <weights>
                T.wait(F[bx], ">=", 1)  # <behind the wait>
                T.copy(X[bx * 64, 0], b)  # <behind the wait>
                k = bx * 2  # <bound>
                T.copy(X[k, 0], b)  # <bound>
                T.wait(F[bx], ">=", 1)  # <sync>
                T.signal(G[bx], dst=1 - rank)  # <sync>
                T.signal(F[bx], dst=1 - rank)  # <own signal>
                T.clear(a)  # <own signal>
                T.barrier()  # <barrier>
                T.copy(X[bx * 64, 0], b)  # <barrier>
                T.barrier()  # <barrier and registers>
                T.clear(r)  # <barrier and registers>
                T.atomic_add(N[0], 1)  # <atomics>
                T.atomic_add(N[0], 2)  # <atomics>

    free = {"other tiles", "other rows", "loops over other rows", "weights", "own signal", "barrier and registers"}
    assert in_pairs(f) == {mark: mark in free for mark in MARKS}


def test_phases_beside_each_other():
    @T.prim_func
    def f(X: T.Tensor((256,), "float32"), Y: T.Tensor((256,), "float32"), Z: T.Tensor((256,), "float32")):
        with T.Kernel(device=2, block=4, threads=64) as bx:
            with T.Scale("block"):
                for i in T.Parallel(64):
                    Y[bx * 64 + i] = X[bx * 64 + i]
            with T.Scale("device"):
                T.barrier()
            with T.Scale("block"):
                for i in T.Parallel(64):
                    Z[bx * 64 + i] = X[bx * 64 + i]
            with T.Scale("device"):
                T.barrier()
            with T.Scale("block"):
                for i in T.Parallel(64):
                    Z[255 - bx * 64 - i] = Y[bx * 64 + i]

    program = taken_apart(f)
    graph = Dependence(program, H200)
    first, second, third = (phase for phase, _ in phases(program.body) if isinstance(phase, GridPhase))
    assert graph.independent(first, second) and graph.independent(second, first)
    assert not graph.independent(first, third) and not graph.independent(second, third)
