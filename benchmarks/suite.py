# SPDX-License-Identifier: MIT
"""A suite of races, from the command line: kernels are compiled, works are raced, rows are written.

`tilescale.tuning.race` documents the measurement. Kernels are first compiled by concurrent jobs, which fill TileLang's
cache for the races. Rows of each work are written when it is done. A step that takes too long ends the run; with
--resume the next one goes on without the contender whose step it was.
"""

from __future__ import annotations

import functools
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import click
import jobs
import torch
from runs import Run, say

import tilescale
from tilescale.tuning.places import TIMERS
from tilescale.tuning.race import Heat

COMPILE_S, ONE_GPU_S = 75.0, 120.0
"""Longest time for compiling beforehand, and for the works of one GPU."""


@dataclass(frozen=True)
class Suite:
    """Works that one script races.

    Attributes:
        script: its file; the results file has the same name.
        heats: takes whether to be quick and a number of GPUs, returns the works of that number of GPUs.
        seeds: of the inputs on which contenders are checked.
    """

    script: Path
    heats: Callable[[bool, int], Iterable[Heat]]
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True)
class Choice:
    """Options of the command line."""

    suite: Suite
    only: str
    contender: str
    rounds: int
    quick: bool
    out: Path
    limit: float
    budget: float

    def heats(self, gpus: int) -> list[Heat]:
        """Works for `gpus` GPUs, with the requested contenders and their baselines."""
        every = self.suite.heats(self.quick, gpus)
        return [self._chosen(heat) for heat in every if any(part in heat.title for part in self.only.split("|"))]

    def _chosen(self, heat: Heat) -> Heat:
        named = {*self.contender.split("|"), heat.baseline}
        wanted = named if self.contender else {c.name for c in heat.contenders}
        return replace(heat, contenders=[c for c in heat.contenders if c.name in wanted])

    def arguments(self, **changes: str) -> list[str]:
        """The same choice for another job."""
        given = {"only": self.only, "contender": self.contender, "rounds": str(self.rounds)}
        given |= {"out": str(self.out), "limit": str(self.limit), "budget": str(self.budget)}
        words = [word for name, value in (given | changes).items() for word in (f"--{name}", value)]
        return [*words, *(["--quick"] if self.quick else [])]


# -- compiling beforehand ----------------------------------------------------------------------------------------------


def compile_all(heats: list[Heat]) -> None:
    """Compile every kernel of this job's works; one that fails does so again, and is recorded, in its race."""
    for heat in heats:
        for contender in heat.contenders:
            try:
                if contender.compile:
                    contender.compile()
            except Exception:  # noqa: BLE001 - the others are to be compiled
                traceback.print_exc()


def compile_beforehand(choice: Choice, heats: list[Heat]) -> None:
    """Fill TileLang's cache, by a job for each kernel."""
    started = {}
    for heat in heats:
        for contender in heat.contenders:
            kernel = heat.work, heat.shape, heat.dtype, heat.gpus, contender.name  # one for all modes
            if contender.compile and kernel not in started:
                words = choice.arguments(only=heat.title, contender=contender.name)
                started[kernel] = jobs.start(choice.suite.script, [*words, "--compile-only"], heat.gpus)
    finish_compiling(list(started.values()), COMPILE_S)


def finish_compiling(started: list[jobs.Job], limit_s: float) -> None:
    """Wait for jobs that fill the cache, and say how far they came."""
    begin, bad = time.monotonic(), []
    for number, job in enumerate(started):
        ((code, text),) = jobs.finish([job], begin + limit_s - time.monotonic())
        bad += [text] if code else []
        done = f"{number + 1} of {len(started)} jobs in {time.monotonic() - begin:.0f} s"
        say(f"compiled by {done}, {len(bad)} of them failed")
    for text in bad:
        say(f"    {last_error(text)}")


def last_error(text: str) -> str:
    """The last line of a job's output that says what was raised; a launcher's own summary comes after it."""
    lines = text.strip().splitlines() or [""]
    raised = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]+(Error|Exception)\b", line)]
    own = [line for line in raised if "ChildFailedError" not in line]
    return (own or lines)[-1]


# -- racing ------------------------------------------------------------------------------------------------------------


def serve_one(heats: list[Heat]) -> None:
    """Check the last contender of the only work, and time it for the job that asks."""
    (heat,) = heats
    runner = heat.contenders[-1].make()
    runner.check(0)
    jobs.serve(TIMERS[heat.mode]().prepare(runner.call))


def race_on_one_gpu(choice: Choice) -> None:
    """Race the works of one GPU in a separate job, while the ranks of this one wait."""
    world = tilescale.init()
    if world.rank == 0:
        job = jobs.start(choice.suite.script, [*choice.arguments(), "--no-beforehand"])
        ((code, text),) = jobs.finish([job], ONE_GPU_S)
        say(text if code == 0 else f"the works of one GPU ended with code {code}:\n{text}")
    world.barrier()


_OPTIONS = (
    click.option("--only", default="", help="Works whose title contains this: a name, a shape, a mode; a|b: any."),
    click.option("--contender", default="", help="The contenders of this name, beside the baselines; a|b: of any."),
    click.option("--rounds", default=10, show_default=True, help="Groups of calls of each contender."),
    click.option("--quick", is_flag=True, help="Small shapes: to see that it works, not how fast it is."),
    click.option("--out", type=click.Path(path_type=Path), help="Folder of the results."),
    click.option("--limit", default=60.0, show_default=True, help="Seconds that a step may take before the run ends."),
    click.option("--budget", default=math.inf, help="Seconds after which no further contender is built."),
    click.option("--resume", is_flag=True, help="Go on after a run that ended, without whom it ended with."),
    click.option("--compile-only", is_flag=True, help="Fill TileLang's cache and end."),
    click.option("--serve", is_flag=True, help="Time the contender whenever a number of calls comes in."),
    click.option("--no-beforehand", is_flag=True, help="Compile each kernel when its turn comes."),
)


def command(suite: Suite, text: str) -> click.Command:
    """Make the command line of a suite; `text` describes it."""
    made: Callable = functools.partial(_run, suite)
    for option in reversed(_OPTIONS):
        made = option(made)
    return click.command(suite.script.stem, help=text.replace("\n    ", "\n\n\b\n    ", 1))(made)


def _run(
    suite: Suite, compile_only: bool, serve: bool, no_beforehand: bool, resume: bool, out: Path | None, **given: object
) -> None:
    choice, world = Choice(suite, out=out or suite.script.parent / "results", **given), tilescale.init()
    if not torch.cuda.is_available():
        raise click.UsageError("times need GPUs; without them `tilescale.emulate` shows that programs are right")
    torch.cuda.set_device(world.device)
    heats, on_one = choice.heats(world.size), choice.heats(1) if world.size > 1 else []
    if compile_only:
        return compile_all(heats)
    if serve:
        return serve_one(heats)
    run = Run(suite.script.stem, choice.out, choice.rounds, choice.limit, suite.seeds, choice.budget)
    steps, heats = run.resumed(heats, resume)
    if not no_beforehand and world.rank == 0:
        compile_beforehand(choice, heats + on_one)
    world.barrier()
    run.race_all(heats, steps)
    if on_one:
        race_on_one_gpu(choice)
