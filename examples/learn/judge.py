# SPDX-License-Identifier: MIT
"""Judge a program: run it on several machines and sizes, several times, and describe the first error."""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from cases import Case
from compare import difference

import tilescale
from tilescale.alarm import raise_after
from tilescale.errors import TileScaleError

if TYPE_CHECKING:
    from learn import Exercise

SOLVED, UNWRITTEN, WRONG, LATE = "solved", "not written yet", "not right yet", "right, but late"
SEEDS = (None, 1)
"""Orders in which the units of a launch run: interleaved evenly, then random."""
WIDTH = 110
LIMIT_S = 60.0
ENDLESS = "which loop does not end, or is far too long?"
"""Time limits of tracing and of a launch; the solutions take seconds."""

ANOTHER_ORDER = "It was right when the units took turns, and is wrong when they run in another order:"
PHASES = (
    "what blocks do stands inside T.Scale('block'), where T.Scale('device') only says whose ranks are meant. "
    "T.Scale('device') on its own is a phase of whole devices, without blocks and without tiles on chip."
)
ADVICE = {"PhaseError": PHASES, "UnsupportedError": PHASES}
"""Explanations of errors, for all exercises."""


class NotWrittenError(TileScaleError):
    """The program has reached a part that is still to be written."""


class EndlessError(TileScaleError):
    """The program runs for so long that it may never end."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on an exercise.

    Attributes:
        state: SOLVED, UNWRITTEN, WRONG or LATE.
        text: the machines it ran on, or the missing or wrong part.
    """

    state: str
    text: str


def judge(exercise: Exercise, program: Callable[[int], Any]) -> Verdict:
    """Run `program` as an exercise asks, until an error is found."""
    trial = _Trial(exercise, program)
    try:
        with _silent():
            if complaint := trial.results():
                return Verdict(WRONG, complaint)
            if complaint := trial.time():
                return Verdict(LATE, complaint)
    except NotWrittenError as error:
        return Verdict(UNWRITTEN, f"{error}\n\nWith --help the exercise explains itself.")
    ran = [f"{_and(sorted(sizes))} {exercise.unit} of {machine}" for machine, sizes in exercise.sizes.items()]
    return Verdict(SOLVED, f"Right on {', '.join(ran)}; in several orders of their units.")


def timed(exercise: Exercise, program: Callable[[int], Any]) -> tilescale.Report:
    """Simulate a launch of a correct program: on the first machine, at the size for timing."""
    machine, (size, *_) = next(iter(exercise.sizes.items()))
    size = exercise.timed or size
    case = exercise.case(size, torch.Generator().manual_seed(size))
    with tilescale.use_machine(machine):
        args = [[tensor.clone() for tensor in tensors] for tensors in zip(*case.args.values(), strict=True)]
        return tilescale.emulate(program(size), args, check="none")


class _Trial:
    """A run of a program for an exercise. Its methods return the first complaint, or None."""

    def __init__(self, exercise: Exercise, program: Callable[[int], Any]):
        self.exercise, self.program = exercise, program

    def results(self) -> str | None:
        """Run on all machines and sizes."""
        for machine, sizes in self.exercise.sizes.items():
            for size in sizes:
                with tilescale.use_machine(machine):
                    complaint = self._size(size)
                if complaint:
                    units = self.exercise.unit.removesuffix("s") if size == 1 else self.exercise.unit
                    return f"With {size} {units} of {machine}:\n\n{complaint}"
        return None

    def _size(self, size: int) -> str | None:
        """Run in several orders of the units, with new inputs each time."""
        traced, complaint = self._attempt(partial(self.program, size))
        rng = torch.Generator().manual_seed(size)
        for seed in SEEDS if complaint is None else ():
            complaint = self._launch(traced, self.exercise.case(size, rng), size, seed)
            if complaint:
                return complaint if seed is None else f"{ANOTHER_ORDER}\n\n{complaint}"
        return complaint

    def _launch(self, traced: Any, case: Case, size: int, seed: int | None) -> str | None:
        args = {name: [tensor.clone() for tensor in tensors] for name, tensors in case.args.items()}
        per_device = list(zip(*args.values(), strict=True))
        emulate = partial(tilescale.emulate, traced, per_device, check="all", time=False, schedule_seed=seed)
        report, complaint = self._attempt(emulate)
        advice = self.exercise.advice.get("wrong values", "")
        return complaint or difference(case, args, advice) or fill(self.exercise.demand(report, size) or "", WIDTH)

    def time(self) -> str | None:
        """Compare the time with the solution's; both are simulated, so exact."""
        asked = self.exercise
        if asked.timed is None:
            return None
        mine, enough = (timed(asked, version).time_us for version in (self.program, asked.right))
        if mine <= asked.slack * enough:
            return None
        where = f"{asked.timed} {asked.unit} of {next(iter(asked.sizes))}"
        return (
            f"On {where} a launch takes {mine:.1f} us in the simulation; {enough:.1f} us are enough.\n"
            "--timeline FILE draws where the time goes.\n\n" + fill(asked.advice.get("too slow", ""), WIDTH)
        )

    def _attempt(self, action: Callable[[], Any]) -> tuple[Any, str | None]:
        """Return the result of an action, or a complaint that explains its error."""
        try:
            with raise_after(LIMIT_S, EndlessError(f"still running after {LIMIT_S:g} s", hint=ENDLESS)):
                return action(), None
        except NotWrittenError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - TileLang refuses with any class
            place = "" if isinstance(error, TileScaleError) else self._line_of(error)
            return None, f"{type(error).__name__}: {error}{place}\n\n{self._advice(error)}".rstrip()

    def _advice(self, error: BaseException) -> str:
        """Explain an error in terms of the exercise, if possible for the tensor that its message names first."""
        kind, tensor = type(error).__name__, re.search(r"(\w+)\[", str(error))
        known = {**ADVICE, **self.exercise.advice}
        text = known.get(f"{kind} of {tensor and tensor[1]}") or known.get(kind)
        return fill(f"What it means here: {text}", WIDTH) if text else ""

    def _line_of(self, error: BaseException) -> str:
        """Return the last line of the learner's file that an error came through."""
        file = self.program.__code__.co_filename
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return f"\n    at {file}:{lines[-1].lineno}\n        {lines[-1].line}" if lines else ""


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence TileLang's log of rejected programs; the learner gets the line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _and(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
