# SPDX-License-Identifier: MIT
"""Labelled programs: the mistake of each, its origin in the literature, and the outcome of a run.

Each kind of mistake is a file with a `Kind`, which decorates functions that make a program and its arguments:

    label = Kind("data race")

    @label("block", HIRACE("write and read of global memory"), wrong={"nothing": RaceError}, right=["flag"])
    def neighbours(order): ...

Each name under `wrong` and `right` is one program, made with that name as the argument. Lines that the error has to
name end with `# named`, or with `# named: nothing, ...` for some of the wrong programs only.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

import tilescale
from tilescale.errors import RaceError, TileScaleError, UninitializedReadError

LEVELS = ("device", "cta_cluster", "block", "warpgroup", "thread")
"""Kind of unit whose synchronization a program is about; threads are those of a block in plain TileLang launches."""

SEEDS = range(20)
"""Orders of the units that the corpus is measured in."""

Error = type[TileScaleError] | tuple[type[TileScaleError], ...]

TOO_EARLY = RaceError, UninitializedReadError
"""A read that comes too early of data that only one unit writes: the run's order decides between the two errors."""


@dataclass(frozen=True)
class Source:
    """A published collection or study, from which the idea of a program is taken; never its text."""

    name: str
    title: str

    def __call__(self, category: str) -> Origin:
        return Origin(self, category)


@dataclass(frozen=True)
class Origin:
    """A category of a source."""

    source: Source
    category: str


RMARACEBENCH = Source(
    "RMARaceBench",
    "Schwitanski, Jenke, Klotz, Müller: RMARaceBench: A Microbenchmark Suite to Evaluate Race Detection Tools for RMA "
    "Programs, SC-W 2023",
)
INDIGO = Source(
    "Indigo",
    "Liu, Azami, Walters, Burtscher: The Indigo Program-Verification Microbenchmark Suite of Irregular Parallel Code "
    "Patterns, ISPASS 2022",
)
HIRACE = Source(
    "HiRace",
    "Jacobson, Burtscher, Gopalakrishnan: HiRace: Accurate and Fast Source-Level Race Checking of GPU Programs, "
    "SC 2024",
)
FAIAL = Source(
    "Faial",
    "Cogumbreiro, Lange, Rong, Zicarelli: Checking Data-Race Freedom of GPU Kernels, Compositionally, CAV 2021",
)
SIMULEE = Source(
    "Simulee",
    "Wu, Ouyang, Zhou, Zhang, Liu, Zhang: Simulee: Detecting CUDA Synchronization Bugs via Memory-Access Modeling, "
    "ICSE 2020",
)
SCORD = Source("ScoRD", "Kamath, George, Basu: ScoRD: A Scoped Race Detector for GPUs, ISCA 2020")
GSAN = Source("GSan", "Triton: GSan, a concurrency sanitizer for global memory, tests in triton-lang/triton, 2026")
SOURCES = (RMARACEBENCH, INDIGO, HIRACE, FAIAL, SIMULEE, SCORD, GSAN)


@dataclass(frozen=True)
class Program:
    """A program of the corpus and its label.

    Attributes:
        make: makes the traced function and its arguments, from `variant` where there is one.
        error: what has to be raised; None for a program that is right.
    """

    kind: str
    level: str
    origin: Origin
    make: Callable[..., tuple[Any, list]]
    variant: str | None
    error: Error | None

    @property
    def name(self) -> str:
        """Unique in the corpus."""
        return self.make.__name__ + (f"[{self.variant}]" if self.variant is not None else "")

    @cached_property
    def named(self) -> set[int]:
        """Lines that the error has to name."""
        lines, first = inspect.getsourcelines(self.make)
        return {number for number, text in enumerate(lines, first) if self._is_named(text)}

    def _is_named(self, line: str) -> bool:
        _, mark, which = line.rstrip().partition("# named")
        return bool(mark) and (not which or self.variant in which.removeprefix(": ").split(", "))


@dataclass
class Kind:
    """A kind of mistake, and the programs that make it or do it right."""

    name: str
    programs: list[Program] = field(default_factory=list)

    def __call__(
        self, level: str, origin: Origin, *, wrong: Error | Mapping[str, Error] | None = None, right: Iterable[str] = ()
    ) -> Callable:
        """Label the programs that a function makes.

        Args:
            wrong: the error of its only program, or names of variants with theirs.
            right: names of correct variants. Without either, its only program is right.
        """
        assert level in LEVELS, level
        variants: dict[str | None, Error | None] = dict.fromkeys(right)
        if isinstance(wrong, Mapping):
            variants.update(wrong)
        elif not variants:
            variants[None] = wrong

        def register(make: Callable) -> Callable:
            self.programs += [Program(self.name, level, origin, make, *each) for each in variants.items()]
            return make

        return register


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run of a program.

    Attributes:
        error: the exception, or None. values: the arguments afterwards, if there was no exception.
        redundant: the lines of the waits that no access of the run needed.
    """

    program: Program
    error: TileScaleError | None
    values: list
    redundant: frozenset[int] = frozenset()

    @property
    def right(self) -> bool:
        """Whether the mistake was found at its line, or none where there is none."""
        if self.program.error is None:
            return self.error is None
        return isinstance(self.error, self.program.error) and self.program.named <= {w.line for w in self.error.where}


class Bench:
    """One program, traced once and run in as many orders as asked for."""

    def __init__(self, program: Program):
        self._program = program
        self._refused: TileScaleError | None = None
        arguments = [] if program.variant is None else [program.variant]
        try:
            self._function, self._given = program.make(*arguments)
        except TileScaleError as error:
            self._refused = error

    def run(self, seed: int | None) -> Outcome:
        """All checks, in the order of units that a seed stands for."""
        if self._refused is not None:
            return Outcome(self._program, self._refused, [])
        given = copy.deepcopy(self._given)  # one tensor stays one tensor
        try:
            report = tilescale.emulate(self._function, given, time=False, schedule_seed=seed)
        except TileScaleError as error:
            return Outcome(self._program, error, [])
        return Outcome(self._program, None, given, frozenset(where.line for _, where in report.redundant_waits))


# -- arguments ---------------------------------------------------------------------------------------------------------


def each(devices: int, *shapes: tuple[int, ...] | int) -> list[list[torch.Tensor]]:
    """For each device a tensor of each shape: float32, another value in each; or int32 zeros for a plain number."""
    return [[_tensor(shape, rank) for shape in shapes] for rank in range(devices)]


def alone(*shapes: tuple[int, ...] | int) -> list[torch.Tensor]:
    """The same for the only device."""
    return each(1, *shapes)[0]


def _tensor(shape: tuple[int, ...] | int, rank: int) -> torch.Tensor:
    if isinstance(shape, int):
        return torch.zeros(shape, dtype=torch.int32)
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1000 * rank
