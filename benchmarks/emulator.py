# SPDX-License-Identifier: MIT
"""Speed of the emulator on this computer: `python benchmarks/emulator.py`.

Each case runs a program, compares its result with torch's, and reports the CPU time, of one core, and the rates of
emulated work: tile operations, bytes of device memory read and written, floating-point operations. They predict how
long a test takes, not the time of the emulated machine. Then the same with each check, with all of them, and with the
record for simulated time, all of which `tilescale.emulate` enables by default.
"""

import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tilescale.backends.emulator.checks import CHECKS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "emulator.json"


@dataclass(frozen=True)
class Work:
    """A program with its arguments and its amount of work.

    Attributes:
        run: emulates it once, with options of `tilescale.emulate`.
        check: raises AssertionError if the result is wrong.
        tile_ops: tile operations over all programs (copies, GEMMs, reductions, parallel loops).
        bytes: device memory read and written by tile operations.
        flops: floating-point operations.
    """

    run: Callable[..., Any]
    check: Callable[[], None]
    tile_ops: int
    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Measurement:
    """One line of the results: the shortest of the repetitions, and rates from it.

    Attributes:
        cpu_s: seconds without checks and without the record of time.
        with_s: seconds with each of them.
    """

    case: str
    devices: int
    cpu_s: float
    tile_ops_per_s: float
    bytes_per_s: float
    flops_per_s: float
    with_s: dict[str, float]


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Raise AssertionError unless two tensors agree."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


# -- cases -------------------------------------------------------------------------------------------------------------


def elementwise(n: int = 4096, tile: int = 128) -> Work:
    """y = 2 x + 1 on n x n float32."""

    @T.prim_func
    def program(X: T.Tensor((n, n), "float32"), Y: T.Tensor((n, n), "float32")):
        with T.Kernel(n // tile, n // tile, threads=256) as (bx, by):
            x = T.alloc_fragment((tile, tile), "float32")
            T.copy(X[by * tile, bx * tile], x)
            for i, j in T.Parallel(tile, tile):
                x[i, j] = x[i, j] * 2 + 1
            T.copy(x, Y[by * tile, bx * tile])

    x, y = torch.randn(n, n), torch.empty(n, n)
    blocks = (n // tile) ** 2
    return Work(
        run=lambda **options: tilescale.emulate(program, [x, y], **options),
        check=lambda: close(y, x * 2 + 1, 1e-6),
        tile_ops=3 * blocks,
        bytes=8 * n * n,
        flops=2 * n * n,
    )


def gemm(n: int = 2048, dtype: str = "float16") -> Work:
    """GEMM of n x n x n with float32 accumulation, tiles of 128 x 128 x 32."""

    @T.prim_func
    def program(A: T.Tensor((n, n), dtype), B: T.Tensor((n, n), dtype), C: T.Tensor((n, n), "float32")):
        with T.Kernel(n // 128, n // 128, threads=128) as (bx, by):
            a = T.alloc_shared((128, 32), dtype)
            b = T.alloc_shared((32, 128), dtype)
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for k in T.Pipelined(n // 32, num_stages=3):
                T.copy(A[by * 128, k * 32], a)
                T.copy(B[k * 32, bx * 128], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 128, bx * 128])

    kind = getattr(torch, dtype)
    a, b, c = torch.randn(n, n).to(kind), torch.randn(n, n).to(kind), torch.empty(n, n)
    blocks, steps = (n // 128) ** 2, n // 32
    loaded = blocks * steps * 2 * 128 * 32 * kind.itemsize
    return Work(
        run=lambda **options: tilescale.emulate(program, [a, b, c], **options),
        check=lambda: close(c, a.float() @ b.float(), 1e-2),
        tile_ops=blocks * (3 * steps + 2),
        bytes=loaded + 4 * n * n,
        flops=2 * n**3,
    )


def flash_attention(heads: int = 8, seq: int = 1024, dim: int = 64) -> Work:
    """Online-softmax attention, tiles of 64 queries and 64 keys, float16."""
    scale = dim**-0.5

    @T.prim_func
    def program(
        Q: T.Tensor((heads, seq, dim), "float16"),
        K: T.Tensor((heads, seq, dim), "float16"),
        V: T.Tensor((heads, seq, dim), "float16"),
        Y: T.Tensor((heads, seq, dim), "float16"),
    ):
        with T.Kernel(seq // 64, heads, threads=128) as (bx, h):
            q = T.alloc_shared((64, dim), "float16")
            k = T.alloc_shared((64, dim), "float16")
            v = T.alloc_shared((64, dim), "float16")
            s = T.alloc_fragment((64, 64), "float32")
            p = T.alloc_fragment((64, 64), "float16")
            acc = T.alloc_fragment((64, dim), "float32")
            top = T.alloc_fragment((64,), "float32")
            before = T.alloc_fragment((64,), "float32")
            part = T.alloc_fragment((64,), "float32")
            total = T.alloc_fragment((64,), "float32")
            T.copy(Q[h, bx * 64, 0], q)
            T.clear(acc)
            T.clear(total)
            T.fill(top, -1e30)
            for step in T.Pipelined(seq // 64, num_stages=2):
                T.copy(K[h, step * 64, 0], k)
                T.copy(V[h, step * 64, 0], v)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True)
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i, j in T.Parallel(64, 64):
                    s[i, j] = T.exp((s[i, j] - top[i]) * scale)
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(64):
                    total[i] = total[i] * T.exp((before[i] - top[i]) * scale) + part[i]
                for i, j in T.Parallel(64, dim):
                    acc[i, j] = acc[i, j] * T.exp((before[i] - top[i]) * scale)
                T.copy(s, p)
                T.gemm(p, v, acc)
            for i, j in T.Parallel(64, dim):
                acc[i, j] = acc[i, j] / total[i]
            T.copy(acc, Y[h, bx * 64, 0])

    q, k, v, y = (torch.randn(heads, seq, dim).half() for _ in range(4))
    blocks, steps = heads * seq // 64, seq // 64
    reference = torch.nn.functional.scaled_dot_product_attention
    return Work(
        run=lambda **options: tilescale.emulate(program, [q, k, v, y], **options),
        check=lambda: close(y, reference(q.float(), k.float(), v.float()), 1e-2),
        tile_ops=blocks * (12 * steps + 6),
        bytes=2 * blocks * 64 * dim * (2 * steps + 2),
        flops=4 * heads * seq * seq * dim,
    )


def gemm_allreduce(n: int = 2048, devices: int = 8) -> Work:
    """GEMM of n x n x n in bfloat16 with K split over devices, and the all-reduce of the partial results."""
    shard = n // devices

    @T.prim_func
    def program(A: T.Tensor((n, n), "bfloat16"), B: T.Tensor((n, n), "bfloat16"), C: T.Tensor((n, n), "float32")):
        with T.Kernel(device=devices, block=(n // 128, n // 128), threads=256) as (bx, by):
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
            with T.Scale("block"):
                a = T.alloc((128, 64), "bfloat16", level="l1")
                b = T.alloc((64, 128), "bfloat16", level="l1")
                c = T.alloc((128, 128), "float32", level="l0")
                T.clear(c)
                for k in T.Pipelined(shard // 64, num_stages=3):
                    T.copy(A_dev[by * 128, k * 64], a)
                    T.copy(B_dev[k * 64, bx * 128], b)
                    T.gemm(a, b, c)
                T.copy(c, C[by * 128, bx * 128])
            with T.Scale("device"):
                T.allreduce(C)

    a, b = torch.randn(n, n).bfloat16(), torch.randn(n, n).bfloat16()
    shards = zip(a.chunk(devices, 1), b.chunk(devices), strict=True)
    args = [[x.contiguous(), y.contiguous(), torch.empty(n, n)] for x, y in shards]
    expected = a.float() @ b.float()
    blocks, steps = devices * (n // 128) ** 2, shard // 64
    return Work(
        run=lambda **options: tilescale.emulate(program, args, **options),
        check=lambda: [close(c, expected, 1e-2) for _, _, c in args],
        tile_ops=blocks * (3 * steps + 2) + devices,
        bytes=blocks * (steps * 2 * 128 * 64 * 2 + 4 * 128 * 128) + devices * 8 * n * n,
        flops=2 * n**3,
    )


def allreduce(devices: int = 64, n: int = 1024, tile: int = 128) -> Work:
    """All-reduce of n x n float32, tile by tile, over the devices of a rack."""
    with tilescale.use_machine("gb200-nvl72"):

        @T.prim_func
        def program(X: T.Tensor((n, n), "float32")):
            with T.Kernel(device=devices, block=(n // tile, n // tile), threads=256) as (bx, by):
                with T.Scale("block"):
                    x = T.alloc((tile, tile), "float32", level="l1")
                    T.copy(X[by * tile, bx * tile], x)
                    with T.Scale("device"):
                        T.allreduce(x)
                    T.copy(x, X[by * tile, bx * tile])

    sources = [torch.randn(n, n) for _ in range(devices)]
    args: list[list[torch.Tensor]] = [[] for _ in sources]

    def run(**options: Any) -> None:
        for mine, x in zip(args, sources, strict=True):
            mine[:] = [x.clone()]
        tilescale.emulate(program, args, machine="gb200-nvl72", **options)

    expected = torch.stack(sources).double().sum(0)
    blocks = devices * (n // tile) ** 2
    return Work(
        run=run,
        check=lambda: [close(x, expected, 1e-4) for (x,) in args],
        tile_ops=3 * blocks,
        bytes=8 * devices * n * n,
        flops=devices * n * n,
    )


def ring_gather(devices: int = 8, rows: int = 2048, columns: int = 256) -> Work:
    """All-gather in a ring: each program forwards its tiles with a signal and waits for those of its neighbour."""
    blocks = rows // 64

    @T.prim_func
    def program(
        X: T.Tensor((rows, columns), "bfloat16"),
        Y: T.Tensor((devices, rows, columns), "bfloat16"),
        F: T.Tensor((devices, blocks), "int32"),
    ):
        with T.Kernel(device=devices, block=blocks, threads=128) as b:
            with T.Scale("block"):
                tile = T.alloc((64, columns), "bfloat16")
                with T.Scale("device") as (rank, size):
                    T.copy(X[b * 64, 0], tile)
                    T.copy(tile, Y[rank, b * 64, 0])
                    for step in T.serial(size - 1):
                        owner = (rank + size - step) % size
                        T.copy(tile, Y[owner, b * 64, 0], dst=(rank + 1) % size, signal=F[owner, b])
                        T.wait(F[(owner + size - 1) % size, b], ">=", 1)
                        T.copy(Y[(owner + size - 1) % size, b * 64, 0], tile)

    args: list[list[torch.Tensor]] = [[] for _ in range(devices)]
    sources = [torch.randn(rows, columns).bfloat16() for _ in range(devices)]

    def run(**options: Any) -> None:
        for mine, x in zip(args, sources, strict=True):
            whole = torch.empty(devices, rows, columns, dtype=torch.bfloat16)
            mine[:] = [x, whole, torch.zeros(devices, blocks, dtype=torch.int32)]
        tilescale.emulate(program, args, **options)

    return Work(
        run=run,
        check=lambda: [close(y, torch.stack(sources), 0) for _, y, _ in args],
        tile_ops=devices * blocks * (2 + 3 * (devices - 1)),
        bytes=devices * devices * rows * columns * 2 * 2,
    )


def histogram(n: int = 1 << 20, bins: int = 256) -> Work:
    """Thread-level code: atomics in shared memory, then to device memory."""

    @T.prim_func
    def program(X: T.Tensor((n,), "int32"), H: T.Tensor((bins,), "int32")):
        with T.Kernel(n // 4096, threads=256) as b:
            tx = T.get_thread_binding()
            counts = T.alloc_shared((bins,), "int32")
            T.clear(counts)
            T.sync_threads()
            for i in T.serial(16):
                T.atomic_add(counts[X[b * 4096 + i * 256 + tx]], 1)
            T.sync_threads()
            T.atomic_add(H[tx], counts[tx])

    x, h = torch.randint(0, bins, (n,), dtype=torch.int32), torch.zeros(bins, dtype=torch.int32)

    def run(**options: Any) -> None:
        h.zero_()
        tilescale.emulate(program, [x, h], **options)

    return Work(
        run=run,
        check=lambda: close(h, x.bincount(minlength=bins), 0),
        tile_ops=n // 4096 * 18,
        bytes=4 * n,
    )


CASES: dict[str, tuple[int, Callable[[], Work]]] = {
    "elementwise 4096^2 fp32": (1, elementwise),
    "GEMM 2048^3 fp16": (1, gemm),
    "GEMM 2048^3 fp8": (1, lambda: gemm(dtype="float8_e4m3fn")),
    "flash attention 8 x 1024 x 64 fp16": (1, flash_attention),
    "histogram 2^20, thread level": (1, histogram),
    "GEMM + all-reduce 2048^3 bf16": (8, gemm_allreduce),
    "ring all-gather with signals": (8, ring_gather),
    "all-reduce 1024^2 fp32 by tiles": (64, allreduce),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


PLAIN = "plain"
EXTRAS: dict[str, dict[str, Any]] = {
    PLAIN: {"check": "none", "time": False},
    **{name: {"check": name, "time": False} for name in CHECKS},
    "all checks": {"check": "all", "time": False},
    "time": {"check": "none", "time": True},
    "all of it": {"check": "all", "time": True},
}
"""Name of a measurement -> options of `tilescale.emulate`."""


def measure(name: str, repeat: int, advance: Callable[[], None]) -> Measurement:
    """Run a case and check it."""
    devices, build = CASES[name]
    torch.manual_seed(0)
    work = build()
    seconds: dict[str, list[float]] = {what: [] for what in EXTRAS}
    for _ in range(repeat):
        for what, options in EXTRAS.items():
            begin = time.process_time()
            work.run(**options)
            seconds[what].append(time.process_time() - begin)
            work.check()
        advance()
    best = {what: min(times) for what, times in seconds.items()}
    plain = best.pop(PLAIN)
    return Measurement(name, devices, plain, work.tile_ops / plain, work.bytes / plain, work.flops / plain, best)


def table(results: list[Measurement]) -> Table:
    """Format the results as text."""
    view = Table(title="emulated work per second of this computer")
    for title in ("case", "devices", "seconds", "tile ops/s", "GB/s", "GFLOP/s"):
        view.add_column(title, justify="left" if title == "case" else "right")
    for m in results:
        view.add_row(
            m.case, str(m.devices), f"{m.cpu_s:.2f}", f"{m.tile_ops_per_s:,.0f}", f"{m.bytes_per_s / 1e9:.2f}",
            f"{m.flops_per_s / 1e9:.1f}" if m.flops_per_s else "-",
        )  # fmt: skip
    return view


def table_of_extras(results: list[Measurement]) -> Table:
    """Format the cost of checks and of the record of time as text."""
    view = Table(title="times as long with")
    view.add_column("case")
    for title in results[0].with_s:
        view.add_column(title, justify="right")
    for m in results:
        view.add_row(m.case, *(f"{seconds / m.cpu_s:.2f}" for seconds in m.with_s.values()))
    return view


def environment() -> dict[str, Any]:
    """Environment of the measurement. The load is that of other processes: call it before measuring."""
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "load": round(os.getloadavg()[0], 1),
    }


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--only", metavar="TEXT", default="", help="Run only cases whose name contains this.")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs of a case (shortest).")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True, help="JSON file to write.")
def main(only: str, repeat: int, out: Path) -> None:
    """Measure, show, and write the results."""
    chosen = [name for name in CASES if only.lower() in name.lower()]
    if not chosen:
        raise click.BadParameter(f"no case contains {only!r}; cases are: {'; '.join(CASES)}", param_hint="--only")
    console, about, results = Console(stderr=True), environment(), []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=len(chosen) * repeat)
        for name in chosen:
            bar.update(task, description=name)
            results.append(measure(name, repeat, lambda: bar.advance(task)))
    Console().print(table(results))
    Console().print(table_of_extras(results))
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {**about, "repeat": repeat, "results": [asdict(m) for m in results]}
    out.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    main()
