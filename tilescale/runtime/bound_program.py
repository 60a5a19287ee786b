# SPDX-License-Identifier: MIT
"""A program for a machine, by a schedule: its structure, and as the back end that runs it has lowered it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tilelang_core import ir
from tilescale import backends
from tilescale.comm import current_world, init
from tilescale.hda import Machine
from tilescale.passes.faults import faults_reported
from tilescale.passes.overlap.legality import has_sites
from tilescale.passes.overlap.rewrite import overlap
from tilescale.passes.overlap.schedule import Schedule
from tilescale.passes.persistent.rewrite import persistent
from tilescale.passes.persistent.tasks import Tasks
from tilescale.passes.pipeline import analyse
from tilescale.passes.retrace import for_machine
from tilescale.program.builder import Declaration, ProgramBuilder
from tilescale.program.model import Program
from tilescale.program.ops import MOMENTS, MOST_MOMENTS
from tilescale.runtime.drop_in import DropIn


class BoundProgram(DropIn):
    """A program bound to a machine and a schedule. That of a builder is traced only if no cache has it lowered."""

    def __init__(
        self,
        traced: ir.PrimFunc | ProgramBuilder,
        machine: Machine,
        options: dict[str, Any],
        schedule: str | Schedule,
    ):
        self.machine = machine
        self.options = options
        self._traced = traced
        self._asked = schedule
        self._known: dict[tuple[str, backends.Target], backends.Lowered] = {}
        if not isinstance(traced, ProgramBuilder):
            self._written  # noqa: B018 - raises if it is not a program, or one for another machine
        if isinstance(schedule, Schedule) or schedule == "persistent":
            self._scheduled  # noqa: B018 - raises if the program has no such schedule

    @cached_property
    def _written(self) -> ir.PrimFunc:
        """The program as the user wrote it."""
        traced = self._traced.build() if isinstance(self._traced, ProgramBuilder) else self._traced
        written = for_machine(traced, self.machine)
        return written.with_attr(MOMENTS, MOST_MOMENTS) if self.options.get("timeline") else written

    @cached_property
    def _scheduled(self) -> tuple[ir.PrimFunc, Schedule | Tasks | None]:
        if self._asked == "sequential":
            return self._written, None
        if self._asked == "persistent":
            self._analysed  # noqa: B018 - raises for mistakes in the program as written
            with faults_reported(self._written, lambda func: persistent(func, self.machine)):
                return persistent(self._written, self.machine)
        given = self._asked if isinstance(self._asked, Schedule) else None
        if given is None and not has_sites(self._analysed):
            return self._written, Schedule()
        with faults_reported(self._written, lambda func: overlap(func, self.machine, given)):
            return overlap(self._written, self.machine, given)

    @cached_property
    def _analysed(self) -> Program:
        """The program in order. The user's mistakes are reported here, in terms of the program as written."""
        return analyse(self._written, self.machine)

    @cached_property
    def program(self) -> Program:  # type: ignore[override] # of `DropIn`, which only reads it
        """The program's structure: parameters, launches, phases."""
        if self._found is not None:
            return self._found.program
        func = self._scheduled[0]
        return self._analysed if func is self._written else analyse(func, self.machine)

    # -- lowered -----------------------------------------------------------------------------------------------------

    @property
    def declaration(self) -> Declaration | None:
        """Its builder's; None for a program that has to be traced."""
        return self._traced.declaration if isinstance(self._traced, ProgramBuilder) else None

    @property
    def declared_outputs(self) -> range | None:
        """Positions of its results, as far as its builder declares them."""
        if not isinstance(self._traced, ProgramBuilder) or self._traced.declaration is None:
            return None
        return self._traced.declaration.outputs(self._traced.arguments)

    @cached_property
    def _found(self) -> backends.LoweredBefore | None:
        """The program as it was lowered before, in this process or another one."""
        if not isinstance(self._traced, ProgramBuilder) or self._asked != "sequential":
            return None
        return backends.find(self._traced.name, self.machine, self._units)

    @property
    def is_compiled(self) -> bool:
        """Whether the caches have the program lowered, and its grids compiled."""
        if self._found is None:
            del self._found  # another process may lower it now
            return False
        return all(each.is_done for each in self._found.ahead(self.options))

    def lower(self) -> backends.Lowered:
        """The program as the back end that runs it has it. Raises as the first call, but for its arguments."""
        if self._found is not None:
            return self._found
        if self.program.is_hierarchical:
            init()  # the job says how many devices there are
        return backends.choose(self.program, self._lowered)

    def compilations(self) -> Sequence[backends.Compilation]:
        """Compilations of the first call. Collective, and raises as that call, errors of its arguments aside."""
        return self.lower().compilations(self.options)

    def _lowered(self, backend: backends.Backend) -> backends.Lowered:
        """The program as a back end has it, made once for the devices that there are. Raises as `Backend.lower`."""
        target = backends.Target.of(self.program, self.machine, self._units)
        known = self._known.get((backend.name, target))
        if known is None:
            known = self._known[backend.name, target] = backend.lower(self.program, target)
        return known

    @property
    def _units(self) -> int | None:
        """Number of ranks that share a launch, as far as it is known."""
        team = self.options.get("team") or current_world()
        return team.size if team is not None and team.size > 1 else None
