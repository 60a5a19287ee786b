# SPDX-License-Identifier: MIT
"""TVM's classes and arrays are asked without detours, and answer as before."""

import pytest
from tvm import tirx
from tvm_ffi import Array, Object

import tilescale.language  # noqa: F401 - installs them

ELEMENTS = [tirx.Var("x", "int32"), tirx.IntImm("int32", 3), tirx.IntImm("int32", 4)]


def test_instances_of_classes_and_of_their_bases():
    x = ELEMENTS[0]
    assert isinstance(x, tirx.Var) and isinstance(x, tirx.PrimExpr) and isinstance(x, Object)
    assert not isinstance(x, tirx.Stmt) and not isinstance(3, tirx.PrimExpr) and not isinstance(tirx.Var, tirx.PrimExpr)
    assert isinstance(x, tirx.Stmt | tirx.PrimExpr)


@pytest.mark.parametrize("index", [0, 2, -1, -3, slice(None), slice(1, None), slice(None, None, -1), True])
def test_elements_are_those_of_a_list(index: int | slice):
    array, wanted = Array(ELEMENTS), ELEMENTS[index]
    found = array[index]
    one, other = (x if isinstance(x, list) else [x] for x in (found, wanted))
    assert len(one) == len(other) and all(a.same_as(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("index", [3, -4])
def test_other_indices_are_errors(index: int):
    with pytest.raises(IndexError):
        Array(ELEMENTS)[index]
    with pytest.raises(TypeError):
        Array(ELEMENTS)["x"]


def test_arrays_are_iterated():
    assert [*Array([])] == [] and all(a.same_as(b) for a, b in zip(Array(ELEMENTS), ELEMENTS, strict=True))
