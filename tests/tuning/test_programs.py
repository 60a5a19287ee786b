# SPDX-License-Identifier: MIT
"""Programs of a calibration are correct: no race, no deadlock, right values, for odd numbers of units."""

from __future__ import annotations

import pytest
import torch

import tilescale
from tilescale.hda import Machine
from tilescale.tuning import programs

H200 = Machine.load("h200-sxm-8")
M, N, K = 128, 256, 64


def random(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * 0.25).bfloat16()


def run(program: object, *tensors: list[torch.Tensor]) -> None:
    tilescale.emulate(program, [list(mine) for mine in zip(*tensors, strict=True)], machine=H200)


@pytest.mark.parametrize("units", [2, 3])
@pytest.mark.parametrize(("operation", "impl"), [("put", "tma"), ("put", "lsu"), ("get", "lsu")])
def test_tiles_go_to_the_next_unit_or_come_from_it(
    units: int, operation: str, impl: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(programs, "TILE", 256)
    x, y = ([make(3, 2, 128) for _ in range(units)] for make in (random, torch.zeros))
    y = [tensor.bfloat16() for tensor in y]
    run(programs.tile_copies(H200, units, operation, 3, 2, impl), x, y)
    for unit in range(units):
        source = (unit - 1) % units if operation == "put" else (unit + 1) % units
        assert torch.equal(y[unit], x[source])


def test_signals_and_launches_end():
    for program in (programs.flags(H200, 3, 4), programs.launch(H200, 3)):
        tensors = [torch.ones(32) for _ in range(3)]
        run(program, tensors)
    assert all(torch.equal(tensor, torch.zeros(32)) for tensor in tensors)


def test_whole_tensors_are_copied():
    x, y = [torch.full((64,), unit, dtype=torch.uint8) for unit in range(3)], [torch.zeros(64).byte() for _ in range(3)]
    run(programs.whole_copy(H200, 3, 64, "copy_engine"), x, y)
    assert [int(tensor[0]) for tensor in y] == [2, 0, 1]


def test_a_product_is_right_beside_copies():
    a, b, c = random(M, K), random(K, N), torch.zeros(M, N).bfloat16()
    x, y = torch.arange(64).byte(), torch.zeros(64).byte()
    program = programs.product(H200, 2, (M, N, K), 64, "copy_engine")
    run(program, [a, a], [b, b], [c, c.clone()], [x, x.clone()], [y, y.clone()])
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(y, x)


@pytest.mark.parametrize("units", [2, 4])
def test_operators_in_phases_are_right(units: int):
    a, b = [random(M, K) for _ in range(units)], [random(K, N) for _ in range(units)]
    total = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True))
    rows = [torch.zeros(M // units, N).bfloat16() for _ in range(units)]
    run(programs.gemm_and_scatter(H200, units, (M, N, K)), a, b, rows)
    torch.testing.assert_close(torch.cat(rows).float(), total, rtol=0.05, atol=0.1)
    sums = [torch.zeros(M, N).bfloat16() for _ in range(units)]
    run(programs.gemm_and_sum(H200, units, (M, N, K)), a, b, sums)
    torch.testing.assert_close(sums[-1].float(), total, rtol=0.05, atol=0.1)
    shards, whole = list(a[0].chunk(units)), [torch.zeros(M, K).bfloat16() for _ in range(units)]
    run(programs.gather_and_gemm(H200, units, (M, N, K)), shards, b, whole, sums)
    torch.testing.assert_close(sums[1].float(), a[0].float() @ b[1].float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("operation", ["allreduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_collectives_are_those_that_they_are_called(operation: str):
    units, n = 3, 12
    part = n // units
    x = [random(part if operation == "all_gather" else n) for _ in range(units)]
    given = [tensor.clone() for tensor in x]
    y = [torch.zeros(part if operation == "reduce_scatter" else n).bfloat16() for _ in range(units)]
    in_place = operation in ("allreduce", "broadcast")
    run(programs.collective(H200, units, operation, n, None), x, *([] if in_place else [y]))
    total = sum(tensor.float() for tensor in given) if operation != "all_gather" else None
    wanted = {
        "allreduce": lambda: total,
        "broadcast": lambda: given[0].float(),
        "all_gather": lambda: torch.cat(given).float(),
        "reduce_scatter": lambda: total[part : 2 * part],
        "all_to_all": lambda: torch.cat([tensor[part : 2 * part] for tensor in given]).float(),
    }[operation]()
    torch.testing.assert_close((x if in_place else y)[1].float(), wanted, rtol=0.02, atol=0.02)
