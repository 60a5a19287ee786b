# SPDX-License-Identifier: MIT
"""Loops that some blocks go through once and others not at all stay so in what stock TileLang makes of them."""

import re
from typing import Any

import tilelang.transform
from hypothesis import given
from hypothesis import strategies as st
from tvm import IRModule, tirx
from tvm.arith import Analyzer
from tvm.tirx.stmt_functor import post_order_visit, substitute

import tilescale.language as T
from tests.cuda.support import source
from tilelang_core.single_trip_loops import with_kept_extents

BLOCKS = 12


def looping(extent: Any, names: int = 0) -> tirx.PrimFunc:
    """Every block stores in a loop of `extent(block)` steps, which has a name, or one of another name."""
    block, step, handle = tirx.Var("block", "int32"), tirx.Var("step", "int32"), tirx.Var("handle", "handle")
    out = tirx.decl_buffer((BLOCKS, 64), "int32", "out")
    store = tirx.BufferStore(out, tirx.IntImm("int32", 1), [block, step])
    known, binds = extent(block), []
    for _ in range(names):
        binds.append(tirx.Bind(tirx.Var("number", "int32"), known))
        known = binds[-1].var
    loop = tirx.For(step, 0, known, tirx.ForKind.SERIAL, store)
    body = tirx.SeqStmt([*binds, loop]) if binds else loop
    blocks = tirx.For(block, 0, BLOCKS, tirx.ForKind.SERIAL, body)
    return tirx.PrimFunc([handle], blocks, buffer_map={handle: out}).with_attr("global_symbol", "main")


def steps(func: tirx.PrimFunc) -> list[int]:
    """Number of steps of each block, after stock's passes."""
    module = IRModule({"main": func})
    for _ in range(2):
        module = tilelang.transform.Simplify()(tilelang.transform.LetInline()(module))
    loops: list[tirx.For] = []
    post_order_visit(module["main"].body, lambda node: loops.append(node) if isinstance(node, tirx.For) else None)
    if len(loops) == 1:
        return [0] * BLOCKS
    inner, outer = loops
    at = lambda block: substitute(inner.extent, {outer.loop_var: tirx.const(block, "int32")})  # noqa: E731
    return [max(0, int(Analyzer().simplify(at(block)))) for block in range(BLOCKS)]


@given(st.integers(-2, 2), st.integers(-30, 40), st.integers(1, 14), st.integers(0, 2))
def test_they_make_as_many_steps_as_before(slope: int, offset: int, divisor: int, names: int):
    def extent(block: Any) -> Any:
        return (slope * block + offset) // divisor

    want = [max(0, extent(block)) for block in range(BLOCKS)]
    assert steps(with_kept_extents(looping(extent, names))) == want


def test_stock_still_gets_them_wrong():
    """When this fails, `tilelang_core/single_trip_loops.py` can be removed."""
    assert steps(looping(lambda block: block // 8)) == [1] * BLOCKS


def test_what_is_loaded_for_an_extent_is_loaded_where_it_was():
    """The memory may be another one when the loop begins."""
    number, block = tirx.Var("number", "int32"), tirx.Var("block", "int32")
    out = tirx.decl_buffer((64,), "int32", "out")
    loaded = tirx.floordiv(tirx.Min(tirx.BufferLoad(out, [block]), tirx.const(8, "int32")), tirx.const(8, "int32"))
    store = tirx.BufferStore(out, tirx.const(1, "int32"), [block])
    loop = tirx.For(tirx.Var("step", "int32"), 0, number, tirx.ForKind.SERIAL, store)
    body = tirx.SeqStmt([tirx.Bind(number, loaded), store, loop])
    func = tirx.PrimFunc([tirx.Var("handle", "handle")], tirx.For(block, 0, 64, tirx.ForKind.SERIAL, body))
    loops: list[tirx.For] = []
    kept = with_kept_extents(func)
    post_order_visit(kept.body, lambda node: loops.append(node) if isinstance(node, tirx.For) else None)
    assert loops[0].extent.same_as(number) and not kept.same_as(func)


def test_other_loops_stay_as_they_are():
    for extent in (lambda block: block // 2, lambda block: (40 - block) // 12, lambda block: block % 2):
        func = looping(extent)
        assert with_kept_extents(func).same_as(func)


def test_a_block_without_a_tile_makes_none():
    """More blocks than tiles of a persistent grid."""

    @T.prim_func
    def copied(X: T.Tensor((5, 64), "float32"), Y: T.Tensor((5, 64), "float32")):
        with T.Kernel(8, threads=64) as block:
            for turn in T.serial(T.ceildiv(5 - block, 8)):
                T.copy(X[block + turn * 8, 0:64], Y[block + turn * 8, 0:64])

    text = source(copied)
    (extent,) = re.findall(r"for \(int turn\w* = 0; turn\w* < (.*); \+\+turn", text)
    for block in range(8):  # C divides towards 0
        number = extent.replace("((int)blockIdx.x)", str(block)).replace("/", "//")
        assert max(0, eval(number)) == (block < 5), extent
