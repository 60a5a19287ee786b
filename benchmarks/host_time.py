# SPDX-License-Identifier: MIT
"""Host time of a repeated call of an operator: `torchrun --nproc-per-node 2 benchmarks/host_time.py`.

Four numbers: with the same tensors in each call; with different ones in each, as in a model; and with gradients,
forward and backward. Each round of calls is too short to fill the launch queue; ranks synchronize between rounds. Two
ranks may share a GPU (TILESCALE_SHARE_GPUS=1), as the device's time is not measured. To compare two versions, alternate
their runs. The first call's result is checked.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import tilescale  # noqa: E402
from tilescale import ops  # noqa: E402

LIMIT_S = 150.0
CALLS, ROUNDS, WARM = 20, 25, 8
KIB = 1 << 10

world = tilescale.init()
SIZE, RANK = world.size, world.rank

Case = tuple[str, Callable[..., torch.Tensor], list[torch.Tensor], torch.Tensor]


def everybody(*shape: int) -> list[torch.Tensor]:
    """Rows of each rank, known to all ranks."""
    torch.manual_seed(sum(shape))
    return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(SIZE)]


def cases() -> Iterator[Case]:
    """An operator to call, its inputs, and the expected result."""
    x = everybody(32 * KIB)
    yield "all_reduce of 64 KiB", ops.all_reduce, [x[RANK]], torch.stack(x).float().sum(0)
    yield "all_gather of 64 KiB each", ops.all_gather, [x[RANK]], torch.cat(x)
    yield from exchanges()
    for rows in (128, 2 * KIB):
        a, w = everybody(rows, KIB), everybody(KIB // 2, KIB)
        gathered = product(torch.cat(a), w[RANK])
        gather = lambda a, w: ops.all_gather_matmul(a, w.t())  # noqa: E731
        yield f"all_gather_matmul, {rows} rows", gather, [a[RANK], w[RANK]], gathered
        whole = torch.stack([product(*pair) for pair in zip(a, w, strict=True)]).sum(0)
        scatter = lambda a, w: ops.matmul_reduce_scatter(a, w.t())  # noqa: E731
        yield f"matmul_reduce_scatter, {rows} rows", scatter, [a[RANK], w[RANK]], whole.chunk(SIZE)[RANK]


def exchanges() -> Iterator[Case]:
    """All-to-alls of few rows, with sizes known to the host, or to the device only."""
    each = 8
    rows, numbers = everybody(each * SIZE, KIB), [each] * SIZE
    came, sent = torch.cat([x.chunk(SIZE)[RANK] for x in rows]), torch.tensor(numbers, device="cuda")
    yield "all_to_all_v", lambda x: ops.all_to_all_v(x, numbers, numbers), [rows[RANK]], came
    yield "all_to_all_v, sizes on the device", lambda x: ops.all_to_all_v(x, sent, most=each)[0], [rows[RANK]], came


def product(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """a times the transpose of w, in float32."""
    return a.float() @ w.float().t()


def timed(prepare: Callable[[], Callable[[], Any]]) -> float:
    """Microseconds of a call, in the median round; `prepare` makes the arguments of the next call, outside the measured
    time.
    """
    for _ in range(WARM):
        prepare()()
    found = []
    for _ in range(ROUNDS):
        calls = [prepare() for _ in range(CALLS)]
        torch.cuda.synchronize()
        world.barrier()
        begin = time.perf_counter_ns()
        kept = [call() for call in calls]
        found.append((time.perf_counter_ns() - begin) / len(kept) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(found)


def ways(function: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> Iterator[tuple[str, float]]:
    """Time all variants of a call of a function."""
    yield "again", timed(lambda: lambda: function(*given))

    def elsewhere(grad: bool) -> list[torch.Tensor]:
        return [x.clone().requires_grad_(grad) for x in given]

    def called(grad: bool) -> Callable[[], Any]:
        tensors = elsewhere(grad)
        return lambda: function(*tensors)

    def backward() -> Callable[[], Any]:
        result = function(*elsewhere(True))
        grad = torch.ones_like(result)
        return lambda: result.backward(grad)

    yield "elsewhere", timed(lambda: called(False))
    yield "forward", timed(lambda: called(True))
    yield "backward", timed(backward)


def main() -> None:
    """Check and time all cases; rank 0 prints the times."""
    torch.cuda.set_device(world.device)
    threading.Timer(LIMIT_S, lambda: (print("out of time", flush=True), os._exit(2))).start()
    for name, function, given, wanted in cases():
        error = (function(*given).float() - wanted.float()).abs().max() / wanted.float().abs().max()
        assert error < 0.02, f"{name}: off by {error:.3g} of the largest number"
        told = ", ".join(f"{way} {us:7.2f} us" for way, us in ways(function, given))
        if RANK == 0:
            print(f"{name:<36} {told}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
