# SPDX-License-Identifier: MIT
"""Experts between two all-to-alls, on GPUs: `torchrun --nproc-per-node 2 tests/gpu/exchange_check.py`.

The same program in order, and overlapped by the compiler. Results of both are compared with `torch.bmm`, and with each
other bit for bit, in repeated calls on fresh inputs; both are timed alternately. Exit code 1 if a check fails.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tests.gpu.ranks import DEVICE, WORLD, barrier, everyones, join  # noqa: E402

EXPERTS, CAPACITY, WIDTH, HIDDEN = 4, 1024, 4096, 2048
HIGH, WIDE, STEP = 128, 256, 64
ROUNDS = 12


def experts(devices: int) -> Any:
    """Slots for each expert go to its device, are multiplied with its weights, and come back."""
    each = CAPACITY // HIGH

    @T.prim_func
    def there_and_back(
        X: T.Tensor((devices, EXPERTS, CAPACITY, WIDTH), "bfloat16"),
        W: T.Tensor((EXPERTS, WIDTH, HIDDEN), "bfloat16"),
        Y: T.Tensor((devices, EXPERTS, CAPACITY, HIDDEN), "bfloat16"),
    ):
        with T.Kernel(device=devices, block=(HIDDEN // WIDE, each * EXPERTS, devices), threads=256) as (bx, by, part):
            come = T.alloc((devices, EXPERTS, CAPACITY, WIDTH), "bfloat16", level="l2")
            made = T.alloc((devices, EXPERTS, CAPACITY, HIDDEN), "bfloat16", level="l2")
            with T.Scale("device"):
                T.all_to_all(X, come)
            with T.Scale("block"):
                a = T.alloc((HIGH, STEP), "bfloat16", level="l1")
                b = T.alloc((STEP, WIDE), "bfloat16", level="l1")
                c = T.alloc((HIGH, WIDE), "float32", level="l0")
                out = T.alloc((HIGH, WIDE), "bfloat16", level="l1")
                expert, row = by // each, by % each * HIGH
                T.clear(c)
                for k in T.Pipelined(WIDTH // STEP, num_stages=3):
                    T.copy(come[part, expert, row, k * STEP], a)
                    T.copy(W[expert, k * STEP, bx * WIDE], b)
                    T.gemm(a, b, c)
                T.copy(c, out)
                T.copy(out, made[part, expert, row, bx * WIDE])
            with T.Scale("device"):
                T.all_to_all(made, Y)

    return there_and_back


def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Expected rows of this rank: its slots times the weights of all ranks' experts."""
    return torch.bmm(x.flatten(0, 1), everyones(w).flatten(0, 1)).view(*x.shape[:-1], HIDDEN)


def main() -> int:
    join()
    func, failed = experts(WORLD.size), 0
    kernels = {name: tilescale.compile(func, schedule=name) for name in ("sequential", "overlap")}
    if WORLD.rank == 0:
        print(kernels["overlap"].moves, flush=True)
    w = torch.randn(EXPERTS, WIDTH, HIDDEN, device=DEVICE).mul_(0.1).bfloat16()
    y = {name: tilescale.zeros((WORLD.size, EXPERTS, CAPACITY, HIDDEN), dtype=torch.bfloat16) for name in kernels}
    times: dict[str, list[float]] = {name: [] for name in kernels}
    for turn in range(ROUNDS):
        x = torch.randn(WORLD.size, EXPERTS, CAPACITY, WIDTH, device=DEVICE).mul_(0.1).bfloat16()
        for name, kernel in kernels.items():
            y[name].fill_(torch.nan)
            barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            kernel(x, w, y[name])
            end.record()
            kernel.synchronize()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
        want = reference(x, w)
        error = float((y["overlap"].float() - want.float()).norm() / want.float().norm())
        same = torch.equal(*(result.view(torch.int16) for result in y.values()))
        if not (same and error < 8e-3):
            failed = 1
            print(f"rank {WORLD.rank}, call {turn}: FAIL, relative error {error:.1e}, same bits: {same}", flush=True)
    if WORLD.rank == 0:
        print("FAIL" if failed else "PASS", {name: f"{statistics.median(us[3:]):.0f} us" for name, us in times.items()})
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
