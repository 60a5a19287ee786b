# SPDX-License-Identifier: MIT
"""Conditions under which a collective may be split: afterwards it orders only the data that it moves.

In program order a collective is a barrier: after it each unit knows that all have arrived. Overlapped with a grid, it
notifies only the waiters of its flags. These suffice where nothing else of the program relies on the barrier, where the
source is unchanged until it is sent, and where the result is used by statements that can wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tilelang_core import ir
from tilescale.errors import one
from tilescale.hda import Machine
from tilescale.passes.declined import Declined
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.effects import Effects, statements
from tilescale.program.model import DevicePhase, GridPhase, Launch, Program, Sequence, location
from tilescale.program.operations import Collective, Copy, operation


@dataclass(frozen=True)
class CollectiveSite:
    """A collective of whole tensors that is done in order."""

    stmt: ir.Stmt
    made: Collective
    phase: DevicePhase
    launch: Launch

    @property
    def tensors(self) -> tuple[str, str]:
        """Names of its source and target."""
        return _name(self.made.source), _name(self.made.target)

    @property
    def name(self) -> str:
        return self.made.name


@dataclass(frozen=True)
class ShiftSite:
    """Copies of a device phase to peers that are done in order, one after the other. `stmts`: the copies, and `made`
    their typed views."""

    stmts: tuple[ir.Stmt, ...]
    made: tuple[Copy, ...]
    phase: DevicePhase
    launch: Launch

    name = "shift"

    @property
    def stmt(self) -> ir.Stmt:
        """The first one."""
        return self.stmts[0]

    @property
    def tensors(self) -> tuple[str, str]:
        """Names of its source and target."""
        return ", ".join(_name(m.source) for m in self.made), ", ".join(_name(m.target) for m in self.made)


def _moved(stmt: ir.Stmt, phase: DevicePhase | GridPhase | None) -> Collective | Copy | None:
    """The collective of whole tensors, or the copy of one to a peer, that a statement does in order."""
    made = operation(stmt.value) if isinstance(stmt, ir.Evaluate) and isinstance(phase, DevicePhase) else None
    if isinstance(made, Collective):
        return made if made.flags is None else None
    return made if isinstance(made, Copy) and made.to_peer and made.signal is None else None


def has_sites(program: Program) -> bool:
    """Whether a program has any of `sites`; a look at its statements, no analysis."""
    return any(launch is not None and _moved(stmt, phase) for stmt, phase, launch in statements(program.body))


def sites(graph: Dependence) -> list[tuple[CollectiveSite | ShiftSite, ProgramStep]]:
    """The collectives of whole tensors and the shifts, in program order, each with its first statement."""
    found: list[tuple[CollectiveSite | ShiftSite, ProgramStep]] = []
    last: ProgramStep | None = None  # flags of the shift that was found before
    for step in graph.steps:
        made = _moved(step.stmt, step.phase)
        if not isinstance(step.phase, DevicePhase) or step.launch is None:
            continue
        if isinstance(made, Collective):
            found.append((CollectiveSite(step.stmt, made, step.phase, step.launch), step))
        elif isinstance(made, Copy):
            shift, first = ShiftSite((step.stmt,), (made,), step.phase, step.launch), step
            if last is not None and last.phase is step.phase and _are_neighbours(last, step, graph):
                before, first = found.pop()
                assert isinstance(before, ShiftSite)
                shift = replace(shift, stmts=(*before.stmts, step.stmt), made=(*before.made, made))
            found.append((shift, first))
            last = step
    return found


def _are_neighbours(a: ProgramStep, b: ProgramStep, graph: Dependence) -> bool:
    return all(isinstance(step.stmt, ir.Bind) for step in graph.steps[a.number + 1 : b.number])


def _name(region: ir.Call) -> str:
    return str(ir.region_parts(region)[0].name).removesuffix("_view")


def check(site: CollectiveSite, mine: ProgramStep, graph: Dependence, own: Iterable[ir.Var]) -> None:
    """Check the conditions of every overlapped collective. Raises Declined: it cannot be proven that only its flags
    matter. `own`: flags of earlier overlapped collectives."""
    where = location(site.stmt)
    if mine.around:
        raise Declined("it is in a loop or a branch", where)
    if not mine.on_device:
        raise Declined(f"{one(graph.machine.tensor_level.name)} has no copy queue", where)
    if site.made.impl is not None:
        raise Declined(f"impl={site.made.impl!r} was requested", where)
    brought = set(own)
    for step in graph.steps:
        effects = step.effects
        if effects.opaque:
            raise Declined("an external function may depend on it", location(step.stmt))
        ordered = any(flag not in brought for flag in effects.flags)
        levels = [access.at.level for access in effects.accesses if access.at is not None]
        reached = any(is_around_programs(level, graph.machine) for level in levels) and not effects.flags
        collective = operation(step.stmt.value) if isinstance(step.stmt, ir.Evaluate) else None
        together = synchronizes_programs(effects, graph.machine)
        if ordered or reached or together and not isinstance(collective, Collective):
            raise Declined("the program orders its units by itself", location(step.stmt))
        if together and isinstance(step.phase, GridPhase):
            raise Declined("programs of the grid synchronize", location(step.stmt))


def synchronizes_programs(effects: Effects, machine: Machine) -> bool:
    """Whether programs, or units above them, wait for each other; those inside of a program order none."""
    return any(is_around_programs(one.level, machine) for one in effects.synchronizes)


def is_around_programs(level: str, machine: Machine) -> bool:
    """Whether units of a level are programs or consist of them."""
    return machine.index(level) >= machine.index(machine.program_level.name)


def is_behind_waiting(mine: ProgramStep, graph: Dependence) -> bool:
    """Whether copies that wait for a flag before they start were started before: the queue is in order, so a device
    must not put copies within its own memory on it then."""
    before = [s.stmt.value for s in graph.steps[: mine.number] if isinstance(s.stmt, ir.Evaluate)]
    copies = [made for made in map(operation, before) if isinstance(made, Copy)]
    return any(copy.after is not None for copy in copies)


def stands_alone(phase: GridPhase, launch: Launch) -> bool:
    """Whether a phase is executed once by a launch, without a loop or a branch around."""
    parts = [launch.body]
    while parts:
        part = parts.pop()
        if part is phase:
            return True
        if isinstance(part, Sequence):
            parts += part.parts
    return False


def uses_after(root: ir.Var, mine: ProgramStep, graph: Dependence) -> list[ProgramStep]:
    """The innermost statements after a collective that touch a tensor. Raises Declined: one of them is in another
    launch, or before the collective."""
    found = []
    for step in graph.steps:
        if step is mine or not any(a.root.same_as(root) for a in step.effects.accesses):
            continue
        if step.number < mine.number:
            raise Declined("what it writes is used before it too", location(step.stmt))
        if step.launch is not mine.launch:
            raise Declined("what it writes is used in another launch", location(step.stmt))
        found.append(step)
    return found


def check_unwritten(root: ir.Var, mine: ProgramStep, graph: Dependence, what: str) -> None:
    """Raise Declined if a tensor is written after a collective that may still read or write it."""
    for step in graph.steps:
        if step.number > mine.number and any(a.root.same_as(root) for a in step.effects.writes):
            raise Declined(f"{what} is overwritten while it may be in flight", location(step.stmt))
