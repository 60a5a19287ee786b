# SPDX-License-Identifier: MIT
"""Record of a collective algorithm: the operations it supports, its requirements, its rounds.

A file in `algorithms/` has the records of a family in its `ALGORITHMS`; nothing else has to know of a new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tilescale.collectives.round_schedule import SEGMENTS, RoundSchedule
from tilescale.errors import UnsupportedError
from tilescale.hda import Level, Machine

Shape = tuple[int, ...]

TENSORS, TILES, PROGRAMS, THREAD_GROUPS = "tensors", "tiles", "programs", "thread groups"

FORMS = {
    TENSORS: "whole tensors",
    TILES: "tiles of programs",
    PROGRAMS: "programs of one grid",
    THREAD_GROUPS: "thread groups of one program",
}
"""Kinds of collective, in words: between units that own tensors, of these, in a phase of theirs; between the same
units, of tiles that their programs bring; between programs of a cluster or grid; between thread groups of a program."""


def form_of(machine: Machine, level: Level, in_program: bool) -> str:
    """The kind of a collective between units of a level, executed by programs or in a phase of tensor-owning units."""
    if level.kind == "thread_group":
        return THREAD_GROUPS
    if machine.index(level.name) < machine.index(machine.tensor_level.name):
        return PROGRAMS
    return TILES if in_program else TENSORS


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm for collectives.

    Attributes:
        name: what `impl=` calls it.
        title: its description, in one sentence.
        schedules: operation -> its rounds, for units numbered row-major in a shape, the innermost groups last.
        forms: kinds of collective that it supports, of `FORMS`.
        segmented: operations of which segments of the tensor follow one another; their schedules take how many.
        in_order: whether sums are added in the order of its rounds on every back end, so that GPUs get the bits of the
            emulator. A library adds in another order.
        keeps_nan: whether a NaN of any unit stays in a maximum and a minimum. For floats an algorithm that drops NaNs
            is used only on request of a program.
        power_of_two: whether it needs a power of two of units.
        dtypes: element types that it takes; () for all.
        moves_all: whether it takes all types where it only moves them.
        library: the software that makes it, in the words of machine descriptions; "" for this project's own.
        by_host: whether the host starts messages.
        most: with more units it is taken only where a program asks for it.
        takes_functions: whether a user's function can combine in its rounds. Elsewhere it gathers the tensors of all
            units, and each unit combines them in the order of ranks.
        only: operation -> the kinds of it that it supports, of one that it does not support in all `forms`.
    """

    name: str
    title: str
    schedules: Mapping[str, Callable[..., RoundSchedule]]
    forms: Iterable[str]
    segmented: frozenset[str] = frozenset()
    in_order: bool = True
    keeps_nan: bool = True
    power_of_two: bool = False
    dtypes: tuple[str, ...] = ()
    moves_all: bool = False
    library: str = ""
    by_host: bool = False
    most: float = math.inf
    takes_functions: bool = True
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = {*self.forms} - {*FORMS} | {*self.segmented, *self.only} - {*self.schedules}
        if not self.name or not self.schedules or not self.forms or unknown:
            raise ValueError(f"algorithm {self.name!r}: a name, schedules, forms of {[*FORMS]}; not {sorted(unknown)}")

    def supports(self, operation: str, form: str | None = None) -> bool:
        return operation in self.schedules and (form is None or form in self.kinds(operation))

    def kinds(self, operation: str) -> Iterable[str]:
        """The kinds of an operation that it supports."""
        return self.only.get(operation, self.forms)

    def is_kept_back(self, units: int, dtype: str, reduction: str | None) -> bool:
        """Whether the algorithm is used only on request for a number of units, a dtype, and a combining operation."""
        drops = not self.keeps_nan and reduction in ("max", "min") and "float" in dtype
        return self.most < units or drops

    def schedule(self, operation: str, shape: Shape, segments: int = SEGMENTS) -> RoundSchedule:
        """Its rounds. Raises UnsupportedError: it needs a power of two of units."""
        reason = self.against(math.prod(shape))
        if reason is not None:
            raise UnsupportedError(f"{operation} by {self.name}: {reason}", hint='"ring" and "direct" take any number')
        make = self.schedules[operation]
        return make(shape, segments) if operation in self.segmented else make(shape)

    def against(self, units: int, dtype: str | None = None, reduction: str | None = None) -> str | None:
        """Why the algorithm cannot run on a number of units, a dtype, or a combining operation; None if it can.

        Without a `reduction` nothing is combined.
        """
        if self.power_of_two and units & (units - 1):
            return f"it needs a power of two of units, here are {units}"
        is_moved = self.moves_all and reduction is None
        if self.dtypes and dtype is not None and dtype not in self.dtypes and not is_moved:
            return f"it takes no {dtype}"
        return None
