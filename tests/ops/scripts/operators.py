# SPDX-License-Identifier: MIT
"""Operators in a job of several ranks. Every `check_` function runs on every rank, one after the other."""

from __future__ import annotations

import time

import torch

import tilescale
from tilescale import ops

WORLD = tilescale.init()
RANK, SIZE = WORLD.rank, WORLD.size


def everyones(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The random tensors of all ranks, which every rank can make."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(SIZE)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the rounding of inputs' products to bfloat16."""
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=0.15)


def check_all_gather_matmul():
    for rows, n, k in ((1, 8, 8), (33, 72, 40)):
        a, b, bias = everyones(rows, k), everyones(n, k, seed=1), everyones(n, seed=2)
        want = torch.cat(a).float() @ b[RANK].float().t() + bias[RANK].float()
        close(ops.all_gather_matmul(a[RANK], b[RANK].t(), bias=bias[RANK]), want)


def check_gradients_of_all_gather_matmul():
    a, b, bias = everyones(5, 16), everyones(24, 16, seed=1), everyones(24, seed=2)
    grads = everyones(5 * SIZE, 24, seed=3)
    leaves = [x[RANK].clone().requires_grad_() for x in (a, b, bias)]
    ops.all_gather_matmul(leaves[0], leaves[1].t(), bias=leaves[2]).backward(grads[RANK])
    far = sum(g.float() @ w.float() for g, w in zip(grads, b, strict=True)).chunk(SIZE)[RANK]
    close(leaves[0].grad, far)
    close(leaves[1].grad, grads[RANK].float().t() @ torch.cat(a).float())
    close(leaves[2].grad, grads[RANK].float().sum(0))


def check_matmul_reduce_scatter():
    a, b, bias = everyones(6 * SIZE, 24), everyones(16, 24, seed=1), everyones(16, seed=2)
    want = sum(x.float() @ w.float().t() for x, w in zip(a, b, strict=True)) + bias[0].float()
    close(ops.matmul_reduce_scatter(a[RANK], b[RANK].t(), bias=bias[0]), want.chunk(SIZE)[RANK])


def check_compiled():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def mlp(x, up, down):
        return ops.matmul_reduce_scatter(torch.relu(ops.all_gather_matmul(x, up.t())), down.t())

    x, up, down = everyones(4, 16), everyones(32, 16, seed=1), everyones(16, 32, seed=2)
    leaves = [t[RANK].clone().requires_grad_() for t in (x, up, down)]
    mlp(*leaves).float().pow(2).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


if __name__ == "__main__":
    checks = [value for name, value in list(globals().items()) if name.startswith("check_")]
    for check in checks:
        t = time.time()
        check()
        WORLD.barrier()
        if RANK == 0:
            print("passed", check.__name__, time.time() - t, flush=True)
