# SPDX-License-Identifier: MIT
"""The program of a layer of experts for few tokens, emulated with all checks, in memory full of NaN."""

from __future__ import annotations

import pytest
import torch

import tilescale
from tests.ops.test_expert_float8 import CHOICES, LOCAL, MOST, ROOM, ROUTES, of_numbers, run_layer
from tests.ops.test_expert_programs import expected, near
from tilescale.hda import Machine
from tilescale.ops import low_latency_program, moe_low_latency
from tilescale.ops.expert_programs import LayerForm

FEW = {
    **ROUTES,
    "ties": lambda size: torch.arange(MOST)[None, :, None].expand(size, MOST, CHOICES) % (size * LOCAL),
    "none at all": lambda size: torch.full((size, MOST, CHOICES), -1),
}


def run(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: list[list[torch.Tensor]],
    by_rows: bool | None = None,
    room: int = ROOM,
    seed: int = 0,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The result of each rank, and the number of dropped choices of its experts."""
    (size, most, choices), features, inner = chosen.shape, x.shape[2], experts[0][1].shape[1]
    local, groups, sent = len(experts) // size, most * features // 128, low_latency_program.padded(most * choices)
    given = torch.bfloat16 if by_rows is None else torch.float8_e4m3fn

    def of(*shape: int) -> torch.Tensor:
        return of_numbers(*shape) if by_rows is not None else of_numbers(1, 1)

    per_device = []
    for r in range(size):
        gate_up, down, *scales = (torch.stack(each) for each in zip(*experts[r * local :][:local], strict=True))
        of_gate_up, of_down = scales or (of_numbers(1, 1, 1), of_numbers(1, 1, 1))
        dropped = torch.full((local,), -77, dtype=torch.int32)
        per_device.append(
            [
                *(x[r].view(groups, 128), of_numbers(1), chosen[r].reshape(-1), weights[r].view(-1)),
                *(gate_up, of_gate_up, down, of_down),
                *(torch.full((size, sent), -9, dtype=torch.int32), of_numbers(size, sent)),
                *(of_numbers(size, groups, 128).to(given), of(size, groups), of_numbers(size, groups, 128).bfloat16()),
                *(dropped.clone(), torch.full((room // 32,), -77, dtype=torch.int32)),
                torch.full((size, most, choices), -77, dtype=torch.int32),
                *(of_numbers(room, features).to(given), of(features // 128, room)),
                *(of_numbers(room, inner).to(given), of(inner // 128, room)),
                *(of_numbers(room, features).bfloat16(), of_numbers(groups, 128).bfloat16()),
            ]
        )
    kind = str(chosen.dtype).removeprefix("torch.")
    shape = size, local, choices, features, inner, kind, LayerForm("bfloat16", by_rows), 3
    tilescale.emulate(low_latency_program.low_latency_program(*shape), per_device, schedule_seed=seed)
    return [(tensors[-1].view(most, features), tensors[13]) for tensors in per_device]


DAILY = [(1 + number % 4, route) for number, route in enumerate(FEW)]
NIGHTLY = [(5, "ties"), (6, "none at all"), (7, "all to the last expert"), (8, "random")]
"""Numbers of ranks, and routes."""


@pytest.mark.parametrize(
    ("size", "route"), [*DAILY, *(pytest.param(*each, marks=pytest.mark.nightly) for each in NIGHTLY)]
)
def test_few_tokens_of_float8_experts(size: int, route: str):
    """Like by the throughput form, which adds up in other tiles."""
    chosen, by_rows = FEW[route](size), size % 2 == 0
    tensors, experts, x = run_layer(size, chosen, LayerForm("bfloat16", by_rows), seed=0)
    weights = torch.stack([given[3].view(MOST, CHOICES) for given in tensors])
    for given, (y, dropped) in zip(tensors, run(x, chosen, weights, experts, by_rows, seed=size % 3), strict=True):
        assert torch.equal(y, given[-2]) and not dropped.any()


@pytest.mark.parametrize(
    ("size", "choices", "features", "most", "high", "flags"),
    [(2, 3, 256, 9, 16, 256), (3, 1, 128, 40, 16, 256), (2, 2, 384, 7, 4, 3)],
)
def test_few_tokens(size: int, choices: int, features: int, most: int, high: int, flags: int, monkeypatch):
    """Tiles with parts of tokens and with many, several with one flag; choices of no expert; int32."""
    monkeypatch.setattr(low_latency_program, "HIGH", high)
    monkeypatch.setattr(low_latency_program, "CHUNKS", flags)
    local, inner = 2, 48
    chosen = torch.randint(-1, size * local + 1, (size, most, choices), dtype=torch.int32)
    x, weights = torch.randn(size, most, features).bfloat16(), torch.rand(size, most, choices)
    gate_up = torch.randn(size, local, 2 * inner, features).mul(features**-0.5).bfloat16()
    down = torch.randn(size, local, features, inner).mul(inner**-0.5).bfloat16()
    experts = [list(each) for each in zip(gate_up.flatten(0, 1), down.flatten(0, 1), strict=True)]
    made = run(x, chosen, weights, experts, seed=1)
    chosen[chosen == size * local] = -1
    want = expected([t.float() for t in (x, weights, gate_up, down)], chosen, local)
    near(torch.stack([y for y, _ in made]), want)


def test_choices_without_a_row_are_dropped():
    """The second expert has none."""
    chosen = torch.arange(4).view(1, 4, 1) % 2
    x, weights = torch.randn(1, 4, 128).bfloat16(), torch.rand(1, 4, 1)
    gate_up, down = torch.randn(1, 2, 32, 128).mul(0.1).bfloat16(), torch.randn(1, 2, 128, 16).mul(0.25).bfloat16()
    experts = [list(each) for each in zip(gate_up[0], down[0], strict=True)]
    ((y, dropped),) = run(x, chosen, weights, experts, room=128)
    chosen[chosen == 1] = -1
    near(y[None], expected([t.float() for t in (x, weights, gate_up, down)], chosen, 2))
    assert dropped.tolist() == [0, 2]


def test_the_machine_model_chooses_the_form():
    """Few tokens to few ranks; between nodes none."""
    machine = Machine.load("h200-sxm-8")

    def takes(size: int, most: int, of: Machine = machine, features: int = 7168, inner: int = 2048) -> bool:
        wide = 1 if features == 7168 else 2  # bytes of a number
        return moe_low_latency._takes_few(
            *(of, size, most, 8, 32, wide * features, 2 * features, 3 * wide * features * inner)
        )

    assert [takes(size, most) for size in (2, 8) for most in (1, 64, 4096)] == [True, True, False] * 2
    assert [takes(size, 128, features=2048, inner=768) for size in (2, 8)] == [True, False]
    assert not takes(32, 1, Machine.load("h200-sxm-8x4"))
    measured = [takes(1, most, *given) for given in [(), (machine, 2048, 768)] for most in (2, 64, 96, 128)]
    assert measured == [True, True, True, False, True, True, True, True], "the faster one on an H200"


def test_absent_scales_have_the_type_of_scales_under_any_default_type():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        absent = moe_low_latency.scales_or_dummy(None, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert (absent.dtype, absent.shape) == (torch.float32, (1, 1, 1))
