# SPDX-License-Identifier: MIT
"""Cluster products against cuBLAS, in turns: `python tests/gpu/cluster_speed.py [size of the matrices ...]`.

ONE PROCESS that measures, after others have compiled. Every contender's calls are a CUDA graph, so that the host's part
of a call does not count; each round runs all of them one after another, a warm-up in front of each, as the GPU's clock
depends on what ran before. Prints medians over the rounds, and ratios to cuBLAS of the same rounds.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tests.cuda import cluster_programs as programs  # noqa: E402
from tilescale.backends.cuda.lowering.clusters import ring  # noqa: E402

ROUNDS, CALLS = 12, 5
WORKERS = min(16, max((os.cpu_count() or 1) // 2, 1))

VARIANTS: dict[str, dict[str, Any]] = {
    "without clusters": {},
    "128x256": {},
    "128x256 rows": {"rows": True},
    "128x256 rows staged": {"rows": True, "staged": True},
    "128x256 rows staged, groups of 8": {"rows": True, "staged": True, "group": 8},
    "128x256 rows staged, groups of 4": {"rows": True, "staged": True, "group": 4},
    "128x256 rows staged, 3 stages": {"rows": True, "staged": True, "stages": 3},
    "128x256 staged": {"staged": True},
    "128x256 in flight": {"flight": 1},
    "128x256 rows in flight": {"rows": True, "flight": 1},
    "128x256 rows staged in flight": {"rows": True, "staged": True, "flight": 1},
    "128x256 rows staged in flight, groups of 8": {"rows": True, "staged": True, "flight": 1, "group": 8},
    "128x256x128, 2 stages, rows staged": {"rows": True, "staged": True, "tile": (256, 256, 128), "stages": 2},
    "128x128 x 2": {"tile": (256, 128, 64), "stages": 6, "rows": True, "staged": True, "flight": 1},
    "128x128 x 4": {"tile": (512, 128, 64), "size": 4, "stages": 6, "rows": True, "staged": True, "flight": 1},
    "128x256 x 4 rows staged in flight": {
        "tile": (512, 256, 64), "size": 4, "rows": True, "staged": True, "flight": 1
    },
    "in turn, rows in flight": {"programs": 132, "rows": True, "flight": 1},
    "in turn, rows staged in flight, 3 stages": {
        "programs": 132, "rows": True, "staged": True, "flight": 1, "stages": 3
    },
}  # fmt: skip


def without_clusters(n: int, bm: int = 128, bn: int = 256, bk: int = 64, stages: int = 4, group: int = 16) -> Any:
    """The same tiles as stock TileLang has them."""
    tn = n // bn

    @T.prim_func
    def plain(A: T.Tensor((n, n), "bfloat16"), B: T.Tensor((n, n), "bfloat16"), C: T.Tensor((n, n), "bfloat16")):
        with T.Kernel(n // bm * tn, threads=256) as i:
            a = T.alloc_shared((bm, bk), "bfloat16")
            b = T.alloc_shared((bk, bn), "bfloat16")
            c = T.alloc_fragment((bm, bn), "float32")
            out = T.alloc_shared((bm, bn), "bfloat16")
            row = (i // (group * tn) * group + i % group) * bm
            column = i % (group * tn) // group * bn
            T.clear(c)
            for step in T.Pipelined(n // bk, num_stages=stages):
                T.copy(A[row, step * bk], a)
                T.copy(B[step * bk, column], b)
                T.gemm(a, b, c)
            T.copy(c, out)
            T.copy(out, C[row, column])

    return plain


def kernel(name: str, n: int) -> Any:
    """A variant, compiled."""
    if name == "without clusters":
        return tilescale.compile(without_clusters(n))
    options = dict(VARIANTS[name])
    ring.IN_FLIGHT = options.pop("flight", 0)
    return tilescale.compile(programs.matmul((n, n, n), **options))


def operands(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and C, nothing right in C."""
    torch.manual_seed(0)
    a, b = (torch.randn(n, n, device="cuda").mul_(0.1).bfloat16() for _ in range(2))
    return a, b, torch.full_like(a, 77)


def graph(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Some calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    stream.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        for _ in range(CALLS):
            call()
    return captured


def time_us(captured: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a call, after a warm-up."""
    captured.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    captured.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS


def contenders(n: int) -> dict[str, torch.cuda.CUDAGraph]:
    """Those whose result is right."""
    a, b, c = operands(n)
    library = torch.empty_like(c)
    found = {"cuBLAS": graph(lambda: torch.mm(a, b, out=library))}
    expected = a.float() @ b.float()
    for name in VARIANTS:
        try:
            compiled = kernel(name, n)
            c.fill_(77)
            compiled(a, b, c)
            torch.cuda.synchronize()
            error = float((c.float() - expected).norm() / expected.norm())
            if not error < 4e-3:
                print(f"FAIL {name}: relative error {error}", flush=True)
                continue
            found[name] = graph(lambda compiled=compiled: compiled(a, b, c))
        except Exception:  # noqa: BLE001 - whatever it is, the others run
            print(f"FAIL {name}: {traceback.format_exc().strip().splitlines()[-1]}", flush=True)
    return found


def race(n: int) -> None:
    """Print what each takes."""
    graphs = contenders(n)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, captured in graphs.items():
            times[name].append(time_us(captured))
    for name, each in times.items():
        middle = statistics.median(each)
        ratio = statistics.median(t / base for t, base in zip(each, times["cuBLAS"], strict=True))
        rate = 2 * n**3 / middle * 1e-6
        print(f"{n} {name:45s} {middle:8.1f} us  {rate:4.0f} TFLOP/s  {ratio:.3f}  {min(each):.1f}-{max(each):.1f}")


def compile_part(sizes: list[int], part: int) -> None:
    """Some of the variants, into the cache on disk."""
    for n, name in [(n, name) for n in sizes for name in VARIANTS][part::WORKERS]:
        with contextlib.suppress(Exception):  # the race says what it is
            kernel(name, n)


def main(words: list[str]) -> None:
    """Compile, then race."""
    if words and words[0] == "compile":
        return compile_part([int(n) for n in words[2:]], int(words[1]))
    sizes = words or ["4096"]
    parts = [[sys.executable, __file__, "compile", str(i), *sizes] for i in range(WORKERS)]
    for worker in [subprocess.Popen(part) for part in parts]:
        worker.wait()
    for n in sizes:
        race(int(n))


if __name__ == "__main__":
    main(sys.argv[1:])
