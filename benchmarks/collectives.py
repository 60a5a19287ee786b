# SPDX-License-Identifier: MIT
"""Collectives on whole tensors: ours, NCCL, PyTorch's symmetric memory, in graphs and eager, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/collectives.py                                   everything
    torchrun --nproc-per-node 2 benchmarks/collectives.py --only allreduce --largest 1048576  small all-reduces
    torchrun --nproc-per-node 2 benchmarks/collectives.py --algorithms --modes graph        single algorithms
    torchrun --nproc-per-node 2 benchmarks/collectives.py --algorithms --modes graph --calibrated   shipped points
    torchrun --nproc-per-node 2 benchmarks/collectives.py --windows --modes graph           NCCL with registered memory
    torchrun --nproc-per-node 2 benchmarks/collectives.py --grid 8 --largest 134217728      nccl-tests -b 8 -e 128M

Works: allreduce, reduce_scatter, all_gather, all_to_all, broadcast, of bfloat16. A shape is that of the whole tensor:
the result of an all-gather, the input of a rank otherwise. Rates count the bytes that a GPU has to send. `race.py`
documents the measurement, `curves.py` draws the results. Times of single algorithms go to `algorithms.json`, which
`choices.py` reads; those at the sizes of nccl-tests go to `nccl_tests.json`, with its busbw as rates, and those of NCCL
with registered windows, and of its collectives by copy engines, to `nccl_windows.json`.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import click
import torch

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import whole_tensors as works  # noqa: E402 - found through the path above
from runs import Run  # noqa: E402

import tilescale  # noqa: E402
from tilescale.tuning import probes  # noqa: E402


@click.command(help=__doc__.replace("\n    ", "\n\n\b\n    ", 1))
@click.option("--only", default="", help="Works whose title contains this: a name, a shape, a mode; a|b: one of both.")
@click.option("--contender", default="", help="The contenders whose name contains this, beside NCCL.")
@click.option("--modes", default="graph,eager", show_default=True, help="How calls are made.")
@click.option("--largest", default=256 * works.MIB, show_default=True, help="Bytes of a tensor at most.")
@click.option("--grid", type=int, help="Sizes from so many bytes on, each twice the one before, as in nccl-tests.")
@click.option("--calibrated", is_flag=True, help="All sizes that a calibration measures, and no others.")
@click.option("--algorithms", is_flag=True, help="Each algorithm that one is chosen from, by itself.")
@click.option("--windows", is_flag=True, help="NCCL with registered memory, and by copy engines.")
@click.option("--rounds", default=10, show_default=True, help="Groups of calls of each contender.")
@click.option("--out", type=click.Path(path_type=Path), default=SCRIPT.parent / "results", help="Folder of results.")
@click.option("--limit", default=60.0, show_default=True, help="Seconds that a step may take before the run ends.")
@click.option("--resume", is_flag=True, help="Go on after a run that ended: not with whom it ended, not what it did.")
def main(
    only: str, contender: str, modes: str, largest: int, grid: int | None, calibrated: bool, algorithms: bool,
    windows: bool, resume: bool, **given: object,
) -> None:  # fmt: skip
    world = tilescale.init()
    if not torch.cuda.is_available() or world.size == 1:
        raise click.UsageError("times need several GPUs; start it with torchrun --nproc-per-node")
    torch.cuda.set_device(world.device)
    sizes = [size for size in (works.doubled(grid) if grid else sorted(works.SIZES + works.ODD)) if size <= largest]
    tensors = probes.tensors(world.size) if calibrated else itertools.product(works.NAMES, sizes)
    every = works.heats(world.size, tuple(modes.split(",")), algorithms, list(tensors), windows)
    heats = [heat for heat in every if any(part in heat.title for part in only.split("|"))]
    if contender:
        heats = [
            replace(heat, contenders=[c for c in heat.contenders if contender in c.name or c.name == heat.baseline])
            for heat in heats
        ]
    file = "algorithms" if algorithms else "nccl_tests" if grid else "nccl_windows" if windows else "collectives"
    run = Run(file, seeds=(0,), **given)
    steps, heats = run.resumed(heats, resume)
    run.race_all(heats, steps)


if __name__ == "__main__":
    main()
