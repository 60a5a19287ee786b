# SPDX-License-Identifier: MIT
"""Errors of TileLang become errors of this project, with the user's line and a remedy; no other error escapes."""

from collections.abc import Callable
from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tests.corpus.collection import PROGRAMS
from tests.corpus.record import Program
from tests.emulator.checks.support import line_of
from tilelang_core import compile as stock
from tilelang_core import ir, tl
from tilescale.backends.tilelang.lowering import stages
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.errors import InternalError, ShapeError, TileScaleError, UnsupportedError, UsageError
from tilescale.passes import pipeline
from tilescale.runtime import bound_program


def reduced(threads: int) -> Any:
    @T.prim_func
    def run(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(device=1, block=1, threads=threads):
            with T.Scale("block"):
                values = T.alloc((64, 64), "float32", level="l0")
                sums = T.alloc((64,), "float32", level="l0")
                T.copy(X, values)  # into registers
                T.reduce_sum(values, sums, dim=1)
                T.copy(sums, Y)

    return run


def summed(m: int, n: int) -> Any:
    @T.prim_func
    def run(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m,), "float32")):
        with T.Kernel(device=1, block=1, threads=256):
            with T.Scale("block"):
                values = T.alloc((m, n), "float32", level="l0")
                sums = T.alloc((m,), "float32", level="l0")
                T.copy(X, values)
                T.reduce_sum(values, sums, dim=1)  # the sums
                T.copy(sums, Y)

    return run


def only_cleared() -> Any:
    @T.prim_func
    def run(X: T.Tensor((64, 64), "float32")):
        with T.Kernel(device=1, block=1, threads=128):
            with T.Scale("block"):
                used = T.alloc((64, 64), "float32", level="l0")
                unused = T.alloc((64, 64), "float32", level="l0")
                T.clear(used)
                T.clear(unused)  # and nothing else
                T.copy(used, X)

    return run


def plain_odd_tile() -> Any:
    @T.prim_func
    def run(X: T.Tensor((33, 7), "float32"), Y: T.Tensor((33, 7), "float32")):
        with T.Kernel(1, threads=64):
            values = T.alloc_fragment((33, 7), "float32")
            T.copy(X, values)  # an odd tile
            T.copy(values, Y)

    return run


def cleared_odd_tile() -> Any:
    @T.prim_func
    def run(X: T.Tensor((33, 20), "float32")):
        with T.Kernel(1, threads=128):
            values = T.alloc_shared((33, 20), "float32")
            T.clear(values)  # in shared memory
            T.copy(values, X)

    return run


def partial_loop() -> Any:
    @T.prim_func
    def run(X: T.Tensor((100,), "float32")):
        with T.Kernel(1, threads=256):
            values = T.alloc_shared((100,), "float32")
            T.copy(X, values)
            for i in T.Parallel(100):
                values[99 - i] = values[99 - i] * 2
            T.copy(values, X)

    return run


@pytest.mark.parametrize(
    ("make", "found", "line"),
    [
        (
            lambda: reduced(48),
            "cannot be distributed evenly over the threads",
            "into registers",
        ),
        (lambda: summed(32, 48), "cannot be distributed evenly over the threads", "the sums"),
        (cleared_odd_tile, "in T.clear or T.fill cannot be distributed evenly", "in shared memory"),
        (plain_odd_tile, "cannot be distributed evenly over the threads", "an odd tile"),
        (only_cleared, "tile unused in registers", "and nothing else"),
        (partial_loop, "threads must synchronize inside a loop", None),
    ],
)
def test_what_tilelang_cannot_lower(make: Callable[[], Any], found: str, line: str | None):
    with pytest.raises((ShapeError, UnsupportedError), match=found) as error:
        tilescale.compile(make()).source  # noqa: B018 - lowered when it is asked for
    (where,) = error.value.where
    assert where.file == __file__ and where.line == (line_of(line) if line else where.line)
    assert error.value.hint


def test_what_nobody_has_heard_of_has_the_line_too(monkeypatch: pytest.MonkeyPatch):
    def lower(func: Any, *_: Any, **__: Any) -> Any:
        if "reduce" in func.script():
            raise ValueError("\n  the third pass says no")

    monkeypatch.setattr(stock, "generate", lower)
    with pytest.raises(UnsupportedError, match="TileLang cannot compile this: the third pass says no") as error:
        tilescale.compile(reduced(64)).source  # noqa: B018
    assert "T.reduce_sum(" in str(error.value)


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_no_other_error_gets_out_of_compile(program: Program):
    try:
        func, _ = program.make(*([] if program.variant is None else [program.variant]))
        tilescale.compile(func, machine="h200-sxm-8").source  # noqa: B018
    except TileScaleError as error:
        assert error.where


def test_what_a_stage_of_ours_trips_over_has_the_line(monkeypatch: pytest.MonkeyPatch):
    def refuse(phase: Phase) -> Phase:
        if ir.contains(phase.stmt, lambda node: ir.op_name(getattr(node, "value", None)) == tl.FILL):
            raise ValueError("the extent is not constant")
        return phase

    monkeypatch.setattr(stages.barriers, "lower", refuse)
    with pytest.raises(UnsupportedError, match="TileLang cannot compile this: the extent is not constant") as error:
        tilescale.compile(only_cleared()).source  # noqa: B018
    assert "T.clear(used)" in str(error.value)


def test_a_fault_of_our_own_code_asks_for_a_report(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(stages.barriers, "ir")
    with pytest.raises(InternalError, match="NameError: name 'ir' is not defined") as error:
        tilescale.compile(only_cleared()).source  # noqa: B018
    assert "report it" in str(error.value.hint)


def endless(*_: Any) -> Any:
    return endless()


FAULTS: dict[str, Callable[..., Any]] = {
    "TypeError": lambda *_: int(None),  # type: ignore[call-overload]
    "IndexError": lambda *_: [][1],
    "KeyError": lambda *_: {}["key"],
    "AttributeError": lambda *_: None.nothing,  # type: ignore[attr-defined]
    "ZeroDivisionError": lambda *_: 1 // 0,
    "RecursionError": endless,
    "AssertionError": lambda *_: impossible(),
}


def impossible() -> None:
    raise AssertionError("it cannot be")


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("place", ["a stage", "a pass", "the analysis of overlap"])
def test_faults_of_all_kinds_have_the_line(name: str, place: str, monkeypatch: pytest.MonkeyPatch):
    broken = FAULTS[name]
    if place == "a stage":
        monkeypatch.setattr(stages.barriers, "lower", broken)
    elif place == "a pass":
        monkeypatch.setattr(pipeline, "CHECKS", (*pipeline.CHECKS, broken))
    else:
        monkeypatch.setattr(bound_program, "has_sites", lambda program: True)
        monkeypatch.setattr(bound_program, "overlap", broken)
    with pytest.raises(InternalError, match=f"TileScale failed while it compiled this: {name}") as error:
        tilescale.compile(only_cleared()).source  # noqa: B018
    assert error.value.where[0].file == __file__


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda: ir.For(None, 0, 1, 0, None), InternalError),
        (lambda: ir.simplify(ir.Var("n", "int32") // 0, {}), UsageError),
    ],
)
def test_what_tvm_says_of_arguments_of_ours(
    wrong: Callable[[], Any], found: type[TileScaleError], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stages.barriers, "lower", lambda phase: wrong())
    with pytest.raises(found) as error:
        tilescale.compile(only_cleared()).source  # noqa: B018
    assert error.value.where


def indexed(wrong: Callable[[Any, Any], Any]) -> Any:
    @T.prim_func
    def run(X: T.Tensor((64,), "int32")):
        with T.Kernel(device=1, block=1, threads=64):
            with T.Scale("block"):
                for i in T.Parallel(64):
                    X[i] = wrong(X, i)

    return run


ODD: dict[str, Callable[[Any, Any], Any]] = {
    "an index divided by zero": lambda X, i: X[i // (i - i)],
    "an index of another type": lambda X, i: X[T.Cast("int64", i)],
    "an index far outside": lambda X, i: X[i + (1 << 40)],
    "a function that nobody has": lambda X, i: T.call_extern("int32", "nobody", X[i]),
    "a shift by its own value": lambda X, i: X[i] << X[i],
    "a negative number of lanes away": lambda X, i: X[i - 1000],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_programs_end_with_an_error_of_ours_or_text(name: str):
    try:
        tilescale.compile(indexed(ODD[name])).source  # noqa: B018
    except TileScaleError as error:
        assert error.where and not isinstance(error, InternalError)
