# SPDX-License-Identifier: MIT
"""Exceptions of Python or TVM in an emulation become errors of this project with the user's line."""

import random
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.test_upstream_errors import FAULTS, ODD, indexed
from tests.emulator.checks.support import line_of
from tests.fuzz.generator import generate
from tests.fuzz.program import Fuzzed, Line
from tests.halves import every_second_at_night
from tilelang_core import tl
from tilescale.backends.emulator.checks.races import Races
from tilescale.backends.emulator.interpret import registry
from tilescale.backends.emulator.run import Run
from tilescale.errors import InternalError, TileScaleError, UsageError


def filled() -> Any:
    @T.prim_func
    def run(X: T.Tensor((64,), "float32")):
        with T.Kernel(device=1, block=1, threads=64):
            with T.Scale("block"):
                tile = T.alloc((64,), "float32", level="l1")
                T.fill(tile, 1)  # fills
                T.copy(tile, X)

    return run


def in_a_rule(broken: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    patch.setitem(registry.OPERATIONS, tl.FILL, broken)


def in_a_closure(broken: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    patch.setitem(registry.OPERATIONS, tl.FILL, lambda compiler, call: broken)


def in_a_check(broken: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Races, "accesses", broken)


def between_statements(broken: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Run, "_unit_ended", broken)


def before_all(broken: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tilescale.backends.emulator.emulate.bind_arguments", broken)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("place", [in_a_rule, in_a_closure, in_a_check, between_statements, before_all])
def test_faults_of_all_kinds_have_the_line(name: str, place: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    place(FAULTS[name], monkeypatch)
    with pytest.raises(InternalError, match=f"TileScale failed while it emulated this: {name}") as error:
        tilescale.emulate(filled(), [torch.zeros(64)])
    assert error.value.where[0].file == __file__
    if place in (in_a_rule, in_a_closure):
        assert error.value.where[0].line == line_of("fills")
    assert type(error.value.__cause__).__name__ == name


def test_memory_that_the_computer_does_not_have_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> None:
        raise MemoryError

    in_a_closure(broken, monkeypatch)
    with pytest.raises(MemoryError):
        tilescale.emulate(filled(), [torch.zeros(64)])


@pytest.mark.parametrize("name", ODD)
def test_odd_programs_end_with_an_error_of_ours_or_a_result(name: str):
    told(lambda: tilescale.emulate(indexed(ODD[name]), [torch.arange(64, dtype=torch.int32)]))


def test_loops_of_less_than_no_iteration_have_none():
    @T.prim_func
    def run(X: T.Tensor((4,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(n, 2):
                X[2 * i + j] = 1

    given = torch.zeros(4, dtype=torch.int32)
    tilescale.emulate(run, [given, -1])
    assert given.tolist() == [0, 0, 0, 0]
    tilescale.emulate(run, [given, 1])
    assert given.tolist() == [1, 1, 0, 0]


def told(run: Callable[[], Any]) -> None:
    """An emulation ends, or reports an error of the program with a line."""
    try:
        run()
    except TileScaleError as error:
        assert error.where and not isinstance(error, InternalError), error


def lines(body: list[Line]) -> Iterator[tuple[list[Line], Line]]:
    """All lines, each with its block."""
    for line in body:
        yield body, line
        yield from lines(line.body)


def changed(program: Fuzzed, rng: random.Random) -> Fuzzed:
    """A program with one line left out, written twice, or with another number or type in it."""
    body = deepcopy(list(program.body))
    block, line = rng.choice(list(lines(body)))
    numbers, draw = list(re.finditer(r"\b\d+\b", line.text)), rng.random()
    if draw < 0.25:
        block.remove(line)
    elif draw < 0.35:
        block.append(deepcopy(line))
    elif draw < 0.45:
        line.text = line.text.replace("32'", rng.choice(["16'", "64'"]))
    elif numbers:
        at, other = rng.choice(numbers), rng.choice([-1, 0, 1, 3, 40])
        line.text = f"{line.text[: at.start()]}{other}{line.text[at.end() :]}"
    return replace(program, body=tuple(body))


WITHOUT_WHILE = [seed for seed in range(9, 30) if "while" not in generate(seed, devices=1 + seed % 2).source]
"""Others may become endless."""


@pytest.mark.parametrize("seed", every_second_at_night(WITHOUT_WHILE))
def test_random_programs_with_a_mistake(seed: int):
    program = changed(generate(seed, devices=1 + seed % 2), random.Random(seed))
    try:
        func = program.trace()
    except Exception:  # noqa: BLE001 - what tracing says of such a program is not asked here
        return
    told(lambda: program.emulated(func=func))


def test_what_a_stand_in_raises_is_the_users(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tilescale.backends.emulator.operations.stand_ins._STAND_INS", {})

    @tilescale.stand_in("halved")
    def halved(value: int) -> int:
        raise ArithmeticError(f"{value} is odd")

    @T.prim_func
    def run(X: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            X[0] = T.call_extern("int32", "halved", X[0])  # calls it

    with pytest.raises(UsageError, match="the stand-in for 'halved' failed: ArithmeticError: 7 is odd") as error:
        tilescale.emulate(run, [torch.full((1,), 7, dtype=torch.int32)])
    assert error.value.where[0].line == line_of("calls it")
