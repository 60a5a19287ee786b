# SPDX-License-Identifier: MIT
"""Times of operators and collectives at random shapes, for `held_out.py` to estimate, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/held_out_times.py --seconds 95
    torchrun --nproc-per-node 2 benchmarks/held_out_times.py --seconds 74 --seed 238      the second draw

Operators take both strategies, with weights that `any_shape.py` has not measured. Collectives run by each algorithm, on
activations of published models and on tensors of any number of elements. All calls are in CUDA graphs. First the
kernels of all weights are compiled, by a job for each; --compile-only and --no-beforehand split this off.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import any_shapes  # noqa: E402 - found through the path above
import click  # noqa: E402
import jobs  # noqa: E402
import strategies  # noqa: E402
import torch  # noqa: E402
import trials  # noqa: E402
import whole_tensors  # noqa: E402
from any_shapes import Shape  # noqa: E402
from runs import Run  # noqa: E402
from suite import finish_compiling  # noqa: E402

import tilescale  # noqa: E402
from tilescale.tuning.race import Heat  # noqa: E402

RESULTS = SCRIPT.parent / "results"

ROWS = 8
"""Row counts of each weight."""

SIZES = 8
"""Tensors of each collective; every third one has any number of elements."""

COMPILE_S = 80.0
"""Longest time for compiling beforehand."""

LOG_BYTES = 12.5, 27.5
"""Binary logarithm of the bytes of tensors of collectives, at least and at most."""


def shapes(seed: int, weights: int, gpus: int) -> list[list[Shape]]:
    """Draw GEMMs, a list for each weight, without the weights of `any_shape.py`."""
    measured = json.loads((RESULTS / "any_shape.json").read_text(encoding="utf-8"))["rows"]
    known = {(row["work"], *row["shape"][1:], row["dtype"]) for row in measured}
    found: dict[tuple[Any, ...], list[Shape]] = {}
    for shape in any_shapes.drawn(seed, 4 * weights, gpus):
        weight = shape.work, shape.n, shape.k, shape.dtype
        if weight not in known:
            found.setdefault(weight, []).append(shape)
    return [same[:ROWS] for same in found.values()][:weights]


def sizes(seed: int) -> list[tuple[str, int]]:
    """Draw collectives and their bytes."""
    chance = random.Random(seed)
    drawn = [
        (name, _nbytes(chance, whole_rows=number % 3 != 2)) for name in whole_tensors.NAMES for number in range(SIZES)
    ]
    return list(dict.fromkeys(drawn))


def _nbytes(chance: random.Random, whole_rows: bool) -> int:
    """Draw a size between two calibrated ones; `whole_rows`: of activations of a model, in bfloat16."""
    least, most = LOG_BYTES
    nbytes = round(2 ** chance.uniform(least, most))
    row = 2 * chance.choice(list(any_shapes.MODELS.values()))[0]
    return -(-nbytes // row) * row if whole_rows else nbytes


def operator(shape: Shape) -> Heat:
    """Race an operator by both strategies."""
    work = any_shapes.WORKS[shape.work](shape)
    ours = next(entry.make for entry in work.heat("graph", False).contenders if entry.name == "tilescale")
    entries = [strategies.contender(name, ours) for name in strategies.STRATEGIES]
    return replace(work.heat("graph", False), contenders=entries, baseline="in order")


def collective(name: str, nbytes: int, gpus: int) -> Heat:
    """Race the algorithms of a collective."""
    return whole_tensors.Work(name, nbytes).heat(gpus, "graph", True)


def compile_weight(same: list[Shape]) -> None:
    """Compile the kernels of operators with one weight by both strategies, all at once."""

    def dry() -> None:
        for shape, name in itertools.product(same, strategies.STRATEGIES):
            strategies.fixed(any_shapes.WORKS[shape.work](shape).dry, name)()

    tilescale.ops.warm_up(dry)


def compile_beforehand(seed: int, weights: int, found: int, gpus: int) -> None:
    """Fill the cache of kernels, by a job for each weight `found` by a draw of `weights`."""
    words = ["--seed", str(seed), "--weights", str(weights), "--weight"]
    finish_compiling([jobs.start(SCRIPT, [*words, str(number)], gpus) for number in range(found)], COMPILE_S)


@click.command(help=__doc__.replace("\n    ", "\n\n\b\n    ", 1))
@click.option("--seed", default=138, show_default=True, help="Of the shapes.")
@click.option("--weights", default=8, show_default=True, help=f"Weights, with {ROWS} numbers of rows each.")
@click.option("--seconds", default=95.0, show_default=True, help="No race begins later.")
@click.option("--rounds", default=5, show_default=True, help="Groups of calls of each contender.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="Folder of the results.")
@click.option("--limit", default=40.0, show_default=True, help="Seconds that a step may take before the run ends.")
@click.option("--weight", type=int, help="Only compile the kernels of this weight, counted from 0.")
@click.option("--compile-only", is_flag=True, help="Only compile the kernels of all weights.")
@click.option("--no-beforehand", is_flag=True, help="Compile each kernel when its turn comes.")
def main(
    seed: int, weights: int, seconds: float, rounds: int, out: Path, limit: float, weight: int | None,
    compile_only: bool, no_beforehand: bool,
) -> None:  # fmt: skip
    begin, world = time.monotonic(), tilescale.init()
    if not torch.cuda.is_available() or world.size == 1:
        raise click.UsageError("times need several GPUs; start it with torchrun --nproc-per-node")
    trials.device()
    products = shapes(seed, weights, world.size)
    if weight is not None:
        return compile_weight(products[weight])
    if not no_beforehand and world.rank == 0:
        compile_beforehand(seed, weights, len(products), world.size)
    world.barrier()
    if compile_only:
        return None
    run = Run(SCRIPT.stem, out, rounds, limit, seeds=(0,))
    heats: list[Callable[[], Heat]] = [lambda s=s: operator(s) for same in products for s in same]
    heats += [lambda of=of: collective(*of, world.size) for of in sizes(seed)]
    random.Random(seed).shuffle(heats)
    steps, _ = run.resumed([], resume=False)
    for heat in heats:
        if world.broadcast(time.monotonic() - begin > seconds):
            break
        run.race_all([heat()], steps)


if __name__ == "__main__":
    main()
