# SPDX-License-Identifier: MIT
"""Accesses of a unit's threads to device memory keep the order of its statements: the barriers that ensure it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.ordered_programs import PROGRAMS
from tests.cuda.support import bodies, lowered, ptxas, source
from tests.cuda.test_stages import begun
from tilescale.backends.tilelang.lowering import hazards, stages
from tilescale.backends.tilelang.lowering.markers import ExecutingThreads
from tilescale.backends.tilelang.lowering.order_state import apart, covers

N, M = 256, 64


def said(func: Any) -> list[str]:
    """The inserted statements, without line numbers."""
    found = [re.sub(r" in line \d+", "", note) for note in lowered(func).notes]
    return [note for note in found if note.startswith(("before ", "the update"))]


def text(func: Any) -> str:
    return bodies(source(func))


def script(func: Any) -> str:
    """The only kernel before stock TileLang lowers it."""
    (kernel,) = lowered(func).kernels
    return str(kernel.func.script())


def reversed_rows(statement: Any) -> Any:
    """A program whose block stores `ws` elementwise, and then executes the statement on it."""

    @T.prim_func
    def program(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32")):
        with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
            ws = T.alloc((N,), "float32", level="l2")
            for i in T.Parallel(N):
                ws[i] = 2 * X[i]
            statement(ws, Z)

    return program


@T.macro
def by_others(ws, Z):
    for i in T.Parallel(N):
        Z[i] = ws[N - 1 - i]


@T.macro
def by_the_same(ws, Z):
    for i in T.Parallel(N):
        Z[i] = ws[i] + 1


@T.macro
def overwritten(ws, Z):
    for i in T.Parallel(N):
        ws[N - 1 - i] = Z[i]


@T.macro
def by_a_copy(ws, Z):
    tile = T.alloc((N,), "float32", level="l1")
    T.copy(ws, tile)
    T.copy(tile, Z)


@T.macro
def of_another_part(ws, Z):
    for i in T.Parallel(N):
        Z[i] = Z[i] + 1


@T.macro
def behind_a_barrier(ws, Z):
    T.sync_threads()
    for i in T.Parallel(N):
        Z[i] = ws[N - 1 - i]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (by_others, ["before the load of ws: threads synchronize (stored)"]),
        (by_the_same, []),
        (overwritten, ["before the store to ws: threads synchronize (stored)"]),
        (by_a_copy, ["before the load of ws: threads synchronize, bulk copies are ordered (stored)"]),
        (of_another_part, []),
        (behind_a_barrier, []),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else "",
)
def test_a_barrier_stands_where_other_threads_touch_what_was_stored(statement: Any, expected: list[str]):
    program = reversed_rows(statement)
    assert said(program) == expected
    if expected:
        between = text(program).split("ws[", 1)[1].split("ws[", 1)[0]
        assert "__syncthreads();" in between


def stored_twice(first: Any, second: Any, between: Any = lambda tile, Z: None) -> Any:
    """A program that stores to a shared tile at two indices of its threads, with a statement in between."""

    @T.prim_func
    def program(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32")):
        with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
            tile = T.alloc((N,), "float32", level="l1")
            for i in T.Parallel(N):
                tile[first(i)] = X[i]
            between(tile, Z)
            for i in T.Parallel(N):
                tile[second(i)] = X[i]
            T.copy(tile, Z)

    return program


@T.macro
def loaded_between(tile, Z):
    for i in T.Parallel(N):
        Z[N - 1 - i] = tile[i]


@T.macro
def loaded_in_part(tile, Z):
    for i in T.Parallel(N // 2):
        Z[i] = tile[i]


@pytest.mark.parametrize(
    ("second", "between", "barriers"),
    [
        (lambda i: i, None, 0),
        (lambda i: N - 1 - i, None, 1),
        (lambda i: (i + 40) % N, None, 1),
        (lambda i: N - 1 - i, loaded_between, 0),
        (lambda i: N - 1 - i, loaded_in_part, 1),
    ],
    ids=["same thread", "mirrored", "shifted", "loaded whole between", "loaded in part between"],
)
def test_stores_to_shared_memory_by_different_threads_are_ordered(second: Any, between: Any, barriers: int):
    """Stock TileLang orders stores with the loads between them, and not with one another."""
    program = stored_twice(lambda i: i, second, *([between] if between else []))
    about_tile = [note for note in said(program) if "tile" in note]
    assert about_tile == ["before the store to tile: threads synchronize (stored)"] * barriers


@pytest.mark.parametrize("name", ["read_in_a_branch", "read_again", "read_before_warps"])
def test_what_is_read_across_the_end_of_a_branch_or_a_unit_is_ordered(name: str):
    notes = [note for note in said(PROGRAMS[name]()) if "store to tile" in note]
    assert notes == ["before the store to tile: threads synchronize (read)"]


def test_the_note_names_the_lines():
    (note,) = [note for note in lowered(reversed_rows(by_others)).notes if note.startswith("before")]
    assert re.fullmatch(r"before the load of ws in line \d+: threads synchronize \(stored in line \d+\)", note)


@T.prim_func
def stored_in_bulk(X: T.Tensor((M, M), "float32"), ws: T.Tensor((M, M), "float32"), Z: T.Tensor((M, M), "float32")):
    with T.Kernel(device=2, block=1, threads=128), T.Scale("block"):
        tile = T.alloc((M, M), "float32", level="l1")
        T.copy(X, tile)
        T.copy(tile, ws)
        for i, j in T.Parallel(M, M):
            Z[i, j] = ws[j, i]


def test_a_bulk_store_is_complete_before_its_target_is_loaded():
    assert said(stored_in_bulk) == ["before the load of ws: bulk stores are completed, threads synchronize (stored)"]
    begin, end = (text(stored_in_bulk).index(part) for part in ("tma_store_wait", "Z["))
    assert re.search(r"complete_stores\(\);\s+__syncthreads\(\);", text(stored_in_bulk)[begin:end])
    assert "ptxas" in ptxas(source(stored_in_bulk))


def test_one_barrier_is_for_all_that_a_statement_loads():
    @T.prim_func
    def program(X: T.Tensor((M, M), "float32"), ws: T.Tensor((2, M, M), "float32"), Z: T.Tensor((M, M), "float32")):
        with T.Kernel(device=2, block=1, threads=128), T.Scale("block"):
            tile = T.alloc((M, M), "float32", level="l1")
            T.copy(X, tile)
            T.copy(tile, ws[1, 0:M, 0:M])
            for i, j in T.Parallel(M, M):
                ws[0, i, j] = X[i, j]
            for i, j in T.Parallel(M, M):
                Z[i, j] = ws[0, j, i] + ws[1, j, i]

    assert said(program) == ["before the load of ws: bulk stores are completed, threads synchronize (stored)"]


def turns(index: Any) -> Any:
    """A program that stores to an element of each iteration, after it has loaded another one."""

    @T.prim_func
    def program(Z: T.Tensor((9, N), "float32")):
        with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
            for turn in T.serial(8):
                for i in T.Parallel(N):
                    Z[index(turn), i] = Z[turn, N - 1 - i] + 1

    return program


@pytest.mark.parametrize("index", [lambda turn: turn + 1, lambda turn: turn % 2], ids=["the next", "slots in turn"])
def test_turns_of_a_loop_are_in_order(index: Any):
    program = turns(index)
    assert len(said(program)) == 1
    assert re.search(r"for \(int turn.*\) \{\s+__syncthreads\(\);", text(program))


@T.prim_func
def rows_apart(X: T.Tensor((16, N), "float32"), Z: T.Tensor((16, N), "float32")):
    with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
        for turn in T.serial(8):
            for i in T.Parallel(N):
                Z[2 * turn, i] = X[turn, i]
            for i in T.Parallel(N):
                Z[2 * turn + 1, i] = X[turn + 8, i]


def test_rows_of_turns_that_are_apart_need_no_barrier():
    assert said(rows_apart) == []
    assert "__syncthreads" not in text(rows_apart)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_earlier_stages_say_of_a_phase_stays(ordered: bool):
    """Neither its order, which keeps a producer from loading ahead, nor its notes."""
    phase = replace(stages.devices(begun(rows_apart), None), ordered=ordered, notes=("a note",))
    after = hazards.lower(phase)
    assert (after.ordered, after.notes) == (ordered, ("a note",))


@T.prim_func
def ahead(X: T.Tensor((8, M, M), "float16"), Z: T.Tensor((M, M), "float32")):
    with T.Kernel(device=2, block=1, threads=128), T.Scale("block"):
        a, b = T.alloc((M, M), "float16", level="l1"), T.alloc((M, M), "float16", level="l1")
        c = T.alloc((M, M), "float32", level="l0")
        T.clear(c)
        for k in T.Pipelined(7, num_stages=2):
            T.copy(X[k, 0:M, 0:M], a)
            T.copy(X[0, 0:M, 0:M], b)
            T.gemm(a, b, c)
            for i, j in T.Parallel(M, M):
                X[k + 1, i, j] = X[k + 1, j, i] + T.Cast("float16", 1.0)
        T.copy(c, Z)


def test_a_loop_that_loads_what_it_stores_does_not_load_ahead():
    assert any(note.startswith("before the load of X") for note in said(ahead))
    assert "mbarrier" not in text(ahead)
    assert "num_stages" not in script(ahead)


def test_stores_before_a_pipelined_loop_keep_other_warps_from_loading_ahead():
    @T.prim_func
    def program(X: T.Tensor((8, M, M), "float16"), Z: T.Tensor((M, M), "float32")):
        with T.Kernel(device=2, block=1, threads=128), T.Scale("block"):
            a, b = T.alloc((M, M), "float16", level="l1"), T.alloc((M, M), "float16", level="l1")
            c = T.alloc((M, M), "float32", level="l0")
            T.clear(c)
            for i, j in T.Parallel(M, M):
                X[3, i, j] = X[3, i, j] + T.Cast("float16", 1.0)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(X[k, 0:M, 0:M], a)
                T.copy(X[k, 0:M, 0:M], b)
                T.gemm(a, b, c)
            T.copy(c, Z)

    assert said(program) == ["before the load of X: threads synchronize, bulk copies are ordered (stored)"]
    barrier = re.search(r"__syncthreads\(\);\s+tilescale::acquired\(\);", text(program))
    loads = re.search(r"tma_load|cp_async|\(half_t\*\)", text(program))
    assert barrier and "128 <= ((int)threadIdx.x)" not in text(program) and loads


@T.prim_func
def warpgroups(X: T.Tensor((2, 128), "float32"), Z: T.Tensor((2, 128), "float32")):
    with T.Kernel(device=2, block=1, threads=256), T.Scale("block"):
        ws = T.alloc((2, 128), "float32", level="l2")
        with T.Scale("warpgroup") as (w, _):
            for i in T.Parallel(128):
                ws[w, i] = 2 * X[w, i]
            for i in T.Parallel(128):
                Z[w, i] = ws[w, 127 - i]


def test_a_warpgroup_synchronizes_alone():
    assert said(warpgroups) == ["before the load of ws: threads synchronize (stored)"] * 2 or len(said(warpgroups)) == 1
    assert len(re.findall(r"__sync_thread_partial(?:<|\()\d+, 128", text(warpgroups))) == 2


@T.prim_func
def taking_turns(X: T.Tensor((128,), "float32"), Z: T.Tensor((8, 128), "float32")):
    with T.Kernel(device=2, block=1, threads=256), T.Scale("block"):
        ws = T.alloc((128,), "float32", level="l2")
        full, empty = T.alloc_flags((1,)), T.alloc_flags((1,))
        with T.Scale("warpgroup") as (w, _):
            for turn in T.serial(8):
                if w == 0:
                    T.wait(empty[0], ">=", turn)
                    for i in T.Parallel(128):
                        ws[i] = X[i] + turn
                    T.signal(full[0])
                if w == 1:
                    T.wait(full[0], ">=", turn + 1)
                    for i in T.Parallel(128):
                        Z[turn, i] = ws[127 - i]
                    T.signal(empty[0])


def test_units_that_signal_each_other_have_no_barrier_in_common():
    """Neither of the first one's stores with the second one's loads, nor of the next stores with the loads before."""
    assert said(taking_turns) == []


@T.macro
def under_a_value_that_threads_hold(ws, Z):
    held = T.alloc((N,), "float32", level="l0")
    T.copy(Z, held)
    if held[0] > 0:
        for i in T.Parallel(N):
            Z[i] = ws[N - 1 - i]


def test_a_branch_on_what_threads_hold_has_no_barrier_inside():
    """Some threads may not take it."""
    found = script(reversed_rows(under_a_value_that_threads_hold))
    assert found.index("tvm_storage_sync") < found.index("if held[0]")


@T.macro
def reversed_under_a_value_that_threads_hold(ws, Z):
    held = T.alloc((N,), "float32", level="l0")
    T.copy(Z, held)
    if held[0] > 0:
        for i in T.Parallel(N):
            ws[N - 1 - i] = Z[i]
        for i in T.Parallel(N):
            Z[i] = ws[i]


def test_statements_in_a_branch_that_threads_hold_are_not_ordered():
    """A barrier there would wait for threads that do not take it."""
    found = script(reversed_rows(reversed_under_a_value_that_threads_hold))
    assert found.count("tvm_storage_sync") == 1
    assert found.index("tvm_storage_sync") < found.index("if held[0]")


def test_a_branch_that_all_threads_take_has_its_own_barrier():
    @T.prim_func
    def program(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32"), n: T.int32):
        with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
            for i in T.Parallel(N):
                Z[i] = X[i]
            if n > 3:
                for i in T.Parallel(N):
                    Z[i] = Z[N - 1 - i]

    assert len(said(program)) == 1
    assert re.search(r"if \(3 < n\) \{\s+__syncthreads", text(program))


def test_both_cases_of_a_branch_have_their_own_barrier():
    assert re.search(r"\} else \{\s+__syncthreads", text(PROGRAMS["read_in_both_cases"]()))


def test_a_barrier_in_a_branch_is_none_behind_it():
    assert re.search(r"\n  \}\n  __syncthreads\(\);\n  Z\[", text(PROGRAMS["read_behind_a_branch"]()))


def test_statements_of_few_threads_have_their_barrier_between_them():
    """Stock TileLang would make them one branch, with the barrier inside."""
    found = text(PROGRAMS["loaded_by_few"]())
    assert re.search(r"if \(\(\(\(int\)threadIdx\.x\) >> 5\) == 0\) \{\n[^\n]*\n +\}\n +__syncthreads\(\);", found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_run_on_gpus_are_accepted_and_ordered(name: str):
    func = PROGRAMS[name]()
    tensor = next(iter(func.buffer_map.values()))
    shape = tuple(map(int, tensor.shape))
    given, result = torch.ones(shape, dtype=getattr(torch, str(tensor.dtype))), torch.full(shape, float("nan"))
    tilescale.emulate(func, [given, result], check="races")
    assert not result.isnan().any()
    assert said(func)


@T.prim_func
def handed_over(X: T.Tensor((128,), "float32"), ws: T.Tensor((128,), "float32"), Z: T.Tensor((128,), "float32")):
    with T.Kernel(device=2, block=1, threads=256), T.Scale("block"):
        tile = T.alloc((128,), "float32", level="l1")
        T.copy(X, tile)
        with T.Scale("warpgroup") as (w, _):
            if w == 0:
                T.copy(tile, ws)
            T.barrier()
            if w == 1:
                for i in T.Parallel(128):
                    Z[i] = ws[127 - i]


def test_a_bulk_store_is_complete_when_units_synchronize():
    assert said(handed_over) == ["before units synchronize: bulk stores are completed (stored)"]
    assert re.search(r"tma_store_wait.*?complete_stores\(\);.*?(sync|bar)", text(handed_over), re.DOTALL)


@pytest.mark.parametrize(
    ("begin", "threads", "expected"),
    [(64, 64, True), (64, 32, True), (32, 64, False), (96, 64, False), (64, 96, False)],
)
def test_a_barrier_of_some_threads_covers_the_accesses_of_these_alone(begin: int, threads: int, expected: bool):
    assert covers(ExecutingThreads(64, 64), ExecutingThreads(begin, threads)) == expected
    assert not covers(None, ExecutingThreads(begin, threads))


@pytest.mark.parametrize(
    ("begin", "threads", "expected"), [(0, 64, True), (128, 64, True), (0, 65, False), (127, 1, False), (0, 256, False)]
)
def test_units_are_apart_without_a_common_thread(begin: int, threads: int, expected: bool):
    one, other = ExecutingThreads(64, 64), ExecutingThreads(begin, threads)
    assert apart(one, other) == apart(other, one) == expected
