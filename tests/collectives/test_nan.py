# SPDX-License-Identifier: MIT
"""A NaN of any unit stays in a maximum and a minimum, in every form and by every algorithm."""

from __future__ import annotations

import re

import pytest
import torch

import tilescale
from tests.collectives.programs import SHAPES, UNITS, arguments, program, results
from tests.cuda.support import lowered, source
from tilescale.collectives import FORMS, PROGRAMS, TENSORS, THREAD_GROUPS, TILES, names


def with_nan(dtype: torch.dtype) -> list[torch.Tensor]:
    """Inputs of units: one NaN each, at different positions, and one common to all."""
    given = [torch.full(SHAPES["allreduce"][0], float(unit)).to(dtype) for unit in range(UNITS)]
    for unit, x in enumerate(given):
        x.view(-1)[[unit * 3, -1]] = torch.nan
    return given


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("operation", ["allreduce", "reduce_scatter"])
@pytest.mark.parametrize("form", FORMS)
def test_it_stays_where_it_is_emulated(form: str, operation: str, op: str, dtype: str):
    given = with_nan(getattr(torch, dtype))
    stacked = torch.stack(given).float()
    total = stacked.amax(0) if op == "max" else stacked.amin(0)
    shares = [total] * UNITS if operation == "allreduce" else total.chunk(UNITS)
    for name in names(operation, form):
        args = arguments(form, operation, given)
        tilescale.emulate(program(operation, form, name, dtype, op), args, progress=False)
        for found, wanted in zip(results(form, args), shares, strict=True):
            assert torch.equal(found.float().nan_to_num(99), wanted.nan_to_num(99)), name


@pytest.mark.parametrize("form", [TILES, PROGRAMS, THREAD_GROUPS])
def test_what_is_generated_has_the_one_rule(form: str):
    """CUDA's maximum drops a NaN; for integers it is used."""
    for operation in ("allreduce", "reduce_scatter"):
        text = source(program(operation, form, None, "bfloat16", "max"))
        kernel = text[text.rindex("__launch_bounds__") :]
        assert re.search(r"(combined|cluster_allreduce|reduce_tile)<[^>(]*tilescale::MAX", kernel)
        assert not re.search(r"\bf?max[f]?\(|__hmax", kernel)


def test_a_library_drops_it_so_it_is_taken_only_where_nothing_else_is_there():
    assert "nccl" not in lowered(program("allreduce", TENSORS, None, "float32", "max")).notes[0]
    assert ": nccl (asked for)" in lowered(program("allreduce", TENSORS, "nccl", "float32", "max")).notes[0]
    assert "nccl" in lowered(program("allreduce", TENSORS, None, "int32", "max")).notes[0]
