# SPDX-License-Identifier: MIT
"""Judge a program: run it on several machines and sizes, several times, and say in words what went wrong first."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from compare import difference

import tilescale
from tilescale.errors import TileScaleError

if TYPE_CHECKING:
    from learn import Exercise, Tensors

SOLVED, UNWRITTEN, WRONG = "solved", "not written yet", "not right yet"
LAUNCHES, WIDTH = 2, 110


class NotWrittenError(TileScaleError):
    """The program has reached a place that is still to be written."""


@dataclass(frozen=True)
class Verdict:
    """What became of an exercise.

    Attributes:
        state: SOLVED, UNWRITTEN or WRONG.
        text: where it ran, or what is missing or wrong.
    """

    state: str
    text: str


def judge(exercise: Exercise, program: Callable[[int], Any]) -> Verdict:
    """Run `program` as an exercise asks, until something is wrong."""
    for machine, sizes in exercise.sizes.items():
        for size in sizes:
            try:
                with _silent(), tilescale.use_machine(machine):
                    complaint = _run(exercise, program, size)
            except NotWrittenError as error:
                return Verdict(UNWRITTEN, f"{error}\n\nWith --help the exercise explains itself.")
            if complaint:
                units = exercise.unit.removesuffix("s") if size == 1 else exercise.unit
                return Verdict(WRONG, f"With {size} {units} of {machine}:\n\n{complaint}")
    ran = [f"{_and(sorted(sizes))} {exercise.unit} of {machine}" for machine, sizes in exercise.sizes.items()]
    return Verdict(SOLVED, f"Right on {', '.join(ran)}; {LAUNCHES} launches each.")


def _run(exercise: Exercise, program: Callable[[int], Any], size: int) -> str | None:
    """Launch several times with fresh inputs in the same tensors; a complaint, or None."""
    traced, complaint = _attempt(exercise, program, lambda: program(size))
    rng = torch.Generator().manual_seed(size)
    args, before = None, None
    for launch in range(LAUNCHES if complaint is None else 0):
        case = exercise.case(size, rng)
        args = _refill(args, case.args)
        per_device = list(zip(*args.values(), strict=True))
        report, complaint = _attempt(exercise, program, lambda: tilescale.emulate(traced, per_device))  # noqa: B023
        if complaint is None:
            advice = exercise.advice.get("wrong values", "")
            complaint = difference(case, args, before, advice) or exercise.demand(report, size)
        if complaint:
            again = "The first launch was right. The second, with new inputs in the same tensors:\n\n" if launch else ""
            return again + complaint
        before = case.want
    return complaint


def _refill(args: Tensors | None, fresh: Tensors) -> Tensors:
    if args is None:
        return {name: [tensor.clone() for tensor in tensors] for name, tensors in fresh.items()}
    for name, tensors in fresh.items():
        for old, new in zip(args[name], tensors, strict=True):
            old.copy_(new)
    return args


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """TileLang logs the whole program that it refuses; the learner is told the line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


# -- words -------------------------------------------------------------------------------------------------------------


def _attempt(exercise: Exercise, program: Callable, action: Callable[[], Any]) -> tuple[Any, str | None]:
    """What an action returns, or a complaint that explains its error."""
    try:
        return action(), None
    except NotWrittenError:
        raise
    except TileScaleError as error:
        advice = exercise.advice.get(type(error).__name__)
        return None, str(error) + ("\n\n" + fill(f"What it means here: {advice}", WIDTH) if advice else "")
    except Exception as error:  # noqa: BLE001 - TileLang refuses what it does not understand with errors of any class
        return None, f"{type(error).__name__}: {error}{_line_of(program, error)}"


def _line_of(program: Callable[[int], Any], error: Exception) -> str:
    """The last line of the learner's file that an error came through."""
    file = program.__code__.co_filename
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"\n    at {file}:{lines[-1].lineno}\n        {lines[-1].line}" if lines else ""


def _and(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
