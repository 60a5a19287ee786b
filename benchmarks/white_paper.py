# SPDX-License-Identifier: MIT
"""Times of two examples, the tensor-parallel GEMM and FlashMLA decode, on this computer's GPUs.

    python benchmarks/white_paper.py                              the programs for one GPU
    torchrun --nproc-per-node 4 benchmarks/white_paper.py         the same work on four, with the times of one

Every program is first run on fresh inputs into poisoned outputs and compared with float64, several times, and then
timed. A time is that of the slowest GPU, the median over rounds of calls in a row. Results go to
`benchmarks/results/white_paper_N.json`, N being the number of GPUs.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "distributed")]

import attention  # noqa: E402
import common  # noqa: E402

import tilescale  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
CHECKS, ROUNDS, CALLS = 3, 7, 20

Launch = tuple[list[torch.Tensor], Callable[[], None]]
"""Arguments of a call, and a check that raises ValueError unless they hold the right result afterwards."""


@dataclass(frozen=True)
class Work:
    """A program and its amount of work.

    Attributes:
        program: traced for all devices.
        fresh: arguments made from a seed, the same whole tensors on every rank.
        flops: floating-point operations over all devices.
        bytes: device memory that has to be read over all devices.
    """

    name: str
    program: Any
    fresh: Callable[[int], Launch]
    flops: int
    bytes: int


@dataclass(frozen=True)
class Measurement:
    """One line of the results; `alone_us` is the time of the program for one GPU, if its results are available."""

    name: str
    gpus: int
    us: float
    tflops: float
    gb_s: float
    alone_us: float | None


def product(size: int, device: torch.device) -> Work:
    """C = A B in bfloat16, all matrices (size, size): every GPU ends with all of C."""
    world, shape = tilescale.init(), (size, size)
    c = tilescale.empty(shape, dtype=torch.float32)

    def fresh(seed: int) -> Launch:
        a, b = _randoms(seed, device, torch.bfloat16, shape, shape)
        c.fill_(torch.nan)
        return [_share(a, 1), _share(b, 0), c], lambda: _compare(
            c, a.double() @ b.double(), common.rounding(size, a.double().abs() @ b.double().abs())
        )

    program = importlib.import_module("08_tp_gemm").tp_gemm(world.size, size, size, size)
    return Work(f"GEMM {size} x {size} x {size}", program, fresh, 2 * size**3, 4 * size**2)


def decode(batch: int, heads: int, keys: int, device: torch.device) -> Work:
    """Attention of one new token of each sequence to `keys` latent vectors, in float16."""
    example, world = importlib.import_module("09_cp_flash_mla"), tilescale.init()
    dim, pe = example.DIM, example.PE_DIM
    out = tilescale.empty((batch, heads, dim), dtype=torch.float32)

    def fresh(seed: int) -> Launch:
        shapes = (batch, heads, dim), (batch, heads, pe), (batch, keys, 1, dim), (batch, keys, 1, pe)
        q, q_pe, kv, k_pe = _randoms(seed, device, torch.float16, *shapes)
        out.fill_(torch.nan)

        def check() -> None:
            whole = torch.cat([q, q_pe], -1), torch.cat([kv, k_pe], -1)[:, :, 0], kv[:, :, 0]
            _compare(out, *attention.reference(*whole))

        return [q, q_pe, _share(kv, 1), _share(k_pe, 1), out], check

    program = example.cp_mla(world.size, batch, heads, keys, dim, pe, splits=2)
    flops, read = 2 * batch * heads * keys * (2 * dim + pe), 2 * batch * keys * (dim + pe)
    return Work(f"MLA decode, {batch} sequences of {keys} keys, {heads} heads", program, fresh, flops, read)


def _randoms(seed: int, device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def _share(whole: torch.Tensor, dim: int) -> torch.Tensor:
    world = tilescale.init()
    return whole.chunk(world.size, dim)[world.rank].contiguous()


def _compare(found: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor) -> None:
    wrong = int((~((found.double() - wanted).abs() <= bound)).sum())
    if wrong:
        raise ValueError(f"{wrong} of {found.numel()} elements are wrong")


def microseconds(call: Callable[[], None]) -> float:
    """Time of a call on this GPU: the median over rounds of calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rounds = []
    for _ in range(ROUNDS):
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(rounds)


def measure(work: Work) -> Measurement:
    """Check a program, then time it."""
    world, kernel = tilescale.init(), tilescale.compile(work.program)
    for seed in range(CHECKS):
        args, check = work.fresh(seed)
        kernel(*args)
        kernel.synchronize()
        check()
    us = max(world.all_gather(microseconds(lambda: kernel(*args))))
    kernel.synchronize()
    rates = work.flops / us / 1e6, work.bytes / us / 1e3
    return Measurement(work.name, world.size, round(us, 2), *(round(r, 1) for r in rates), _alone(work.name))


def _alone(name: str) -> float | None:
    path = RESULTS / "white_paper_1.json"
    lines = json.loads(path.read_text())["measurements"] if path.exists() and tilescale.init().size > 1 else []
    return next((line["us"] for line in lines if line["name"] == name), None)


@click.command()
@click.option("--size", default=8192, show_default=True, help="Extents of the matrices.")
@click.option("--batch", default=32, show_default=True, help="Sequences that decode one token.")
@click.option("--heads", default=128, show_default=True, help="Query heads.")
@click.option("--keys", default=16384, show_default=True, help="Keys of each sequence.")
def main(size: int, batch: int, heads: int, keys: int) -> None:
    """Check and time both programs, and write the results as JSON."""
    world = tilescale.init()
    if not torch.cuda.is_available():
        raise click.UsageError("times need GPUs; without them the examples themselves show that they are right")
    device = world.device
    torch.cuda.set_device(device)
    lines = [measure(product(size, device)), measure(decode(batch, heads, keys, device))]
    if world.rank == 0:
        for line in lines:
            beside = f"; alone {line.alone_us} us" if line.alone_us else ""
            print(f"{line.name}: {line.us} us on {line.gpus} GPUs, {line.tflops} TFLOP/s, {line.gb_s} GB/s{beside}")
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        result = {"date": date, "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
        result["measurements"] = [asdict(line) for line in lines]
        (RESULTS / f"white_paper_{world.size}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
