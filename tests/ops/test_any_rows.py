# SPDX-License-Identifier: MIT
"""GEMMs of any number of rows: the rasterization of tiles, and results on the emulator with all checks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch

import tilescale
from tests.halves import half_at_night
from tilelang_core import ir
from tilescale.ops.gemm_tiles import CHUNK, GemmSpec, GemmTiling
from tilescale.passes.overlap.raster import grouped

TILES = GemmTiling(64, 64, 1.0, stages=3, group=2)
"""Small, so that few rows have several groups of tiles, the last one smaller."""

ROWS = [(1, 7), (2, 1), (2, 65), (3, 131), (4, 257)]
"""World sizes, and rows of a shard: odd, prime, one more and one less than whole tiles."""

MORE_ROWS = [(2, 193), (5, 97), (7, 67), (8, 65)]
"""The same at night."""

CHUNKS = [(2, CHUNK + 1), (3, CHUNK + 131)]
"""The same of shards whose last chunk is smaller than the others."""

SCALED = [(2, 65), (3, 131), CHUNKS[0]]
"""Those of float8, whose tiles are the ones of bfloat16, with scales."""

FORMS = (0, 3)
"""Blocks of a persistent grid; 0 for one block for each tile."""

N, K = 136, 24


def cases(forms: Sequence[Any], scaled: Sequence[Any]) -> list[Any]:
    """Types, forms, sizes and rows: all forms of all rows in bfloat16, the `scaled` ones of some in float8."""
    wide = half_at_night(["bfloat16"], forms, ROWS + CHUNKS)
    wide += [pytest.param("bfloat16", form, *each, marks=pytest.mark.nightly) for form in forms for each in MORE_ROWS]
    return wide + [("float8_e4m3fn", form, *each) for form in scaled for each in SCALED]


def begin(tile: Sequence[ir.PrimExpr]) -> tuple[int, ...]:
    """Numbers of a tile's indices."""
    return tuple(ir.integer(ir.simplify(index, {})) for index in tile)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1024, 1025, 1300, 3008, 4096])
@pytest.mark.parametrize(("columns", "group"), [(1, 8), (42, 8), (7, 4)])
def test_each_tile_is_made_once_group_by_group(rows: int, columns: int, group: int):
    high = -(-rows // 128)
    found = [begin(grouped(n, group, ir.IntImm("int32", high), columns)) for n in range(high * columns)]
    assert set(found) == {(m, n) for m in range(high) for n in range(columns)}
    groups = [m // group for m, _ in found]
    assert groups == sorted(groups), "rows that arrive first are multiplied first"
    for number in set(groups):
        across = [n for (_, n), of in zip(found, groups, strict=True) if of == number]
        assert across == sorted(across), "a column of B serves all rows of a group"


def operands(size: int, rows: int, dtype: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
    """For each device A of (rows, K), B of (N, K), and scales of both, which are 1 unless these are float8."""
    kind = getattr(torch, dtype)
    a, b = ([torch.randn(n, K).to(kind) for _ in range(size)] for n in (rows, N))
    scaled = dtype.startswith("float8")
    scales = [tuple(torch.rand(n) + 0.5 if scaled else torch.ones(n) for n in (rows, N)) for _ in a]
    return a, b, scales


def multiplied(a: torch.Tensor, b: torch.Tensor, scales: Any) -> torch.Tensor:
    return (a.float() @ b.float().t()) * scales[0][:, None] * scales[1]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), want, rtol=2**-6, atol=float(want.abs().mean()) * 2**-4)


def unwritten(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, torch.nan).to(dtype)


@pytest.mark.parametrize(("dtype", "blocks", "size", "rows"), cases(FORMS, FORMS[:1]))
def test_gathered_rows_of_any_number_are_multiplied(size: int, rows: int, dtype: str, blocks: int):
    of, made = GemmSpec(N, K, dtype, TILES, True, False), import_module("tilescale.ops.ag_gemm_programs")
    program = made.program(size, of, blocks=blocks)
    a, b, scales = operands(size, rows, dtype)
    one, per_device = a[0].view(-1)[:1], []
    for r in range(size):
        given = [scales[r][0][None], scales[r][1]] if of.scaled else [one.view(1, 1), one]
        room = [unwritten(size, rows, K, dtype=a[r].dtype), *[unwritten(size, rows, dtype=torch.float32)] * of.scaled]
        bias = torch.zeros(1, dtype=torch.bfloat16)
        per_device.append([a[r][None], b[r], b[r], bias, *given, unwritten(size, rows, N), *room])
    tilescale.emulate(program, per_device)
    for r, (*_, c) in enumerate(given[:7] for given in per_device):
        for owner in range(size):
            close(c[owner], multiplied(a[owner], b[r], (scales[owner][0], scales[r][1])))


@pytest.mark.parametrize(("dtype", "blocks", "size", "rows"), cases(FORMS, FORMS))
def test_sums_of_any_number_of_rows_are_scattered(size: int, rows: int, dtype: str, blocks: int):
    of, made = GemmSpec(N, K, dtype, TILES, True, True), import_module("tilescale.ops.gemm_rs")
    program = made.program(size, of, blocks)
    a, b, scales = operands(size, size * rows, dtype)
    bias, shape, per_device = torch.randn(N).bfloat16(), (size, rows, N), []
    for r in range(size):
        pair = (scales[r][0].view(size, rows), scales[r][1])
        given = pair if of.scaled else (bias[:1].view(1, 1), bias[:1])
        space = [unwritten(*s) for s in ((1, rows, N), shape, shape)]
        per_device.append([a[r].view(size, rows, K), b[r], bias, *given, *space])
    tilescale.emulate(program, per_device)
    want = sum(multiplied(*each) for each in zip(a, b, scales, strict=True)) + bias.float()
    for r, (*_, c, _, _) in enumerate(per_device):
        close(c[0], want.view(shape)[r])


@pytest.mark.parametrize(("dtype", "blocks", "size", "rows"), cases(FORMS, FORMS))
def test_sums_of_any_number_of_rows_are_made_everywhere(size: int, rows: int, dtype: str, blocks: int):
    of = GemmSpec(N, K, dtype, TILES, True, False)
    a, b, scales = operands(size, rows, dtype)
    one, per_device = torch.zeros(1, dtype=torch.bfloat16), []
    for r in range(size):
        given = (scales[r][0][None], scales[r][1]) if of.scaled else (one.view(1, 1), one)
        per_device.append([a[r][None], b[r], one, *given, unwritten(rows, N)])
    tilescale.emulate(import_module("tilescale.ops.gemm_ar").program(size, of, blocks), per_device)
    want = sum(multiplied(*each) for each in zip(a, b, scales, strict=True))
    for *_, c in per_device:
        close(c, want)
        assert torch.equal(c, per_device[0][-1])
