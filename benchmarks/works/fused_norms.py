# SPDX-License-Identifier: MIT
"""All-reduce, residual and RMSNorm: one kernel, two, and other libraries' two."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import trials

from tilescale.tuning.race import Contender, Heat, Runner

SHAPES = (
    (1, 6144), (6, 6144), (16, 8192), (32, 6144), (64, 6144), (100, 8192), (138, 6144), (300, 6144), (256, 8192),
    (512, 6144), (600, 6144),
)  # fmt: skip
"""Rows and columns of published times and of models, and between them."""

EAGER, EPS, DRAWN, GROUP = (32, 6144), 1e-5, 6, 128

Tensors = tuple[torch.Tensor, ...]
Call = Callable[["Rows"], Callable[[], Tensors]]
"""Makes a call from inputs; it returns the normalised rows and the sum, or float8 rows, their scales and the sum."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Calls in CUDA graphs, of bfloat16, and of random shapes; then eager calls, which allocate their results."""
    if gpus == 1:
        return
    for shape in SHAPES[:1] if quick else SHAPES:
        yield Work(*shape, torch.bfloat16).heat(gpus, "graph")
    for number, shape in enumerate(drawn(0 if quick else DRAWN)):
        yield Work(*shape, (torch.float16, torch.bfloat16)[number % 2]).heat(gpus, "graph")
    yield Work(*EAGER, torch.bfloat16).heat(gpus, "eager")


def drawn(count: int) -> list[tuple[int, int]]:
    """Random rows and columns, the same on all ranks."""
    chance = random.Random(34)
    return [(chance.randint(1, 600), 8 * chance.randint(128, 2048)) for _ in range(count)]


@dataclass
class Rows:
    """Inputs of a call, which a contender may lay elsewhere, and poisoned results."""

    x: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor
    out: list[torch.Tensor]


@dataclass(frozen=True)
class Work:
    """Rows of a sum that are normalised."""

    rows: int
    features: int
    dtype: torch.dtype

    def heat(self, gpus: int, mode: str, others: dict[str, Call] | None = None) -> Heat:
        """All contenders; `others` are more of them."""
        calls = {"nccl": nccl, "symm_mem": symm_mem, "tilescale, two kernels": two_kernels, "tilescale": one_kernel}
        calls |= {"tilescale, float8 per row": float8_rows, "tilescale, float8 per group": float8_groups}
        calls |= {"tilescale, float8, packed scales": float8_packed}
        entries = [
            Contender(name, functools.partial(self.runner, call)) for name, call in {**calls, **(others or {})}.items()
        ]
        shape, kind = (self.rows, self.features), str(self.dtype).removeprefix("torch.")
        return Heat("all_reduce_rms_norm", shape, kind, gpus, mode, "nccl", entries, calls=4 if mode == "graph" else 20)

    def runner(self, call: Call) -> Runner:
        """A contender with its tensors."""
        shape = self.rows, self.features
        x, y, normed, residual = (trials.nothing(*shape, dtype=self.dtype) for _ in range(4))
        rows = Rows(x, trials.nothing(self.features, dtype=self.dtype), residual, [normed, y])
        made = call(rows)

        def check(seed: int) -> None:
            want = self.load(rows, seed)
            for out in rows.out:
                out.fill_(torch.nan)
            trials.skew(seed)
            found = made()
            torch.cuda.synchronize()
            self.compare(found, want)

        self.load(rows, 0)
        return Runner(made, check)

    def load(self, rows: Rows, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New inputs; the norm and the sum that they have, in float32."""
        (x,) = trials.randoms(seed, self.dtype, tuple(rows.x.shape))
        generator = torch.Generator(rows.x.device).manual_seed(seed)
        for into in rows.weight, rows.residual:
            into.copy_(torch.randn(into.shape, generator=generator, device=into.device))
        rows.x.copy_(x)
        y = x.float()
        dist.all_reduce(y)
        y = (y.to(self.dtype).float() + rows.residual.float()).to(self.dtype).float()
        return y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + EPS) * rows.weight.float(), y

    def compare(self, found: Tensors, want: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Raises ValueError where a result is further off than its roundings."""
        *normed, y = found
        if normed[-1].dtype is torch.int32:
            normed[-1] = _unpacked(normed[-1])
        narrow = 2 * torch.finfo(self.dtype).eps
        trials.compare(y, trials.Case((), want[1], narrow * want[1].abs() + narrow))
        rows, bound = normed[0], narrow * want[0].abs() + narrow * want[0].abs().mean()
        if len(normed) == 2:
            wide = self.features if normed[1].shape[1] == 1 else GROUP
            factors = normed[1].repeat_interleave(wide, 1)[:, : self.features]
            rows, bound = rows.float() * factors, bound + 2.0**-4 * want[0].abs() + 2.0**-9 * factors
        trials.compare(rows, trials.Case((), want[0], bound))


@functools.cache
def _norm() -> Callable[..., Tensors]:
    """PyTorch's sum with the residual and norm, by its compiler."""

    def normalised(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        y = x + residual
        return torch.nn.functional.rms_norm(y, y.shape[1:], weight, EPS), y

    return torch.compile(normalised)


def nccl(rows: Rows) -> Callable[[], Tensors]:
    """NCCL in place, then the compiled norm."""
    norm = _norm()

    def call() -> Tensors:
        dist.all_reduce(rows.x)
        return norm(rows.x, rows.residual, rows.weight)

    return call


def symm_mem(rows: Rows) -> Callable[[], Tensors]:
    """PyTorch's one-shot all-reduce of symmetric memory, which has the inputs, then the compiled norm."""
    import torch.distributed._symmetric_memory as symm

    rows.x = symm.empty(rows.x.shape, dtype=rows.x.dtype, device=rows.x.device)
    symm.rendezvous(rows.x, dist.group.WORLD)
    norm, group, reduced = _norm(), dist.group.WORLD.group_name, torch.ops.symm_mem.one_shot_all_reduce
    return lambda: norm(reduced(rows.x, "sum", group), rows.residual, rows.weight)


def two_kernels(rows: Rows) -> Callable[[], Tensors]:
    """Our all-reduce, then the compiled norm."""
    from tilescale import ops

    norm = _norm()
    return lambda: norm(ops.all_reduce(rows.x), rows.residual, rows.weight)


def one_kernel(rows: Rows) -> Callable[[], Tensors]:
    from tilescale import ops

    return lambda: ops.all_reduce_rms_norm(rows.x, rows.weight, rows.residual, eps=EPS)


def float8_rows(rows: Rows) -> Callable[[], Tensors]:
    """The operator that quantizes, with a scale for each row."""
    from tilescale import ops

    return lambda: ops.all_reduce_rms_norm_float8(rows.x, rows.weight, rows.residual, eps=EPS)


def float8_groups(rows: Rows) -> Callable[[], Tensors]:
    """The same, with a scale for 128 columns."""
    from tilescale import ops

    return lambda: ops.all_reduce_rms_norm_float8(rows.x, rows.weight, rows.residual, eps=EPS, group_size=GROUP)


def float8_packed(rows: Rows) -> Callable[[], Tensors]:
    """The same, with exponents as scales, four in a word."""
    from tilescale import ops

    how = {"eps": EPS, "group_size": GROUP, "packed": True}
    return lambda: ops.all_reduce_rms_norm_float8(rows.x, rows.weight, rows.residual, **how)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """The scales of such words."""
    return torch.exp2(words.contiguous().view(torch.uint8).float() - 127)
