# SPDX-License-Identifier: MIT
"""Barriers of roles: stock TileLang's numbers and threads, without its counts of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import tilelang
from tvm import IRModule, tirx
from tvm.error import InternalError
from tvm.ir import Op

from tests.cuda import overlap_programs
from tests.cuda.support import lowered
from tilelang_core import compile
from tilelang_core.counted_barriers import with_counted_barriers
from tilelang_core.ir import nodes, op_name, same
from tilelang_core.lru import LruCache
from tilelang_core.rewrite import sequence
from tilescale.backends.cuda.target import target_for
from tilescale.hda import Machine

X, BLOCK, ROWS, TURN = (tirx.Var(name, "int32") for name in ("tx", "bx", "rows", "turn"))
TILE = tirx.decl_buffer((1024,), "float32", "tile", scope="shared")
OUT = tirx.decl_buffer((1024,), "float32", "out")
ZERO = tirx.IntImm("int32", 0)


def exchange(first: int = 0) -> tirx.Stmt:
    """Each thread reads the element of the next one."""
    store = tirx.BufferStore(TILE, tirx.FloatImm("float32", 1.0), [X - first])
    return sequence([store, tirx.BufferStore(OUT, tirx.BufferLoad(TILE, [X - first + 1]), [X])])


def barrier(*number_and_threads: int) -> tirx.Stmt:
    given = [tirx.StringImm("shared"), *(tirx.IntImm("int32", x) for x in number_and_threads)]
    return tirx.Evaluate(tirx.Call("int32", Op.get("tirx.tvm_storage_sync"), given))


def kernel(body: tirx.Stmt, threads: int = 384, rows: int = 1) -> tirx.PrimFunc:
    extents = {"threadIdx.y": rows, "threadIdx.z": 1}
    for tag, extent in reversed(extents.items()):
        body = bound(tirx.Var(tag[-1], "int32"), tag, extent, body)
    body = bound(BLOCK, "blockIdx.x", 132, bound(X, "threadIdx.x", threads, body))
    return tirx.PrimFunc([OUT.data, ROWS], sequence([tirx.AllocBuffer(TILE), body]))


def bound(var: tirx.Var, tag: str, extent: int, body: tirx.Stmt) -> tirx.Stmt:
    index = tirx.IterVar((0, extent), var, tirx.IterVar.ThreadIndex, tag)
    return tirx.AttrStmt(index, "thread_extent", tirx.IntImm("int32", extent), body)


def roles(*ends: int, of: Callable[[int], tirx.Stmt] = exchange, first: int = 0) -> tirx.Stmt:
    """A role for the threads before each end, and one for all others."""
    if not ends:
        return of(first)
    return tirx.IfThenElse(X < ends[0], of(first), roles(*ends[1:], of=of, first=ends[0]))


def repeated(body: tirx.Stmt, extent: Any = ROWS) -> tirx.Stmt:
    return tirx.For(TURN, ZERO, extent, tirx.ForKind.SERIAL, body)


def if_own(body: tirx.Stmt) -> tirx.Stmt:
    """A branch of some blocks in some iterations."""
    return tirx.IfThenElse(tirx.NE((ROWS + TURN * 132 + BLOCK) % 2, 1), body, None)


def stock(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return tilelang.transform.ThreadSync("shared")(IRModule({"main": func}))["main"]


def barriers(func: tirx.PrimFunc) -> list[list[Any]]:
    calls = nodes(func.body, lambda node: op_name(node) == "tirx.tvm_storage_sync")
    return [[getattr(arg, "value", arg) for arg in call.args] for call in calls]


def runs(func: tirx.PrimFunc) -> int:
    """Number of runs of stock's pass for its own result or error."""
    made: list[tirx.PrimFunc] = []

    def counted(given: tirx.PrimFunc) -> tirx.PrimFunc:
        made.append(given)
        return stock(given)

    own, expected = result(lambda: with_counted_barriers(func, counted)), result(lambda: stock(func))
    assert own == expected if isinstance(expected, str) else same(own.body, expected.body)
    return len(made)


def result(make: Callable[[], tirx.PrimFunc]) -> tirx.PrimFunc | str:
    try:
        return make()
    except InternalError as error:
        return str(error).splitlines()[-1]


@pytest.mark.parametrize("ends", [(256,), (256, 320), (32, 96), (64, 128, 192), (352,)])
def test_roles_of_whole_warps_have_the_barriers_of_stock(ends: tuple[int, ...]):
    func = kernel(roles(*ends))
    assert runs(func) == 1
    sizes = [end - first for first, end in zip((0, *ends), (*ends, 384), strict=True)]
    found = [call[1:] for call in barriers(with_counted_barriers(func, stock))]
    assert found == [[3 + number, size] for number, size in enumerate(sizes)]


def test_each_range_of_threads_has_one_number():
    twice = sequence([roles(64), tirx.IfThenElse(X < 64, exchange(), None), roles(128)])
    func = kernel(roles(256, of=lambda first: sequence([exchange(first), exchange(first)])))
    assert runs(func) == 1 and len({tuple(call) for call in barriers(stock(func))}) == 2
    assert runs(kernel(twice)) == 1


@pytest.mark.parametrize("body", [exchange(), repeated(exchange()), if_own(exchange())])
def test_barriers_of_all_threads_have_no_number(body: tirx.Stmt):
    func = kernel(body)
    assert runs(func) == 1 and [["shared"]] * len(barriers(stock(func))) == barriers(stock(func)) != []


def test_loops_and_conditions_of_blocks_are_known():
    func = kernel(roles(256, of=lambda first: repeated(if_own(exchange(first)))))
    assert runs(func) == 1 and barriers(stock(func)) == [["shared", 3, 256]] * 2 + [["shared", 4, 128]] * 2


def test_barriers_of_a_program_get_their_numbers_too():
    func = kernel(roles(256, of=lambda first: sequence([barrier(), barrier(15, 64), exchange(first)])))
    assert runs(func) == 1
    assert [call[1:] for call in barriers(stock(func))] == [[3, 256], [15, 64], [3, 256], [4, 128], [15, 64], [4, 128]]


@pytest.mark.parametrize("ends", [(1,), (16, 64), (100,), (256, 321)])
def test_parts_of_warps_are_stocks_error(ends: tuple[int, ...]):
    func = kernel(roles(*ends))
    assert runs(func) == 2 and isinstance(result(lambda: stock(func)), str)


def test_a_thread_without_a_barrier_may_be_a_role():
    func = kernel(tirx.IfThenElse(X < 1, tirx.BufferStore(OUT, ZERO.astype("float32"), [X]), None))
    assert runs(func) == 1 and barriers(stock(func)) == []


NAME = tirx.Var("warp", "int32")


@pytest.mark.parametrize(
    "body",
    [
        *(
            tirx.IfThenElse(condition, exchange(), None)
            for condition in (X // 32 < 2, X < 64 + BLOCK - BLOCK, X >= 320, tirx.And(X < 64, BLOCK < 3), ROWS < X)
        ),
        sequence([tirx.Bind(NAME, X // 32), tirx.IfThenElse(NAME < 2, exchange(), None)]),
        repeated(exchange(), X // 128),
        tirx.AttrStmt(X < 64, "tl.assume", tirx.StringImm("few"), exchange()),
    ],
)
def test_other_conditions_on_threads_run_stocks_pass(body: tirx.Stmt):
    assert runs(kernel(body)) == 2


def test_fewer_threads_than_a_warp_run_stocks_pass():
    assert runs(kernel(if_own(exchange()), threads=16)) == 2


def test_threads_in_rows_run_stocks_pass_alone():
    assert runs(kernel(roles(64), threads=128, rows=2)) == 1


def test_functions_without_threads_are_left_to_stock():
    assert runs(tirx.PrimFunc([OUT.data], tirx.BufferStore(OUT, ZERO.astype("float32"), [ZERO]))) == 1


def test_texts_of_roles_are_those_of_stock(monkeypatch: pytest.MonkeyPatch):
    (kernel,) = lowered(overlap_programs.rs_gemm(shape=(2048, 512, 512), stages=2, blocks=12)).kernels
    given = kernel.func, target_for(Machine.load("h200-sxm-8"))
    monkeypatch.setattr(compile, "_generated", LruCache(1))
    own = compile.generate(*given).text
    monkeypatch.setattr(compile, "counted_barriers", contextlib.nullcontext)
    monkeypatch.setattr(compile, "_generated", LruCache(1))
    assert own == compile.generate(*given).text and "__sync_thread_partial(3, " in own
