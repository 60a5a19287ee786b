# SPDX-License-Identifier: MIT
"""What asynchrony is worth: programs that overlap, wait and call, beside libraries, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/asynchrony.py                      everything, in about four minutes
    torchrun --nproc-per-node 2 benchmarks/asynchrony.py --only ag_gemm       one work
    python benchmarks/asynchrony.py                                           the works of one GPU

Works: ag_gemm, gemm_rs, put, small_put, allreduce, mla_decode on all GPUs; gemm, cluster_gemm, mla_decode, plain_call
on one. `race.py` says how they are measured. Kernels are first compiled by jobs beside one another, whose results the
races find in TileLang's cache. Rows of each work are written when it is done. A step that takes too long ends the
run; with --resume the next one goes on without the contender whose step it was.
"""

from __future__ import annotations

import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import calls  # noqa: E402 - found through the path above
import jobs  # noqa: E402
import one_gpu  # noqa: E402
import overlap  # noqa: E402
from gpu_timers import TIMERS  # noqa: E402
from race import Heat  # noqa: E402
from runs import Run, say  # noqa: E402

import tilescale  # noqa: E402

COMPILE_S, ONE_GPU_S = 75.0, 120.0
"""Longest time for compiling beforehand, and for the works of one GPU."""


@dataclass(frozen=True)
class Choice:
    """What the command line asks for."""

    only: str
    contender: str
    rounds: int
    quick: bool
    out: Path
    limit: float

    def heats(self, gpus: int) -> list[Heat]:
        """Works of so many GPUs, with the contenders that are asked for and their baselines."""
        every = [heat for part in (overlap, calls, one_gpu) for heat in part.heats(self.quick, gpus)]
        return [self._chosen(heat) for heat in every if any(part in heat.title for part in self.only.split("|"))]

    def _chosen(self, heat: Heat) -> Heat:
        wanted = {self.contender, heat.baseline} if self.contender else {c.name for c in heat.contenders}
        return replace(heat, contenders=[c for c in heat.contenders if c.name in wanted])

    def arguments(self, **changes: str) -> list[str]:
        """The same choice for another job."""
        given = {"only": self.only, "contender": self.contender, "rounds": str(self.rounds)}
        given |= {"out": str(self.out), "limit": str(self.limit)}
        words = [word for name, value in (given | changes).items() for word in (f"--{name}", value)]
        return [*words, *(["--quick"] if self.quick else [])]


# -- compiling beforehand ----------------------------------------------------------------------------------------------


def compile_all(heats: list[Heat]) -> None:
    """Compile every kernel of this job's works; one that fails does so again, and is recorded, where it races."""
    for heat in heats:
        for contender in heat.contenders:
            try:
                if contender.compile:
                    contender.compile()
            except Exception:  # noqa: BLE001 - the others are to be compiled
                traceback.print_exc()


def compile_beforehand(choice: Choice, heats: list[Heat]) -> None:
    """Fill TileLang's cache, by a job for each kernel."""
    begin, started = time.monotonic(), {}
    for heat in heats:
        for contender in heat.contenders:
            kernel = heat.work, heat.shape, heat.gpus, contender.name  # one for all modes
            if contender.compile and kernel not in started:
                words = choice.arguments(only=heat.title, contender=contender.name)
                started[kernel] = jobs.start(SCRIPT, [*words, "--compile-only"], heat.gpus)
    bad = [text for code, text in jobs.finish(list(started.values()), COMPILE_S) if code]
    say(f"compiled by {len(started)} jobs in {time.monotonic() - begin:.0f} s, {len(bad)} of them failed")
    for text in bad:
        say("    " + "\n    ".join(text.strip().splitlines()[-3:]))


# -- racing ------------------------------------------------------------------------------------------------------------


def serve_one(heats: list[Heat]) -> None:
    """Check the last contender of the only work, and time it for the job that asks."""
    (heat,) = heats
    runner = heat.contenders[-1].make()
    runner.check(0)
    jobs.serve(TIMERS[heat.mode]().prepare(runner.call))


def race_on_one_gpu(choice: Choice) -> None:
    """The works of one GPU, in a job of their own, while the ranks of this one wait."""
    world = tilescale.init()
    if world.rank == 0:
        ((code, text),) = jobs.finish([jobs.start(SCRIPT, [*choice.arguments(), "--no-beforehand"])], ONE_GPU_S)
        say(text if code == 0 else f"the works of one GPU ended with code {code}:\n{text}")
    world.barrier()


@click.command(help=__doc__.replace("\n    ", "\n\n\b\n    ", 1))
@click.option("--only", default="", help="Works whose title contains this: a name, a shape, a mode; a|b: one of both.")
@click.option("--contender", default="", help="The contenders of this name, beside the baselines.")
@click.option("--rounds", default=10, show_default=True, help="Groups of calls of each contender.")
@click.option("--quick", is_flag=True, help="Small shapes: to see that everything works, not how fast it is.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=SCRIPT.parent / "results", help="Folder of asynchrony.json."
)
@click.option("--limit", default=60.0, show_default=True, help="Seconds that a step may take before the run ends.")
@click.option("--resume", is_flag=True, help="Go on after a run that ended: not with whom it ended, not what it did.")
@click.option("--compile-only", is_flag=True, help="Fill TileLang's cache and end.")
@click.option("--serve", is_flag=True, help="Time the contender whenever a number of calls comes in.")
@click.option("--no-beforehand", is_flag=True, help="Compile each kernel when its turn comes.")
def main(compile_only: bool, serve: bool, no_beforehand: bool, resume: bool, **given: object) -> None:
    """Compile, race, write."""
    choice, world = Choice(**given), tilescale.init()
    if not torch.cuda.is_available():
        raise click.UsageError("times need GPUs; without them `tilescale.emulate` shows that programs are right")
    torch.cuda.set_device(world.device)
    heats, on_one = choice.heats(world.size), choice.heats(1) if world.size > 1 else []
    if compile_only:
        return compile_all(heats)
    if serve:
        return serve_one(heats)
    run = Run("asynchrony", choice.out, choice.rounds, choice.limit)
    steps, heats = run.resumed(heats, resume)
    if not no_beforehand and world.rank == 0:
        compile_beforehand(choice, heats + on_one)
    world.barrier()
    run.race_all(heats, steps)
    if on_one:
        race_on_one_gpu(choice)


if __name__ == "__main__":
    main()
