# SPDX-License-Identifier: MIT
"""Unequal exchanges, and those of experts: tables of all ranks, the programs that go by them, and grouped products."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import tilescale
from tilescale.ops import grouped_gemm, row_exchange
from tilescale.ops.moe_route import ALIGN

moe_route = import_module("tilescale.ops.moe_route")

CHOICES = [
    # ranks, experts, tokens, choices, tokens of the first rank, room
    (1, 3, 9, 2, 9, None),
    (3, 6, 20, 3, 0, None),
    (8, 16, 5, 3, 2, None),
    (2, 4, 150, 2, 150, 2 * ALIGN),
]


def chosen_by_all(size: int, experts: int, tokens: int, choices: int, first: int) -> torch.Tensor:
    """Different experts for each token, the last one for nobody; some choose fewer, and rank 0 has fewer tokens."""
    scores = torch.rand(size, tokens, experts)
    scores[..., -1] = -1
    chosen = scores.topk(choices).indices.int()
    chosen[torch.rand(chosen.shape) < 0.2] = -1
    chosen[0, first:] = -1
    return chosen


class Tables:
    """What every rank works out from everybody's choices."""

    def __init__(self, chosen: torch.Tensor, experts: int, room: int | None):
        size, most, choices = chosen.shape
        self.local = experts // size
        self.room = room or -(-size * most * min(choices, self.local) // ALIGN) * ALIGN + self.local * ALIGN
        self.out = [moe_route.outgoing(mine, self.local, size) for mine in chosen]
        self.rows = [moe_route.rows_of(chosen, rank, self.local, self.room) for rank in range(size)]
        self.into = [moe_route.incoming(chosen, self.rows[r][0], r, self.local) for r in range(size)]


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_every_choice_has_a_row_of_its_expert(case: tuple[Any, ...]):
    size, experts, _, _, _, room = case
    chosen = chosen_by_all(*case[:5])
    tables = Tables(chosen, experts, room)
    for rank, (row, counts, owners) in enumerate(tables.rows):
        # In the order of experts, ranks, tokens and choices, each expert from a multiple of ALIGN.
        begin, want = 0, torch.full_like(row, -1)
        for expert in range(tables.local):
            where = (chosen == rank * tables.local + expert).nonzero()
            for i, place in enumerate(where.tolist()):
                want[tuple(place)] = begin + i if begin + i < tables.room else -1
            assert counts[expert] == min(len(where), max(tables.room - begin, 0))
            tiles = -(-len(where) // ALIGN)
            assert (owners[begin // ALIGN :][:tiles] == expert).all()
            begin += tiles * ALIGN
        assert torch.equal(row, want) and (owners[begin // ALIGN :] == -1).all()
    if room is not None:
        assert any((chosen // tables.local == r).sum() > (rows[0] >= 0).sum() for r, rows in enumerate(tables.rows))


def scattered(x: torch.Tensor, tables: Tables, seed: int | None = None) -> list[torch.Tensor]:
    """The rows of the experts of each rank; what nobody writes is -1."""
    size, most, width = x.shape
    per_device = [
        [x[r], *tables.out[r][:2], torch.full((size, most, width), -7, dtype=torch.int32), *tables.into[r]]
        + [torch.full((tables.room, width), -1, dtype=torch.int32)]
        for r in range(size)
    ]
    program = row_exchange.scatter_program(size, width, tables.into[0][1].shape[2])
    tilescale.emulate(program, per_device, schedule_seed=seed)
    return [tensors[-1] for tensors in per_device]


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_tokens_go_to_their_experts_and_back(case: tuple[Any, ...]):
    there_and_back(case)


@pytest.mark.parametrize(("seed", "senders"), [(None, 3), (1, 3), (2, 9)])
def test_tiles_of_parts_of_rows(seed: int | None, senders: int, monkeypatch: pytest.MonkeyPatch):
    """Several with one flag; several for each sender, or as many blocks for one; in any order of blocks."""
    for name in ("TILE", "SUMMED"):
        monkeypatch.setattr(row_exchange, name, 32)
    for name in ("PIECE", "SUMMED_PIECE"):
        monkeypatch.setattr(row_exchange, name, 16)
    for name, value in (("SENDERS", senders), ("SUMMING_SENDERS", senders), ("CHUNKS", 3)):
        monkeypatch.setattr(row_exchange, name, value)
    monkeypatch.setattr(row_exchange, "MANY_ROWS", 1)
    assert row_exchange.tile_of(24, 8, 32, 16) == (4, 8)
    there_and_back((3, 6, 13, 3, 5, None), seed)


def there_and_back(case: tuple[Any, ...], seed: int | None = None) -> None:
    """Rows of tokens where they belong, and sums of experts' rows where they came from."""
    size, experts, tokens, choices, _, room = case
    chosen, width = chosen_by_all(*case[:5]), 24
    tables = Tables(chosen, experts, room)
    x = torch.randint(0, 999, (size, tokens, width), dtype=torch.int32)
    there = scattered(x, tables, seed)
    for (row, *_), got in zip(tables.rows, there, strict=True):
        want = torch.full_like(got, -1)
        want[row[row >= 0].long()] = x[(row >= 0).nonzero(as_tuple=True)[:2]]
        assert torch.equal(got, want)

    weights = [torch.rand(tables.room) for _ in range(size)]
    weighted, kind = size != 2, torch.float32 if size == 3 else torch.bfloat16
    y = [torch.randn(tables.room, width).to(kind) for _ in range(size)]
    for rows, (row, *_) in zip(y, tables.rows, strict=True):
        nobody = torch.ones(tables.room, dtype=torch.bool).index_fill_(0, row[row >= 0].long(), False)
        rows[nobody] = torch.nan
    per_device = [
        [y[r], weights[r] if weighted else weights[r][:1], *tables.into[r]]
        + [torch.full((size, tokens, width), torch.nan).to(kind), tables.out[r][2]]
        + [torch.full((tokens, width), torch.nan).to(kind)]
        for r in range(size)
    ]
    name, unit = str(kind).removeprefix("torch."), 16 // kind.itemsize
    groups = row_exchange.sharers(width, unit, tokens)
    program = row_exchange.sum_program(size, width, choices, name, unit, weighted)
    tilescale.emulate(program, [[*tensors, groups] for tensors in per_device], schedule_seed=seed)
    want = torch.zeros(size, tokens, width)
    for rows, (row, *_), weight in zip(y, tables.rows, weights, strict=True):
        part = torch.zeros_like(want)
        for c in range(choices):
            place = row[..., c].clamp(min=0).long()
            term = rows[place].float() * (weight[place][..., None] if weighted else 1)
            part += torch.where(row[..., c, None] >= 0, term, 0)
        want += part.to(kind).float()
    for r, tensors in enumerate(per_device):
        torch.testing.assert_close(tensors[-1], want[r].to(kind), rtol=1e-2 if kind.itemsize == 2 else 1e-6, atol=1e-6)


@pytest.mark.parametrize(("size", "most", "width"), [(3, 20, 36), (8, 2, 8), (2, 3, 1)])
def test_unequal_parts(size: int, most: int, width: int):
    """Ranks have different numbers of rows."""
    counts = torch.randint(0, most + 1, (size, size), dtype=torch.int32)
    counts[0, size - 1] = 0
    x = [torch.randint(0, 999, (int(counts[r].sum()) + r, width), dtype=torch.int32) for r in range(size)]
    per_device = [
        [x[r], counts[r].clone(), torch.full((int(counts[:, r].sum()) + 2 * r, width), -1, dtype=torch.int32)]
        + [torch.full((size,), -1, dtype=torch.int32)]
        for r in range(size)
    ]
    tilescale.emulate(import_module("tilescale.ops.all_to_all_v").program(size, "int32"), per_device)
    for r, (*_, found, received) in enumerate(per_device):
        want = torch.cat([x[s][: counts[s].sum()].split(counts[s].tolist())[r] for s in range(size)])
        assert torch.equal(found[: len(want)], want) and (found[len(want) :] == -1).all()
        assert torch.equal(received, counts[:, r])


def layout(counts: list[int]) -> tuple[list[slice], torch.Tensor, int]:
    """The rows of each expert, whose tiles are whose, and how many rows there are; the last tile is nobody's."""
    tiles = [-(-count // ALIGN) for count in counts]
    begins = [sum(tiles[:e]) * ALIGN for e in range(len(counts))]
    owners = [e for e, many in enumerate(tiles) for _ in range(many)] + [-1]
    rows = [slice(b, b + count) for b, count in zip(begins, counts, strict=True)]
    return rows, torch.tensor(owners, dtype=torch.int32), len(owners) * ALIGN


@pytest.mark.parametrize(
    ("counts", "n", "k", "transposed", "dtype"),
    [([5, 0, 130], 72, 40, True, torch.bfloat16), ([0, 128], 256, 64, False, torch.float16)],
)
def test_grouped_products(counts: list[int], n: int, k: int, transposed: bool, dtype: torch.dtype):
    rows, owners, room = layout(counts)
    x, b = torch.full((room, k), torch.nan, dtype=dtype), torch.randn(len(counts), k, n).to(dtype)
    dy = torch.full((room, n), torch.nan, dtype=dtype)
    for part in rows:
        x[part], dy[part] = (torch.randn(part.stop - part.start, w).to(dtype) for w in (k, n))
    name = str(dtype).removeprefix("torch.")
    y, dbt = torch.full((room, n), torch.nan, dtype=dtype), torch.full((len(counts), n, k), torch.nan, dtype=dtype)
    lying = b.mT.contiguous() if transposed else b
    tilescale.emulate(grouped_gemm.program(n, k, name, transposed), [x, lying, owners, y])
    outer = grouped_gemm.outer_program(len(counts), n, k, name)
    tilescale.emulate(outer, [dy, x, torch.tensor(counts, dtype=torch.int32), dbt])
    for e, part in enumerate(rows):
        close(y[part], x[part].float() @ b[e].float())
        close(dbt[e], dy[part].float().t() @ x[part].float())
    assert y[-ALIGN:].isnan().all(), "tiles of nobody are left out"


def test_grouped_products_of_float8():
    (rows, owners, room), n, k = layout([3, 129]), 256, 384
    x, of_x = (torch.randn(room, k)).to(torch.float8_e4m3fn), torch.rand(room, k // 128) + 0.5
    b, of_b = torch.randn(2, n, k).to(torch.float8_e4m3fn), torch.rand(2, n // 128, k // 128) + 0.5
    wide = torch.zeros(room, k + 16).to(torch.float8_e4m3fn)
    wide[:, :k] = x
    y = torch.zeros(room, n).bfloat16()
    tilescale.emulate(grouped_gemm.scaled_program(n, k, k + 16, "float8_e4m3fn"), [wide, b, of_x, of_b, owners, y])
    whole = x.float() * of_x.repeat_interleave(128, 1)
    weights = b.float() * of_b.repeat_interleave(128, 1).repeat_interleave(128, 2)
    for e, part in enumerate(rows):
        close(y[part], whole[part] @ weights[e].t())


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for roundings of the result."""
    bound = float(want.abs().mean()) * 2**-6 if want.numel() else 0
    torch.testing.assert_close(got.float(), want, rtol=2**-6, atol=bound)
