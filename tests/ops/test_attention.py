# SPDX-License-Identifier: MIT
"""Attention over several ranks: its programs, emulated, against float32."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch

import tilescale
from tilescale.ops.key_cache import CacheLayout
from tilescale.ops.softmax import base2

decode, sequence, backward = (
    import_module(f"tilescale.ops.{name}") for name in ("decode", "sequence_attention", "attention_backward")
)


def nothing(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for roundings of weights, parts and results."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), want, rtol=2 * eps, atol=4 * eps * float(want.abs().max()))


@pytest.mark.parametrize(
    ("size", "heads", "of_keys", "dim", "value_dim", "splits", "blocks", "own_heads", "dtype"),
    [
        (1, 6, 2, 64, 64, 1, 2, False, torch.bfloat16),
        (3, 6, 1, 64, 128, 2, 1, True, torch.float16),
        (2, 80, 1, 128, 64, 3, 9, False, torch.bfloat16),  # latent, two tiles of heads
    ],
)
def test_decode(
    size: int,
    heads: int,
    of_keys: int,
    dim: int,
    value_dim: int,
    splits: int,
    blocks: int,
    own_heads: bool,
    dtype: torch.dtype,
):
    """Blocks that exchange take several groups of heads each, one, or none."""
    batch, keys, is_latent = 2, 150, dim > value_dim
    q = torch.randn(batch, heads, dim).to(dtype)
    k = [torch.randn(batch, keys, of_keys, dim).to(dtype) for _ in range(size)]
    v = [x[..., :value_dim] if is_latent else torch.randn(batch, keys, of_keys, value_dim).to(dtype) for x in k]
    lengths = [torch.tensor([keys - 11 * r, 65 * (r % 2)], dtype=torch.int32) for r in range(size)]
    lengths[0][1] += size == 1  # some rank has a key
    merged, scale = heads // size if own_heads else heads, base2(None, dim)
    name = str(dtype).removeprefix("torch.")
    how = splits, blocks, name, is_latent, own_heads, scale, *[CacheLayout(name)] * 2
    program = decode.program(size, heads, of_keys, dim, value_dim, *how)
    per_device = [
        [q, k[r], k[r] if is_latent else v[r], lengths[r], *unread()]
        + [torch.full((splits, batch, heads, value_dim), torch.nan), torch.full((splits, batch, heads), torch.nan)]
        + [nothing(size, batch, heads, value_dim + 8, dtype=dtype), nothing(batch, merged, value_dim, dtype=dtype)]
        for r in range(size)
    ]
    tilescale.emulate(program, per_device)
    for b in range(batch):
        k_all, v_all = (torch.cat([x[b, : n[b]] for x, n in zip(xs, lengths, strict=True)]).float() for xs in (k, v))
        queries = q[b].float().view(of_keys, -1, dim)
        weights = (torch.einsum("hgd,khd->hgk", queries, k_all) * dim**-0.5).softmax(-1)
        want = torch.einsum("hgk,khd->hgd", weights, v_all).reshape(heads, value_dim)
        for r, (*_, got) in enumerate(per_device):
            close(got[b], want[r * merged : (r + 1) * merged] if own_heads else want)


def unread() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Defaults for a block table and for scales."""
    return torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1), torch.zeros(1)


@pytest.mark.parametrize(
    ("size", "page", "apart", "heads", "of_keys", "dim", "value_dim", "splits", "dtype", "narrow"),
    [
        (1, 16, 1, 4, 2, 64, 64, 2, torch.bfloat16, False),
        (2, 48, 2, 4, 2, 64, 64, 1, torch.float16, True),  # pages of keys and values alternate latent latent
        (2, 256, 1, 66, 1, 128, 64, 2, torch.bfloat16, True),  # pages of keys and values alternate
        (3, 64, 1, 3, 1, 128, 64, 4, torch.float16, False),  # latent
        (2, 0, 1, 6, 3, 64, 128, 2, torch.bfloat16, True),
    ],
)
def test_decode_of_pages_and_of_float8(
    size: int,
    page: int,
    apart: int,
    heads: int,
    of_keys: int,
    dim: int,
    value_dim: int,
    splits: int,
    dtype: torch.dtype,
    narrow: bool,
):
    """Pages in any order, others full of NaN, entries that are not used -1; lengths from 0."""
    most, is_latent, name = 150, dim > value_dim, str(dtype).removeprefix("torch.")
    lengths = [torch.tensor([most, 17 * r, 1, 128 - 3 * r, 0], dtype=torch.int32) for r in range(size)]
    batch, width = len(lengths[0]), -(-most // page) if page else 0
    kind = torch.float8_e4m3fn if narrow else dtype
    q, scales = torch.randn(batch, heads, dim).to(dtype), torch.rand(2, of_keys) + 0.5
    caches = [[torch.randn(batch, most, of_keys, n).to(kind) for n in (dim, value_dim)] for _ in range(size)]
    k, v = zip(*[(k, k[..., :value_dim] if is_latent else v) for k, v in caches], strict=True)
    of = CacheLayout(str(kind).removeprefix("torch."), page, apart)
    inputs = [in_pages(x, lengths[r], page, width, apart) if page else x for r, x in enumerate(caches)]
    program = decode.program(
        size, heads, of_keys, dim, value_dim, splits, 3, name, is_latent, False, base2(None, dim), of, of
    )
    table, *others = unread()
    per_device = [
        [q, x[0], x[0 if is_latent else 1], lengths[r], x[2] if page else table, *(scales if narrow else others)]
        + [torch.full((splits, batch, heads, value_dim), torch.nan), torch.full((splits, batch, heads), torch.nan)]
        + [nothing(size, batch, heads, value_dim + 8, dtype=dtype), nothing(batch, heads, value_dim, dtype=dtype)]
        for r, x in enumerate(inputs)
    ]
    tilescale.emulate(program, per_device)
    of_k, of_v = scales.double()[:, None, :, None] if narrow else torch.ones(2)
    for b in range(batch):
        k_all, v_all = (torch.cat([x[b, : n[b]] for x, n in zip(xs, lengths, strict=True)]).double() for xs in (k, v))
        scores = torch.einsum("hgd,khd->hgk", q[b].double().view(of_keys, -1, dim), k_all * of_k) * dim**-0.5
        want = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v_all * of_v).reshape(heads, value_dim)
        for *_, got in per_device:
            close(got[b], want.float())


def in_pages(
    caches: list[torch.Tensor], lengths: torch.Tensor, page: int, width: int, apart: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values (batch, keys, heads, D) in pages, and the block table."""
    needed = -(-lengths // page)
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    order = torch.randperm(table.numel() + 2).int()
    made = [torch.full(((len(order) - 1) * apart + 1, page, *x.shape[2:]), torch.nan).to(x.dtype) for x in caches]
    for b, n in enumerate(needed):
        for i in range(int(n)):
            table[b, i], order = order[0], order[1:]
            for x, pages in zip(caches, made, strict=True):
                part = x[b, i * page : min((i + 1) * page, int(lengths[b]))]
                pages[table[b, i] * apart] = 7
                pages[table[b, i] * apart, : len(part)] = part
    return *made, table


@pytest.mark.parametrize(
    ("size", "shape", "how", "dtype"),
    [  # (batch, half of a rank's tokens, heads, key heads, D), (causal, zigzag, ring)
        (1, (1, 5, 2, 2, 64), (True, False, False), torch.bfloat16),
        (2, (1, 130, 2, 1, 64), (True, True, False), torch.bfloat16),
        (3, (2, 20, 2, 1, 64), (False, False, True), torch.float16),
        (5, (1, 3, 1, 1, 128), (True, True, True), torch.bfloat16),
    ],
)
def test_sequence_attention(size: int, shape: tuple[int, ...], how: tuple[bool, ...], dtype: torch.dtype):
    (batch, half, heads, of_keys, dim), (causal, zigzag, _) = shape, how
    shapes = (batch, 2 * size, half, heads, dim), *[(batch, 2 * size, half, of_keys, dim)] * 2
    whole = [torch.randn(shape).to(dtype) for shape in shapes]
    parts = [[sequence.part_of(r, h, size, zigzag) for h in range(2)] for r in range(size)]
    assert sorted(sum(parts, [])) == list(range(2 * size)), "each part is somebody's"
    per_device = [
        [*(x[:, mine].contiguous() for x in whole)]
        + [nothing(2 * size, batch, half, of_keys, dim, dtype=dtype) for _ in range(2)]
        + [nothing(*s, dtype=torch.float32) for s in ((batch, 2, half, heads, dim), (2, batch, 2, heads, half))]
        + [nothing(batch, 2, half, heads, dim, dtype=dtype), nothing(batch, 2, heads, half, dtype=torch.float32)]
        for mine in parts
    ]
    name = str(dtype).removeprefix("torch.")
    program = sequence.program(size, batch, heads, of_keys, dim, name, *how, base2(None, dim))
    tilescale.emulate(program, per_device)
    want, sums = reference([x.float() for x in whole], causal)
    for mine, (*_, got, of_rows) in zip(parts, per_device, strict=True):
        close(got, want[:, mine])
        torch.testing.assert_close(of_rows, sums[:, mine], rtol=1e-3, atol=1e-3)


def reference(whole: list[torch.Tensor], causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of (batch, parts, tokens, heads, D), and log2 of the sums of weights, (batch, parts, heads, tokens)."""
    q, k, v = (x.flatten(1, 2).transpose(1, 2) for x in whole)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    sums = scores.logsumexp(-1).unflatten(2, whole[0].shape[1:3]).transpose(1, 2) / math.log(2)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(whole[0].shape), sums


@pytest.mark.parametrize(
    ("size", "shape", "how", "dtype"),
    [  # as above
        (2, (1, 130, 2, 1, 64), (True, True, False), torch.float16),
        (3, (1, 3, 1, 1, 128), (False, False, True), torch.bfloat16),
    ],
)
def test_gradients_of_sequence_attention(size: int, shape: tuple[int, ...], how: tuple[bool, ...], dtype: torch.dtype):
    (batch, half, heads, of_keys, dim), (causal, zigzag, _) = shape, how
    numbers = (heads, of_keys, of_keys, heads)
    q, k, v, grad = (torch.randn(batch, 2 * size, half, n, dim).to(dtype) for n in numbers)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    out, sums = reference(leaves, causal)
    out.backward(grad.float())
    means = (grad.float() * out).sum(-1).transpose(2, 3)
    rows = torch.nn.functional.pad(torch.stack([sums, means]).detach(), (0, -half % backward.TALL))
    parts = [[sequence.part_of(r, h, size, zigzag) for h in range(2)] for r in range(size)]
    keys, theirs = (batch, 2, half, of_keys, dim), (4 * size * batch, half, of_keys, dim)
    per_device = [
        [*(x[:, mine].contiguous() for x in (q, k, v, grad)), rows[:, :, mine].contiguous()]
        + [nothing(2 * size, batch, half, of_keys, dim, dtype=dtype) for _ in range(2)]
        + [nothing(*theirs, dtype=dtype) for _ in range(2)]
        + [nothing(batch, 2, half, heads, dim, dtype=torch.float32), *(nothing(*keys, dtype=dtype) for _ in range(2))]
        for mine in parts
    ]
    name = str(dtype).removeprefix("torch.")
    tilescale.emulate(backward.program(size, batch, heads, of_keys, dim, name, *how, base2(None, dim)), per_device)
    for mine, (*_, of_q, of_k, of_v) in zip(parts, per_device, strict=True):
        for got, leaf in zip((of_q.to(dtype), of_k, of_v), leaves, strict=True):
            close(got, leaf.grad[:, mine])
