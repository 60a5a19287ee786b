# SPDX-License-Identifier: MIT
"""Grids that wait, send and signal, on GPUs: `torchrun --nproc-per-node 2 tests/gpu/overlap_check.py [names]`.

Every program is compared with `torch.mm` on random inputs and poisoned outputs, then raced against it alternately.
Copies by copy engine are left out: data and flags of peers exist beforehand, or are written late by the host. Prints a
line for each check, and ends with exit code 1 if one fails.
"""

import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tests.cuda import overlap_programs as programs  # noqa: E402
from tests.gpu import ranks  # noqa: E402
from tests.gpu.ranks import DEVICE, SHARED, WORLD, barrier, everyones, slowest, total  # noqa: E402

ROUNDS, CALLS = 10, 6
BOUND = 8e-3
"""Largest relative error in the Frobenius norm: results are rounded to bfloat16, sums of parts twice."""


def say(*what: Any) -> None:
    """Print by the first rank, with the seconds since the start."""
    ranks.say(f"[{time.monotonic() - BEGIN:4.0f}]", *what)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(0.1).to(torch.bfloat16)


def symmetric(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return tilescale.zeros(shape, dtype=dtype)


def check(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error < BOUND:
        raise ValueError(f"{what}: relative error {error}")
    say(f"PASS {what}: relative error {error:.1e}")


def race(title: str, contenders: dict[str, Callable[[], Any]], base: str, moved: float = 0) -> None:
    """Alternating times: median of the slowest rank, ratio to the baseline, smallest and largest."""
    if SHARED:
        return
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            barrier()
            call()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
    medians = {name: slowest(statistics.median(found)) for name, found in times.items()}
    for name, us in medians.items():
        rate = f", {moved / us / 1e3:.0f} GB/s" if moved and name != base else ""
        spread = f"{min(times[name]):.0f}-{max(times[name]):.0f}"
        say(f"TIME {title} {name}: {us:.1f} us ({spread}), {us / medians[base]:.3f} x{rate}")


# -- all-gather and GEMM
# -------------------------------------------------------------------------------------------------


def gathered_parts(shape: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """This rank's rows, those of all, the other operand, and the result."""
    m, n, k = shape
    mine, b = random(m // WORLD.size, k), random(n, k)
    full = everyones(mine).view(m, k)
    return mine, full, b, full @ b.t()


def ag(title: str, shape: tuple[int, int, int], **options: Any) -> None:
    """The flags are set before; then a call whose operands and flags come while it waits."""
    m, n, k = shape
    rows, chunk = m // WORLD.size, 512
    _, full, b, want = gathered_parts(shape)
    gathered, arrived = symmetric(WORLD.size, rows, k), symmetric(WORLD.size, rows // chunk, dtype=torch.int32)
    kernel = tilescale.compile(programs.ag_gemm(WORLD.size, shape, chunk=chunk, **options))
    c = torch.full((WORLD.size, rows, n), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    gathered.copy_(full.view_as(gathered))
    arrived.fill_(1)
    kernel(gathered, b, c, arrived)
    check(f"{title}, flags set", c.view(m, n), want)
    calls = {"torch.mm": lambda: torch.mm(full, b.t()), "ours": lambda: kernel(gathered, b, c, arrived)}
    race(title, calls, "torch.mm")
    for turn in range(3):
        late(kernel, full, b, gathered, c, arrived)
        check(f"{title}, flags set late, {turn}", c.view(m, n), want)


def late(kernel: Any, full: Any, b: Any, gathered: Any, c: Any, arrived: Any) -> None:
    """Rows and flags come from the host, by copy engine, while the kernel waits for them."""
    rows, one = full.cpu().pin_memory().view(gathered.shape), torch.ones(1, dtype=torch.int32).pin_memory()
    for tensor in (gathered, c):
        tensor.fill_(float("nan"))
    arrived.zero_()
    barrier()
    side = torch.cuda.Stream()
    kernel(gathered, b, c, arrived)
    time.sleep(0.02)
    with torch.cuda.stream(side):
        chunks = arrived.shape[1]
        chunk = gathered.shape[1] // chunks
        for shard in range(WORLD.size):
            for i in range(chunks):
                part = slice(i * chunk, (i + 1) * chunk)
                gathered[shard, part].copy_(rows[shard, part], non_blocking=True)
                arrived[shard, i : i + 1].copy_(one, non_blocking=True)
    barrier()


def senders(shape: tuple[int, int, int], **options: Any) -> None:
    m, n, k = shape
    mine, full, b, want = gathered_parts(shape)
    rows = m // WORLD.size
    gathered, arrived = symmetric(WORLD.size, rows, k), symmetric(WORLD.size, rows // 512, dtype=torch.int32)
    kernel = tilescale.compile(programs.ag_gemm_senders(WORLD.size, shape, **options))
    c = torch.full((WORLD.size, rows, n), float("nan"), device=DEVICE, dtype=torch.bfloat16)

    def call() -> None:
        arrived.zero_()
        kernel(gathered, b, c, arrived)

    for turn in range(3):
        gathered.fill_(float("nan"))
        gathered[WORLD.rank].copy_(mine)
        barrier()
        call()
        barrier()
        check(f"AG+GEMM {options}, {turn}", c.view(m, n), want)
    race(f"AG+GEMM {options}", {"torch.mm": lambda: torch.mm(full, b.t()), "ours": call}, "torch.mm")


def loads(shape: tuple[int, int, int]) -> None:
    """Rows of peers are loaded remotely, by a producer ahead or by the threads that multiply."""
    m, n, k = shape
    mine, full, b, want = gathered_parts(shape)
    a, ready = symmetric(m // WORLD.size, k), symmetric(WORLD.size, dtype=torch.int32)
    a.copy_(mine)
    ready.fill_(1)
    calls: dict[str, Callable[[], Any]] = {"torch.mm": lambda: torch.mm(full, b.t())}
    for options in ({}, {"waits": True}, {"waits": True, "blocks": 16, "stages": 3}, {"impl": "lsu"}):
        kernel = tilescale.compile(programs.ag_gemm_by_loads(WORLD.size, shape, **options))
        c = torch.full((WORLD.size, m // WORLD.size, n), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        barrier()
        kernel(a, b, c, ready)
        barrier()
        check(f"AG+GEMM by loads {options}", c.view(m, n), want)
        calls[str(options)] = partial(kernel, a, b, c, ready)
    race("AG+GEMM by loads", calls, "torch.mm")


# -- GEMM and reduce-scatter
# ---------------------------------------------------------------------------------------------


def rs(title: str, shape: tuple[int, int, int], **options: Any) -> None:
    m, n, k = shape
    size, rank, rows, chunk = WORLD.size, WORLD.rank, m // WORLD.size, 512
    direct = options.get("direct", False)
    bm, bn, _ = options.get("tile", (128, 256, 64))
    a, b = random(m, k), random(n, k)
    whole = a @ b.t()
    inbox, arrived = symmetric(size, rows, n), symmetric(size, rows // chunk, dtype=torch.int32)
    parts, done = symmetric(size, rows, n), symmetric(size, rows // chunk, dtype=torch.int32)
    c = torch.full((rows, n), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    kernel = tilescale.compile(programs.rs_gemm(size, shape, chunk=chunk, **options))
    operands = (a.view(size, rows, k), b, c, parts, inbox, done, arrived)
    if direct:
        want = total(whole).view(size, rows, n)[rank]
    else:
        inbox.copy_(random(size, rows, n))
        arrived.fill_(1)
        others = [inbox[s].float() for s in range(size) if s != rank]
        want = whole.view(size, rows, n)[rank].float() + sum(others)

    def call() -> None:
        if direct:
            arrived.zero_()
        kernel(*operands)

    for turn in range(3):
        c.fill_(float("nan"))
        parts.fill_(float("nan"))
        done.zero_()
        barrier()
        call()
        barrier()
        check(f"{title}, {turn}", c, want)
        if not direct:
            for owner in (o for o in range(size) if o != rank):
                check(f"{title}, parts for {owner}", parts[owner], whole.view(size, rows, n)[owner])
                per = chunk // bm * (n // bn)
                if done[owner].unique().tolist() != [per]:
                    raise ValueError(f"{title}: counted {done[owner].tolist()}, not {per}")
    race(title, {"torch.mm": lambda: torch.mm(a, b.t()), "ours": call}, "torch.mm")


# -- puts --------------------------------------------------------------------------------------------------------------


def puts() -> None:
    rows = columns = 8192
    x, y = random(rows, columns), symmetric(rows, columns)
    theirs = torch.empty_like(x)
    everybody = everyones(x)
    calls: dict[str, Callable[[], Any]] = {"local copy": lambda: theirs.copy_(x)}
    ways = ((132, "tma", 256), (132, "tma", 128), (32, "tma", 256), (0, "tma", 128), (0, "lsu", 128))
    for blocks, impl, wide in ways:
        kernel = tilescale.compile(programs.put(WORLD.size, rows, columns, blocks, impl, wide))
        name = f"{impl} {blocks or 'all'} blocks 128x{wide}"
        y.fill_(float("nan"))
        barrier()
        kernel(x, y)
        barrier()
        check(f"put {name}", y, everybody[WORLD.rank - 1])
        calls[name] = lambda kernel=kernel: kernel(x, y)
    race("put 128 MiB", calls, "local copy", moved=x.numel() * 2)


LESS = max(4096, 8 * 128 * WORLD.size)
"""Rows: a group of tiles for each rank at least."""

CHECKS: dict[str, Callable[[], None]] = {
    "ag": lambda: ag("AG+GEMM 8192x3584x8192 grid", (8192, 3584, 8192)),
    "ag-persistent": lambda: ag("AG+GEMM 8192x3584x8192 persistent", (8192, 3584, 8192), blocks=132, stages=3),
    "ag-small": lambda: ag(f"AG+GEMM {LESS}x3584x8192 grid 128x224", (LESS, 3584, 8192), tile=(128, 224, 64)),
    "senders": lambda: senders((8192, 3584, 8192), senders=16),
    "senders-8": lambda: senders((8192, 3584, 8192), senders=8),
    "put": puts,
    "rs": lambda: rs("GEMM+RS 8192x8192x3584 local, grid", (8192, 8192, 3584)),
    "rs-persistent": lambda: rs("GEMM+RS 8192x8192x3584 local, persistent", (8192, 8192, 3584), blocks=132, stages=3),
    "rs-direct-persistent": lambda: rs(
        "GEMM+RS 8192x8192x3584 direct, persistent", (8192, 8192, 3584), blocks=132, stages=3, direct=True
    ),
    "loads": lambda: loads((2048, 1024, 4096)),
    "rs-small": lambda: rs(f"GEMM+RS {LESS}x8192x3584 local, persistent", (LESS, 8192, 3584), blocks=132, stages=3),
}


def main() -> int:
    ranks.join()
    torch.manual_seed(WORLD.rank)
    failed = 0
    for name in sys.argv[1:] or CHECKS:
        try:
            CHECKS[name]()
        except Exception:
            failed += 1
            print(f"FAIL {name} rank {WORLD.rank}\n{traceback.format_exc()}", flush=True)
        barrier()
    return int(failed > 0)


if __name__ == "__main__":
    BEGIN = time.monotonic()
    sys.exit(main())
