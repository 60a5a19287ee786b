# SPDX-License-Identifier: MIT
"""Thread-block clusters on one GPU: `python tests/gpu/cluster_check.py [part of a check's name ...]`.

ONE PROCESS that starts others, which mostly compile. Prints a PASS or FAIL line for each check, and ends with exit code
1 if one fails. Every launch gets fresh inputs and poisoned outputs. The checks are functions of the number of launches,
which the tests call too: without a GPU they run in the emulator.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tests.cuda import cluster_programs as programs  # noqa: E402

LIMIT_S = 150
LAUNCHES = 4
WORKERS = 8

Check = Callable[[int], None]


def tensor(*shape: int, dtype: str = "float32", seed: int) -> torch.Tensor:
    """Random values: small integers for integer types, so that sums do not overflow."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.startswith(("int", "uint")):
        return torch.randint(-9, 10, shape, generator=generator, dtype=getattr(torch, dtype))
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype))


def poisoned(*shape: int, dtype: str = "float32") -> torch.Tensor:
    """A tensor full of wrong values."""
    return torch.full(shape, 77, dtype=getattr(torch, dtype))


def launch(kernel: Any, *args: torch.Tensor) -> list[torch.Tensor]:
    """Run on copies where the kernel wants them; returns all arguments afterwards, on the CPU."""
    there = [x.to(kernel.device) for x in args]
    kernel(*there)
    return [x.cpu() for x in there]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=0)


# -- between programs of a cluster -------------------------------------------------------------------------------------


def check_ring(launches: int, size: int, dtype: str) -> None:
    """Puts and gets, of whole rows and of parts."""
    kernel, blocks, n = tilescale.compile(programs.ring(size, dtype=dtype)), 2 * size, 256
    before = [b // size * size + (b - 1) % size for b in range(blocks)]
    for seed in range(launches):
        x = tensor(blocks, n, dtype=dtype, seed=seed)
        _, put, got = launch(kernel, x, poisoned(blocks, n, dtype=dtype), poisoned(blocks, n, dtype=dtype))
        same(got, x[before])
        same(put, x[before].roll(n // 2, 1))


def check_allreduce(launches: int, size: int, dtype: str, op: str, layer: str) -> None:
    """In the order of ranks, with float32 accumulation: the same bits everywhere."""
    kernel, shape = tilescale.compile(programs.allreduce(size, dtype, op, layer)), (2 * size, 32, 48)
    for seed in range(launches):
        x = tensor(*shape, dtype=dtype, seed=seed)
        _, found = launch(kernel, x, poisoned(*shape, dtype=dtype))
        wide = x if dtype.startswith("int") else x.float()
        combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul}[op]
        total = functools.reduce(combine, wide.reshape(2, size, 32, 48).unbind(1))
        same(found, total.repeat_interleave(size, 0).to(x.dtype))


def check_skew(launches: int, size: int, longest: int) -> None:
    """Barriers of programs that arrive at very different times."""
    rounds, blocks = 3, 4 * size
    kernel = tilescale.compile(programs.skewed(size, rounds=rounds))
    busy = [1]
    for i in range(longest):
        busy.append((busy[-1] * 5 + i) % 8191)
    after = [b // size * size + (b + 1) % size for b in range(blocks)]
    before = [b // size * size + (b - 1) % size for b in range(blocks)]
    for seed in range(launches):
        draw = random.Random(seed)
        delays = torch.tensor([[draw.choice((0, longest)) for _ in range(blocks)] for _ in range(rounds)])
        x = tensor(rounds, blocks, dtype="int32", seed=seed)
        written = x + torch.tensor(busy)[delays]
        out = poisoned(rounds, blocks, 2, dtype="int32")
        _, _, v, y = launch(kernel, delays.int(), x, poisoned(rounds, blocks, dtype="int32"), out)
        same(v, written)
        same(y[..., 0], written[:, after])
        same(y[..., 1], x[:, before] + 1)


def check_collectives(launches: int, size: int, root: int) -> None:
    """reduce_scatter, all_gather, all_to_all, all-reduce with a function, broadcast."""
    kernel, rows, n = tilescale.compile(programs.collectives(size, root=root)), 8, 16
    whole = (2 * size, rows * size, n)
    for seed in range(launches):
        x = tensor(*whole, seed=seed)
        outs = [poisoned(2 * size, rows, n), *(poisoned(*whole) for _ in range(3)), poisoned(2 * size, rows, 2)]
        _, scattered, gathered, exchanged, sent, larger = launch(kernel, x, *outs)
        parts = x.reshape(2, size, size, rows, n)  # cluster, program, part
        sums = functools.reduce(torch.add, parts.unbind(1))
        same(scattered, sums.reshape(2 * size, rows, n))
        same(gathered, sums.reshape(2, 1, size * rows, n).expand(2, size, size * rows, n).reshape(whole))
        same(exchanged, parts.transpose(1, 2).reshape(whole))
        same(sent, x.reshape(2, size, *whole[1:])[:, root].repeat_interleave(size, 0))
        pairs = x.reshape(2, size, rows * size, n)[:, :, :rows, :2]
        best = pairs[..., 0].argmax(1, keepdim=True)[..., None].expand(2, 1, rows, 2)
        same(larger, pairs.gather(1, best)[:, 0].repeat_interleave(size, 0))


# -- the cluster as one unit -------------------------------------------------------------------------------------------


def check_gemm(launches: int, **options: Any) -> None:
    """Against float64."""
    func = programs.product(**options)
    kernel, (a_shape, b_shape, c_shape) = tilescale.compile(func), shapes(func)
    dtype = options.get("dtype", "bfloat16")
    for seed in range(launches):
        a, b = tensor(*a_shape, dtype=dtype, seed=seed), tensor(*b_shape, dtype=dtype, seed=seed + 1000)
        *_, c = launch(kernel, a, b, poisoned(*c_shape))
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-3)


def shapes(func: Any) -> list[tuple[int, ...]]:
    """Shapes of the parameters of a traced function."""
    return [tuple(int(n) for n in func.buffer_map[p].shape) for p in func.params]


def check_epilogue(launches: int) -> None:
    """Loads, GEMM, bias and store of whole tiles of the cluster."""
    func = programs.epilogue()
    kernel, (a_shape, b_shape, bias_shape, c_shape) = tilescale.compile(func), shapes(func)
    rows = torch.arange(c_shape[0])[:, None]
    for seed in range(launches):
        a, b = tensor(*a_shape, dtype="float16", seed=seed), tensor(*b_shape, dtype="float16", seed=seed + 1000)
        bias = tensor(*bias_shape, seed=seed + 2000)
        *_, c = launch(kernel, a, b, bias, poisoned(*c_shape))
        expected = (a.double() @ b.double().T + bias + rows).clamp(min=0)
        torch.testing.assert_close(c.double(), expected, rtol=1e-4, atol=1e-3)


def check_persistent(launches: int, size: int) -> None:
    """Tiles one after the other through the same pipeline."""
    func = programs.persistent(size)
    kernel, (a_shape, b_shape, c_shape) = tilescale.compile(func), shapes(func)
    bias = size - 1 + torch.arange(3).repeat_interleave(c_shape[1] // 3)
    for seed in range(launches):
        a, b = tensor(*a_shape, dtype="bfloat16", seed=seed), tensor(*b_shape, dtype="bfloat16", seed=seed + 1000)
        *_, c = launch(kernel, a, b, poisoned(*c_shape))
        torch.testing.assert_close(c.double(), a.double() @ b.double() + bias, rtol=1e-4, atol=1e-3)


def check_elements(launches: int, size: int) -> None:
    """Single elements of a cluster's tile, and programs' own values around it."""
    kernel, blocks = tilescale.compile(programs.variables(size)), 2 * size
    for seed in range(launches):
        x = tensor(blocks, dtype="int32", seed=seed)
        _, y = launch(kernel, x, poisoned(blocks, 4, dtype="int32"))
        own = 3 * x
        mirror = [b // size * size + size - 1 - b % size for b in range(blocks)]
        clusters = torch.arange(blocks) // size
        same(y, torch.stack([own + 1, own[mirror] + 1, clusters, own], 1))


def check_grid(launches: int) -> None:
    """A cluster of two dimensions."""
    kernel = tilescale.compile(programs.grid_sum())
    ranks = torch.tensor([[4, 14], [24, 34]]).repeat(2, 2) + torch.tensor([[0, 100], [200, 300]]).repeat_interleave(
        2, 0
    ).repeat_interleave(2, 1)
    for seed in range(launches):
        x = tensor(4, 4, dtype="int32", seed=seed)
        _, found, sums = launch(kernel, x, poisoned(4, 4, dtype="int32"), poisoned(4, 4, dtype="int32"))
        same(found, ranks)
        quarters = x.reshape(2, 2, 2, 2).sum((1, 3))
        same(sums, quarters.repeat_interleave(2, 0).repeat_interleave(2, 1))


def all_checks(on_gpu: bool) -> dict[str, Check]:
    """Name -> check. In the emulator, sizes that do not take long."""
    checks: dict[str, Check] = {}
    for size in (2, 4, 8):
        for dtype in ("float16", "int8"):
            checks[f"ring of {size}, {dtype}"] = functools.partial(check_ring, size=size, dtype=dtype)
        for dtype, op, layer in (
            ("float32", "sum", "l1"),
            ("bfloat16", "sum", "l1"),
            ("float32", "max", "l0"),
            ("bfloat16", "max", "l1"),
            ("int32", "min", "l0"),
            ("float16", "prod", "l0"),
        ):
            name = f"all-reduce over {size}, {op} of {dtype} in {layer}"
            checks[name] = functools.partial(check_allreduce, size=size, dtype=dtype, op=op, layer=layer)
        longest = 20_000 if on_gpu else 20
        checks[f"barrier of {size}, skewed"] = functools.partial(check_skew, size=size, longest=longest)
        checks[f"elements of a tile of {size}"] = functools.partial(check_elements, size=size)
    for size, root in ((2, 1), (4, 3)):
        checks[f"collectives over {size}"] = functools.partial(check_collectives, size=size, root=root)
    checks["cluster of 2 x 2"] = check_grid
    small = {} if on_gpu else {"tile": (128, 64, 32), "grid": (2, 1), "threads": 128}
    for name, options in products(on_gpu).items():
        checks[f"product: {name}"] = functools.partial(check_gemm, **{**small, **options})
    checks["product with an epilogue"] = check_epilogue
    checks["products in turn"] = functools.partial(check_persistent, size=2)
    return checks


def products(on_gpu: bool) -> dict[str, dict[str, Any]]:
    """Variants of the GEMM of a cluster."""
    variants: dict[str, dict[str, Any]] = {
        "multicast": {},
        "operand by columns": {"operand": "columns"},
        "operand through shared memory": {"operand": "each"},
        "columns of C": {"split": "columns"},
        "one stage, float16": {"stages": 1, "dtype": "float16"},
        "fewer steps than stages": {"steps": 2, "stages": 4},
        "4 programs": {"size": 4, "tile": (256, 64, 64)},
    }
    if on_gpu:
        variants["many clusters, many steps"] = {"grid": (8, 16), "steps": 37}
        variants["8 programs"] = {"size": 8, "tile": (512, 64, 64)}
    return variants


def speed() -> str:
    """The GEMM of 4096 x 4096 x 4096 in TFLOP/s."""
    n = 4096
    kernel = tilescale.compile(programs.product(tile=(256, 256, 64), grid=(16, 16), steps=64, stages=4))
    a, b = (tensor(n, n, dtype="bfloat16", seed=seed).cuda() for seed in (1, 2))
    c = poisoned(n, n).cuda()
    times = []
    for run in (lambda: kernel(a, b, c), lambda: torch.mm(a, b)):
        for _ in range(3):
            run()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(20):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 20 * 1e-3)
    torch.testing.assert_close(c, (a @ b).float(), rtol=2e-2, atol=1)
    ours, library = (2 * n**3 / t * 1e-12 for t in times)
    return f"INFO product 4096^3 bf16 by clusters of 2: {ours:.0f} TFLOP/s, cuBLAS {library:.0f}"


def run(words: list[str]) -> int:
    """Run the checks whose names contain one of the words, or all; the number that failed."""
    failed = 0
    for name, check in all_checks(torch.cuda.is_available()).items():
        if words and not any(word in name for word in words):
            continue
        begin = time.monotonic()
        try:
            check(LAUNCHES)
            print(f"PASS {name} ({time.monotonic() - begin:.1f} s)", flush=True)
        except Exception:  # noqa: BLE001 - after any error, the other checks run
            failed += 1
            print(f"FAIL {name}\n{traceback.format_exc()}", flush=True)
    return failed


def run_all() -> int:
    """Run all checks in several processes, which mostly compile; then measure."""
    names = list(all_checks(True))
    count = min(WORKERS, max((os.cpu_count() or 1) // 2, 1))
    workers = [subprocess.Popen([sys.executable, __file__, *names[i::count]]) for i in range(count)]
    failed = sum(worker.wait() != 0 for worker in workers)
    print(speed(), flush=True)
    return failed


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    together = torch.cuda.is_available() and len(sys.argv) == 1
    sys.exit(1 if (run_all() if together else run(sys.argv[1:])) else 0)
