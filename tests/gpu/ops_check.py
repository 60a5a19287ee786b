# SPDX-License-Identifier: MIT
"""Operators on GPUs: `torchrun --nproc-per-node 2 tests/gpu/ops_check.py [names]`.

Every operator runs on fresh random inputs, one rank late, its workspace full of NaN, eager, repeated and in a CUDA
graph, and is compared with float32. Numbers are sizes at which products are raced against cuBLAS alone, and NCCL with
cuBLAS, in turns. Prints a line for each check, and ends with exit code 1 if one fails.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tilescale import ops  # noqa: E402
from tilescale.ops.group import team_of  # noqa: E402
from tilescale.ops.workspace import workspace_of  # noqa: E402

WORLD = tilescale.init()
RANK, SIZE, DEVICE = WORLD.rank, WORLD.size, WORLD.device
BEGIN = time.monotonic()
ROUNDS, CALLS, LATE_CYCLES = int(os.environ.get("OPS_ROUNDS", "8")), 6, 2_000_000
"""With OPS_ROUNDS=0 kernels are only compiled, for a job that finds them in TileLang's cache."""


def say(*what: Any) -> None:
    if RANK == 0:
        print(f"[{time.monotonic() - BEGIN:4.0f}]", *what, flush=True)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(0.1).to(dtype)


def everyones(x: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, (ranks, ...)."""
    out = torch.empty(SIZE, *x.shape, device=DEVICE, dtype=x.dtype)
    dist.all_gather_into_tensor(out.view(-1, *x.shape[1:]), x.contiguous())
    return out


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in float32."""
    x = x.float()
    dist.all_reduce(x)
    return x


def compare(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raises ValueError if a result is further from the reference than two roundings and the order of sums explain."""
    error = (got.float() - want.float()).abs()
    bound = 2.0**-6 * want.float().abs() + 2.0**-7 * want.float().abs().mean() + 1e-6
    wrong = int((~(error <= bound)).sum())
    if wrong or got.shape != want.shape:
        raise ValueError(f"{what}: {wrong} of {error.numel()} elements wrong, by up to {float(error.max()):.3g}")


def poison() -> None:
    space = workspace_of(team_of(""))
    for memory in (*space._shared, *space._own):
        memory.fill_(0xFF)  # NaN, in every type
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def runs(what: str, call: Callable[[], Any], check: Callable[[Any], None]) -> None:
    """Eager, twice more, and in a graph, ranks out of step."""
    for turn in range(4):
        poison()
        if turn % SIZE == RANK:
            torch.cuda._sleep(LATE_CYCLES)
        check(call())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for turn in range(2):
        poison()
        if turn % SIZE == RANK:
            torch.cuda._sleep(LATE_CYCLES)
        graph.replay()
        check(result)
    say(f"PASS {what}")


SHAPES = [
    (1, 64, 64, True),
    (24, 200, 136, False),
    (300, 512, 1024, True),
    (1100, 3584, 1024, True),
    (1024, 3584, 1024, False),
]
"""Rows of a rank, N, K, and whether the right operand is a transposed one."""


def operand(n: int, k: int, transposed: bool) -> torch.Tensor:
    """A right operand (k, n)."""
    return random(n, k).t() if transposed else random(k, n)


def check_all_gather_matmul() -> None:
    for rows, n, k, transposed in SHAPES:
        a, right, bias = random(rows, k), operand(n, k, transposed), random(n)
        want = everyones(a).view(-1, k).float() @ right.float() + bias.float()
        title = f"all_gather_matmul {SIZE * rows}x{n}x{k} {'NT' if transposed else 'NN'}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.all_gather_matmul(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )


def check_several_weights() -> None:
    a, weights = random(700, 1024), [random(n, 1024) for n in (1024, 256, 256)]
    whole = everyones(a).view(-1, 1024).float()

    def check(results: list[torch.Tensor]) -> None:
        for result, weight in zip(results, weights, strict=True):
            compare("several weights", result, whole @ weight.float().t())

    runs("several weights", lambda: ops.all_gather_matmul(a, [w.t() for w in weights]), check)


def check_matmul_reduce_scatter() -> None:
    for rows, n, k, transposed in SHAPES:
        a, right, bias = random(SIZE * rows, k), operand(n, k, transposed), random(n)
        dist.broadcast(bias, 0)
        want = (total(a.float() @ right.float()) + bias.float()).chunk(SIZE)[RANK]
        title = f"matmul_reduce_scatter {SIZE * rows}x{n}x{k} {'NT' if transposed else 'NN'}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.matmul_reduce_scatter(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )


def check_gathers() -> None:
    for shape in ((3,), (100, 33), (4096, 2048)):
        x = random(*shape)
        want = everyones(x).flatten(0, 1)
        runs(f"all_gather {shape}", lambda x=x: ops.all_gather(x), lambda c, want=want: compare("gather", c, want))
        x = random(SIZE * shape[0], *shape[1:])
        want = total(x).chunk(SIZE)[RANK]
        runs(
            f"reduce_scatter {shape}", lambda x=x: ops.reduce_scatter(x), lambda c, want=want: compare("sum", c, want)
        )


def check_matmul_all_reduce() -> None:
    for m, n, k, transposed in [(1, 1024, 512, True), (100, 1032, 520, False), (2047, 3584, 1024, True)]:
        a, right, bias = random(m, k), operand(n, k, transposed), random(n)
        dist.broadcast(bias, 0)
        want = total(a.float() @ right.float()) + bias.float()
        title = f"matmul_all_reduce {m}x{n}x{k} {'NT' if transposed else 'NN'}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.matmul_all_reduce(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )


def check_all_reduce() -> None:
    for shape in ((3,), (100, 33), (1024, 512), (5000, 2048)):
        x = random(*shape)
        want = total(x)
        runs(f"all_reduce {shape}", lambda x=x: ops.all_reduce(x), lambda c, want=want: compare("sum", c, want))


def check_gradients_and_compile() -> None:
    x, up, down = random(512, 1024), random(1024, 1024), random(1024, 1024)

    def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return ops.matmul_reduce_scatter(torch.relu(ops.all_gather_matmul(x, up.t())), down.t())

    h = everyones(x).view(-1, 1024).float() @ up.float().t()
    want = total(torch.relu(h).bfloat16().float() @ down.float().t()).chunk(SIZE)[RANK]
    for name, call in (("eager", mlp), ("compiled", torch.compile(mlp, fullgraph=True, backend="aot_eager"))):
        leaves = [t.clone().requires_grad_() for t in (x, up, down)]
        out = call(*leaves)
        compare(name, out.detach(), want)
        out.sum().backward()
        ones = torch.ones(SIZE * 512, 1024, device=DEVICE)
        compare(f"{name}, down", leaves[2].grad, ones.t() @ torch.relu(h).bfloat16().float())
        dh = ((ones @ down.float()).bfloat16() * (h > 0)).float()
        compare(f"{name}, up", leaves[1].grad, dh.t() @ everyones(x).view(-1, 1024).float())
        compare(f"{name}, x", leaves[0].grad, total(dh @ up.float()).chunk(SIZE)[RANK])
        say(f"PASS gradients, {name}")


# -- times -------------------------------------------------------------------------------------------------------------


def meet() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def race(title: str, contenders: dict[str, Callable[[], Any]]) -> None:
    """Times in turns: medians of the slowest rank, ratios to the first."""
    if not ROUNDS:
        return [call() for call in contenders.values()] and None
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            meet()
            call()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            slowest = torch.tensor(begin.elapsed_time(end) * 1e3 / CALLS, device=DEVICE)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[name].append(float(slowest))
    medians = {name: statistics.median(found) for name, found in times.items()}
    base = next(iter(medians.values()))
    for name, us in medians.items():
        say(f"TIME {title} {name}: {us:.1f} us ({min(times[name]):.0f}-{max(times[name]):.0f}), {us / base:.3f} x")


def time_products(*sizes: int) -> None:
    for m in sizes:
        rows = m // SIZE
        a, b, whole = random(rows, 8192), random(3584, 8192), random(m, 8192)

        def unfused(a: Any = a, b: Any = b, whole: Any = whole) -> torch.Tensor:
            dist.all_gather_into_tensor(whole, a)
            return whole @ b.t()

        ours = lambda a=a, b=b: ops.all_gather_matmul(a, b.t())  # noqa: E731
        alone = lambda whole=whole, b=b: whole @ b.t()  # noqa: E731
        race(f"ag_gemm {m}x3584x8192", {"cublas alone": alone, "nccl+cublas": unfused, "ours": ours})
        x, w = random(m, 3584), random(8192, 3584)
        out = random(rows, 8192)

        def scattered(x: Any = x, w: Any = w, out: Any = out) -> torch.Tensor:
            dist.reduce_scatter_tensor(out, x @ w.t())
            return out

        ours = lambda x=x, w=w: ops.matmul_reduce_scatter(x, w.t())  # noqa: E731
        alone = lambda x=x, w=w: x @ w.t()  # noqa: E731
        race(f"gemm_rs {m}x8192x3584", {"cublas alone": alone, "nccl+cublas": scattered, "ours": ours})

        def reduced(x: Any = x, w: Any = w) -> torch.Tensor:
            result = x @ w.t()
            dist.all_reduce(result)
            return result

        ours = lambda x=x, w=w: ops.matmul_all_reduce(x, w.t())  # noqa: E731
        race(f"gemm_ar {m}x8192x3584", {"cublas alone": alone, "nccl+cublas": reduced, "ours": ours})


def main() -> None:
    """Checks in order; a failing one does not keep the others from running. Numbers are sizes to time."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE)
    ops.workspace(8192, 8192)
    failed: list[str] = []
    every = [name for name in globals() if name.startswith("check_")]
    for name in sys.argv[1:] or [*every, "4096"]:
        try:
            time_products(int(name)) if name.isdigit() else globals()[name]()
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - the next check may say more
            traceback.print_exc()
            failed.append(name)
    say(f"{len(failed)} failed: {failed}")
    dist.destroy_process_group()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
