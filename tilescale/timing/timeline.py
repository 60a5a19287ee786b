# SPDX-License-Identifier: MIT
"""Result of a simulation: the time of every step, the load of each resource, and the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tilescale.errors import Location
from tilescale.hda.units import format_time

KINDS = ("compute", "transfer", "collective", "wait", "launch", "sync")
"""Kinds of spans. A wait is for a flag or for others to arrive; sync is the cost of the barrier itself."""


class Span(NamedTuple):
    """Something that one engine did for a while. A tuple, as simulations make hundreds of thousands.

    Attributes:
        row: number of the unit that owns tensors (a device) it belongs to, in the order of the arguments.
        engine: which part of that unit, e.g. "block 17.0" for the first of the programs on the 18th place, "tma".
        unit: its readable name, e.g. "device 3, block (4, 1)".
        name: what, e.g. "gemm".
        kind: one of KINDS.
        begin_s, end_s: seconds since the launch.
        nbytes: that it moved.
        flops: operations that it computed.
        where: the line of the program.
        cause: the span without whose end it could not have begun, as a position in `Timeline.spans`.
        seconds: from its begin to its end.
    """

    row: int
    engine: str
    unit: str
    name: str
    kind: str
    begin_s: float
    end_s: float
    nbytes: int = 0
    flops: int = 0
    where: Location | None = None
    cause: int | None = None

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Copies(Sequence):
    """The spans of all units, of which those of the first were simulated: span i of unit u is number i * units + u.

    Attributes:
        first: the spans of the first unit; their causes are numbers among all.
        units: names of the units, in the order of their rows.
    """

    first: Sequence[Span]
    units: Sequence[str]

    def __repr__(self) -> str:
        return f"<Copies of {len(self.first)} spans for {len(self.units)} units>"

    def __len__(self) -> int:
        return len(self.first) * len(self.units)

    def __getitem__(self, number: int) -> Span:  # type: ignore[override] # slices are not made
        at, row = divmod(range(len(self))[number], len(self.units))
        return self._of(self.first[at], row)

    def __iter__(self) -> Iterator[Span]:
        return (self._of(span, row) for span in self.first for row in range(len(self.units)))

    def _of(self, span: Span, row: int) -> Span:
        if row == 0:
            return span
        unit = self.units[row] + span.unit.removeprefix(self.units[0])
        cause = None if span.cause is None else span.cause + row
        return span._replace(row=row, unit=unit, cause=cause)


@dataclass(frozen=True, slots=True)
class Use:
    """Load of one resource.

    Attributes:
        unit: its owner: a unit that owns tensors with all programs on it, or a link.
        resource: e.g. "tensor", "l2", "nvlink".
        busy_s: seconds in which it worked, as a share of its full capacity: at half of it a second counts half.
        kind: "compute", "memory" or "network".
    """

    unit: str
    resource: str
    busy_s: float
    kind: str


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bound of a program's time on a machine, and the resource that determines it."""

    seconds: float
    use: Use

    def __str__(self) -> str:
        return f"{self.seconds * 1e6:.2f} us by {self.use.resource} of {self.use.unit}"


@dataclass(frozen=True, slots=True)
class WaitLine:
    """Waiting time of a program line, over all units that waited."""

    where: Location | None
    name: str
    seconds: float
    count: int


@dataclass(frozen=True)
class Timeline:
    """When everything happened.

    Attributes:
        level: name of the level whose units are the rows.
        spans: in the order of their ends.
        uses: the load of each resource.
        end_s: when the last span ended.
        title: what ran where, as drawings say above.
        titles: resource -> its common name outside of the machine's description, e.g. HBM3e.
    """

    level: str
    spans: Sequence[Span]
    uses: Sequence[Use]
    end_s: float
    title: str = ""
    titles: Mapping[str, str] = field(default_factory=dict)

    def called(self, resource: str) -> str:
        """The name of a resource, and its title if it has one: "l2 (HBM3e)", to distinguish it from "l2 cache"."""
        return f"{resource} ({self.titles[resource]})" if resource in self.titles else resource

    def __repr__(self) -> str:
        what = f"{self.title}, " if self.title else ""
        return f"<Timeline {what}{format_time(self.end_s)}, {len(self.spans)} spans, {self.rows} x {self.level}>"

    @cached_property
    def rows(self) -> int:
        """Number of units that own tensors."""
        spans, units = self._simulated
        return units if units > 1 else 1 + max((span.row for span in spans), default=0)

    @property
    def _simulated(self) -> tuple[Sequence[Span], int]:
        """Spans that stand for all, and for how many units each."""
        spans = self.spans
        return (spans.first, len(spans.units)) if isinstance(spans, Copies) else (spans, 1)

    @cached_property
    def utilization(self) -> dict[str, float]:
        """Resource -> the share of the time that it worked, over all units that have one."""
        busy: dict[str, list[float]] = {}
        for use in self.uses:
            busy.setdefault(use.resource, []).append(use.busy_s)
        return {name: sum(times) / len(times) / self.end_s if self.end_s else 0.0 for name, times in busy.items()}

    @cached_property
    def bound(self) -> Bound | None:
        """The roofline: no schedule of the same work is faster than its busiest resource (Williams, Waterman and
        Patterson, "Roofline", 2009). None where nothing was asked of any resource."""
        most = max(self.uses, key=lambda use: use.busy_s, default=None)
        return Bound(most.busy_s, most) if most is not None else None

    @property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that led to the end, first one first: each began when the one before it ended."""
        return tuple(self.spans[number] for number in self.critical_numbers)

    @cached_property
    def critical_numbers(self) -> tuple[int, ...]:
        """The positions in `spans` of the critical path."""
        spans, units = self._simulated
        if not spans:
            return ()
        at: int | None = units * max(range(len(spans)), key=lambda i: spans[i].end_s)
        chain = []
        while at is not None:
            chain.append(at)
            at = self.spans[at].cause
        return tuple(reversed(chain))

    @cached_property
    def waits(self) -> tuple[WaitLine, ...]:
        """Lines at which the program waited, the longest first."""
        totals: dict[tuple[Location | None, str], list[float]] = {}
        spans, units = self._simulated
        for span in spans:
            if span.kind == "wait":
                totals.setdefault((span.where, span.name), []).append(span.seconds)
        lines = [
            WaitLine(where, name, units * sum(times), units * len(times)) for (where, name), times in totals.items()
        ]
        return tuple(sorted(lines, key=lambda line: -line.seconds))
