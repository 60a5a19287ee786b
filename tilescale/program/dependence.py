# SPDX-License-Identifier: MIT
"""Dependence between the statements of a program, and between its phases, from their effects.

All units execute one text, so a statement that happens before another on any unit precedes it in the text, or shares a
loop with it. Every answer errs on the side of "depends". The contract of a call is assumed: tensors that are passed for
different parameters do not overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from tilelang_core import ir
from tilescale.hda import Machine
from tilescale.program.asynchronous import owns_a_queue
from tilescale.program.effects import Access, Completion, Effects, ProgramNames, names_of
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Program
from tilescale.program.operations import Wait, operation
from tilescale.program.ops import SCALE
from tilescale.program.regions import BoundVariables, conflict

Enclosing: TypeAlias = tuple["ir.Stmt | tuple[ir.IfThenElse, bool]", ...]
"""Loops, and conditions with whether they hold, outermost first."""


@dataclass(frozen=True)
class ProgramStep:
    """A statement at its place in the program, without the statements inside it.

    Attributes:
        number: in the order of the text.
        around: the loops and conditions around it; those around phases included.
        on_device: whether units that own a copy queue execute it.
    """

    number: int
    stmt: ir.Stmt
    effects: Effects
    around: Enclosing
    phase: DevicePhase | GridPhase | None
    launch: Launch | None
    on_device: bool

    @property
    def loops(self) -> list[ir.Stmt]:
        """The enclosing loops."""
        return [stmt for stmt in self.around if isinstance(stmt, ir.Stmt)]


@dataclass(frozen=True)
class OrderedAccesses:
    """Accesses that a wait orders: they must come after it.

    Attributes:
        everything: all of device memory, because the signallers of the flag are unknown.
        written, read: tensors and tiles that a unit wrote, or read, before it signalled.
    """

    names: ProgramNames
    everything: bool
    written: frozenset[ir.Var] = frozenset()
    read: frozenset[ir.Var] = frozenset()

    def load(self, data: ir.Var) -> bool:
        """Whether a later load from a buffer, or a view of it, must come after the wait."""
        root = self.names.root(data)
        return root in self.written or self.everything and self.names.shared(root)

    def store(self, data: ir.Var) -> bool:
        """Whether a later store must come after the wait: also one to memory that was read before the signal."""
        return self.load(data) or self.names.root(data) in self.read


class Dependence:
    """The dependence of a program's statements.

    Args:
        program: as `passes.pipeline.analyse` returns it.
    """

    def __init__(self, program: Program, machine: Machine):
        self.program, self.machine = program, machine
        self.names = names_of(program)
        self._queues = owns_a_queue(machine.tensor_level, machine)
        self.steps: list[ProgramStep] = []
        self._collect(program.body, None, ())

    def _collect(self, part: Part, launch: Launch | None, around: Enclosing) -> None:
        if isinstance(part, DevicePhase | GridPhase):
            self._statement(part.stmt, part, launch, around)
        elif isinstance(part, Launch):
            self._collect(part.body, part, around)
        elif isinstance(part, Control):
            self._step(part.stmt, None, launch, around)
            for inner, inside in zip(part.parts, _inside(part.stmt, around), strict=False):
                self._collect(inner, launch, inside)
        else:
            for inner in part.parts:
                self._collect(inner, launch, around)

    def _statement(
        self, stmt: ir.Stmt, phase: DevicePhase | GridPhase, launch: Launch | None, around: Enclosing
    ) -> None:
        self._step(stmt, phase, launch, around)
        for inner, inside in zip(ir.children(stmt), _inside(stmt, around), strict=False):
            self._statement(inner, phase, launch, inside)

    def _step(
        self, stmt: ir.Stmt, phase: DevicePhase | GridPhase | None, launch: Launch | None, around: Enclosing
    ) -> None:
        on_device = self._queues and isinstance(phase, DevicePhase)
        effects = self.names.effects(stmt, on_device=on_device)
        self.steps.append(ProgramStep(len(self.steps), stmt, effects, around, phase, launch, on_device))

    @staticmethod
    def precedes(a: ProgramStep, b: ProgramStep) -> bool:
        """Whether step a may happen before step b on one unit: it precedes b, or both are in one loop."""
        return a.number < b.number or any(x.same_as(y) for x in a.loops for y in b.loops)

    @cached_property
    def is_opaque(self) -> bool:
        """Whether there is a statement of which nothing is known: it may signal any flag."""
        return any(step.effects.opaque for step in self.steps)

    # -- order by waits ----------------------------------------------------------------------------------------------

    def ordered_by(self, call: ir.Call) -> OrderedAccesses:
        """Later accesses of a waiting unit that must come after the wait.

        Guaranteed: an access that `load` or `store` rejects may be executed before the wait without changing any value
        that it, or another access, reads. This covers the signallers' effects before their signals, and effects that
        they observed through waits and barriers. A flag that no statement of the program updates, and any flag of a
        program with unknown statements, orders all of device memory. A barrier or collective orders all accesses of all
        statements. `call`: of `tilescale.wait`, a barrier or a collective, in terms of this program.
        """
        made = operation(call)
        if isinstance(made, Wait):
            return self._released(self.names.region(made.flag, "r").root)
        return OrderedAccesses(self.names, everything=True) if self.is_opaque else self._after(self.steps)

    def gates(self, call: ir.Call, data: ir.Var) -> bool:
        """Whether later loads of a tensor must come after a wait, a barrier or a collective.

        Flags that nothing in the program signals may order any of its writes. A tensor that no statement writes is
        ready from the start of the call.
        """
        ordered = self.ordered_by(call)
        if not ordered.everything or self.is_opaque:
            return ordered.load(data)
        root = self.names.root(data)
        return any(access.root.same_as(root) for step in self.steps for access in step.effects.writes)

    def _released(self, flag: ir.Var) -> OrderedAccesses:
        """Accesses that may have happened before an update of a flag."""
        if self.is_opaque:
            return OrderedAccesses(self.names, everything=True)
        before: dict[int, ProgramStep] = {}
        flags, done = [flag], set[ir.Var]()
        while flags:
            current = flags.pop()
            if current in done:
                continue
            done.add(current)
            updates = [step for step in self.steps if any(a.root.same_as(current) for a in step.effects.writes)]
            if not updates:
                return OrderedAccesses(self.names, everything=True)
            found = [s for s in self.steps if any(s is u or self.precedes(s, u) for u in updates)]
            before |= {step.number: step for step in found}
            flags += [acquire.flag.root for step in found for acquire in step.effects.acquires]
        return self._after(before.values())

    def _after(self, steps: Iterable[ProgramStep]) -> OrderedAccesses:
        accesses = [a for step in steps for a in step.effects.accesses if self._reaches_others(a)]
        written = frozenset(a.root for a in accesses if a.writes)
        return OrderedAccesses(self.names, False, written, frozenset(a.root for a in accesses if a.reads))

    @cached_property
    def _reached(self) -> frozenset[ir.Var]:
        """On-chip tiles that units access at one another."""
        return frozenset(a.root for step in self.steps for a in step.effects.accesses if a.at is not None)

    @cached_property
    def _forks(self) -> bool:
        """Whether units inside a program execute separate statements: they share its tiles."""
        scales = [s.stmt for s in self.steps if isinstance(s.stmt, ir.AttrStmt) and str(s.stmt.attr_key) == SCALE]
        return any(self.machine.level(str(scale.value.value)).kind == "thread_group" for scale in scales)

    def _reaches_others(self, access: Access) -> bool:
        """Whether other units may access the memory of an access."""
        root = access.root
        return self.names.shared(root) or root in self._reached or self._forks and not self._private(access)

    # -- publication by signals --------------------------------------------------------------------------------------

    def complete_before(self, signal: ir.Call) -> tuple[ProgramStep, ...]:
        """The remote copies that must be complete before a signal, or a copy with a signal, updates its flag.

        Guaranteed: a copy that precedes the signal, or shares a loop with it, and is not in the result, may still be in
        flight when the flag changes: no unit that observes the flag, directly or through others, touches its target or
        writes its source. A copy with this signal is in the result. Operations of a copy queue are not: their own flags
        signal their end. `signal`: a call of `tilescale.signal` or `tilescale.copy` in terms of this program. One that
        is not found in it publishes all.
        """
        mine = next((s for s in self.steps if isinstance(s.stmt, ir.Evaluate) and s.stmt.value.same_as(signal)), None)
        deferred = [s for s in self.steps if s.effects.completes is Completion.DEFERRED]
        if mine is None:
            return tuple(deferred)
        before = [s for s in deferred if s is mine or self.precedes(s, mine)]
        after = self._learn_of([release.flag.root for release in mine.effects.releases])
        if after is None:
            return tuple(before)
        return tuple(s for s in before if s is mine or _shared_roots(_moved(s.effects), _accesses(after)))

    def _learn_of(self, flags: Iterable[ir.Var]) -> list[ProgramStep] | None:
        """Steps of units that may observe updates of flags; None if any unit may."""
        if self.is_opaque:
            return None
        found: dict[int, ProgramStep] = {}
        todo, done = list(flags), set[ir.Var]()
        while todo:
            flag = todo.pop()
            if flag in done:
                continue
            done.add(flag)
            waits = [s for s in self.steps if any(w.flag.root.same_as(flag) for w in s.effects.acquires)]
            if not waits or self._is_polled(flag):
                return None  # the flag is read by other means, or outside of the program
            later = [s for s in self.steps if any(self.precedes(w, s) for w in waits)]
            found |= {step.number: step for step in later}
            todo += [release.flag.root for step in later for release in step.effects.releases]
        # Units that synchronize with them later observe the flag too, and may be anywhere.
        return self.steps if any(step.effects.synchronizes for step in found.values()) else list(found.values())

    def _is_polled(self, flag: ir.Var) -> bool:
        """Whether something that neither waits nor signals reads a flag."""
        plain = (s.effects for s in self.steps if not s.effects.acquires and not s.effects.releases)
        return any(access.reads and access.root.same_as(flag) for effects in plain for access in effects.accesses)

    # -- what may change places --------------------------------------------------------------------------------------

    def independent(
        self, a: ir.Stmt | DevicePhase | GridPhase, b: ir.Stmt | DevicePhase | GridPhase, *, on_device: bool = False
    ) -> bool:
        """Whether two neighbours may be exchanged, or run concurrently.

        Guaranteed: in either order of execution, all units compute the same, and a program without races stays
        race-free. Whether a grid has the capacity to run them at the same time is a separate question.

        Rewrites ask narrower questions with more facts: `gates` of one tensor, `complete_before` of one signal, regions
        in one iteration of known loops. Tests check the declared effects with this general question: on random programs
        an allowed exchange changes no result of the emulator.

        Args:
            a, b: statements that one unit executes one after the other, in the same iteration of all loops around
                both; or phases of one launch, with all their programs.
            on_device: whether the statements are in a phase of units that own a copy queue.
        """
        one, other = (self._side(x, on_device) for x in (a, b))
        if any(e.opaque or e.fixed for e in (one.effects, other.effects)):
            return False
        if one.effects.orders and other.effects.orders:
            return False
        if one.inside.names & other.uses or other.inside.names & one.uses:
            return False
        if conflict(one.effects.accesses, one.inside, other.effects.accesses, other.inside):
            return False
        return not (self._ordered(one.effects, other.effects) or self._ordered(other.effects, one.effects))

    def _side(self, x: ir.Stmt | DevicePhase | GridPhase, on_device: bool) -> _AccessSide:
        if isinstance(x, DevicePhase | GridPhase):
            launch = next((s.launch for s in self.steps if s.phase is x), None)
            on_device = self._queues and isinstance(x, DevicePhase)
            inside = BoundVariables.of(x.stmt, launch if isinstance(x, GridPhase) else None)
            stmt = x.stmt
        else:
            stmt, inside = x, BoundVariables.of(x)
        used = {var for inner in ir.statements(stmt) for var in ir.uses(inner)}
        return _AccessSide(self.names.all_effects(stmt, on_device=on_device), inside, used)

    def _ordered(self, sync: Effects, other: Effects) -> bool:
        """Whether what orders units orders the other statement too."""
        if sync.synchronizes and any(not self._private(a) for a in other.accesses):
            return True
        for acquire in sync.acquires:
            ordered = self._released(acquire.flag.root)
            if any(ordered.store(a.root) if a.writes else ordered.load(a.root) for a in other.accesses):
                return True
        if not sync.releases:
            return False
        after = self._learn_of([release.flag.root for release in sync.releases])
        visible = [a for a in other.accesses if self._reaches_others(a)]
        return bool(visible) and (after is None or _shared_roots(visible, _accesses(after)))

    def _private(self, access: Access) -> bool:
        """Whether only the unit itself reaches the accessed memory."""
        home = self.names.homes.get(access.root)
        return access.at is None and home is not None and home.scope().startswith("local")


@dataclass(frozen=True)
class _AccessSide:
    effects: Effects
    inside: BoundVariables
    uses: set[ir.Var]


def _inside(stmt: ir.Stmt, around: Enclosing) -> Iterator[Enclosing]:
    if isinstance(stmt, ir.IfThenElse):
        yield from ((*around, (stmt, True)), (*around, (stmt, False)))
    elif isinstance(stmt, ir.For | ir.While):
        yield (*around, stmt)
    else:
        yield from itertools.repeat(around)


def _accesses(steps: Iterable[ProgramStep]) -> list[Access]:
    return [access for step in steps for access in step.effects.accesses]


def _moved(effects: Effects) -> list[Access]:
    """Accesses of a copy, without its flag."""
    flags = {release.flag.root for release in effects.releases}
    return [access for access in effects.accesses if access.root not in flags]


def _shared_roots(a: Iterable[Access], b: Iterable[Access]) -> bool:
    """Whether one of two groups of accesses writes a buffer that the other touches, in any region."""
    ours: dict[Any, bool] = {}
    for access in a:
        ours[access.root] = ours.get(access.root, False) or access.writes
    return any(access.root in ours and (access.writes or ours[access.root]) for access in b)
