# SPDX-License-Identifier: MIT
"""Schedules of sequential programs on GPUs: `torchrun --nproc-per-node 2 tests/gpu/schedules_check.py [names]`.

Rings, sums along columns and GEMMs of experts leave the same bits overlapped and in order, call after call on fresh
inputs; then both are timed. `default` does the same with GEMMs that are compiled without a schedule. `measured`
compiles a gather and a GEMM with the fastest schedule, and prints the measurements. Prints a line for each check, and
ends with exit code 1 if one fails.
"""

import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tests.gpu.ranks import DEVICE, SHARED, WORLD, barrier, everyones, join, say, slowest  # noqa: E402
from tests.ladder import NUMBERED, load  # noqa: E402
from tests.overlap.support import H200, overlapped  # noqa: E402
from tests.overlap.test_reductions import scale_then_scatter_columns  # noqa: E402
from tests.overlap.test_shifts import around, ring_product  # noqa: E402
from tilescale.tuning.database import Database  # noqa: E402
from tilescale.tuning.programs import gather_and_gemm, gemm_and_scatter, gemm_and_sum  # noqa: E402

ROUNDS, CALLS, CHECKED = 7, 6, 20


def agree(
    title: str,
    program: Any,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype = torch.bfloat16,
    chunk: int | None = None,
) -> None:
    """The overlapped program and the one in order, on the same inputs; then their times."""
    changed, schedule = overlapped(program, chunk=chunk)
    if not all(move.overlapped for move in schedule.moves):
        raise ValueError(f"{title}: {schedule}")
    both = [tilescale.compile(func, machine=H200, schedule="sequential") for func in (program, changed)]
    race(title, both, shapes, dtype)


def race(title: str, both: list[Any], shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    """A kernel in order and an overlapped one, on the same inputs; then their times."""
    inputs = [tilescale.empty(shape, dtype=dtype) for shape in shapes[:-1]]
    results = [tilescale.empty(shapes[-1], dtype=dtype) for _ in both]
    for turn in range(CHECKED):
        for tensor in inputs:
            tensor.normal_()
        for kernel, result in zip(both, results, strict=True):
            result.fill_(torch.nan)
            kernel(*inputs, result)
            kernel.synchronize()
        if not torch.equal(*results) or torch.isnan(results[0]).any():
            raise ValueError(f"{title}: other bits in call {turn}")
    say(f"PASS {title}: the same bits in {CHECKED} calls")
    if SHARED:
        return
    times = [timed(lambda k=kernel, r=result: k(*inputs, r)) for kernel, result in zip(both, results, strict=True)]
    say(f"TIME {title}: {times[0]:.1f} us in order, {times[1]:.1f} us overlapped")


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of a call, the median of the slowest rank."""
    found = []
    for _ in range(ROUNDS):
        barrier()
        call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return slowest(statistics.median(found))


def ring() -> None:
    n = WORLD.size
    for shape in ({}, {"shift_first": True, "both": True}, {"back": True, "guarded": True, "grids": 2}):
        grids = shape.get("grids", 1)
        agree(f"ring {shape}", around(n, 64, 16, **shape), [(64, 8), (grids, n, 64, 8)], torch.float32)


def product() -> None:
    n, size = WORLD.size, 8192
    shapes = [(size // n, size), (size, size), (n, size // n, size)]
    agree("product on a ring", ring_product(size, n), shapes, torch.bfloat16)


def columns() -> None:
    n = WORLD.size
    agree("sums along columns", scale_then_scatter_columns(n, 96, 16, 64), [(64, 96 * n), (64, 96)], torch.float32)


def default() -> None:
    for make, (m, n, k) in (
        (gather_and_gemm, (4096, 3584, 8192)),
        (gemm_and_scatter, (4096, 8192, 3584)),
        (gemm_and_scatter, (1024, 8192, 3584)),
        (gemm_and_sum, (2048, 8192, 3584)),
    ):
        program = make(H200, WORLD.size, (m, n, k))
        both = [tilescale.compile(program, schedule=schedule) for schedule in ("sequential", "overlap")]
        say(both[1].moves)
        shapes = [[int(extent) for extent in p.shape] for p in both[0].program.parameters]
        race(f"{make.__name__} {m} x {n} x {k}", both, [tuple(shape) for shape in shapes], torch.bfloat16)


def grouped() -> None:
    """GEMMs of experts between two exchanges; chunks of an expert and of less, a last tile that is cut off."""
    n, experts = WORLD.size, load(NUMBERED[24])
    for capacity, chunk in (256, None), (256, 64), (192, None):
        sizes = (n, 3, capacity, 256, 128)
        rows, up, down = (n, 3, capacity, 256), (3, 256, 128), (3, 128, 256)
        tile = {"tile": (128, 128, 64), "threads": 256}
        program = experts.with_capacity(*sizes, **tile)
        agree(f"experts {sizes}, chunk {chunk}", program, [rows, up, down, rows], chunk=chunk)
    by_offsets(experts)
    sizes = (n, 8, 512, 4096, 2048)
    program = experts.with_capacity(*sizes, tile=(128, 256, 64), stages=4, threads=256)
    both = [tilescale.compile(program, schedule=schedule) for schedule in ("sequential", "overlap")]
    say(both[1].moves)
    rows = (n, 8, 512, 4096)
    race(f"experts {sizes}", both, [rows, (8, 4096, 2048), (8, 2048, 4096), rows], torch.bfloat16)


def by_offsets(experts: Any) -> None:
    """Rows that are looked up: uneven numbers, also zero, and those of an expert in several chunks."""
    n, local, tokens, size = WORLD.size, 4, 512, 256
    program = experts.by_offsets(n, local, tokens, size, size)
    changed, schedule = overlapped(program, chunk=96, kept=("begins",))
    if not schedule.moves[1].overlapped:
        raise ValueError(str(schedule))
    both = [tilescale.compile(func, machine=H200, schedule="sequential") for func in (program, changed)]
    x, w = (tilescale.empty(shape, dtype=torch.bfloat16) for shape in ((tokens, size), (local, size, size)))
    results = [tilescale.empty((n, tokens, size), dtype=torch.float32) for _ in both]
    for turn in range(CHECKED):
        x.normal_()
        w.normal_()
        ends = [turn * 7 % 100, 100 + 2 * turn * WORLD.rank, 300, tokens]
        places = torch.tensor([[0, *ends]], dtype=torch.int32, device=DEVICE)
        for kernel, result in zip(both, results, strict=True):
            result.fill_(torch.nan)
            kernel(x, places, w, result)
            kernel.synchronize()
        if not torch.equal(*results) or torch.isnan(results[0]).any():
            raise ValueError(f"rows that are looked up: other bits in call {turn}")
    say(f"PASS rows that are looked up: the same bits in {CHECKED} calls")


def measured() -> None:
    n, (rows, cols, inner) = WORLD.size, (4096, 3584, 8192)
    kernel = tilescale.compile(gather_and_gemm(H200, n, (rows, cols, inner)), schedule=tilescale.measured)
    say(kernel.moves)
    for _, found in Database.of_user().all() if WORLD.rank == 0 else ():
        for trial in found["trials"]:
            say(trial["us"], trial["spread"], trial["estimated_us"], trial["config"], trial["failed"] or "")
    tensors = [(rows // n, inner), (inner, cols), (rows, inner), (rows, cols)]
    a, b, gathered, c = (tilescale.empty(shape, dtype=torch.bfloat16) for shape in tensors)
    for tensor in (a, b):
        tensor.normal_(0, 0.1)
    c.fill_(torch.nan)
    kernel(a, b, gathered, c)
    kernel.synchronize()
    want = everyones(a).view(rows, inner) @ b
    error = float((c.double() - want.double()).norm() / want.double().norm())
    if not error < 8e-3:
        raise ValueError(f"measured: relative error {error}")
    say(f"PASS measured: relative error {error:.1e}")


TIMED = (measured,)
CHECKS = {check.__name__: check for check in (ring, product, columns, grouped, default, *(() if SHARED else TIMED))}


def main() -> None:
    """Run the checks that are named, or all."""
    join()
    failed = 0
    for name in sys.argv[1:] or CHECKS:
        try:
            CHECKS[name]()
        except Exception as error:  # noqa: BLE001 - the others go on
            failed += 1
            traceback.print_exc()
            say(f"FAIL {name}: {error}")
    torch.distributed.destroy_process_group()
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
