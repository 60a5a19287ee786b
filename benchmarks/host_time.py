# SPDX-License-Identifier: MIT
"""The host's time for a call of an operator that repeats: `torchrun --nproc-per-node 2 benchmarks/host_time.py`.

Rounds of calls, each too short for a launch to wait for room in a queue, with nothing to wait for between them but the
ranks. Two ranks may share a GPU (TILESCALE_SHARE_GPUS=1), as nothing is said of the device's time. To compare two
versions, run them in turns. The first call's result is checked.
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

Case = tuple[str, Callable[[], torch.Tensor], torch.Tensor]


def everybody(*shape: int) -> list[torch.Tensor]:
    """What each rank has: all know that of all."""
    torch.manual_seed(sum(shape))
    return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(SIZE)]


def cases() -> Iterator[Case]:
    """What is called, and what it gives."""
    x = everybody(32 * KIB)
    yield "all_reduce of 64 KiB", lambda: ops.all_reduce(x[RANK]), torch.stack(x).float().sum(0)
    yield "all_gather of 64 KiB each", lambda: ops.all_gather(x[RANK]), torch.cat(x)
    yield from exchanges()
    a, w = everybody(128, KIB), everybody(KIB // 2, KIB)
    gathered = product(torch.cat(a), w[RANK])
    yield "all_gather_matmul, 128 rows", lambda: ops.all_gather_matmul(a[RANK], w[RANK].t()), gathered
    whole = torch.stack([product(*pair) for pair in zip(a, w, strict=True)]).sum(0)
    scattered = whole.chunk(SIZE)[RANK]
    yield "matmul_reduce_scatter, 128 rows", lambda: ops.matmul_reduce_scatter(a[RANK], w[RANK].t()), scattered


def exchanges() -> Iterator[Case]:
    """All-to-alls of few rows, of sizes that the host knows, or the device."""
    each = 8
    rows, numbers = everybody(each * SIZE, KIB), [each] * SIZE
    came, sent = torch.cat([x.chunk(SIZE)[RANK] for x in rows]), torch.tensor(numbers, device="cuda")
    yield "all_to_all_v", lambda: ops.all_to_all_v(rows[RANK], numbers, numbers), came
    yield "all_to_all_v, sizes on the device", lambda: ops.all_to_all_v(rows[RANK], sent, most=each)[0], came


def product(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """a times the transpose of w, in float32."""
    return a.float() @ w.float().t()


def timed(call: Callable[[], Any]) -> list[float]:
    """Microseconds of a call, in each round."""
    for _ in range(WARM):
        call()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        world.barrier()
        begin = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter_ns() - begin) / CALLS / 1e3)
    torch.cuda.synchronize()
    return found


def main() -> None:
    """Check and time all cases; rank 0 says how long they took."""
    torch.cuda.set_device(world.device)
    threading.Timer(LIMIT_S, lambda: (print("out of time", flush=True), os._exit(2))).start()
    for name, call, wanted in cases():
        error = (call().float() - wanted.float()).abs().max() / wanted.float().abs().max()
        assert error < 0.02, f"{name}: off by {error:.3g} of the largest number"
        found = timed(call)
        if RANK == 0:
            print(f"{name:<36} median {statistics.median(found):7.2f} us, least {min(found):7.2f} us", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
