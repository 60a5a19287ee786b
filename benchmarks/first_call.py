# SPDX-License-Identifier: MIT
"""Time of the first training step: a decoder layer of Llama 3 8B, by PyTorch's tensor parallelism and by TileScale's.

    python benchmarks/first_call.py                 cold and warm caches of kernels, both contenders, 2 ranks each
    python benchmarks/first_call.py --only "cold, no warm-up"     without `ops.warm_up` before the step
    python benchmarks/first_call.py --profile       also a profile of the host, on the first rank

Each is a separate job. A cold cache is an empty folder; the warm one is the same folder again, after the first job has
compiled the kernels of other row counts too. Seconds are from the model with its weights until its first step has ended
on the device; loading libraries and weights is the same for all.
"""

from __future__ import annotations

import contextlib
import cProfile
import json
import multiprocessing
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

TOKENS, LAYERS, LIMIT_S, SHOWN = 4096, 1, 240, 45
PARTS = {"torch": "torch", "cold": "tilescale", "warm": "tilescale", "cold, no warm-up": "tilescale, no warm-up"}
"""The contender by the name of a job."""

OTHER_ROWS_S = 150
"""Longest time in which a job may compile kernels of other row counts, after its steps."""

CACHE = "TILELANG_CACHE_DIR"


@click.command(help=__doc__.replace("\n    ", "\n\n\b\n    ", 1))
@click.option("--ranks", default=2, show_default=True, help="GPUs.")
@click.option("--out", type=click.Path(path_type=Path), default=SCRIPT.parent / "results" / "first_call.json")
@click.option("--profile", is_flag=True, help="Print what the host of the first rank does.")
@click.option("--only", type=click.Choice(["", *PARTS]), default="", help="Only this part.")
@click.option("--rank-of", default="", help="For the jobs that this starts: the contender whose rank this is.")
def main(ranks: int, out: Path, profile: bool, only: str, rank_of: str) -> None:
    """Time all jobs, write and print the results."""
    if rank_of:
        return _rank(rank_of, profile)
    rows = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        folders = {"cold": folder, "cold, no warm-up": other} | ({} if only else {"warm": folder})
        for name, contender in PARTS.items():
            if only in ("", name):
                rows.append({"contender": contender, "cache": name, "ranks": ranks})
                rows[-1] |= _timed(contender, ranks, {CACHE: folders[name]} if name in folders else {}, profile)
                print(json.dumps(rows[-1]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _timed(contender: str, ranks: int, environment: dict[str, str], profile: bool) -> dict[str, Any]:
    """Run a job; return its times by part, or its failure."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    words += ["--rank-of", contender, *(["--profile"] if profile else [])]
    try:
        done = subprocess.run(
            words, env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {LIMIT_S} s"}
    lines = done.stdout.splitlines()
    print("\n".join(line for line in lines if not line.startswith("{")))
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return found[-1] if found else {"failed": (done.stderr or done.stdout)[-600:]}


def _rank(contender: str, profile: bool) -> None:
    """Run one rank of a job: build, step, and print the times on the first rank."""
    import torch
    import trials
    from decoder_layers import Steps
    from model_families import LLAMA
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from tilescale import init, ops

    device, world, ours = trials.device(), init(), contender != "torch"
    family = replace(LLAMA, sizes=tuple((dict(LLAMA.sizes) | {"num_hidden_layers": LAYERS}).items()))
    model = family.stack(TOKENS, device).train()
    mesh = init_device_mesh(device.type, (world.size,))
    x = torch.zeros(1, TOKENS // world.size, family.hidden, device=device, dtype=torch.bfloat16)
    world.barrier()
    torch.cuda.synchronize()
    seconds: dict[str, float] = {}
    profiler = cProfile.Profile()
    if profile and world.rank == 0:
        profiler.enable()
    with _part(seconds, "parallelize"):
        (ops.parallelize_module if ours else parallelize_module)(model, mesh, family.plan(sequence=True))
    if contender == "tilescale":
        with _part(seconds, "warm_up"):
            ops.warm_up(model, x)
    step = Steps(model, x.numel() * world.size)
    for number in (1, 2):
        with _part(seconds, f"step_{number}"):
            step(x)
            torch.cuda.synchronize()
    profiler.disable()
    if world.rank == 0:
        if profile:
            pstats.Stats(profiler, stream=sys.stdout).sort_stats("cumulative").print_stats(SHOWN)
        seconds["first"] = sum(seconds.values()) - seconds["step_2"]
        print(json.dumps({name: round(value, 2) for name, value in seconds.items()}), flush=True)
    end = time.monotonic() + OTHER_ROWS_S
    for process in multiprocessing.active_children():
        process.join(max(end - time.monotonic(), 0))


@contextlib.contextmanager
def _part(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Record how long the body takes."""
    begin = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begin


if __name__ == "__main__":
    main()
