# SPDX-License-Identifier: MIT
"""Symbolic extents by the shapes of arguments."""

from types import SimpleNamespace

import pytest
import torch

import tilescale.language as T
from tests.cuda.support import program
from tilescale.errors import ArgumentError
from tilescale.program.extents import evaluate, inside_expressions, solve
from tilescale.runtime import outputs


def traced(units):
    n, m = T.dynamic("n"), T.dynamic("m")

    @T.prim_func
    def f(X: T.Tensor((n, m), "float32"), Y: T.Tensor((m, 4), "float32"), k: T.int32):
        with T.Kernel(device=units, block=1, threads=32):
            with T.Scale("device"):
                T.fill(T.view(X, layout=T.FullRow), k)

    return program(f)


@pytest.mark.parametrize("units", [1, 2, 3])
def test_a_shard_says_the_whole_extent(units):
    found = traced(units)
    known = solve(found.parameters, [(5, 7), (7, 4), None])
    assert {var.name: size for var, size in known.items()} == {"n": 5 * units, "m": 7}


def test_units_that_the_launch_leaves_open_are_known_from_it():
    found = traced(T.ALL)
    ((_, units),) = found.extents
    assert {v.name: n for v, n in solve(found.parameters, [(5, 7), (7, 4), None], {units: 3}).items()}["n"] == 15
    assert "n" not in {v.name for v in solve(found.parameters, [(5, 7), (7, 4), None])}


def test_an_extent_as_a_number():
    found = traced(2)
    known = solve(found.parameters, [(5, 7), (7, 4), None])
    assert [evaluate(n, known) for n in found.parameters[0].shape] == [5, 7]
    assert evaluate(found.parameters[0].shape[0], {}) is None and evaluate(3, {}) == 3
    n, x = T.dynamic("n"), T.dynamic("x", "float32")
    assert evaluate(n // 4 + 1, {n: 9, x: 1.5}) == 3
    assert evaluate(n * (x < 2), {n: 9, x: 1.5}) == 9


def test_only_extents_inside_expressions_have_to_be_passed():
    assert {var.name for var in inside_expressions(traced(2))} == {"n"}
    assert not inside_expressions(traced(1))


def of_shapes(*shapes):
    """A program with a tensor of each shape, whose extents are expressions."""

    @T.prim_func
    def f(X: T.Tensor(shapes[0], "int32"), Y: T.Tensor(shapes[1], "int32")):
        with T.Kernel(1, threads=32):
            X[0] = 1

    return program(f).parameters


def names(known):
    return {var.name: size for var, size in known.items()}


def test_an_extent_is_solved_for_the_variable_in_it():
    n, m = T.dynamic("n"), T.dynamic("m")
    found = of_shapes((n * 4,), (2 * m - 1,))
    assert names(solve(found, [(20,), (7,)])) == {"n": 5, "m": 4}
    assert names(solve(found, [None, (7,)])) == {"m": 4}
    assert names(solve(of_shapes((n * m,), (5 - m,)), [(6,), (3,)])) == {"m": 2, "n": 3}


def test_a_quotient_says_what_nothing_else_says():
    n = T.dynamic("n")
    assert names(solve(of_shapes((n // 4,), (n + 1,)), [(2,), (12,)])) == {"n": 11}
    assert names(solve(of_shapes((n // 4,), (n + 1,)), [(2,), None])) == {"n": 8}


@pytest.mark.parametrize("size", [7, 0])
def test_an_extent_that_no_value_makes(size):
    n, m = T.dynamic("n"), T.dynamic("m")
    with pytest.raises(ArgumentError, match=rf"'Y' has an extent of {size} where .*: no m makes that"):
        solve(of_shapes((n,), ((m + 2) * 4,)), [(3,), (size,)])


def test_shapes_of_outputs_are_kept_for_some_choices_of_arguments(monkeypatch: pytest.MonkeyPatch):
    n = T.dynamic("n")
    program = SimpleNamespace(parameters=of_shapes((n,), (2 * n,)), func=None)
    made = outputs.KernelOutputs(program, [1], "cpu")
    monkeypatch.setattr(outputs, "KEPT", 3)
    for _ in range(2):
        for extent in range(1, 7):
            assert made.allocate([torch.zeros(extent), None])[1].shape == (2 * extent,)
    assert len(made._known) == 3
