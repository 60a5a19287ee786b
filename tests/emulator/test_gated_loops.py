# SPDX-License-Identifier: MIT
"""Pipelined loops of warpgroups that wait for their operands: free of races, and right, for any waits."""

from typing import Any

import pytest
import torch

import tilescale
from tests.cuda import gated_programs
from tests.cuda.gated_programs import VARIANTS


def run(count: int, **how: Any) -> None:
    """Two calls on two devices, whose flags count on."""
    func = gated_programs.arriving(devices=2, **how)
    steps, turns = how.get("steps", 6), how.get("turns", 1)
    flags = [torch.zeros((turns, steps), dtype=torch.int32) for _ in range(2)]
    for epoch in (1, 2):
        args: list[list[Any]] = []
        for rank in range(2):
            x, b = gated_programs.operands(epoch, rank, **how)
            c = torch.full((len(x), gated_programs.COLUMNS), torch.nan)
            args.append([x, torch.full_like(x, torch.nan), b, c, flags[rank], count, epoch])
        tilescale.emulate(func, args)
        for rank, (*_, c, _, _, _) in enumerate(args):
            wanted = gated_programs.product(epoch, rank, 2, count, **how)
            torch.testing.assert_close(c.double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_product_of_what_arrives(name: str):
    run(6, **VARIANTS[name])


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_product_of_as_many_tiles_as_a_call_says(count: int):
    run(count)
