# SPDX-License-Identifier: MIT
"""Operators at random shapes, drawn by a seed, compared with NCCL and cuBLAS, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/any_shape.py --seconds 120
    torchrun --nproc-per-node 2 benchmarks/any_shape.py --seconds 120 --resume      the remaining shapes

From 1 to 16384 rows, log-uniform; weights of layers of 20 published models, split over the GPUs; all-gather,
reduce-scatter and all-reduce, bfloat16 and float8, eager and in CUDA graphs. Every call has inputs and results at other
addresses than the previous one, and is one of many of its shape. First a job of its own compiles all kernels, so that
no compiler takes the host's cores from a race; --compile-only and --no-beforehand split this off.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import any_shapes  # noqa: E402 - found through the path above
import click  # noqa: E402
import jobs  # noqa: E402
import torch  # noqa: E402
import trials  # noqa: E402
from any_shapes import MODES, ROWS_OF_EACH, WORKS, Shape  # noqa: E402
from runs import Run  # noqa: E402
from steps import Steps  # noqa: E402
from suite import finish_compiling  # noqa: E402

import tilescale  # noqa: E402

RESULTS = SCRIPT.parent / "results"

COMPILE_S = 150.0
"""Longest time for compiling beforehand."""


@click.command(help=__doc__.replace("\n    ", "\n\n\b\n    ", 1))
@click.option("--seed", default=32, show_default=True, help="Of the shapes.")
@click.option("--weights", default=24, show_default=True, help=f"Weights, with {ROWS_OF_EACH} numbers of rows each.")
@click.option("--seconds", default=120.0, show_default=True, help="No race begins later after the first one.")
@click.option("--rounds", default=5, show_default=True, help="Groups of calls of each contender.")
@click.option("--symm-mem", is_flag=True, help="With PyTorch's operators, which may hang where a rank is late.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="Folder of the results.")
@click.option("--limit", default=30.0, show_default=True, help="Seconds that a step may take before the run ends.")
@click.option("--resume", is_flag=True, help="Go on after a run, without whom it ended with.")
@click.option("--compile-only", is_flag=True, help="Only compile the kernels of all shapes.")
@click.option("--no-beforehand", is_flag=True, help="Compile each kernel when its turn comes.")
def main(
    seed: int, weights: int, seconds: float, rounds: int, symm_mem: bool, out: Path, limit: float, resume: bool,
    compile_only: bool, no_beforehand: bool,
) -> None:  # fmt: skip
    """Draw shapes, compile, race, write the results."""
    world = tilescale.init()
    if not torch.cuda.is_available():
        raise click.UsageError("times need GPUs; without them `tilescale.emulate` shows that programs are right")
    trials.device()
    shapes = any_shapes.drawn(seed, weights, world.size)
    if compile_only:
        return tilescale.ops.warm_up(lambda: [_work(shape).dry() for shape in shapes])
    if not no_beforehand and world.rank == 0:
        words = ["--seed", str(seed), "--weights", str(weights), "--compile-only"]
        finish_compiling([jobs.start(SCRIPT, words, world.size)], COMPILE_S)
    world.barrier()
    run = Run(SCRIPT.stem, out, rounds, limit, seeds=(0,))
    steps, left = run.resumed([_work(s).heat(mode, symm_mem) for s in shapes for mode in MODES], resume)
    titles, begin = {heat.title for heat in left}, time.monotonic()
    for shape in shapes:
        if world.broadcast(time.monotonic() - begin > seconds):
            break
        _race(run, steps, shape, titles, symm_mem)
    return None


def _work(shape: Shape) -> any_shapes.Work:
    return WORKS[shape.work](shape)


def _race(run: Run, steps: Steps, shape: Shape, titles: set[str], symm_mem: bool) -> None:
    """Race a shape in all modes, on the same inputs; results are checked in the first one."""
    work = _work(shape)
    heats = [heat for mode in MODES if (heat := work.heat(mode, symm_mem)).title in titles]
    if heats:
        work.settle(symm_mem)
    for number, heat in enumerate(heats):
        (run if number == 0 else replace(run, seeds=())).race_all([heat], steps)
        work.__dict__.pop("case", None)


if __name__ == "__main__":
    main()
