# SPDX-License-Identifier: MIT
"""Operators on GPUs: `torchrun --nproc-per-node 2 tests/gpu/ops_check.py [name or name:number of a case ...]`.

Every operator runs on fresh random inputs, one rank late, its workspace full of NaN, eager, repeated and in a CUDA
graph, and is compared with float32. Prints a line for each check, and ends with exit code 1 if one fails.
"""

from __future__ import annotations

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
LATE_CYCLES = 2_000_000


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
    """Raises ValueError if a result is further from the reference than roundings explain.

    Those of a sum's parts are relative to the parts, the largest of which are some five times the typical element.
    """
    error = (got.float() - want.float()).abs()
    bound = 2.0**-6 * want.float().abs() + 2.0**-5 * want.float().abs().mean() + 1e-6
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
    (1536, 3584, 1024, False),
]
"""Rows of a rank, N, K, and whether the right operand is a transposed one."""


def operand(n: int, k: int, transposed: bool) -> torch.Tensor:
    """A right operand (k, n)."""
    return random(n, k).t() if transposed else random(k, n)


def check_all_gather_matmul(only: slice) -> None:
    for rows, n, k, transposed in SHAPES[only]:
        a, right, bias = random(rows, k), operand(n, k, transposed), random(n)
        want = everyones(a).view(-1, k).float() @ right.float() + bias.float()
        title = f"all_gather_matmul {SIZE * rows}x{n}x{k} {'NT' if transposed else 'NN'}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.all_gather_matmul(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )


def check_several_weights(_: slice) -> None:
    a, weights = random(700, 1024), [random(n, 1024) for n in (1024, 256, 256)]
    whole = everyones(a).view(-1, 1024).float()

    def check(results: list[torch.Tensor]) -> None:
        for result, weight in zip(results, weights, strict=True):
            compare("several weights", result, whole @ weight.float().t())

    runs("several weights", lambda: ops.all_gather_matmul(a, [w.t() for w in weights]), check)


def check_matmul_reduce_scatter(only: slice) -> None:
    for rows, n, k, transposed in SHAPES[only]:
        a, right, bias = random(SIZE * rows, k), operand(n, k, transposed), random(n)
        dist.broadcast(bias, 0)
        want = (total(a.float() @ right.float()) + bias.float()).chunk(SIZE)[RANK]
        title = f"matmul_reduce_scatter {SIZE * rows}x{n}x{k} {'NT' if transposed else 'NN'}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.matmul_reduce_scatter(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )


def check_gathers(only: slice) -> None:
    for shape in [(3,), (100, 33), (4096, 2048)][only]:
        x = random(*shape)
        want = everyones(x).flatten(0, 1)
        runs(f"all_gather {shape}", lambda x=x: ops.all_gather(x), lambda c, want=want: compare("gather", c, want))


def check_scatters(only: slice) -> None:
    for shape in [(3,), (100, 33), (4096, 2048)][only]:
        x = random(SIZE * shape[0], *shape[1:])
        want = total(x).chunk(SIZE)[RANK]
        runs(
            f"reduce_scatter {shape}", lambda x=x: ops.reduce_scatter(x), lambda c, want=want: compare("sum", c, want)
        )


def check_all_to_all(only: slice) -> None:
    for shape, cut, joined in [((SIZE * 3,), 0, 0), ((2, 64, 4 * SIZE, 24), 2, 1), ((2, 64 * SIZE, 4, 24), 1, 2)][only]:
        x = random(*shape)
        want = torch.cat([part.chunk(SIZE, cut)[RANK] for part in everyones(x)], joined)
        runs(
            f"all_to_all {shape}",
            lambda x=x, cut=cut, joined=joined: ops.all_to_all(x, cut, joined),
            lambda c, want=want: compare("exchange", c, want),
        )


def check_matmul_all_reduce(only: slice) -> None:
    for m, n, k, transposed in [(1, 1024, 512, True), (100, 1032, 520, False), (2047, 3584, 1024, True)][only]:
        a, right, bias = random(m, k), operand(n, k, transposed), random(n)
        dist.broadcast(bias, 0)
        want = total(a.float() @ right.float()) + bias.float()
        title = f"matmul_all_reduce {m}x{n}x{k} {'NT' if transposed else 'NN'}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.matmul_all_reduce(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )


def check_all_reduce(only: slice) -> None:
    for shape in [(3,), (100, 33), (1024, 512), (5000, 2048)][only]:
        x = random(*shape)
        want = total(x)
        runs(f"all_reduce {shape}", lambda x=x: ops.all_reduce(x), lambda c, want=want: compare("sum", c, want))


def check_gradients_and_compile(_: slice) -> None:
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


def main() -> None:
    """Checks in order; a failing one does not keep the others from running."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE)
    ops.workspace(8192, 8192)
    failed: list[str] = []
    every = [name for name in globals() if name.startswith("check_")]
    for word in sys.argv[1:] or every:
        name, _, number = word.partition(":")
        try:
            globals()[name](slice(int(number), int(number) + 1) if number else slice(None))
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - the next check may say more
            traceback.print_exc()
            failed.append(name)
    say(f"{len(failed)} failed: {failed}")
    dist.destroy_process_group()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
