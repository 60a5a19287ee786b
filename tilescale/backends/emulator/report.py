# SPDX-License-Identifier: MIT
"""The result of `tilescale.emulate`: the activity of every device over time, as text, table, picture and trace."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import overload

from tilescale.backends.emulator.record.recorder import Recorder
from tilescale.backends.emulator.run import Activity
from tilescale.errors import Location, TileScaleError, UsageError
from tilescale.hda import Machine
from tilescale.hda.units import format_bytes
from tilescale.program.preformatted import preformatted
from tilescale.timing.draw import TimelinePage, page, plot, summary, trace
from tilescale.timing.timeline import Timeline

MOST_LINES = 16
"""Maximum number of units that have a line each in a report."""


@dataclass(frozen=True)
class Report:
    """The result of an emulation.

    Attributes:
        program: the name of the program.
        machine: the name of the emulated machine.
        activity: the activity of each tensor-owning unit, in the order of the arguments.
        wall_s: seconds that the emulation took on this computer, unrelated to the machine's speed.
        recorder: gives the record of which `timeline` is the simulation; None if the run was not timed.
        missed: tile operations wholly out of bounds, so that loads gave zero and stores nothing: the tensor's name and
            the line -> their number.
        clipped: the same for operations partly out of bounds.
        negative: the same for accesses with an index below zero, such as a missing page.
        unwritten: the unchanged parts of outputs, if "outputs" were checked: the part, "Y[32:64, 0:64] of device 0",
            and the line that writes the tensor.
        diverged: parts of tensors that were equal on all units at the start and differ at the end.
        redundant_waits: waits that order no two accesses to one element of this run, if its races were checked: the
            flag's name and the line.
        unsupported: the error of a program that has been lowered for the machine, in doubt about its tiles, and that
            cannot run there.
    """

    program: str
    machine: Machine
    activity: tuple[Activity, ...]
    wall_s: float
    recorder: Callable[[], Recorder] | None = field(default=None, compare=False)
    missed: Mapping[tuple[str, Location | None], int] = field(default_factory=dict)
    redundant_waits: Sequence[tuple[str, Location | None]] = ()
    clipped: Mapping[tuple[str, Location | None], int] = field(default_factory=dict)
    negative: Mapping[tuple[str, Location | None], int] = field(default_factory=dict)
    unwritten: Sequence[tuple[str, Location | None]] = ()
    diverged: Sequence[tuple[str, Location | None]] = ()
    unsupported: TileScaleError | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of the run; computed at the first access.

        Raises:
            UsageError: the run was not timed.
        """
        if self.recorder is None:
            raise UsageError("this run was not timed", hint="leave out time=False")
        titles = {layer.name: layer.title for layer in self.machine.memory if layer.title and "global" in layer.scopes}
        return replace(self.recorder().timeline(), title=f"{self.program} on {self.machine.name}", titles=titles)

    @property
    def time_us(self) -> float:
        """Simulated duration in microseconds. Raises as `timeline`."""
        return self.timeline.end_s * 1e6

    @property
    def utilization(self) -> dict[str, float]:
        """Resource -> utilization (share of the time), averaged over the units that have it. Raises as `timeline`."""
        return self.timeline.utilization

    def trace(self, path: str | PathLike[str]) -> None:
        """Write the timeline for Perfetto (https://ui.perfetto.dev), compressed where the path ends in ".gz".

        Units that own tensors are processes, their engines threads, and arrows show dependencies. Raises as `timeline`,
        and a UsageError where no file can be made.
        """
        trace(self.timeline, path)

    @overload
    def plot(self, path: None = None, *, engines: bool = False) -> TimelinePage: ...

    @overload
    def plot(self, path: str | PathLike[str], *, engines: bool = False, dark: bool = False) -> None: ...

    def plot(
        self, path: str | PathLike[str] | None = None, *, engines: bool = False, dark: bool = False
    ) -> TimelinePage | None:
        """Draw the timeline: a row for each unit that owns tensors, time in microseconds.

        Args:
            path: an .html file makes an interactive page that needs no other file and no network; .png, .svg and .pdf
                make pictures. Without a path the page is returned, and a notebook shows it below its cell.
            engines: a row for each engine of a unit instead, or for each family of engines where there are many; on a
                page, units begin unfolded.
            dark: dark mode. Without it .svg and .html files follow their reader's preference.

        Raises:
            UsageError: the run was not timed, another ending, or no file can be made there.
            DependencyError: matplotlib is missing, or Bokeh for a page.
        """
        if path is None:
            return page(self.timeline, unfolded=engines)
        plot(self.timeline, path, engines=engines, dark=dark)
        return None

    def __repr__(self) -> str:
        units = f"{len(self.activity)} x {self.machine.tensor_level.name}"
        return f"<tilescale.Report of {self.program} on {self.machine.name}, {units}>"

    def __str__(self) -> str:
        parts = [self._activity()] + ([summary(self.timeline)] if self.recorder is not None else [])
        return "\n".join([*parts, *self._remarks()])

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        line = lambda cells, tag: f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"  # noqa: E731
        table = line(head, "th") + "".join(line(row, "td") for row in rows)
        words = [summary(self.timeline)] if self.recorder is not None else []
        words += self._remarks()
        title = f"<b>{escape(self.program)}</b> on {escape(self.machine.name)}"
        return f"<div>{title}<table>{table}</table>{preformatted(chr(10).join(words))}</div>"

    def _remarks(self) -> Iterator[str]:
        """Remarks: events that are allowed, but seldom intended."""
        for (name, where), count in self.missed.items():
            yield f"no effect: access wholly out of bounds of {name} x{count}{_place(where)}"
        for (name, where), count in self.clipped.items():
            yield f"clipped: part of the access is out of bounds of {name} x{count}{_place(where)}"
        for (name, where), count in self.negative.items():
            yield f"negative index: {name} x{count}{_place(where)}"
        for part, where in self.unwritten:
            yield f"unwritten: the program does not write {part}{_place(where)}"
        for part, where in self.diverged:
            yield f"diverged: all units were given the same, and end with different values of {part}{_place(where)}"
        for name, where in self.redundant_waits:
            yield f"redundant wait for {name}: no access of this run needs it{_place(where)}"
        if self.unsupported is not None:
            where = self.unsupported.where[0] if self.unsupported.where else None
            yield f"unsupported on {self.machine.name}: {self.unsupported.message}{_place(where)}"

    def _activity(self) -> str:
        rows = list(self._rows())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows)

    def _rows(self) -> Iterator[list[str]]:
        """The table of the units' activity, its header first."""
        yield [self.machine.tensor_level.name, *_HEADINGS]
        # Neighbouring units with the same activity share a line where there are many.
        many = len(self.activity) > MOST_LINES
        numbered = enumerate(map(_cells, self.activity))
        for _, group in itertools.groupby(numbered, key=lambda item: item[1] if many else item[0]):
            (first, cells), *others = group
            yield [f"{first}-{others[-1][0]}" if others else str(first), *cells]


_HEADINGS = ("programs", "messages", "sent", "received", "signals", "collective bytes", "collectives")


def _cells(did: Activity) -> list[str]:
    names = ", ".join(f"{name} x{count}" for name, count in did.collectives.items()) or "-"
    moved = [str(did.messages), format_bytes(did.sent), format_bytes(did.received), str(did.signals)]
    return [str(did.programs), *moved, format_bytes(did.contributed), names]


def _place(where: Location | None) -> str:
    return f"  {Path(where.file).name}:{where.line}" if where else ""
