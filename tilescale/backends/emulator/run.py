# SPDX-License-Identifier: MIT
"""One emulation: the units of a launch, their memory, what they did, and what is said when nobody can go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilescale.backends.emulator import collectives, threads, tiles  # noqa: F401 - they register their operations
from tilescale.backends.emulator import statements as _statements  # noqa: F401
from tilescale.backends.emulator.compiler import Compiler
from tilescale.backends.emulator.frame import Frame
from tilescale.backends.emulator.grid import compile_part
from tilescale.backends.emulator.scheduler import Deadlock, Scheduler, Task
from tilescale.backends.emulator.units import Unit
from tilescale.errors import DeadlockError, Location
from tilescale.hda import Machine
from tilescale.program.model import Program


@dataclass
class Activity:
    """What one tensor-owning unit (a device) did.

    Attributes:
        programs: tile programs that ran.
        sent, received: bytes that its own copies moved to and from peers.
        messages: copies to or from peers.
        signals: flags it updated.
        collectives: how often it took part in which collective, by name.
        contributed: bytes it brought into collectives.
    """

    programs: int = 0
    sent: int = 0
    received: int = 0
    messages: int = 0
    signals: int = 0
    contributed: int = 0
    collectives: dict[str, int] = field(default_factory=dict)


class Run:
    """The state that all frames of an emulation share."""

    def __init__(self, program: Program, machine: Machine, progress: Callable[[int], None]):
        self.program, self.machine = program, machine
        self.compiler = Compiler(program, machine)
        self.body = compile_part(self.compiler, program.body)
        self.scheduler = Scheduler()
        self.meetings: dict[Any, Any] = {}
        self.activity: list[Activity] = []
        self.grids: list[Any] = []
        self.root = Unit("", 0)
        self._numbers: dict[Unit, int] = {}
        self._progress = progress

    def launch(self, extents: list[tuple[str, int]], values: list[dict[int, Any]]) -> None:
        """Run the program.

        Args:
            extents: units of each launched level above the program, coarsest first; [] for a single device.
            values: for each tensor-owning unit, slot -> its array or scalar.

        Raises:
            DeadlockError: nobody can go on.
        """
        level = self.machine.tensor_level.name
        levels = extents or [(level, len(values))]
        units = list(self._units(self.root, levels))
        for number, (unit, mine) in enumerate(zip(units, values, strict=True)):
            self._numbers[unit] = number
            self.activity.append(Activity())
            unit.storage.update(mine)
            slots: list[Any] = [None] * (self.compiler.slot_count + 1)
            for slot, value in mine.items():
                slots[slot] = value
            frame = Frame(self, unit, slots, threads=1)
            self.scheduler.spawn(str(unit), lambda f=frame: self.body(f))
        try:
            with np.errstate(all="ignore"):
                self.scheduler.run()
        except Deadlock as deadlock:
            raise self._deadlock_error(deadlock.tasks) from None

    def _units(self, parent: Unit, levels: list[tuple[str, int]]):
        if not levels:
            yield parent
            return
        (name, extent), *finer = levels
        for rank in range(extent):
            unit = parent.child(name, rank)
            unit.siblings = extent
            yield from self._units(unit, finer)

    # -- accounts ---------------------------------------------------------------------------------------------------------

    def _of(self, unit: Unit) -> Activity:
        while unit not in self._numbers:
            unit = unit.parent
        return self.activity[self._numbers[unit]]

    def moved(self, unit: Unit, peer: Unit, size: int, sent: bool) -> None:
        """A copy of `size` bytes to or from a peer."""
        account = self._of(unit)
        if account is self._of(peer):
            return
        account.messages += 1
        if sent:
            account.sent += size
        else:
            account.received += size

    def signalled(self, unit: Unit) -> None:
        """A flag was updated."""
        self._of(unit).signals += 1

    def collected(self, unit: Unit, name: str, size: int) -> None:
        """A unit took part in a collective with `size` bytes."""
        account = self._of(unit)
        account.contributed += size
        account.collectives[name] = account.collectives.get(name, 0) + 1

    def program_ended(self, unit: Unit) -> None:
        """A tile program has ended."""
        self._of(unit).programs += 1
        self._progress(1)

    # -- deadlock ---------------------------------------------------------------------------------------------------------

    def _deadlock_error(self, tasks: list[Task]) -> DeadlockError:
        waits = [t for t in tasks if not t.wait.quiet]
        groups: dict[tuple[str, Location | None], list[Task]] = {}
        for task in waits:
            groups.setdefault((task.wait.what, task.wait.where), []).append(task)
        lines = [f"deadlock: {len(waits)} units wait for something that nobody will do"]
        for (what, _), members in list(groups.items())[:8]:
            lines.append(f"  {_names(members)} wait{'s' if len(members) == 1 else ''} for {what}")
            wait = members[0].wait
            lines += [f"    {text}" for text in (_labelled("now", wait.seen()), wait.missing()) if text]
        if len(groups) > 8:
            lines.append(f"  ... and {len(groups) - 8} more groups")
        lines += self._not_resident()
        hint = "signal what is waited for before waiting, or let every unit reach the same barriers"
        where = [w for (_, w) in list(groups)[:8] if w]
        return DeadlockError("\n".join(lines), hint=hint, where=list(dict.fromkeys(where)))

    def _not_resident(self) -> list[str]:
        lines = []
        for grid in self.grids:
            left = grid.not_started
            if left:
                what = self.machine.program_level.name
                lines.append(
                    f"  {grid.device.unit} holds {grid.plan.resident} {what}s at once; {left} of {grid.count} have not "
                    f"started, and those that run wait: launch at most {grid.plan.resident} that wait for each other"
                )
        return lines


def _names(tasks: list[Task]) -> str:
    shown = "; ".join(t.name for t in tasks[:3])
    return shown if len(tasks) <= 3 else f"{shown}; and {len(tasks) - 3} more"


def _labelled(label: str, text: str) -> str:
    return f"{label}: {text}" if text else ""
