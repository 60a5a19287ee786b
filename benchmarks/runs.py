# SPDX-License-Identifier: MIT
"""A run of a benchmark: heats one after the other, each written when it is done; a later run can resume it."""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import trials
from steps import Steps

import tilescale
from tilescale.tuning.places import TIMERS
from tilescale.tuning.race import ContenderFailed, Heat, line, race, record
from tilescale.tuning.versions import machine, versions


def say(text: str, error: bool = False) -> None:
    """Print on the first rank; `error`: to the standard error stream."""
    if tilescale.init().rank == 0:
        print(text, flush=True, file=sys.stderr if error else sys.stdout)


@dataclass
class Run:
    """A run.

    Attributes:
        name: of the benchmark, and of its results file in the folder `out`.
        rounds: groups of calls of each contender.
        limit: seconds that a step may take before the run ends.
        seeds: of the inputs on which contenders are checked.
        budget: seconds after which no further contender is built: its row reports that.
    """

    name: str
    out: Path
    rounds: int
    limit: float
    seeds: tuple[int, ...] = (0, 1, 2)
    budget: float = math.inf

    def resumed(self, heats: Sequence[Heat], resume: bool) -> tuple[Steps, list[Heat]]:
        """Steps of this run, with the contenders that earlier runs ended in, and the remaining heats; collective."""
        world, results = tilescale.init(), self.out / f"{self.name}.json"
        path = self.out / f"{self.name}.steps.json" if world.rank == 0 else None
        steps = Steps(path, self.limit, functools.partial(say, error=True))
        done = []
        if resume and world.rank == 0:
            steps.resume()
            done = json.loads(results.read_text(encoding="utf-8"))["rows"] if results.exists() else []
        steps.lost, done = world.broadcast((steps.lost, done))
        return steps, [heat for heat in heats if not any(heat.is_of(row) for row in done)]

    def race_all(self, heats: Sequence[Heat], steps: Steps) -> None:
        """Race all heats; the rows of each are written when it ends."""
        world, about = tilescale.init(), (machine(), versions())
        self._ends = time.monotonic() + self.budget
        steps.start("all works", "libraries", "start")
        trials.device()
        for heat in heats:
            begin, title = time.monotonic(), heat.title
            step = functools.partial(self._step, steps, title)
            lost = steps.lost.get(title)
            rows = race(heat, TIMERS[heat.mode](), world, self.rounds, self.seeds, step=step, out=lost)
            steps.end()
            if world.rank == 0:
                record(self.out / f"{self.name}.json", rows, *about)
            say(f"{title}, {time.monotonic() - begin:.0f} s")
            for row in rows:
                say(f"    {line(row)}")
            torch.cuda.empty_cache()

    def _step(self, steps: Steps, title: str, contender: str, what: str) -> None:
        """Build the next contender. Raises Out where no time is left for it."""
        steps.start(title, contender, what)
        if what == "build" and any(tilescale.init().all_gather(time.monotonic() > self._ends)):
            raise ContenderFailed("no time left")
