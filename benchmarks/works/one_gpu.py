# SPDX-License-Identifier: MIT
"""GEMM on one GPU, by warpgroups and by clusters, and MLA decode on one GPU and on several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import programs
import torch
import trials
from programs import Tiling
from trials import Case, checked, ours

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

SCRIPT = Path(__file__).resolve().parents[1] / "asynchrony.py"
BATCH, HEADS, DIM, PE_DIM = 32, 128, 512, 64
"""MLA decode as in DeepSeek-V3."""
SPLITS = 2
"""Blocks that share the keys of a device: one alone would leave half of an H200 idle."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """GEMMs on one GPU, decode on one or, split by keys, on all."""
    if gpus == 1:
        size, small = (1536, 1024) if quick else (8192, 4096)
        warpgroups = lambda: trials.example("08_tp_gemm").tp_gemm(1, size, size, size)  # noqa: E731
        clusters = lambda: by_clusters(small, small, small)  # noqa: E731
        yield _product("gemm", size, warpgroups, torch.float32)
        yield _product("cluster_gemm", small, clusters, torch.bfloat16)
    yield Decode(quick, gpus).heat()


def by_clusters(M: int, N: int, K: int) -> Any:
    """The example's program, with tiles of two blocks, each as large as those of the others."""
    make = trials.example("10_cluster_gemm").cluster_gemm
    return make(1, M, N, K, tile=(256, 256, 64), stages=4, dtype="bfloat16")


def _product(work: str, size: int, program: Callable[[], Any], dtype: torch.dtype) -> Heat:
    """All matrices (size, size); the program takes B untransposed, and leaves C in `dtype`."""

    def draw(seed: int) -> Case:
        a, b = trials.randoms(seed, torch.bfloat16, (size, size), (size, size))
        want, magnitudes = trials.product(a, b)
        return Case((a, b), want, trials.product_bound(size, want, magnitudes))

    def cublas() -> Runner:
        a, b, c = (trials.nothing(size, size) for _ in range(3))
        return checked(draw, trials.into(a, b), lambda: torch.mm(a, b.T, out=c), [c])

    def own(kernel: Any) -> Runner:
        a, b = trials.nothing(size, size), trials.nothing(size, size)
        c = trials.symmetric(size, size, dtype=dtype)
        load = lambda left, right: trials.into(a, b)(left, right.T)  # noqa: E731
        return checked(draw, load, trials.returning(c, kernel, a, b, c), [c], kernel.synchronize)

    def plain(kernel: Any) -> Runner:
        a, b, c = trials.nothing(1, size, size), trials.nothing(size, size), trials.nothing(1, size, size)
        call = trials.returning(c, kernel, a, b, c)
        return checked(draw, trials.into(a[0], b), call, [c], kernel.synchronize)

    entries = [
        Contender("cublas alone", cublas),
        ours("tilescale", program, own),
        ours("plain tiles", lambda: programs.gemm(size, size, size, Tiling()), plain),
    ]
    return Heat(work, (size,) * 3, "bfloat16", 1, "eager", "cublas alone", entries, 2 * size**3)


class Decode:
    """Attention of one new token of each sequence to latent vectors; keys are split over the GPUs."""

    def __init__(self, quick: bool, gpus: int):
        self.quick, self.gpus, self.keys = quick, gpus, 1024 if quick else 16384
        self.share = self.keys // gpus

    def heat(self) -> Heat:
        """TileScale's program; on one GPU also libraries, on several the program on one."""
        other = Contender(*(("cublas and softmax", self.libraries) if self.gpus == 1 else ("one GPU", self.on_one)))
        entries = [other, ours("tilescale", self.program, self.own)]
        if self.gpus == 1:
            entries.append(ours("tilescale, 64 keys a step", lambda: self.program(64), self.own))
        flops = 2 * BATCH * HEADS * self.share * (2 * DIM + PE_DIM)
        read = 2 * BATCH * self.share * (DIM + PE_DIM)
        shape = BATCH, HEADS, self.keys
        return Heat("mla_decode", shape, "float16", self.gpus, "eager", other.name, entries, flops, read)

    def on_one(self) -> Runner:
        """All keys on the first rank's GPU, in a separate job; the other ranks' GPUs are idle."""
        if tilescale.init().rank != 0:
            return Runner(lambda: None, group=lambda calls: 0.0)
        words = ["--only", Decode(self.quick, 1).heat().title, "--contender", "tilescale", "--serve"]
        job = jobs.Served(SCRIPT, [*words, *(["--quick"] if self.quick else [])])
        return Runner(lambda: job.group(1), group=job.group)

    def program(self, step: int | None = None) -> Any:
        """The example's program, with tiles of `tile` keys."""
        make = trials.example("09_cp_flash_mla").cp_mla
        return make(self.gpus, BATCH, HEADS, self.keys, DIM, PE_DIM, tile_n=step, splits=SPLITS)

    def draw(self, seed: int) -> Case:
        """The same whole tensors on every rank; this rank's keys."""
        made = torch.Generator(trials.device()).manual_seed(seed)
        shapes = (BATCH, HEADS, DIM), (BATCH, HEADS, PE_DIM), (BATCH, self.keys, 1, DIM), (BATCH, self.keys, 1, PE_DIM)
        q, q_pe, kv, k_pe = (torch.randn(s, generator=made, device=made.device, dtype=torch.half) for s in shapes)
        reference, wants, bounds = trials.example("attention").reference, [], []
        for one in range(BATCH):  # float64 of all at once would not fit
            query = torch.cat([q[one], q_pe[one]], -1)
            want, bound = reference(query, torch.cat([kv[one], k_pe[one]], -1)[:, 0], kv[one, :, 0])
            wants.append(want.float())
            bounds.append(bound.float())
        rank = tilescale.init().rank
        mine = slice(rank * self.share, (rank + 1) * self.share)
        return Case((q, q_pe, kv[:, mine], k_pe[:, mine]), torch.stack(wants), torch.stack(bounds))

    def operands(self) -> list[torch.Tensor]:
        """Buffers of the queries and of this rank's keys, and of their parts with positions."""
        sequences = (BATCH, HEADS, DIM), (BATCH, HEADS, PE_DIM)
        keys = (BATCH, self.share, 1, DIM), (BATCH, self.share, 1, PE_DIM)
        return [trials.nothing(*shape, dtype=torch.half) for shape in (*sequences, *keys)]

    def libraries(self) -> Runner:
        """Two GEMMs and a softmax. Scores in float16 exceed the bound of float32: it is only timed."""
        q, q_pe, kv, k_pe = given = self.operands()
        trials.into(*given)(*self.draw(0).inputs)

        def call() -> torch.Tensor:
            values = kv[:, :, 0]
            scores = torch.bmm(q, values.mT).add_(torch.bmm(q_pe, k_pe[:, :, 0].mT))
            return torch.bmm(torch.softmax(scores * (DIM + PE_DIM) ** -0.5, -1), values)

        return Runner(call)

    def own(self, kernel: Any) -> Runner:
        given, out = self.operands(), trials.symmetric(BATCH, HEADS, DIM, dtype=torch.float32)
        call = trials.returning(out, kernel, *given, out)
        return checked(self.draw, trials.into(*given), call, [out], kernel.synchronize)
