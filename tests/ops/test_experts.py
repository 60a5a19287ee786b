# SPDX-License-Identifier: MIT
"""Unequal exchanges, and those of experts: tables of all ranks, the programs that use them, and grouped GEMMs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import tilescale
from tilescale import ops
from tilescale.ops import grouped_float8, grouped_gemm, moe_tables, row_exchange
from tilescale.ops.moe_tables import ALIGN

CHOICES = [
    # ranks, experts, tokens, choices, tokens of the first rank, capacity
    (1, 3, 9, 2, 9, None),
    (3, 6, 20, 3, 0, None),
    (8, 16, 5, 3, 2, None),
    (2, 4, 150, 2, 150, 2 * ALIGN),
]


def chosen_by_all(size: int, experts: int, tokens: int, choices: int, first: int) -> torch.Tensor:
    """Different experts for each token, none for the last one; some choose fewer, and rank 0 has fewer tokens."""
    scores = torch.rand(size, tokens, experts)
    scores[..., -1] = -1
    chosen = scores.topk(choices).indices.int()
    chosen[torch.rand(chosen.shape) < 0.2] = -1
    chosen[0, first:] = -1
    return chosen


class Tables:
    """Routing that every rank computes from all ranks' choices, emulated.

    Attributes:
        chosen: (ranks, tokens, choices).
        weights: float32, of the same shape.
        local, room: number of experts, and of rows, of a rank.
        of: the tensors of each rank's Routing, by name.
    """

    def __init__(self, case: tuple[Any, ...], seed: int | None = None, kind: torch.dtype = torch.int32):
        size, experts, tokens, choices, _, room = case
        self.chosen, self.weights = chosen_by_all(*case[:5]), torch.rand(size, tokens, choices)
        self.local = experts // size
        self.room = room or -(-size * tokens * min(choices, self.local) // ALIGN) * ALIGN + self.local * ALIGN
        boxes = size, -(-tokens // moe_tables.tokens_of(choices)), moe_tables.whole(choices)
        counted = torch.empty(boxes[0] * boxes[1], self.local + 2, dtype=torch.int32)
        per_device = []
        for chosen, weights in zip(self.chosen.to(kind), self.weights, strict=True):
            made = moe_tables.new_tables(chosen, size, self.local, tokens, self.room)
            beside = [torch.empty(boxes, dtype=torch.int32), torch.empty(boxes), counted.clone()]
            per_device.append([chosen.flatten(), weights.flatten(), *(poisoned(x) for x in (*beside, *made))])
        program = moe_tables.tables_program(size, self.local, choices, str(kind).removeprefix("torch."), True)
        tilescale.emulate(program, per_device, schedule_seed=seed)
        self.of = [dict(zip(ops.Routing._fields, tensors[5:], strict=False)) for tensors in per_device]

    def row(self, rank: int) -> torch.Tensor:
        """(ranks, tokens, choices): the row on a rank of each choice of all ranks, -1 for none."""
        row = torch.full_like(self.chosen, -1)
        for source, before in enumerate(routing["before"] for routing in self.of):
            for token, slot in enumerate(before[:-1, rank].tolist()):
                if before[token + 1, rank] > slot:
                    row[source, token] = self.of[rank]["places"][source, slot]
        return row


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """Full of what no result is."""
    return x.fill_(torch.nan if x.is_floating_point() else -77)


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_every_choice_has_a_row_of_its_expert(case: tuple[Any, ...]):
    tables = Tables(case)
    for rank, routing in enumerate(tables.of):
        # In the order of experts, ranks, tokens and choices, each expert from a multiple of ALIGN.
        begin, want, share = 0, torch.full_like(tables.chosen, -1), torch.zeros(tables.room)
        for expert in range(tables.local):
            where = (tables.chosen == rank * tables.local + expert).nonzero()
            for i, place in enumerate(where.tolist()):
                if begin + i < tables.room:
                    want[tuple(place)], share[begin + i] = begin + i, tables.weights[tuple(place)]
            kept = min(len(where), max(tables.room - begin, 0))
            assert routing["counts"][expert] == kept and routing["dropped"][expert] == len(where) - kept
            tiles = -(-len(where) // ALIGN)
            assert (routing["owners"][begin // ALIGN :][:tiles] == expert).all()
            begin += tiles * ALIGN
        assert torch.equal(tables.row(rank), want) and (routing["owners"][begin // ALIGN :] == -1).all()
        assert routing["used"] == (routing["owners"] >= 0).sum()
        assert torch.equal(routing["weights"], share)
    if case[-1] is not None:
        assert any(routing["dropped"].sum() > 0 for routing in tables.of)


@pytest.mark.parametrize(
    ("case", "seed", "kind"),
    [((2, 600, 5, 2, 5, None), None, torch.int64), ((1, 301, 3, 300, 3, None), None, torch.int32)]
    + [((3, 6, 400, 2, 3, None), 1, torch.int64)],
    ids=["experts", "choices", "chunks"],
)
def test_more_than_a_block_has_threads(case: tuple[Any, ...], seed: int | None, kind: torch.dtype):
    """Experts, choices of a token, or choices of a rank."""
    tables = Tables(case, seed, kind)
    for rank in range(case[0]):
        is_here = (tables.chosen >= 0) & (tables.chosen // tables.local == rank)
        row = tables.row(rank)
        assert torch.equal(row >= 0, is_here) and len(row[is_here].unique()) == is_here.sum()
        assert torch.equal(tables.of[rank]["weights"][row[is_here]], tables.weights[is_here])
        experts = tables.of[rank]["owners"][row[is_here] // ALIGN] + rank * tables.local
        assert torch.equal(experts, tables.chosen[is_here])


def scattered(x: torch.Tensor, tables: Tables, seed: int | None = None) -> list[torch.Tensor]:
    """Rows of the experts of each rank; rows that are not written are -1."""
    size, most, width = x.shape
    per_device = [
        [x[r], routing["order"], routing["sent"], torch.full((size, most, width), -7, dtype=torch.int32)]
        + [routing["received"], routing["places"], torch.full((tables.room, width), -1, dtype=torch.int32)]
        for r, routing in enumerate(tables.of)
    ]
    program = row_exchange.scatter_program(size, width, tables.chosen.shape[2])
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
    size, _, tokens, choices = case[:4]
    tables, width = Tables(case), 24
    rows_of = [tables.row(rank) for rank in range(size)]
    x = torch.randint(0, 999, (size, tokens, width), dtype=torch.int32)
    there = scattered(x, tables, seed)
    for row, got in zip(rows_of, there, strict=True):
        want = torch.full_like(got, -1)
        want[row[row >= 0].long()] = x[(row >= 0).nonzero(as_tuple=True)[:2]]
        assert torch.equal(got, want)

    weights = [torch.rand(tables.room) for _ in range(size)]
    weighted, kind = size != 2, torch.float32 if size == 3 else torch.bfloat16
    y = [torch.randn(tables.room, width).to(kind) for _ in range(size)]
    for rows, row in zip(y, rows_of, strict=True):
        nobody = torch.ones(tables.room, dtype=torch.bool).index_fill_(0, row[row >= 0].long(), False)
        rows[nobody] = torch.nan
    per_device = [
        [y[r], weights[r] if weighted else weights[r][:1], routing["received"], routing["places"]]
        + [torch.full((size, tokens, width), torch.nan).to(kind), routing["before"]]
        + [torch.full((tokens, width), torch.nan).to(kind)]
        for r, routing in enumerate(tables.of)
    ]
    name, unit = str(kind).removeprefix("torch."), 16 // kind.itemsize
    groups = row_exchange.sharers(width, unit, tokens)
    program = row_exchange.sum_program(size, width, choices, name, unit, weighted)
    tilescale.emulate(program, [[*tensors, groups] for tensors in per_device], schedule_seed=seed)
    want = torch.zeros(size, tokens, width)
    for rows, row, weight in zip(y, rows_of, weights, strict=True):
        part = torch.zeros_like(want)
        for c in range(choices):
            place = row[..., c].clamp(min=0).long()
            term = rows[place].float() * (weight[place][..., None] if weighted else 1)
            part += torch.where(row[..., c, None] >= 0, term, 0)
        want += part.to(kind).float()
    for r, tensors in enumerate(per_device):
        torch.testing.assert_close(tensors[-1], want[r].to(kind), rtol=1e-2 if kind.itemsize == 2 else 1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "case", [(1, 3, 9, 2, 9, None), (3, 6, 100, 3, 0, None), (2, 4, 150, 2, 150, 2 * ALIGN)], ids=str
)
def test_numbers_of_rows_come_to_their_choices(case: tuple[Any, ...]):
    tables = Tables(case)
    size, tokens, choices = tables.chosen.shape
    grads = torch.randint(0, 99, (size, 2, tables.room)).float()
    boxes = size, -(-tokens // moe_tables.tokens_of(choices)), moe_tables.whole(choices)
    per_device = [
        [grads[r], routing["received"], routing["places"], routing["before"]]
        + [torch.full(boxes, torch.nan), torch.full((tokens, choices), torch.nan)]
        for r, routing in enumerate(tables.of)
    ]
    tilescale.emulate(moe_tables.returns_program(size, choices), per_device)
    want = torch.zeros(size, tokens, choices)
    for rank, grad in enumerate(grads.sum(1)):
        row = tables.row(rank)
        want += torch.where(row >= 0, grad[row.clamp(min=0).long()], 0)
    assert torch.equal(torch.stack([tensors[-1] for tensors in per_device]), want)


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
    """Rows of each expert, the expert of each tile, and the number of rows; the last tile has no expert."""
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
    tilescale.emulate(grouped_gemm.program(0, n, k, name, transposed, 3), [x, lying, owners, used_tiles(counts), y])
    outer = grouped_gemm.outer_program(0, len(counts), n, k, name)
    tilescale.emulate(outer, [dy, x, torch.tensor(counts, dtype=torch.int32), dbt])
    for e, part in enumerate(rows):
        close(y[part], x[part].float() @ b[e].float())
        close(dbt[e], dy[part].float().t() @ x[part].float())
    assert y[-ALIGN:].isnan().all(), "tiles of nobody are left out"


def used_tiles(counts: list[int]) -> torch.Tensor:
    return torch.tensor([sum(-(-n // ALIGN) for n in counts)], dtype=torch.int32)


def test_grouped_products_of_float8():
    (rows, owners, room), n, k = layout([3, 129]), 256, 384
    x, of_x = (torch.randn(room, k)).to(torch.float8_e4m3fn), torch.rand(room, k // 128) + 0.5
    b, of_b = torch.randn(2, n, k).to(torch.float8_e4m3fn), torch.rand(2, n // 128, k // 128) + 0.5
    wide = torch.zeros(room, k + 16).to(torch.float8_e4m3fn)
    wide[:, :k] = x
    y, given = torch.zeros(room, n).bfloat16(), [wide, of_x.t().contiguous(), b, of_b, owners]
    tilescale.emulate(grouped_float8.scaled_program(n, k, k + 16), [*given, y])
    whole = x.float() * of_x.repeat_interleave(128, 1)
    weights = b.float() * of_b.repeat_interleave(128, 1).repeat_interleave(128, 2)
    for e, part in enumerate(rows):
        close(y[part], whole[part] @ weights[e].t())


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for roundings of the result."""
    bound = float(want.abs().mean()) * 2**-6 if want.numel() else 0
    torch.testing.assert_close(got.float(), want, rtol=2**-6, atol=bound)
