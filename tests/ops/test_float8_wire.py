# SPDX-License-Identifier: MIT
"""Collectives whose numbers travel as float8: their error against float64, by the bound of docs/operators/float8.md."""

from __future__ import annotations

import pytest
import torch

import tilescale
from tests.ops.float8_bounds import bound_of_gather, bound_of_sum
from tilescale.ops.whole_tensors import program, sum_program
from tilescale.program.wire import WIRE, line_floats

LINE = line_floats()

INPUTS = {
    "random": lambda *shape: torch.randn(shape),
    "zeros": lambda *shape: torch.zeros(shape),
    "huge ranges": lambda *shape: torch.randn(shape) * 2.0 ** torch.randint(-140, 110, shape),
    "groups of huge ranges": lambda *shape: torch.randn(shape) * 2.0 ** torch.randint(-120, 118, (*shape[:-1], 1)),
    "one large number": lambda *shape: torch.randn(shape).index_fill(-1, torch.tensor([5]), 1e4),
    "alternating": lambda *shape: (-1.0) ** torch.arange(LINE) * torch.full(shape, 17.5 * 2.0**-9),
}


def emulated(name: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results of all devices, of (parts, rows, LINE) floats."""
    size, (parts, *row) = len(given), given[0].shape
    dtype = str(given[0].dtype).removeprefix("torch.")
    if name == "all_reduce":
        made = sum_program(size, dtype, "sum", "two_shot", WIRE)
    else:
        made = program(size, name, dtype, "direct", WIRE)
    shape = {"all_gather": size * parts, "reduce_scatter": parts // size}.get(name, parts), *row
    tensors = [[x.flatten(), torch.full(shape, torch.nan).to(x.dtype).flatten()] for x in given]
    tilescale.emulate(made, tensors)
    return [y.view(shape) for _, y in tensors]


def inputs(which: str, size: int, parts: int, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(size + rows)
    most = torch.finfo(dtype).max
    return [INPUTS[which](parts, rows, LINE).clamp(-most, most).to(dtype) for _ in range(size)]


CASES = [
    (2, 67, "bfloat16", "random"),
    (3, 40, "float16", "one large number"),
    (4, 1, "float32", "huge ranges"),
    (2, 5, "bfloat16", "groups of huge ranges"),
    (2, 1, "float16", "zeros"),
    (8, 2, "bfloat16", "alternating"),
]


@pytest.mark.parametrize(("size", "rows", "dtype", "which"), CASES)
def test_a_gather(size: int, rows: int, dtype: str, which: str):
    given = inputs(which, size, 1, rows, getattr(torch, dtype))
    want = torch.cat(given).double()
    for made in emulated("all_gather", given):
        assert bool(((made.double() - want).abs() <= bound_of_gather(want)).all())


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("size", "rows", "dtype", "which"), CASES)
def test_sums(size: int, rows: int, dtype: str, which: str, name: str):
    given = inputs(which, size, size, rows, getattr(torch, dtype))
    every = torch.stack(given).double()
    want, bound = every.sum(0), bound_of_sum(every, given[0].dtype, again=name == "all_reduce")
    results = emulated(name, given)
    for rank, made in enumerate(results):
        mine = slice(rank, rank + 1) if name == "reduce_scatter" else slice(None)
        assert bool(((made.double() - want[mine]).abs() <= bound[mine]).all())
        assert name == "reduce_scatter" or torch.equal(made, results[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_numbers_stay_finite(dtype: torch.dtype):
    most = torch.finfo(dtype).max
    given = [torch.full((1, 1, LINE), sign * most, dtype=dtype) for sign in (1, -1)]
    for made in emulated("all_gather", given):
        assert bool(((made.double().abs() - most).abs() <= most / 16).all()) and bool((made[0] == -made[1]).all())


@pytest.mark.parametrize("found", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_makes_its_group_nan(found: float):
    given = [torch.ones(2, 3, LINE).bfloat16() for _ in range(2)]
    given[1][0, 1, 7] = found
    for made in emulated("all_reduce", given):
        assert bool(made[0, 1].isnan().all())
        made[0, 1] = 2
        assert bool((made == 2).all())


def test_a_sum_that_overflows_is_nan():
    given = [torch.full((2, 1, LINE), 60000.0).half() for _ in range(2)]
    assert all(bool(made.isnan().all()) for made in emulated("all_reduce", given))
