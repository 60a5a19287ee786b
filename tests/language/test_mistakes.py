# SPDX-License-Identifier: MIT
"""Common mistakes in traced functions are errors of ours, with the user's line."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tilescale.errors import ShapeError, TileScaleError, UsageError


def index_of_a_store(a: Any, b: Any, i: Any) -> None:
    a[i] = 1.0


def index_of_a_load(a: Any, b: Any, i: Any) -> None:
    b[i, 0] = a[i]


def index_of_an_update(a: Any, b: Any, i: Any) -> None:
    a[i] += 1.0


def indices(a: Any, b: Any, i: Any) -> None:
    a[i, 0, 0] = 1.0


def addition(a: Any, b: Any, i: Any) -> None:
    b[i, 0] = a + 1


def addition_from_the_right(a: Any, b: Any, i: Any) -> None:
    b[i, 0] = 1 + a


def sum_of_tensors(a: Any, b: Any, i: Any) -> None:
    b[i, 0] = a + b


def sign(a: Any, b: Any, i: Any) -> None:
    b[i, 0] = -a


def product(a: Any, b: Any, i: Any) -> None:
    b[i, 0] = a @ b


def comparison(a: Any, b: Any, i: Any) -> None:
    if a > 1:
        b[i, 0] = 1.0


def store(a: Any, b: Any, i: Any) -> None:
    b[i, 0] = a


def function(a: Any, b: Any, i: Any) -> None:
    b[i, 0] = T.exp(a)


def method(a: Any, b: Any, i: Any) -> None:
    b.copy_(a)


def keyword(a: Any, b: Any, i: Any) -> None:
    T.copy(a, dest=b)


def keyword_of_a_product(a: Any, b: Any, i: Any) -> None:
    T.gemm(a, a, b, transposeB=True)


def too_few_arguments(a: Any, b: Any, i: Any) -> None:
    T.clear()


def too_many_arguments(a: Any, b: Any, i: Any) -> None:
    T.clear(a, 1, 2)


VALUE = "a tensor or tile is used as a value"
MISTAKES = [
    (index_of_a_store, ShapeError, "an index of A needs 2 dimensions, and has 1"),
    (index_of_a_load, ShapeError, "an index of A needs 2 dimensions, and has 1"),
    (index_of_an_update, ShapeError, "an index of A needs 2 dimensions, and has 1"),
    (indices, ShapeError, "an index of A needs 2 dimensions, and has 3"),
    *((body, UsageError, VALUE) for body in (addition, addition_from_the_right, sum_of_tensors, sign, comparison)),
    *((body, UsageError, VALUE) for body in (product, store, function)),
    (method, UsageError, "no copy_"),
    (keyword, UsageError, "T.copy got an unexpected keyword argument 'dest'"),
    (keyword_of_a_product, UsageError, "T.gemm got an unexpected keyword argument 'transposeB'"),
    (too_few_arguments, UsageError, "T.clear missing 1 required positional argument"),
    (too_many_arguments, UsageError, "T.clear takes from 1 to 2 positional arguments"),
]


def traced(body: Any) -> Any:
    statement = T.macro(body)

    @T.prim_func
    def program(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                statement(A, B, i)

    return program


@pytest.mark.parametrize(("body", "kind", "said"), MISTAKES, ids=lambda value: getattr(value, "__name__", None))
def test_a_mistake_has_the_users_line(body: Any, kind: type[TileScaleError], said: str):
    with pytest.raises(kind) as found:
        traced(body)
    assert said in found.value.message and found.value.hint
    first, caller = found.value.where
    assert (first.file, first.line) == (__file__, body.__code__.co_firstlineno + 1)
    assert str(caller).endswith("statement(A, B, i)")


def test_hints_name_the_argument_that_was_meant():
    for body, meant in ((keyword, "dst"), (keyword_of_a_product, "transpose_B")):
        with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
            traced(body)


@pytest.mark.parametrize("alloc", [T.alloc_shared, T.alloc_fragment])
def test_a_tile_ends_with_its_kernel(alloc: Any):
    with pytest.raises(UsageError, match="^t is used outside of the block of statements that defines it") as found:

        @T.prim_func
        def program(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=64):
                t = alloc((64,), "float32")
                T.copy(A, t)
            with T.Kernel(1, threads=64):
                T.copy(t, B)

    assert "T.copy(t, B)" in str(found.value.where[0])


def test_functions_in_eager_style_have_these_errors_too():
    @tilescale.jit
    def program(A):  # noqa: ANN001, ANN202
        n = T.const("n")
        A: T.Tensor[[n], T.float32]
        with T.Kernel(1, threads=64):
            A[0] = A + 1

    with pytest.raises(UsageError, match=VALUE):
        program.get_tir(__import__("torch").zeros(8))


def test_mistakes_in_functions_of_the_user_stay_pythons():
    def helper(one: Any) -> Any:
        return one

    with pytest.raises(TypeError, match="helper"):

        @T.prim_func
        def program(A: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=64):
                A[0] = helper(1, 2)
