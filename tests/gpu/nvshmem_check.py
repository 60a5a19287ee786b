# SPDX-License-Identifier: MIT
"""Copies by NVSHMEM on real GPUs: `torchrun --nproc-per-node N tests/gpu/nvshmem_check.py [FOLDER]`.

Prints a PASS or FAIL line for each check and rank, writes what was found to `nvshmem_check.json` in the folder
(benchmarks/results), and ends with exit code 1 if one fails. Every launch has fresh inputs, poisoned outputs, and ranks
that come at different times. Kernels without NVSHMEM run before and after. Programs between nodes are for a machine in
which each GPU is a node: they take NVSHMEM by themselves. A check that takes too long ends the job with what its
threads are at.
"""

import gc
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TILESCALE_HEAP", "nvshmem")
os.environ.setdefault("TILESCALE_WAIT_S", "10")

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "cuda")]

import node_programs  # noqa: E402
import nvshmem_programs as programs  # noqa: E402
import tilelang  # noqa: E402
import tilelang.language as stock_language  # noqa: E402
from limits import bounded  # noqa: E402
from outcomes import RESULTS, Outcome, write  # noqa: E402

import tilescale  # noqa: E402
from tilelang_core import compile as stock  # noqa: E402
from tilescale import backends  # noqa: E402
from tilescale.backends.cuda import headers  # noqa: E402
from tilescale.backends.tilelang import nvshmem_link  # noqa: E402
from tilescale.backends.tilelang.lowering.phase import LoweringTarget  # noqa: E402
from tilescale.backends.tilelang.lowering.program import lower  # noqa: E402
from tilescale.backends.tilelang.text import REWRITES  # noqa: E402
from tilescale.comm.heap import default_heap  # noqa: E402

LIMITS_S = {"warm": 150.0}
LIMIT_S = 60.0
"""Seconds that a check may take, where `LIMITS_S` has no other bound."""
LAUNCHES = 6
PROGRAMS = {
    "ring": programs.ring(),
    "ring_set": programs.ring("float32", "int32", "set"),
    "tails": programs.tails(),
    "gets": programs.gets(),
    "tensors": programs.tensors(),
    "rows": programs.rows_of_all(128, 64, 4096),
}

NODES = """
extends: h200-sxm-8x4
title: each GPU a node
levels:
  node:
    count: {nodes}
  device:
    count: 1
"""


class Job:
    """This rank, its kernels, and data that every rank can make for every other."""

    def __init__(self) -> None:
        self.world = tilescale.init(timeout_s=150)
        self.rank, self.size = self.world.rank, self.world.size
        self.device = self.world.device
        torch.cuda.set_device(self.device)
        self.skew = random.Random(self.rank)
        self.kernels = {name: tilescale.compile(func) for name, func in PROGRAMS.items()}
        self.cases: dict[str, node_programs.Cases] = {}
        with tempfile.TemporaryDirectory() as folder:
            nodes = Path(folder) / "nodes.yaml"
            nodes.write_text(NODES.format(nodes=self.size), encoding="utf-8")
            with tilescale.use_machine(str(nodes)):
                for level in ("node", "device"):
                    made = node_programs.cases(level, self.size, 1)
                    self.cases |= {f"{name}, {level}": case for name, case in made.items()}
                self.kernels |= {name: tilescale.compile(func) for name, (func, _, _) in self.cases.items()}

    def warm(self) -> None:
        """Compile all kernels side by side into the compiler's cache."""
        heap = default_heap()
        assert heap.provider == "nvshmem", heap.provider
        nvshmem_link.prepare(heap, {}, None)
        if self.world.local_rank == 0:
            kernels = [grid.kernel for f in self.kernels.values() for grid in self._lowered(f).grids]
            made = [stock.generate(kernel.func, "auto", None, REWRITES) for kernel in kernels]
            texts = [stock.checked_text(generated) for generated in made]
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda text: stock.device_code(text, "auto"), texts))
        self.world.barrier()

    def _lowered(self, kernel: Any) -> Any:
        """A program as lowered at its first call."""
        program, stride = kernel.program, default_heap().addresses.stride
        sizes = backends.Target.of(program, kernel.machine, self.size).sizes
        target = LoweringTarget(kernel.machine, sizes, stride, headers.__name__, nvshmem=True)
        return lower(program, target.with_mapped(self.size))

    def data(self, rank: int, launch: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Input of a rank for a launch."""
        generator = torch.Generator(device=self.device).manual_seed(1000 * launch + rank % self.size)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)

    def launches(self) -> Iterator[int]:
        """Numbers from 1, at a time that differs between ranks."""
        for launch in range(1, LAUNCHES + 1):
            time.sleep(self.skew.random() * 0.01)
            yield launch

    def run(self, name: str, *args: object) -> None:
        """A kernel, until this rank has run it. Raises what a wait in it raises."""
        self.kernels[name](*args)
        self.kernels[name].synchronize()


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal to the last bit."""
    wrong = (found != expected) | found.isnan()
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {wrong.nonzero()[0].tolist()}"
    )


def check_plain_kernel(job: Job) -> None:
    """A kernel of stock TileLang's, compiled and loaded by itself."""

    @tilelang.jit
    def double(rows: int):
        @stock_language.prim_func
        def kernel(X: stock_language.Tensor((rows, 128), "float32"), Y: stock_language.Tensor((rows, 128), "float32")):
            with stock_language.Kernel(rows, threads=128) as bx:
                for i in stock_language.Parallel(128):
                    Y[bx, i] = X[bx, i] * 2

        return kernel

    x = job.data(job.rank, 1, (64, 128))
    y = torch.full_like(x, torch.nan)
    double(64)(x, y)
    same(y, 2 * x, "Y")


def check_stores(job: Job) -> None:
    """A program between devices that calls no NVSHMEM, on the same heap."""
    kernel, shape = tilescale.compile(programs.without()), (64, 64)
    y = tilescale.empty(shape, torch.float32)
    for launch in job.launches():
        y.fill_(torch.nan)
        kernel(job.data(job.rank, launch, shape), y)
        torch.cuda.synchronize()
        same(y, job.data(job.rank - 1, launch, shape), "Y")


def ring(job: Job, name: str, dtype: torch.dtype, flag: torch.dtype, *, symmetric: bool = True) -> None:
    shape = (64, 64)
    y, flags = (torch.empty(shape, dtype=dtype, device=job.device), torch.zeros(4, dtype=flag, device=job.device))
    if symmetric:
        y, flags = tilescale.empty(shape, dtype), tilescale.zeros(4, flag)
    for launch in job.launches():
        z = torch.full(shape, torch.nan, dtype=dtype, device=job.device)
        y.fill_(torch.nan)
        job.run(name, job.data(job.rank, launch, shape, dtype), y, z, flags, launch)
        expected = job.data(job.rank - 1, launch, shape, dtype)
        same(y, expected, f"Y of launch {launch}")
        same(z, expected + 1, f"Z of launch {launch}")
        assert flags.tolist() == [launch] * 4, flags.tolist()


def check_put_signal(job: Job) -> None:
    """One piece with a 64-bit flag: NVSHMEM's put with signal."""
    ring(job, "ring", torch.bfloat16, torch.uint64)


def check_put_signal_set(job: Job) -> None:
    """A flag of 32 bits that is set."""
    ring(job, "ring_set", torch.float32, torch.int32)


def check_tensors_outside_the_heap(job: Job) -> None:
    """Copied into the heap and back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ring(job, "ring", torch.bfloat16, torch.uint64, symmetric=False)


def check_put_tails(job: Job) -> None:
    """Many rows for each tile, some beyond the tensor, converted from registers."""
    y, flags = tilescale.empty((50, 100), torch.float16), tilescale.zeros(1, torch.int32)
    for launch in job.launches():
        y.fill_(torch.nan)
        job.run("tails", job.data(job.rank, launch, (50, 100)), y, flags)
        same(y, job.data(job.rank + 1, launch, (50, 100)).half(), f"Y of launch {launch}")
        assert flags.item() == 8 * launch, flags.item()


def check_get(job: Job) -> None:
    """Planes of the next rank, with rows that do not exist."""
    x = tilescale.empty((3, 40, 96), torch.float32)
    for launch in job.launches():
        y = torch.full((4, 2, 16, 32), torch.nan, device=job.device)
        x.copy_(job.data(job.rank, launch, (3, 40, 96)))
        job.run("gets", x, y)
        rows = torch.nn.functional.pad(job.data(job.rank + 1, launch, (3, 40, 96)), (0, 0, 3, 64))
        expected = torch.stack([rows[1:3, block * 16 : block * 16 + 16, 64:96] for block in range(4)])
        same(y, expected, f"Y of launch {launch}")


def check_device_phase(job: Job) -> None:
    """Whole tensors, there and back."""
    x, y, z = (tilescale.empty((64, 128), torch.float32) for _ in range(3))
    flags = tilescale.zeros(1, torch.int64)
    for launch in job.launches():
        x.copy_(job.data(job.rank, launch, (64, 128)))
        y.fill_(torch.nan)
        z.fill_(torch.nan)
        job.run("tensors", x, y, z, flags)
        same(y, job.data(job.rank - 1, launch, (64, 128)), f"Y of launch {launch}")
        same(z, x, f"Z of launch {launch}")
        assert flags.item() == launch, flags.item()


def between_nodes(job: Job, name: str) -> None:
    """Copies, signals, barriers or collectives of tiles between nodes, or between devices of all of them."""
    _, shapes, wanted = job.cases[name]
    assert "nvshmem" in job.kernels[name].schedule, job.kernels[name].schedule
    mine = [tilescale.empty(shape, getattr(torch, dtype)) for shape, dtype in shapes]
    for launch in job.launches():
        everybody = [node_programs.arguments(shapes, rank, launch) for rank in range(job.size)]
        for tensor, value in zip(mine, everybody[job.rank], strict=True):
            tensor.copy_(value)
        job.run(name, *mine)
        given = [args[0].double() for args in everybody]
        for position, expected in wanted(given, job.rank).items():
            same(mine[position].double().cpu(), expected.double(), f"launch {launch}, argument {position}")


def check_bandwidth(job: Job) -> None:
    """64 MiB by 128 blocks, straight from memory to memory."""
    shape = (128 * 64, 4096)
    x = tilescale.from_tensor(job.data(job.rank, 1, shape, torch.bfloat16))
    y = tilescale.empty(shape, torch.bfloat16)
    y.fill_(torch.nan)
    job.run("rows", x, y)
    same(y, job.data(job.rank - 1, 1, shape, torch.bfloat16), "Y")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        job.kernels["rows"](x, y)
    end.record()
    torch.cuda.synchronize()
    rate = 10 * x.numel() * x.element_size() / begin.elapsed_time(end) / 1e6
    print(f"INFO rank {job.rank}: put of 64 MiB at {rate:.0f} GB/s, with its two barriers", flush=True)


def checks(job: Job) -> Iterator[tuple[str, Callable[[], None]]]:
    """All checks by name, in order."""
    first = [check_plain_kernel, check_stores, Job.warm, check_put_signal, check_put_signal_set, check_put_tails]
    last = [check_tensors_outside_the_heap, check_bandwidth, check_plain_kernel, check_stores]
    for check in (*first, check_get, check_device_phase):
        yield check.__name__.removeprefix("check_"), partial(check, job)
    for name in job.cases:
        yield f"between nodes: {name}", partial(between_nodes, job, name)
    for check in last:
        yield check.__name__.removeprefix("check_"), partial(check, job)


class Results:
    """Results that rank 0 writes: a check that does not end is recorded as failed."""

    def __init__(self, job: Job):
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
        self._job, self._path, self._ended = job, folder / "nvshmem_check.json", []

    def begin(self, name: str) -> None:
        self._write(self._outcome(name, "it did not end", 0.0))

    def end(self, name: str, verdict: str, seconds: float) -> None:
        """A check has ended, with "PASS" or why not."""
        self._ended.append(self._outcome(name, verdict, seconds))
        self._write()

    def _outcome(self, name: str, verdict: str, seconds: float) -> Outcome:
        return Outcome.of("nvshmem", name, self._job.size, [verdict] * self._job.size, seconds)

    def _write(self, *running: Outcome) -> None:
        if self._job.rank == 0:
            write([*self._ended, *running], self._path)


def main() -> None:
    """All checks in order; the first that fails ends the job."""
    with bounded("start", LIMIT_S):
        job = Job()
    results = Results(job)
    for name, check in checks(job):
        start, where = time.monotonic(), f"{name} on rank {job.rank} of {job.size}"
        results.begin(name)
        try:
            with bounded(where, LIMITS_S.get(name, LIMIT_S)):
                check()
                torch.cuda.synchronize()
                job.world.barrier()
        except BaseException:
            print(f"FAIL {where}\n{traceback.format_exc()}", flush=True)
            results.end(name, traceback.format_exc(limit=-4), time.monotonic() - start)
            os._exit(1)  # the others notice; a rank that ends in order would wait for them
        print(f"PASS {where} ({time.monotonic() - start:.2f} s)", flush=True)
        results.end(name, "PASS", time.monotonic() - start)
    start = time.monotonic()
    with bounded("close", LIMIT_S):
        job.kernels.clear()
        gc.collect()
        default_heap().close()
    print(f"PASS close on rank {job.rank} ({time.monotonic() - start:.2f} s)", flush=True)


if __name__ == "__main__":
    main()
