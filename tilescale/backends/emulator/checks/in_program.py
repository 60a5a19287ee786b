# SPDX-License-Identifier: MIT
"""Common base of the checks of races inside a program: the places of accesses by number, and the error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilescale.backends.emulator.checks.explain import VERBS
from tilescale.backends.emulator.checks.shadow import Shadow
from tilescale.backends.emulator.checks.text import declared_name, owner_of, region_text
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.observe import Observer
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.run import Run
from tilescale.errors import RaceError

Access = tuple["Home", str]
"""An access in the program, and its kind."""


class InProgram(Observer[Frame, Home]):
    """Base of the checks."""

    def starts(self, run: Run) -> None:
        self._run = run
        self._places: list[Home] = []
        self._place_of: dict[Home, int] = {}

    def _place(self, home: Home) -> int:
        """The number of an access in the program, for shadow memory."""
        if home not in self._place_of:
            self._place_of[home] = len(self._places)
            self._places.append(home)
        return self._place_of[home]

    def _race(
        self,
        frame: Frame,
        actor: str,
        accesses: tuple[Access, Access],
        shadow: Shadow,
        cells: np.ndarray,
        how: str,
        hint: str,
    ) -> RaceError:
        """The error that two accesses race on some cells.

        Args:
            actor: "thread", "iteration".
            how: why nothing orders them.
        """
        home = accesses[1][0]
        region = region_text(declared_name(self._run, home), shadow.around(cells))
        holder = owner_of(frame.unit, home.root, shadow.owner)
        place = f" of {holder}" if holder is not None and holder.level else ""
        acts = f" and another {actor} ".join(f"{VERBS[kind]} it" for _, kind in accesses)
        article = "an" if actor[0] in "aeiou" else "a"
        error = RaceError(
            f"{region}{place}: {article} {actor} of {frame.unit} {acts}, {how}",
            hint=hint,
            where=[replace(home.where, what=f"{VERBS[kind]} here") for home, kind in accesses if home.where],
        )
        error.located = True
        return error
