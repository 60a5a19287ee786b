# SPDX-License-Identifier: MIT
"""`fn=` of a collective with Python's own `and`, `or`, `not`, `if` and chained comparisons."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import bodies, source
from tilescale.errors import UsageError


def with_or(a, b):
    take = a[0] > b[0] or (a[0] == b[0] and not b[1] < a[1])
    return T.if_then_else(take, a[0], b[0]), T.if_then_else(take, a[1], b[1])


def with_if(a, b):
    if a[0] < b[0] or a[0] == b[0] and a[1] > b[1]:
        return b
    return a


def with_chain(a, b):
    if b[0] <= a[0] <= 100 and not (a[0] == b[0] and not a[1] <= b[1]):
        return a[0], a[1]
    return b[0], b[1]


def best(fn):
    """The largest value of all devices, and of equal ones that with the lowest index."""

    @T.prim_func
    def program(X: T.Tensor((64,), "float32"), J: T.Tensor((64,), "int32")):
        with T.Kernel(device=3, block=1, threads=64):
            with T.Scale("block"), T.Scale("device"):
                x, i = T.alloc((64,), "float32"), T.alloc((64,), "int32")
                T.copy(X, x)
                T.copy(J, i)
                T.allreduce(x, i, fn=fn)
                T.copy(x, X)
                T.copy(i, J)

    return program


@pytest.mark.parametrize("fn", [with_or, with_if, with_chain])
def test_a_combination_may_branch(fn):
    values = torch.randint(0, 3, (3, 64)).float()
    per_device = [[values[rank].clone(), torch.full((64,), rank, dtype=torch.int32)] for rank in range(3)]
    program = best(fn)
    tilescale.emulate(program, per_device)
    for x, i in per_device:
        assert torch.equal(x, values.amax(0)) and torch.equal(i.long(), (values == values.amax(0)).int().argmax(0))
    assert "tilescale" in bodies(source(program))


def test_too_many_conditions_are_an_error():
    def endless(a, b):
        for bound in range(20):
            if a > bound and b > bound:
                continue
        return a + b

    with pytest.raises(UsageError, match="more than 8 conditions"):

        @T.prim_func
        def program(X: T.Tensor((64,), "float32")):
            with T.Kernel(device=2, block=1, threads=64):
                with T.Scale("block"), T.Scale("device"):
                    x = T.alloc((64,), "float32")
                    T.copy(X, x)
                    T.allreduce(x, fn=endless)


def test_elsewhere_the_truth_of_an_expression_stays_an_error():
    best(with_or)
    with pytest.raises(ValueError, match="and / or / not"):
        bool(T.Var("n", "int32") > 0)
