# SPDX-License-Identifier: MIT
"""Warpgroups and warps on real GPUs: `torchrun --nproc-per-node N tests/gpu/thread_groups_check.py [names |
PART/PARTS]`.

Runs the single-device programs (with one rank only), those of one warpgroup that talks to peers, and the two reference
programs on all ranks, several launches each with fresh inputs and poisoned outputs, and compares with the emulator or
with float64. Prints a PASS or FAIL line for each check and rank; ends with exit code 1 if one fails.
"""

from __future__ import annotations

import os
import random
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tests.cuda import gated_programs, thread_group_programs  # noqa: E402
from tests.cuda.thread_group_exchanges import LEVELS, Case  # noqa: E402
from tests.cuda.thread_group_programs import CASES  # noqa: E402
from tests.language import programs as reference  # noqa: E402

LIMIT_S = 600.0
LAUNCHES = 4


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Raise if a result is not the expected one."""
    torch.testing.assert_close(
        found.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def run_case(case: Case) -> None:
    """One device: every launch against the emulator."""
    func = case.make()
    kernel = tilescale.compile(func)
    for launch in range(LAUNCHES):
        expected, mine = case.arguments(launch), [x.cuda() for x in case.arguments(launch)]
        tilescale.emulate(func, expected)
        kernel(*mine)
        torch.cuda.synchronize()
        for number, (a, b) in enumerate(zip(mine, expected, strict=True)):
            close(a, b, 2e-4, f"launch {launch}, argument {number}")


def skew() -> None:
    """Ranks begin at different times."""
    time.sleep(random.random() * 0.02)


def randoms(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Numbers that every rank can make for every other."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def couriers(world: Any, level: str) -> None:
    """One unit sends, the other waits for what comes."""
    blocks = 8
    shape = (blocks * thread_group_programs.ROWS, thread_group_programs.COLUMNS)
    kernel = tilescale.compile(thread_group_programs.couriers(blocks=blocks, level=level))
    x, y, z = (tilescale.empty(shape, dtype=torch.float32) for _ in range(3))
    flags = tilescale.zeros((blocks,), dtype=torch.int32)
    for launch in range(20):
        x.copy_(randoms(100 * launch + world.rank, shape)[0])
        z.fill_(float("nan"))
        skew()
        kernel(x, y, z, flags, launch + 1)
        torch.cuda.synchronize()
        sent = randoms(100 * launch + (world.rank - 1) % world.size, shape)[0]
        close(z, sent * 2 + world.rank, 1e-6, f"launch {launch}")


def namesakes(world: Any) -> None:
    """Warpgroups sum with their namesakes on all devices."""
    n = 64
    kernel = tilescale.compile(thread_group_programs.namesakes(n=n))
    for launch in range(20):
        parts = [randoms(100 * launch + rank, (2, n))[0] for rank in range(world.size)]
        y = torch.full((2, n), float("nan"), device="cuda")
        skew()
        kernel(parts[world.rank].cuda(), y)
        torch.cuda.synchronize()
        close(y, sum(p.double() for p in parts), 1e-5, f"launch {launch}")


def gated(world: Any, name: str, count: int = 6) -> None:
    """Warpgroups multiply what arrives while they do, and a loader waits for it: Y is poisoned before each call."""
    how = gated_programs.VARIANTS[name]
    kernel = tilescale.compile(gated_programs.arriving(**how))
    x, b = gated_programs.operands(0, world.rank, **how)
    sent, y = (tilescale.empty(x.shape, dtype=x.dtype) for _ in range(2))
    flags = tilescale.zeros((how.get("turns", 1), 6), dtype=torch.int32)
    for launch in range(20):
        x, b = gated_programs.operands(launch, world.rank, **how)
        sent.copy_(x)
        y.fill_(float("nan"))
        c = torch.full((len(x), gated_programs.COLUMNS), float("nan"), device="cuda")
        torch.cuda.synchronize()
        world.barrier()
        skew()
        kernel(sent, y, b.cuda(), c, flags, count, launch + 1)
        torch.cuda.synchronize()
        close(c, gated_programs.product(launch, world.rank, world.size, count, **how), 2e-3, f"launch {launch}")


def product(world: Any) -> None:
    """The tensor-parallel GEMM: warpgroups split the K tile, devices split K."""
    m, n, k = 256, 384, 128 * world.size
    kernel = tilescale.compile(reference.tensor_parallel_gemm(world.size, m, n, k))
    share = slice(world.rank * 128, (world.rank + 1) * 128)
    c = tilescale.empty((m, n), dtype=torch.float32)
    for launch in range(LAUNCHES):
        a, b = randoms(launch, (m, k), (k, n), dtype=torch.bfloat16)
        c.fill_(float("nan"))
        skew()
        kernel(a[:, share].contiguous().cuda(), b[share].contiguous().cuda(), c)
        torch.cuda.synchronize()
        close(c, a.double() @ b.double(), 1e-3, f"launch {launch}")


def attention(world: Any, exchange: Any, block_h: int, dim: int, splits: int = 1) -> None:
    """Context-parallel decoding: devices and blocks of a cluster split the keys, warpgroups the scores of a tile."""
    batch, heads, pe, block_n = 2, 2 * block_h, 64, 64
    own = 4 * block_n
    seq = own * world.size
    kernel = tilescale.compile(
        reference.context_parallel_mla(world.size, batch, heads, seq, dim, pe, block_h, block_n, exchange, splits)
    )
    share = slice(world.rank * own, (world.rank + 1) * own)
    for launch in range(LAUNCHES):
        shapes = ((batch, heads, dim), (batch, heads, pe), (batch, seq, 1, dim), (batch, seq, 1, pe))
        q, q_pe, kv, k_pe = randoms(launch, *shapes, dtype=torch.float16)
        out = torch.full((batch, heads, dim), float("nan"), device="cuda")
        skew()
        kernel(q.cuda(), q_pe.cuda(), kv[:, share].contiguous().cuda(), k_pe[:, share].contiguous().cuda(), out)
        torch.cuda.synchronize()
        keys = torch.cat([kv, k_pe], 3)[:, :, 0].double()
        scores = torch.einsum("bhd,bsd->bhs", torch.cat([q, q_pe], 2).double(), keys) / (dim + pe) ** 0.5
        expected = torch.einsum("bhs,bsd->bhd", scores.softmax(-1), kv[:, :, 0].double())
        close(out, expected, 4e-3, f"launch {launch}")


def checks(world: Any) -> dict[str, Callable[[], None]]:
    """Name -> check, in order."""
    found: dict[str, Callable[[], None]] = {}
    if world.size == 1:
        found |= {name: lambda case=case: run_case(case) for name, case in CASES.items()}
    for level in LEVELS:
        found[f"couriers, {level}s"] = lambda level=level: couriers(world, level)
    found["namesakes"] = lambda: namesakes(world)
    for name in gated_programs.VARIANTS:
        found[f"gated, {name}"] = lambda name=name: gated(world, name)
    found |= {f"gated, {count} tiles": lambda count=count: gated(world, "each step", count) for count in (0, 4)}
    found["reference: product"] = lambda: product(world)
    for name, exchange in (("gathered", reference.gathered), ("exchanged", reference.exchanged)):
        for block_h, dim in ((16, 128), (64, 256)):
            found[f"reference: attention, {name}, {block_h} heads, {dim} columns"] = (
                lambda exchange=exchange, block_h=block_h, dim=dim: attention(world, exchange, block_h, dim)
            )
    for splits in (2, 4):
        found[f"reference: attention, clusters of {splits}"] = (
            lambda splits=splits: attention(world, reference.gathered, 64, 512, splits)
        )
    return found


def wanted(found: dict[str, Callable[[], None]], words: list[str]) -> dict[str, Callable[[], None]]:
    """The checks that the command line names."""
    part = re.fullmatch(r"(\d+)/(\d+)", words[0]) if words else None
    if part is not None:
        return dict(list(found.items())[int(part[1]) - 1 :: int(part[2])])
    return {name: check for name, check in found.items() if not words or any(word in name for word in words)}


def main() -> None:
    """Run all checks whose names contain one of the arguments; or, given 2/3, every third from the second on."""
    world = tilescale.init()
    torch.cuda.set_device(world.device)
    watch = threading.Timer(LIMIT_S, lambda: (print(f"rank {world.rank}: out of time", flush=True), os._exit(2)))
    watch.daemon = True
    watch.start()
    failed = 0
    for name, check in wanted(checks(world), sys.argv[1:]).items():
        begin = time.time()
        try:
            check()
            print(f"PASS {name} (rank {world.rank}, {time.time() - begin:.1f} s)", flush=True)
        except Exception as error:
            failed += 1
            lines = str(error).strip().splitlines()[:12]
            print(f"FAIL {name} (rank {world.rank}): {type(error).__name__}: " + "\n    ".join(lines), flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
        if any(world.all_gather(failed)) and world.size > 1:
            break
    watch.cancel()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
