# SPDX-License-Identifier: MIT
"""The program of a layer of float8 experts, emulated with all checks, in memory full of NaN."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

import tilescale
from tests.cuda.support import ptxas, source
from tests.ops.float8_experts import near, random_expert, wanted
from tilescale import ops
from tilescale.errors import ArgumentError, UnsupportedError
from tilescale.ops import expert_float8, grouped_float8, moe_tables, row_exchange

LOCAL, FEATURES, INNER, CHOICES, MOST, ROOM = 2, 384, 128, 2, 5, 768

ROUTES = {
    "random": lambda size: torch.randint(-1, size * LOCAL, (size, MOST, CHOICES)),
    "all to the last expert": lambda size: torch.full((size, MOST, CHOICES), size * LOCAL - 1),
    "none to the last rank": lambda size: torch.randint(0, LOCAL, (size, MOST, CHOICES)),
    "a rank has one token, others none": lambda size: torch.full((size, MOST, CHOICES), -1).index_put_(
        (torch.tensor(0), torch.tensor(0)), torch.tensor([1, 2])
    ),
}


@pytest.mark.parametrize(("size", "route"), [*enumerate(ROUTES, 1)])
def test_a_layer_of_float8_experts(size: int, route: str):
    run_layer(size, ROUTES[route](size), seed=size % 2)


def run_layer(size: int, chosen: torch.Tensor, seed: int) -> None:
    """Compare with float64."""
    experts = [random_expert(FEATURES, INNER) for _ in range(size * LOCAL)]
    x, weights = torch.randn(size, MOST, FEATURES).bfloat16(), torch.rand(size, MOST, CHOICES)
    per_device = [arguments(size, r, x[r], chosen[r], weights[r], experts) for r in range(size)]
    program = expert_float8.layer_float8_program(size, LOCAL, CHOICES, FEATURES, INNER, "int64")
    tilescale.emulate(program, per_device, schedule_seed=seed)
    for r in range(size):
        near(f"rank {r}", per_device[r][-2], wanted(x[r], chosen[r], weights[r], experts))


def arguments(size: int, rank: int, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: list):
    """Of the program on a rank."""
    mine = zip(*experts[rank * LOCAL :][:LOCAL], strict=True)
    gate_up, down, of_gate_up, of_down = (torch.stack(each) for each in mine)
    of_choices, groups = moe_tables.arriving_choices(size, MOST, CHOICES), MOST * FEATURES // 128
    inboxes = numbers(size, groups, 128), of_numbers(size, groups), sums(size, MOST, FEATURES)
    counted = torch.empty(moe_tables.form_of_counts(size, LOCAL, MOST, CHOICES)[0], dtype=torch.int32)
    tables = counted, *moe_tables.new_tables(chosen, size, LOCAL, MOST, ROOM)
    rows = numbers(ROOM, FEATURES), of_numbers(FEATURES // 128, ROOM), numbers(ROOM, INNER), of_numbers(1, ROOM)
    given = x, chosen.reshape(-1), weights.reshape(-1), gate_up, of_gate_up, down, of_down
    arrived = torch.full(of_choices, -9, dtype=torch.int32), of_numbers(*of_choices), *inboxes
    made = sums(ROOM, FEATURES), sums(MOST, FEATURES), row_exchange.sharers(FEATURES, 8, MOST)
    return [*given, *arrived, *tables, *rows, *made]


def numbers(*shape: int) -> torch.Tensor:
    return of_numbers(*shape).to(torch.float8_e4m3fn)


def of_numbers(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


def sums(*shape: int) -> torch.Tensor:
    return of_numbers(*shape).bfloat16()


def test_tokens_with_infinities_are_nan():
    """Of their own results alone; zeros stay zeros, and small and large groups keep their precision."""
    gate_up, down, *scales = (t[None] for t in random_expert(256, 128))
    x = torch.randn(5, 256).bfloat16()
    x[1, 3], x[2], x[3, :128] = torch.inf, 0, x[3, :128] * 2.0**-100
    chosen, weights = torch.zeros(5, 1).long(), torch.ones(5, 1)
    y = ops.moe_layer(x, (chosen, weights), gate_up, down, scales=tuple(scales))
    assert y[1].isnan().all() and not y[2].any()
    rest = [0, 2, 3, 4]
    experts = [[t[0] for t in (gate_up, down, *scales)]]
    near("the others", y[rest], wanted(x[rest], chosen[rest], weights[rest], experts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: {"scales": None}, "gate_up is torch.float8_e4m3fn"),
        (lambda given: {"scales": given["scales"][:1]}, "scales is 1 things"),
        (lambda given: {"scales": given["scales"][::-1]}, r"scales\[0\] has shape"),
        (lambda given: {"scales": tuple(s.bfloat16() for s in given["scales"])}, r"scales\[0\] is torch.bfloat16"),
        (lambda given: {"gate_up": given["gate_up"].bfloat16()}, "gate_up is torch.bfloat16"),
        (lambda given: {"x": given["x"].half()}, "x is torch.float16"),
        (lambda given: {"gate_up": given["gate_up"][:, :96], "down": given["down"][..., :48]}, "inner of 128"),
    ],
)
def test_mistakes_of_float8_experts_are_named(change, message: str):
    gate_up, down, *scales = (t[None] for t in random_expert(128, 128))
    given = {"x": torch.zeros(3, 128).bfloat16(), "gate_up": gate_up, "down": down, "scales": tuple(scales)}
    given |= change(given)
    with pytest.raises(ArgumentError, match=message):
        ops.moe_layer(choice=(torch.zeros(3, 1).long(), torch.ones(3, 1)), **given)


def test_float8_experts_have_no_gradients():
    gate_up, down, *scales = (t[None] for t in random_expert(128, 128))
    x = torch.zeros(3, 128).bfloat16().requires_grad_()
    with pytest.raises(UnsupportedError, match="no gradients"):
        ops.moe_layer(x, (torch.zeros(3, 1).long(), torch.ones(3, 1)), gate_up, down, scales=tuple(scales))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_both_sums_of_a_tile_are_in_registers():
    """And that of 128 products as well."""
    said = ptxas(source(grouped_float8.scaled_gated_program(0, 2048, 7168)))
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
