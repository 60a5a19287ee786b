# SPDX-License-Identifier: MIT
"""The operators' programs, emulated with all checks: results for tails, layouts, types and numbers of devices."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import tilescale
from tilescale.hda import Machine
from tilescale.hda.current import use_machine
from tilescale.ops.gemm_tiles import CHUNK, TILINGS, GemmSpec, GemmTiling

SMALL = TILINGS[-1]


def module(name: str) -> Any:
    return import_module(f"tilescale.ops.{name}")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def unwritten(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, torch.nan).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for two roundings and those of parts, all far below the typical element."""
    torch.testing.assert_close(got.float(), want, rtol=2**-6, atol=float(want.abs().mean()) * 2**-5)


def operands(size: int, n: int, k: int, transposed: bool, dtype: torch.dtype) -> tuple[list, list]:
    """For each device B (K, N), and what the program takes."""
    b = [random(k, n, dtype=dtype) for _ in range(size)]
    return b, [x.t().contiguous() if transposed else x for x in b]


@pytest.mark.parametrize(
    ("size", "rows", "n", "k", "tiles", "transposed", "biased", "dtype", "slices"),
    [
        (1, 33, 72, 40, SMALL, True, True, "bfloat16", 1),
        (2, 1, 8, 8, SMALL, False, False, "float16", 1),
        (2, 64, 64, 64, SMALL, True, False, "bfloat16", 1),
        (3, 70, 136, 96, SMALL, False, True, "float16", 1),
        (2, CHUNK + 65, 72, 16, GemmTiling(128, 128, 1.0), True, True, "bfloat16", 1),
        (2, 256, 448, 64, GemmTiling(128, 224, 1.0, group=2), True, False, "bfloat16", 1),
        (2, 300, 440, 72, GemmTiling(128, 208, 1.0, group=2), True, True, "bfloat16", 1),
        (8, 9, 16, 24, SMALL, False, True, "bfloat16", 1),
        (3, 70, 136, 384, SMALL, True, True, "bfloat16", 3),
    ],
)
def test_all_gather_matmul(
    size: int, rows: int, n: int, k: int, tiles: GemmTiling, transposed: bool, biased: bool, dtype: str, slices: int
):
    kind = getattr(torch, dtype)
    a, bias = random(size * rows, k, dtype=kind), random(n, dtype=kind)
    b, lying = operands(size, n, k, transposed, kind)
    activation = {1: "relu", 2: "", 3: "silu", 8: "gelu_tanh"}[size]
    of = GemmSpec(n, k, dtype, tiles, transposed, biased, activation)
    program = module("ag_gemm").program(size, of, True, slices)
    nobodys = [bias[:1].view(1, 1), bias[:1]]  # no scales
    per_device = [
        [a.chunk(size)[r][None].contiguous(), lying[r], lying[r], bias if biased else bias[:1]]
        + [*nobodys, unwritten(size, rows, n, dtype=kind), unwritten(size, rows, k, dtype=kind)]
        for r in range(size)
    ]
    report = tilescale.emulate(program, per_device)
    assert {each.messages for each in report.activity} == {(size - 1) * max(slices, -(-rows // CHUNK))}
    for right, (*_, c, _) in zip(b, per_device, strict=True):
        want = a.float() @ right.float() + (bias.float() if biased else 0)
        close(c.view(-1, n), module("ag_gemm").ACTIVATIONS[activation](want) if activation else want)


COLUMNS = [
    (1, 33, 72, 64, SMALL, True, True, "bfloat16"),
    (2, 1, 8, 128, SMALL, False, False, "float16"),
    (3, 70, 136, 64, SMALL, True, True, "float16"),
    (2, CHUNK + 65, 72, 64, GemmTiling(128, 128, 1.0, group=2), False, True, "bfloat16"),
    (8, 9, 16, 64, SMALL, False, False, "bfloat16"),
]
"""Size, rows, N, K of a rank, tiles, whether b is transposed, whether there is a bias, the type."""


@pytest.mark.parametrize(("size", "rows", "n", "k", "tiles", "transposed", "biased", "dtype"), COLUMNS)
def test_all_gather_columns_matmul(
    size: int, rows: int, n: int, k: int, tiles: GemmTiling, transposed: bool, biased: bool, dtype: str
):
    kind = getattr(torch, dtype)
    a, bias = [random(rows, k, dtype=kind) for _ in range(size)], random(n, dtype=kind)
    b, lying = operands(size, n, size * k, transposed, kind)
    program = module("ag_columns_gemm").program(size, GemmSpec(n, k, dtype, tiles, transposed, biased))
    per_device = [
        [a[r][None], lying[r], bias if biased else bias[:1]]
        + [unwritten(rows, n, dtype=kind), unwritten(size, rows, k, dtype=kind)]
        for r in range(size)
    ]
    report = tilescale.emulate(program, per_device)
    assert {each.messages for each in report.activity} == {(size - 1) * -(-rows // CHUNK)}
    for right, (*_, c, _) in zip(b, per_device, strict=True):
        close(c, torch.cat(a, 1).float() @ right.float() + (bias.float() if biased else 0))


@pytest.mark.parametrize(("size", "rows", "n", "k", "tiles", "transposed", "biased", "dtype"), COLUMNS[1:])
def test_matmul_all_gather(
    size: int, rows: int, n: int, k: int, tiles: GemmTiling, transposed: bool, biased: bool, dtype: str
):
    kind = getattr(torch, dtype)
    a, bias = random(rows, k, dtype=kind), random(n, dtype=kind)
    b, lying = operands(size, n, k, transposed, kind)
    program = module("gemm_ag").program(size, GemmSpec(n, k, dtype, tiles, transposed, biased))
    per_device = [
        [a[None], lying[r], bias if biased else bias[:1]]
        + [unwritten(*shape, dtype=kind) for shape in ((rows, size, n), (1, rows, n), (size, rows, n))]
        for r in range(size)
    ]
    report = tilescale.emulate(program, per_device)
    assert {each.messages for each in report.activity} == {(size - 1) * -(-rows // CHUNK)}
    want = torch.cat([a.float() @ right.float() + (bias.float() if biased else 0) for right in b], 1)
    for _, _, _, c, _, _ in per_device:
        close(c.flatten(1), want)


@pytest.mark.parametrize(("size", "chunks", "blocks", "gated"), [(1, 1, 3, False), (2, 2, 5, True), (3, 1, 4, False)])
def test_a_gathered_product_in_turns(size: int, chunks: int, blocks: int, gated: bool):
    """Tiles that do not divide among the blocks, and columns that do not among tiles."""
    rows, n, k = chunks * CHUNK, 72, 24
    of = GemmSpec(n, k, "bfloat16", GemmTiling(128, 64, 1.0, 3, 2), True, True, "silu", gated)
    a, both = random(size * rows, k), [operands(2 if gated else 1, n, k, True, torch.bfloat16) for _ in range(size)]
    bias, one = random(2 * n if gated else n), a.view(-1)[:1]
    per_device = [
        [a.view(size, rows, k)[r : r + 1], lying[0], lying[-1], bias, one.view(1, 1), one]
        + [unwritten(size, rows, n), unwritten(size, rows, k)]
        for r, (_, lying) in enumerate(both)
    ]
    tilescale.emulate(module("ag_gemm").program(size, of, blocks=blocks), per_device)
    for (b, _), (*_, c, _) in zip(both, per_device, strict=True):
        parts = (a.float() @ torch.cat(b, 1).float() + bias.float()).chunk(2 if gated else 1, 1)
        want = torch.nn.functional.silu(parts[0])
        close(c.view(-1, n), want * parts[1] if gated else want)


@pytest.mark.parametrize(
    ("size", "rows", "parts", "blocks", "scaled"),
    [
        (1, 40, (128, 64), 0, False),
        (2, 70, (192, 64, 64), 0, False),
        (3, CHUNK, (64, 64, 128), 4, False),
        (2, 33, (64, 128), 0, True),
    ],
)
def test_products_side_by_side_have_results_of_their_own(
    size: int, rows: int, parts: tuple[int, ...], blocks: int, scaled: bool
):
    n, k, kind = sum(parts), 256, "float8_e4m3fn" if scaled else "bfloat16"
    dtype = getattr(torch, kind)
    a, b, bias = random(size * rows, k, dtype=dtype), [random(n, k, dtype=dtype) for _ in range(size)], random(n)
    of = GemmSpec(n, k, kind, GemmTiling(64, 64, 1.0, 3, 2), True, True, parts=parts)
    of_a, of_b = torch.rand(size, rows), torch.rand(n)
    one = a.view(-1)[:1]
    scales = [(of_a[r : r + 1], of_b) if scaled else (one.view(1, 1), one) for r in range(size)]
    results = [[unwritten(size, rows, wide) for wide in parts] for _ in range(size)]
    per_device = [
        [a.view(size, rows, k)[r : r + 1], b[r], b[r], bias, *scales[r], *[*results[r], results[r][0]][:3]]
        + [unwritten(size, rows, k).to(dtype), unwritten(size, rows, dtype=torch.float32)][: 1 + scaled]
        for r in range(size)
    ]
    tilescale.emulate(module("ag_gemm").program(size, of, blocks=blocks), per_device)
    for right, made in zip(b, results, strict=True):
        want = a.float() @ right.float().t()
        want = (want * of_a.view(-1, 1) * of_b if scaled else want) + bias.float()
        for got, part in zip(made, want.split(parts, 1), strict=True):
            close(got.flatten(0, 1), part)


@pytest.mark.parametrize("blocks", [0, 5])
def test_further_products_take_what_has_been_gathered(blocks: int):
    size, rows, n, k = 2, CHUNK if blocks else 40, 64, 64
    a, (b, lying) = random(size * rows, k), operands(size, n, k, False, torch.bfloat16)
    of, made = GemmSpec(n, k, "bfloat16", SMALL, False, False), module("ag_gemm")
    program = made.program(size, of, False, blocks=blocks)
    gathered, one = a.view(size, rows, k), a.view(-1)[:1]
    nobodys = [one, one.view(1, 1), one]  # no bias, no scales
    per_device = [
        [gathered[r : r + 1].contiguous(), lying[r], lying[r], *nobodys, unwritten(size, rows, n)]
        + [gathered.clone()]
        for r in range(size)
    ]
    for r, (*_, there) in enumerate(per_device):
        there[r] = torch.nan  # local rows are read in place
    report = tilescale.emulate(program, per_device)
    assert all(activity.messages == 0 for activity in report.activity)
    for right, (*_, c, _) in zip(b, per_device, strict=True):
        close(c.view(-1, n), a.float() @ right.float())


@pytest.mark.parametrize(
    ("size", "rows", "n", "k", "transposed", "biased", "dtype", "activation"),
    [
        (1, 33, 72, 40, False, True, "bfloat16", "silu"),
        (2, 70, 40, 96, True, False, "float16", "gelu_tanh"),
        (3, 5, 80, 144, True, True, "float8_e4m3fn", "silu"),
        (4, 3, 16, 16, True, False, "float8_e4m3fn", ""),
        (2, 2 * CHUNK + 3, 16, 16, True, False, "float8_e4m3fn", ""),
    ],
)
def test_a_product_gates_another(
    size: int, rows: int, n: int, k: int, transposed: bool, biased: bool, dtype: str, activation: str
):
    kind, of = getattr(torch, dtype), GemmSpec(n, k, dtype, SMALL, transposed, biased, activation, True)
    a, made = random(size * rows, k, dtype=kind), getattr(torch, of.result)
    both = [operands(2, n, k, transposed, kind) for _ in range(size)]
    bias, shares = random(2 * n, dtype=made), (torch.rand(size, rows), torch.rand(size, 2 * n))
    assert of.scaled == (dtype == "float8_e4m3fn")
    one, per_device = a.view(-1)[:1], []
    for r, (_, lying) in enumerate(both):
        scales = [shares[0][r : r + 1], shares[1][r]] if of.scaled else [one.view(1, 1), one]
        own = [a.view(size, rows, k)[r : r + 1], *lying, bias if biased else bias[:1], *scales]
        room = [unwritten(size, rows, k, dtype=kind), *[unwritten(size, rows, dtype=torch.float32)] * of.scaled]
        per_device.append([*own, unwritten(size, rows, n, dtype=made), *room])
    tilescale.emulate(module("ag_gemm").program(size, of), per_device)
    ending = module("ag_gemm").ACTIVATIONS.get(activation, lambda x: x)
    for r, ((b, _), given) in enumerate(zip(both, per_device, strict=True)):
        c = given[6]
        want = a.float() @ torch.cat(b, 1).float()
        want = want * shares[0].view(-1, 1) * shares[1][r] if of.scaled else want
        gate, up = (want + bias.float() if biased else want).chunk(2, 1)
        close(c.view(-1, n), ending(gate) * up)


@pytest.mark.parametrize("blocks", [0, 5])
def test_sums_of_scaled_products(blocks: int):
    size, n, k, dtype = 2, 80, 48, torch.float8_e4m3fn
    rows = CHUNK if blocks else CHUNK + 70
    a, (b, lying) = [random(size * rows, k, dtype=dtype) for _ in range(size)], operands(size, n, k, True, dtype)
    scales = [(torch.rand(size, rows), torch.rand(n)) for _ in range(size)]
    bias, of = random(n), GemmSpec(n, k, "float8_e4m3fn", GemmTiling(128, 128, 1.0, stages=3), True, True)
    program, shape = module("gemm_rs").program(size, of, blocks), (size, rows, n)
    per_device = [
        [a[r].view(size, rows, k), lying[r], bias, *scales[r], *(unwritten(*s) for s in ((1, rows, n), shape, shape))]
        for r in range(size)
    ]
    tilescale.emulate(program, per_device)
    for r, (*_, c, _, _) in enumerate(per_device):
        close(c[0], (scaled(a, b, scales) + bias.float()).view(shape)[r])


def scaled(a: list[torch.Tensor], b: list[torch.Tensor], scales: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Sum of scaled GEMMs."""
    given = zip(a, b, scales, strict=True)
    return sum((x.float() @ y.float()) * of_a.view(-1, 1) * of_b for x, y, (of_a, of_b) in given)


@pytest.mark.parametrize(
    ("size", "rows", "n", "k", "tiles", "transposed", "biased", "dtype"),
    [
        (1, 33, 72, 40, SMALL, True, True, "bfloat16"),
        (2, 1, 8, 8, SMALL, False, False, "float16"),
        (3, 70, 136, 96, SMALL, False, True, "float16"),
        (2, CHUNK + 65, 72, 16, GemmTiling(128, 128, 1.0), True, True, "bfloat16"),
        (2, 256, 448, 64, GemmTiling(128, 224, 1.0, group=2), True, False, "bfloat16"),
        (2, 300, 440, 72, GemmTiling(128, 208, 1.0, group=2), True, True, "bfloat16"),
        (8, 9, 16, 24, SMALL, False, True, "bfloat16"),
    ],
)
def test_sums_of_products(
    size: int, rows: int, n: int, k: int, tiles: GemmTiling, transposed: bool, biased: bool, dtype: str
):
    kind, shape = getattr(torch, dtype), (size, rows, n)
    a, bias = [random(size * rows, k, dtype=kind) for _ in range(size)], random(n, dtype=kind)
    b, lying = operands(size, n, k, transposed, kind)
    program = module("gemm_rs").program(size, GemmSpec(n, k, dtype, tiles, transposed, biased))
    scales = [bias[:1].view(1, 1), bias[:1]]  # none
    per_device = [
        [a[r].view(size, rows, k), lying[r], bias if biased else bias[:1], *scales]
        + [unwritten(*s, dtype=kind) for s in ((1, rows, n), shape, shape)]
        for r in range(size)
    ]
    tilescale.emulate(program, per_device)
    want = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True)) + (bias.float() if biased else 0)
    for r, (*_, c, _, _) in enumerate(per_device):
        close(c[0], want.chunk(size)[r])


@pytest.mark.parametrize(
    ("size", "rows", "n", "k", "tiles", "blocks", "transposed", "biased", "dtype"),
    [
        (1, 33, 72, 40, SMALL, 0, True, True, "bfloat16"),
        (2, 577, 72, 16, GemmTiling(128, 128, 1.0), 2, False, True, "bfloat16"),
        (3, 70, 136, 96, SMALL, 4, True, False, "float16"),
        (4, 256, 200, 144, GemmTiling(128, 64, 1.0, group=2, deep=2), 3, True, True, "bfloat16"),
        (8, 9, 16, 24, SMALL, 0, False, True, "bfloat16"),
        (2, 140, 80, 48, GemmTiling(128, 128, 1.0, stages=3), 0, True, True, "float8_e4m3fn"),
        (3, 300, 80, 48, GemmTiling(128, 64, 1.0, stages=3), 2, True, False, "float8_e4m3fn"),
    ],
)
def test_sums_of_products_everywhere(
    size: int, rows: int, n: int, k: int, tiles: GemmTiling, blocks: int, transposed: bool, biased: bool, dtype: str
):
    """With a block for each tile, and with a persistent grid."""
    of = GemmSpec(n, k, dtype, tiles, transposed, biased)
    check_sum(module("gemm_ar").program(size, of, blocks), size, rows, of)


@pytest.mark.parametrize(
    ("size", "rows", "n", "k", "parts", "transposed", "biased", "dtype"),
    [
        (1, 1, 8, 8, 2, True, True, "float16"),
        (2, 5, 200, 1000, 4, True, True, "bfloat16"),
        (3, 32, 72, 40, 4, False, False, "float16"),
        (4, 7, 136, 200, 1, False, True, "bfloat16"),
        (2, 17, 136, 304, 2, True, True, "float8_e4m3fn"),
    ],
)
def test_sums_of_few_rows(
    size: int, rows: int, n: int, k: int, parts: int, transposed: bool, biased: bool, dtype: str
):
    """Also parts of tiles and of steps, and blocks of a cluster without a step."""
    of = GemmSpec(n, k, dtype, GemmTiling(32 if rows > 16 else 16, 64, 1.0, stages=3), transposed, biased)
    check_sum(module("few_rows").program(size, of, parts), size, rows, of)


@pytest.mark.parametrize(("rows", "parts", "widths"), [(1, 1, (256,)), (5, 2, (128, 128)), (17, 4, (256, 64, 128))])
def test_few_rows_of_several_weights(rows: int, parts: int, widths: tuple[int, ...]):
    """Each result is contiguous."""
    n, k = sum(widths), 200
    of = GemmSpec(n, k, "bfloat16", GemmTiling(32 if rows > 16 else 16, 64, 1.0, stages=3), True, False)
    a, b, c = random(1, rows, k), random(n, k), unwritten(rows * n)
    one = a.view(-1)[:1]
    tilescale.emulate(module("few_rows").program(0, of, parts, widths), [a, b, one, one.view(1, 1), one, c])
    results = [part.view(rows, -1) for part in c.split([rows * width for width in widths])]
    close(torch.cat(results, 1), a[0].float() @ b.float().t())


def test_few_rows_decline_what_their_kernel_does_not_make():
    made, few = random(384, 64), module("few_rows").few_rows_gemms
    side_by_side = list(made.split([256, 128]))
    with use_machine(Machine.load("h200-sxm-8")):
        x = random(3, 64)
        results = few(x, side_by_side)
        close(torch.cat(results, 1), x.float() @ made.float().t())
        assert all(result.is_contiguous() for result in results)
        for rows, weights in (
            (random(33, 64), side_by_side),
            (random(0, 64), side_by_side),
            (x, side_by_side[::-1]),
            (x, list(made.split([320, 64]))),
            (x.float(), list(made.float().split([256, 128]))),
            (random(3, 60), list(random(384, 60).split([256, 128]))),
        ):
            assert few(rows, weights) is None
    with use_machine(Machine.load("a100-sxm-8")):
        assert few(x, side_by_side) is None


def check_sum(program: Any, size: int, rows: int, of: GemmSpec) -> None:
    """Compare a product and all-reduce; all devices get the same bits."""
    n, k, kind, made = of.N, of.K, getattr(torch, of.dtype), getattr(torch, of.result)
    a, bias = [random(rows, k, dtype=kind) for _ in range(size)], random(n, dtype=made)
    b, lying = operands(size, n, k, of.transposed, kind)
    scales = [(torch.rand(1, rows), torch.rand(n)) if of.scaled else (torch.ones(1, 1), torch.ones(1)) for _ in a]
    given = scales if of.scaled else [(bias[:1].view(1, 1), bias[:1])] * size
    per_device = [
        [a[r][None], lying[r], bias if of.biased else bias[:1], *given[r], unwritten(rows, n, dtype=made)]
        for r in range(size)
    ]
    tilescale.emulate(program, per_device)
    for *_, c in per_device:
        close(c, scaled(a, b, scales) + (bias.float() if of.biased else 0))
        assert torch.equal(c, per_device[0][-1])


@pytest.mark.parametrize(
    ("size", "P", "Q", "P2", "width", "chunk", "dtype"),
    [
        (1, 1, 3, 3, 8, 512, "float32"),
        (2, 5, 6, 1, 512, 8, "bfloat16"),
        (3, 1, 600, 8, 8, 256, "bfloat16"),
        (4, 9, 70, 30, 8, 100, "int16"),
        (3, 4, 2, 4, 64, 1, "float32"),
    ],
)
def test_parts_go_from_one_layout_to_another(size: int, P: int, Q: int, P2: int, width: int, chunk: int, dtype: str):
    kind = getattr(torch, dtype)
    x = [torch.randint(0, 99, (P, size, Q, width)).to(kind) for _ in range(size)]
    given = [part[0] if P == 1 else part for part in x]
    shapes = (P2, size, P * Q // P2, width), given[0].shape
    per_device = [[part, *(torch.full(s, -1).to(kind) for s in shapes)] for part in given]
    tilescale.emulate(module("all_to_all").program(size, width, dtype, chunk, P == 1), per_device)
    for r, (_, got, _) in enumerate(per_device):
        parts = [part[:, r].reshape(P2, -1, width) for part in x]
        assert torch.equal(got, torch.stack(parts, 1))


@pytest.mark.parametrize(("size", "impl", "n"), [(1, None, 24), (2, "direct", 24), (3, None, 7), (4, "direct", 5)])
def test_tensors_whole(size: int, impl: str | None, n: int):
    whole, by_stores = module("whole_tensors"), impl and "two_shot"
    x = [random(size * n) for _ in range(size)]
    total = sum(part.float() for part in x)
    gathers = [[part[:n].clone(), unwritten(size * n)] for part in x]
    tilescale.emulate(whole.program(size, "all_gather", "bfloat16", impl), gathers)
    scatters = [[part, unwritten(n)] for part in x]
    tilescale.emulate(whole.program(size, "reduce_scatter", "bfloat16", impl), scatters)
    swaps = [[part, unwritten(size * n)] for part in x]
    tilescale.emulate(whole.program(size, "all_to_all", "bfloat16", impl), swaps)
    sums = [[part, unwritten(size * n)] for part in x]
    tilescale.emulate(whole.sum_program(size, "bfloat16", impl=by_stores), sums)
    for r in range(size):
        assert torch.equal(gathers[r][1], torch.cat([part[:n] for part in x]))
        close(scatters[r][1], total.chunk(size)[r])
        assert torch.equal(swaps[r][1], torch.cat([part.chunk(size)[r] for part in x]))
        close(sums[r][1], total)


def test_any_schedule_of_the_blocks_gives_the_same():
    size, rows, n, k = 3, 65, 64, 64
    a, (_, lying) = [random(size * rows, k) for _ in range(size)], operands(size, n, k, True, torch.bfloat16)
    program, results = module("gemm_rs").program(size, GemmSpec(n, k, "bfloat16", SMALL, True, False)), []
    one = a[0].view(-1)[:1]
    for seed in (None, 1, 2):
        per_device = [
            [a[r].view(size, rows, k), lying[r], one, one.view(1, 1), one]
            + [unwritten(*s) for s in ((1, rows, n), (size, rows, n), (size, rows, n))]
            for r in range(size)
        ]
        tilescale.emulate(program, per_device, schedule_seed=seed)
        results.append(torch.stack([tensors[-3] for tensors in per_device]))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("blocks", [3, 100])
def test_blocks_take_tiles_in_turns(blocks: int):
    size, rows, n, k = 3, CHUNK, 136, 64
    a, bias = [random(size * rows, k, dtype=torch.half) for _ in range(size)], random(n, dtype=torch.half)
    shape, (b, lying) = (size, rows, n), operands(size, n, k, True, torch.half)
    tiles = GemmTiling(128, 128, 1.0, stages=3, group=2)
    program = module("gemm_rs").program(size, GemmSpec(n, k, "float16", tiles, True, True), blocks)
    per_device = [
        [a[r].view(size, rows, k), lying[r], bias, bias[:1].view(1, 1), bias[:1]]
        + [unwritten(*s, dtype=torch.half) for s in ((1, rows, n), shape, shape)]
        for r in range(size)
    ]
    tilescale.emulate(program, per_device)
    want = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True)) + bias.float()
    for r, (*_, c, _, _) in enumerate(per_device):
        close(c[0], want.chunk(size)[r])
