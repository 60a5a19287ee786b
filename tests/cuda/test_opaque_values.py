# SPDX-License-Identifier: MIT
"""Index expressions with conversions are calls while stock TileLang's passes run, and then expressions again."""

from __future__ import annotations

from typing import Any

import pytest
import tilelang  # noqa: F401 - it brings tvm
from tvm import tirx

from tests.cuda.support import lowered
from tilelang_core import compile, opaque_values
from tilelang_core.ir import contains, instances, nodes, same, substitute
from tilelang_core.lru import LruCache
from tilelang_core.opaque_values import OpaqueValues
from tilelang_core.rewrite import sequence
from tilescale.backends.cuda.target import target_for
from tilescale.hda import Machine
from tilescale.ops import ag_gemm_programs, gemm_rs
from tilescale.ops.gemm_tiles import GemmSpec, GemmTiling

TURN, ROWS, THREAD = (tirx.Var(name, "int32") for name in ("turn", "rows", "thread"))
OUT, READ = (tirx.decl_buffer((4096,), "int32", name) for name in ("out", "read"))
OF = GemmSpec(512, 512, "bfloat16", GemmTiling(128, 256, 1.0, 3, 8, 1), True, False)


def long(value: Any) -> Any:
    """A coordinate from 0 to 15, as that of a rasterized tile."""
    quotient = (tirx.Cast("float32", value) + 0.5) / tirx.Cast("float32", ROWS)
    return tirx.Min(tirx.Max(tirx.Cast("int32", quotient), tirx.IntImm("int32", 0)), tirx.IntImm("int32", 15))


def storing(value: Any, kind: int = tirx.ForKind.SERIAL, *before: tirx.Stmt) -> tirx.PrimFunc:
    """Stores a named value in a loop of a kernel with 128 threads."""
    name = tirx.Var("name", "int32")
    body = sequence([*before, tirx.Bind(name, value), tirx.BufferStore(OUT, name * 8, [TURN])])
    threads = tirx.IterVar((0, 128), THREAD, tirx.IterVar.ThreadIndex, "threadIdx.x")
    return tirx.PrimFunc([ROWS], tirx.AttrStmt(threads, "thread_extent", 128, tirx.For(TURN, 0, 8, kind, body)))


def bound(func: tirx.PrimFunc) -> Any:
    return instances(func.body, tirx.Bind)[-1].value


def is_call(node: Any) -> bool:
    return isinstance(node, tirx.Call)


def test_an_expression_is_a_call_within_its_bounds_and_then_itself():
    values, func = OpaqueValues(), storing(long(TURN))
    hidden = values.hidden(func)
    value = bound(hidden)
    assert isinstance(value, tirx.Min) and int(value.b) == 15
    assert isinstance(value.a, tirx.Max) and int(value.a.b) == 0 and is_call(value.a.a)
    assert [str(arg.name) for arg in value.a.a.args[1:]] == ["rows", "turn"]
    assert same(values.shown(hidden).body, func.body)


@pytest.mark.parametrize(
    "func",
    [
        storing(tirx.truncdiv(TURN * 8 + ROWS, ROWS)),
        storing(long(TURN + THREAD)),
        storing(long(TURN), tirx.ForKind.PARALLEL),
        storing(long(tirx.BufferLoad(READ, [TURN]))),
    ],
    ids=["of integers", "of a thread", "of an element", "of memory"],
)
def test_other_values_stay(func: tirx.PrimFunc):
    assert OpaqueValues().hidden(func).same_as(func)


def test_a_value_takes_the_variables_that_passes_give_it():
    other, values = tirx.Var("turn_1", "int32"), OpaqueValues()
    hidden = values.hidden(storing(long(TURN)))
    wide = tirx.Cast("int32", tirx.Cast("int64", other) + tirx.IntImm("int64", 1))
    for given, taken in ((other, other), (tirx.Cast("int64", other), other), (wide, wide)):
        call = tirx.call_pure_extern("int32", bound(hidden).a.a.args[0].value, ROWS, given)
        assert same(values.shown(hidden.with_body(tirx.Evaluate(call))).body.value, long(taken))


def test_a_value_of_another_one_is_shown_with_it():
    values, first = OpaqueValues(), tirx.Var("first", "int32")
    hidden = values.hidden(storing(long(first), tirx.ForKind.SERIAL, tirx.Bind(first, long(TURN))))
    one, other = (bind.value for bind in instances(hidden.body, tirx.Bind))
    inlined = hidden.with_body(tirx.Evaluate(substitute(other, {first: one})))
    assert same(values.shown(inlined).body.value, long(long(TURN)))


def test_narrower_bounds_of_a_pass_stay():
    values = OpaqueValues()
    hidden = values.hidden(storing(long(TURN)))
    value = tirx.Evaluate(tirx.Min(bound(hidden), tirx.IntImm("int32", 3)))
    assert same(values.shown(hidden.with_body(value)).body.value, tirx.Min(long(TURN), tirx.IntImm("int32", 3)))


COUNT = tirx.truncdiv(ROWS * 4 - TURN, 132)


def looping(extent: Any, kind: int = tirx.ForKind.SERIAL, **annotations: Any) -> tirx.PrimFunc:
    """A loop in a block of 128 threads."""
    index = tirx.Var("index", extent.dtype)
    body = tirx.BufferStore(OUT, tirx.IntImm("int32", 1), [index])
    loop = tirx.For(index, tirx.IntImm(extent.dtype, 0), extent, kind, body, annotations=annotations)
    threads = tirx.IterVar((0, 128), THREAD, tirx.IterVar.ThreadIndex, "threadIdx.x")
    return tirx.PrimFunc([ROWS, TURN], tirx.AttrStmt(threads, "thread_extent", 128, loop))


def test_a_trip_count_is_a_call_until_threads_are_synchronized():
    values, func = OpaqueValues(), looping(COUNT)
    hidden = values.hidden(func)
    assert contains(hidden.body, is_call) and not contains(hidden.body, lambda node: isinstance(node, tirx.Div))
    assert same(values.shown(hidden).body, hidden.body)
    assert same(values.with_extents(hidden).body, func.body)


def test_a_trip_count_of_a_hidden_value_is_shown_with_its_call():
    values, name = OpaqueValues(), tirx.Var("name", "int32")
    count = tirx.truncdiv(name - ROWS, 132)
    hidden = values.hidden(looping(count).with_body(sequence([tirx.Bind(name, long(TURN)), looping(count).body])))
    (value,) = (bind.value for bind in instances(hidden.body, tirx.Bind))
    inlined = hidden.with_body(substitute(hidden.body.seq[1], {name: value}))
    (loop,) = instances(values.with_extents(inlined).body, tirx.For)
    assert same(loop.extent, tirx.truncdiv(value - ROWS, 132))


@pytest.mark.parametrize(
    "func",
    [
        looping(tirx.IntImm("int32", 8)),
        looping((ROWS + 131) // 132),
        looping(tirx.truncdiv(ROWS - THREAD, 132)),
        looping(COUNT, tirx.ForKind.UNROLLED),
        looping(COUNT, num_stages=3),
        looping(tirx.Cast("int64", COUNT)),
    ],
    ids=["constant", "of positive numbers", "of a thread", "unrolled", "pipelined", "wide"],
)
def test_other_trip_counts_stay(func: tirx.PrimFunc):
    assert OpaqueValues().hidden(func).same_as(func)


def texts(program: Any) -> list[str]:
    target = target_for(Machine.load("h200-sxm-8"))
    return [compile.generate(kernel.func, target).text for kernel in lowered(program).kernels]


def test_passes_do_not_see_expressions_that_texts_have(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    shown = OpaqueValues.shown

    def counted(own: OpaqueValues, func: tirx.PrimFunc) -> tirx.PrimFunc:
        made = shown(own, func)
        seen.extend([len(nodes(func.body)), len(nodes(made.body))] if contains(func.body, is_opaque) else [])
        return made

    monkeypatch.setattr(OpaqueValues, "shown", counted)
    (text,) = texts(gemm_rs.program(2, OF, 132))
    assert max(seen[0::2]) < max(seen[1::2])
    assert "opaque_value" not in text and "max((int64_t)0" not in text


def is_opaque(node: Any) -> bool:
    return is_call(node) and "opaque_value" in str(node.args[:1])


def test_the_text_of_a_persistent_loop_is_the_same(monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []
    shown = OpaqueValues.with_extents

    def noted(own: OpaqueValues, func: tirx.PrimFunc) -> tirx.PrimFunc:
        seen.append(contains(func.body, lambda node: is_call(node) and "opaque_extent" in str(node.args[:1])))
        return shown(own, func)

    monkeypatch.setattr(OpaqueValues, "with_extents", noted)
    monkeypatch.setattr(compile, "_generated", LruCache(1))
    own = texts(gemm_rs.program(2, OF, 132))
    monkeypatch.setattr(opaque_values, "_is_trip_count", lambda loop: False)
    monkeypatch.setattr(compile, "_generated", LruCache(1))
    assert any(seen) and own == texts(gemm_rs.program(2, OF, 132))


def test_the_texts_of_a_gather_are_the_same(monkeypatch: pytest.MonkeyPatch):
    program = ag_gemm_programs.program(2, OF, True, 1, 132)
    own, *_ = texts(program)
    monkeypatch.setattr(opaque_values, "_is_conversion", lambda node: False)
    monkeypatch.setattr(compile, "_generated", LruCache(1))
    assert own == texts(program)[0]
