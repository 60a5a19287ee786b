# SPDX-License-Identifier: MIT
"""PyTorch's fused operators by TileScale on GPUs: `torchrun --nproc-per-node 2 tests/gpu/symm_mem_check.py`.

Through `torch.ops.symm_mem`, eagerly and in graphs, and in what inductor makes of functional collectives.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.ops_support import compare, main, random, runs, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, as_first, everyones, total  # noqa: E402
from tilescale import ops  # noqa: E402
from tilescale.ops.symm_mem import calls  # noqa: E402

SHAPES = [((2, 640, 512), 384), ((1, 1504, 1024), 2048), ((4096, 512), 1792), ((3, 128, 256), 264)]
"""Extents of A, whose last dimension but one is split over the ranks, and columns of B."""

Reference = tuple[torch.Tensor, torch.Tensor | None]
"""Expected result, and magnitudes of the parts of its sums."""


def check_eager(_: slice) -> None:
    """Rows of all dimensions but the last, sums and means, several B."""
    group = dist.group.WORLD.group_name
    fused = torch.ops.symm_mem
    for shape, n in SHAPES:
        dim, k = len(shape) - 2, shape[-1]
        A, B, C = random(*shape), as_first(random(k, n)), as_first(random(n + 8, k)).t()
        whole = torch.cat(list(everyones(A)), dim).float()
        want = torch.cat([whole, whole @ B.float(), whole @ C.float()], -1)

        def gather(A=A, B=B, C=C, dim=dim):
            kept, results = fused.fused_all_gather_matmul(A, [B, C], dim, group, return_A=True)
            return torch.cat([kept, *results], -1)

        runs(f"gather {shape}", gather, lambda x, w=want: compare("gather", x, w))
        big, one = random(*[n * SIZE if i == dim else n for i, n in enumerate(shape)]), random(k, n)
        summed = total(big.float() @ one.float())
        for op in ("sum", "avg"):
            part = summed.chunk(SIZE, dim)[RANK] / (SIZE if op == "avg" else 1)
            runs(
                f"scatter {shape} {op}",
                lambda A=big, B=one, op=op, dim=dim: fused.fused_matmul_reduce_scatter(A, B, op, dim, group),
                lambda x, w=part: compare("scatter", x, w),
            )


def check_inner_dimension(_: slice) -> None:
    """A gather of the last dimension of A, and a scatter of the result's columns."""
    group, fused = dist.group.WORLD.group_name, torch.ops.symm_mem
    for shape, n in SHAPES:
        A, B = random(*shape), random(SIZE * shape[-1], n)
        whole = torch.cat(list(everyones(A)), -1).float()
        want = whole @ B.float()

        def gather(A=A, B=B) -> torch.Tensor:
            return fused.fused_all_gather_matmul(A, [B], A.ndim - 1, group, return_A=False)[1][0]

        def several(A=A, B=B) -> torch.Tensor:
            kept, results = fused.fused_all_gather_matmul(A, [B, B], A.ndim - 1, group, return_A=True)
            return torch.cat([kept, *results], -1)

        runs(f"gather of the inner dimension {shape}", gather, lambda x, w=want: compare("gather", x, w))
        every = torch.cat([whole, want, want], -1)
        runs(f"the same, kept, two B {shape}", several, lambda x, w=every: compare("gather", x, w))
        weight = random(n, shape[-1]).t()
        part = total(A.float() @ weight.float()).chunk(SIZE, -1)[RANK]
        runs(
            f"scatter of columns {shape}",
            lambda A=A, B=weight: fused.fused_matmul_reduce_scatter(A, B, "sum", A.ndim - 1, group),
            lambda x, w=part: compare("scatter", x, w),
        )


def check_scaled(_: slice) -> None:
    """Float8 with scales of rows, local ones and those of all ranks, and of tensors; biases; all types of results."""
    for (shape, n), kind in itertools.product(SHAPES[:3], (torch.bfloat16, torch.float16, torch.float32)):
        check_scaled_gather(shape, n, kind)
        check_scaled_scatter(shape, n, kind)


def eighth(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(torch.float8_e4m3fn)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device=DEVICE) / 8 + 0.05


def check_scaled_gather(shape: tuple[int, ...], n: int, kind: torch.dtype) -> None:
    gather, group = torch.ops.symm_mem.fused_all_gather_scaled_matmul, dist.group.WORLD.group_name
    dim, A, B = len(shape) - 2, eighth(*shape), as_first(eighth(n, shape[-1])).t()
    rows, columns, bias = scales(*shape[:-1], 1), as_first(scales(1, n)), as_first(random(n))
    of_all, one = torch.cat(list(everyones(rows)), dim), torch.tensor(0.125, device=DEVICE)
    whole = torch.cat(list(everyones(A)), dim).float()
    for name, of_A, of_whole, of_B in (
        ("local rows", rows, of_all, columns),
        ("all rows", of_all, of_all, columns),
        ("tensors", one, one, one),
    ):

        def call(of_A: torch.Tensor = of_A, of_B: torch.Tensor = of_B) -> torch.Tensor:
            given = A, [B, B], of_A, [of_B, of_B], dim, group, [None, bias], [None] * 2, [kind] * 2, [False] * 2
            kept, results = gather(*given)
            if any(x.dtype != kind for x in results):
                raise ValueError(f"results are {[x.dtype for x in results]}")
            return torch.cat([kept.float(), *results], -1)

        product = (whole * of_whole) @ (B.float() * of_B)
        want = torch.cat([whole, product, product + bias], -1)
        runs(f"scaled gather {shape} {kind}, {name}", call, lambda x, w=want: compare("scaled gather", x, w))


def check_scaled_scatter(shape: tuple[int, ...], n: int, kind: torch.dtype) -> None:
    scatter, group = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter, dist.group.WORLD.group_name
    dim, bias = len(shape) - 2, as_first(random(n))
    A, B = eighth(*shape[:-2], shape[-2] * SIZE, shape[-1]), eighth(n, shape[-1]).t()
    rows, columns, one = scales(*A.shape[:-1], 1), scales(1, n), torch.tensor(0.125, device=DEVICE)
    for op, (of_A, of_B) in itertools.product(("sum", "avg"), ((rows, columns), (one, one))):
        product = total((A.float() * of_A) @ (B.float() * of_B)) + SIZE * bias
        want = product.chunk(SIZE, dim)[RANK] / (SIZE if op == "avg" else 1)

        def call(op: str = op, of_A: torch.Tensor = of_A, of_B: torch.Tensor = of_B) -> torch.Tensor:
            return scatter(A, B, of_A, of_B, op, dim, dim, group, [*A.shape[:-1], n], bias, None, kind)

        what = f"scaled scatter {shape} {kind}, {op}, {of_A.numel()} scales"
        runs(what, call, lambda x, w=want: compare("scaled scatter", x, w))


def check_inductor(_: slice) -> None:
    """`_micro_pipeline_tp` finds the pairs; the graph calls PyTorch's names and TileScale runs."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    group = dist.group.WORLD
    enable_symm_mem_for_group(group.group_name)
    up, down = as_first(random(1024, 1536)), as_first(random(1536, 1024))

    def block(x: torch.Tensor) -> torch.Tensor:
        gathered = functional.all_gather_tensor(x, 0, group)
        return functional.reduce_scatter_tensor(torch.relu(gathered @ up) @ down, "sum", 0, group)

    with torch._inductor.config.patch(_micro_pipeline_tp=True):
        compiled = torch.compile(block, fullgraph=True)
        for rows in (512, 1528):
            x = random(rows, 1024)
            before = sum(n for (_, reason), n in calls.items() if not reason)
            want = total(torch.relu(everyones(x).flatten(0, 1).float() @ up.float()).bfloat16().float() @ down.float())
            compare("compiled block", compiled(x), want.chunk(SIZE)[RANK])
            after = sum(n for (_, reason), n in calls.items() if not reason)
            if after - before < 2:
                raise ValueError(f"{after - before} of 2 operators of the compiled block ran TileScale's")
            say(f"PASS compiled block of {rows} rows")


def check_graphs(_: slice) -> None:
    """The pass of `installed(graphs=True)`: patterns of forward and backward, values, and what was replaced."""
    import torch.distributed._functional_collectives as functional

    from tilescale.ops.graph_patterns import replaced

    group, weight = dist.group.WORLD, as_first(random(1024))
    up, down, residual = as_first(random(1024, 1536)), as_first(random(1536, 1024)), as_first(random(512, 1024))

    def split(x: torch.Tensor) -> torch.Tensor:
        gathered = functional.all_gather_tensor(x, 0, group)
        return functional.reduce_scatter_tensor(torch.relu(gathered @ up) @ down, "sum", 0, group)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(torch.relu(x @ up) @ down, "sum", group)

    def normed(x: torch.Tensor) -> torch.Tensor:
        y = residual + functional.all_reduce(x * 2, "sum", group)
        return torch.nn.functional.rms_norm(y, (1024,), weight, 1e-6)

    def products(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Reference:
        return function(x).float(), None

    def of_normed(_: Any, x: torch.Tensor) -> Reference:
        """In float32: PyTorch rounds the sum at every rank, and the residual cancels most of the result."""
        summed = total(x * 2)
        y = residual.float() + summed
        scale = y.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * weight.float()
        return y * scale, (residual.float().abs() + summed.abs()) * scale.abs()

    wanted = {
        split: (products, {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}),
        whole: (products, {"matmul_all_reduce": 1}),
        normed: (of_normed, {"all_reduce_rms_norm": 1}),
    }
    for function, (reference, expected) in wanted.items():
        torch._dynamo.reset()
        with ops.installed(graphs=True), torch._inductor.config.patch(force_disable_caches=True):
            replaced.clear()
            compiled = torch.compile(function, fullgraph=True, dynamic=False)
            for _call in range(5):  # the operators' calls from the third one on are graphs
                x = random(512, 1024)
                compare(function.__name__, compiled(x), *reference(function, x))
            found = {name: count for (name, reason), count in replaced.items() if not reason}
        if found != expected:
            raise ValueError(f"{function.__name__}: {dict(replaced)} replaced, not {expected}")
        say(f"PASS graph of {function.__name__}: {found}")


if __name__ == "__main__":
    ops.install()
    checks = {"eager": check_eager, "inner": check_inner_dimension, "scaled": check_scaled}
    main({**checks, "inductor": check_inductor, "graphs": check_graphs})
