# SPDX-License-Identifier: MIT
"""Attention of sequences that are split over the GPUs, compared with one GPU that has all of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import trials
from plain_attention import flash_attention
from trials import Case, checked

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

HEADS, OF_KEYS, DIM = 32, 8, 128
"""Sizes of a layer of Llama-3 8B."""

LATENT_HEADS, LATENT, VALUES = 128, 576, 512
"""Sizes of DeepSeek-V3: a latent key, also used as the value, and its part with positions."""

PAGE = 64
"""Keys of a page."""

QUERIES = 2048
"""Queries of a step of the reference."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Tokens of each GPU x heads x their size; sequences x heads x keys of all GPUs."""
    if gpus == 1:
        return
    work = Causal(512 if quick else 16384)
    shape = work.tokens, HEADS, DIM
    yield Heat("sequence_attention", shape, "bfloat16", gpus, "eager", "one GPU", work.contenders(), calls=3)
    for batch, keys in [(2, 2048)] if quick else [(4, 131072), (32, 131072)]:
        latent = Latent(batch, keys)
        entries = [Contender("one GPU", latent.on_one), Contender("tilescale", latent.operator)]
        yield Heat("mla_decode", (batch, LATENT_HEADS, keys), "bfloat16", gpus, "graph", "one GPU", entries)
    for batch, keys in [(2, 2048)] if quick else [(1, 131072), (32, 32768), (256, 4096)]:
        for kind in ("bfloat16", "float8_e4m3fn"):
            paged = Paged(batch, keys, getattr(torch, kind))
            yield Heat("flash_decode", (batch, HEADS, keys), kind, gpus, "graph", "torch, one GPU", paged.contenders())


def same(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random tensors, the same on every rank."""
    made = torch.Generator(trials.device()).manual_seed(seed)
    return [torch.randn(shape, generator=made, device=made.device, dtype=torch.bfloat16) for shape in shapes]


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries (n, D) to keys and values in float32, and the error bound of a result in bfloat16.

    Weights, partial results and results are rounded to bfloat16: by 2**-9 of themselves, each independently. `seen`:
    (n, keys), the mask of keys of a query.
    """
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    weights = (scores if seen is None else scores.masked_fill_(~seen, -torch.inf)).softmax(-1)
    want = weights @ v.float()
    spread = (weights.square_() @ v.float().square()).sqrt()
    return want, 2.0**-7 * want.abs() + 2.0**-6 * spread


class Causal:
    """Causal attention, half of the local tokens from the front of the sequence and half from its end."""

    def __init__(self, tokens: int):
        self.tokens, self.whole = tokens, tokens * tilescale.init().size

    def contenders(self) -> list[Contender]:
        """One GPU that has all tokens: by a plain program, and by PyTorch; then the operator by both strategies."""
        return [
            Contender("one GPU", self.plain, self.compiled),
            Contender("torch, one GPU", self.torch),
            Contender("tilescale", lambda: self.operator(False), lambda: self.operator(False).call()),
            Contender("tilescale ring", lambda: self.operator(True), lambda: self.operator(True).call()),
        ]

    def draw(self, which: torch.Tensor, seed: int) -> Case:
        """The whole sequence, and the results of some of its tokens."""
        q, k, v = same(seed, (1, self.whole, HEADS, DIM), *[(1, self.whole, OF_KEYS, DIM)] * 2)
        positions = torch.arange(self.whole, device=q.device)
        want = torch.empty(1, len(which), HEADS, DIM, device=q.device)
        bound = torch.empty_like(want)
        for first in range(0, len(which), QUERIES):
            rows = slice(first, first + QUERIES)
            seen = positions <= which[rows, None]
            for head in range(HEADS):
                there = head * OF_KEYS // HEADS
                case = attended(q[0, which[rows], head], k[0, :, there], v[0, :, there], seen)
                want[0, rows, head], bound[0, rows, head] = case
        return Case((q, k, v), want, bound)

    def operator(self, ring: bool) -> Runner:
        from tilescale import ops

        own = ops.sequence_positions(self.tokens, zigzag=True).to(trials.device())
        q, k, v = (trials.nothing(1, self.tokens, heads, DIM) for heads in (HEADS, OF_KEYS, OF_KEYS))

        def load(*given: torch.Tensor) -> None:
            trials.into(q, k, v)(*(x[:, own] for x in given))

        call = partial(ops.sequence_attention, q, k, v, causal=True, zigzag=True, ring=ring)
        return checked(partial(self.draw, own), load, call)

    def everything(self) -> tuple[list[torch.Tensor], Any]:
        """Buffers of the whole sequence, and cases of all its results."""
        places = [trials.nothing(1, self.whole, heads, DIM) for heads in (HEADS, OF_KEYS, OF_KEYS)]
        return places, partial(self.draw, torch.arange(self.whole, device=trials.device()))

    def compiled(self) -> Any:
        """Attention in plain TileLang, compiled by TileLang."""
        import tilelang

        program = flash_attention(self.whole, HEADS, OF_KEYS, DIM)
        return tilelang.compile(program, target="cuda", execution_backend="tvm_ffi")

    def plain(self) -> Runner:
        """All tokens on each GPU."""
        kernel, (given, draw) = self.compiled(), self.everything()
        out = torch.full_like(given[0], torch.nan)
        return checked(draw, trials.into(*given), trials.returning(out, kernel, *given, out), [out])

    def torch(self) -> Runner:
        """All tokens on each GPU."""
        given, draw = self.everything()
        attention = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)

        def call() -> torch.Tensor:
            return attention(*(x.transpose(1, 2) for x in given)).transpose(1, 2)

        return checked(draw, trials.into(*given), call)


class Latent:
    """Attention of one new token of each sequence to latent keys (MLA); all keys are counted."""

    def __init__(self, batch: int, keys: int):
        self.batch, self.keys = batch, keys

    def draw(self, mine: slice, seed: int) -> Case:
        """Queries, and this rank's keys."""
        q, cache = same(seed, (self.batch, LATENT_HEADS, LATENT), (self.batch, self.keys, LATENT))
        cases = [attended(q[b], cache[b], cache[b, :, :VALUES]) for b in range(self.batch)]
        want, bound = (torch.stack(parts) for parts in zip(*cases, strict=True))
        return Case((q, cache[:, mine]), want, bound)

    def operator(self) -> Runner:
        """Each GPU has a part of the keys."""
        world = tilescale.init()
        return self._among(world.rank, world.size, None)

    def on_one(self) -> Runner:
        """Each GPU has all keys, by the same operator."""
        return self._among(0, 1, trials.alone())

    def _among(self, rank: int, size: int, group: Any) -> Runner:
        from tilescale import ops

        share = self.keys // size
        q, cache = trials.nothing(self.batch, LATENT_HEADS, LATENT), trials.nothing(self.batch, share, LATENT)
        lengths = torch.full((self.batch,), share, dtype=torch.int32, device=q.device)
        draw = partial(self.draw, slice(rank * share, (rank + 1) * share))
        call = partial(ops.mla_decode, q, cache, lengths, value_dim=VALUES, group=group)
        return checked(draw, trials.into(q, cache), call)


class Paged:
    """Attention of one new token of each sequence to keys in pages (GQA), as serving engines keep them."""

    def __init__(self, batch: int, keys: int, kind: torch.dtype):
        self.batch, self.keys, self.kind = batch, keys, kind

    def contenders(self) -> list[Contender]:
        """One GPU that has all keys, by PyTorch from contiguous ones in bfloat16 and by the operator; then all GPUs."""
        world = tilescale.init()
        return [
            Contender("torch, one GPU", self.torch),
            Contender("one GPU", lambda: self.operator(0, 1, trials.alone())),
            Contender("tilescale", lambda: self.operator(world.rank, world.size, None)),
        ]

    def draw(self, mine: slice, seed: int) -> Case:
        """Queries, and this rank's keys and values."""
        q, *caches = same(seed, (self.batch, HEADS, DIM), *[(self.batch, self.keys, OF_KEYS, DIM)] * 2)
        k, v = (x.to(self.kind) for x in caches)
        want, bound = (torch.empty(q.shape, device=q.device) for _ in range(2))
        for b in range(self.batch):
            for head in range(OF_KEYS):
                heads = slice(head * HEADS // OF_KEYS, (head + 1) * HEADS // OF_KEYS)
                want[b, heads], bound[b, heads] = attended(q[b, heads], k[b, :, head], v[b, :, head])
        return Case((q, k[:, mine], v[:, mine]), want, bound)

    def operator(self, rank: int, size: int, group: Any) -> Runner:
        """Each GPU has a part of the keys, in pages in any order."""
        from tilescale import ops

        share = self.keys // size
        pages = self.batch * share // PAGE
        q = trials.nothing(self.batch, HEADS, DIM)
        k, v = (torch.zeros(pages, PAGE, OF_KEYS, DIM, dtype=self.kind, device=q.device) for _ in range(2))
        table = torch.randperm(pages, device=q.device).view(self.batch, -1).int()
        lengths = torch.full((self.batch,), share, dtype=torch.int32, device=q.device)

        def load(queries: torch.Tensor, *given: torch.Tensor) -> None:
            q.copy_(queries)
            for cache, x in zip((k, v), given, strict=True):
                cache.view(torch.uint8)[table.long()] = x.unflatten(1, (-1, PAGE)).view(torch.uint8)

        draw = partial(self.draw, slice(rank * share, (rank + 1) * share))
        return checked(draw, load, partial(ops.flash_decode, q, k, v, lengths, block_table=table, group=group))

    def torch(self) -> Runner:
        """All keys on each GPU, contiguous."""
        q = trials.nothing(self.batch, HEADS, DIM)
        k, v = (trials.nothing(self.batch, self.keys, OF_KEYS, DIM) for _ in range(2))
        attention = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)

        def call() -> torch.Tensor:
            return attention(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2))[:, :, 0]

        return checked(partial(self.draw, slice(None)), trials.into(q, k, v), call)
