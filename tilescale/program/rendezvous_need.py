# SPDX-License-Identifier: MIT
"""Whether all devices must come together when a call of a program begins, and when it ends.

A call guarantees that earlier work on the stream of a device is complete before another device touches that device's
memory, and that no device touches it after the call has returned there. Where the program establishes this order
itself, by barriers, or by flags that begin at zero and whose signals are all waited for, no rendezvous is needed.
Collectives synchronize themselves. Everything else is device-local: a stream is in order.

Why flags are enough at the end. Let a device end call n when its stream has executed all of it, its own waits among it,
and its copy queue is empty. Then

- all remote writes into its memory in call n have arrived: each such write is followed by a signal, and as many signals
  as all devices send to a flag have been waited for, from zero on. Neither data nor signals are in flight;
- its sends have been read from its memory: its kernels and its queue are done;
- no device touches its memory before it has arrived at call n + 1, or at another program: an accessing device has
  synchronized with it there, at the entry or in a barrier (`needs_rendezvous_at_entry`), and its stream arrives there
  after call n, and after it has zeroed its flags. So signals of call n + 1 are not lost, and no inbox is overwritten
  that call n still reads.

When flags are zeroed. Either before a device arrives at call n + 1, by separate launches, or at the end of call n, by
the last of its blocks, if one kernel is the whole call. The second is early enough, as no device signals in between. It
is late enough, as all accesses to the device's flags in call n are over when its last block ends. Without a rendezvous
at the exit this follows from the guarantee above, and signals sent before a barrier of all devices have arrived after
it; with one, all blocks of all devices have left. A call that was stopped may leave any values. After it no device
arrives at a call (a stopped device does not signal its arrival) until `kernel.reset`, which zeroes all flags while all
devices are idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilelang_core.accesses import leaves_loop
from tilescale.hda import Machine
from tilescale.program.arrivals import SignalArrivals, by_whole_programs, is_scale
from tilescale.program.dependence import Dependence
from tilescale.program.effects import Completion, Effects, PeerUnit
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Program, location


@dataclass(frozen=True)
class RendezvousNeed:
    """Whether a rendezvous is needed.

    Attributes:
        why: the reason, as text for the user.
        synchronized: devices synchronize at the end anyway: none of them is done while another one still waits.
    """

    needed: bool
    why: str
    synchronized: bool = False

    def __bool__(self) -> bool:
        return self.needed


def needs_rendezvous_at_entry(program: Program, machine: Machine) -> RendezvousNeed:
    """Find out whether devices must wait for each other before a call begins.

    Guaranteed, if not: every access of a device to another one's memory follows a barrier or collective of all devices
    on every path, so the other one has begun the call before.
    """
    found = _EventSearch(Dependence(program, machine), reverse=False).part(program.body)
    if isinstance(found, ir.Stmt):
        return RendezvousNeed(
            True, f"a device accesses another one's memory before the two have synchronized{_line(found)}"
        )
    return RendezvousNeed(False, "devices synchronize before one accesses another's memory" if found else _ALONE)


def needs_rendezvous_at_exit(
    program: Program, machine: Machine, sizes: Mapping[str, int] | None = None
) -> RendezvousNeed:
    """Find out whether devices must wait for each other before a call ends.

    Guaranteed, if not: every access of a device to another one's memory is ordered before the end of the call there. It
    is followed by a barrier or collective of all devices on every path to the end; or it has a signal whose flag is
    zero when the call begins, and the other device waits until all signals to that flag have arrived; or it precedes
    such an access to the same device, and is complete before that signal. `sizes`: units of each launched level, where
    the program leaves them open.
    """
    graph = Dependence(program, machine)
    if graph.is_opaque and program.extents:
        return RendezvousNeed(True, "a function from elsewhere may reach another device's memory, or leave the program")
    search = _EventSearch(graph, reverse=True)
    found = search.last()
    if not isinstance(found, ir.Stmt):
        why = "devices synchronize after all accesses to each other's memory" if search.seen else _ALONE
        return RendezvousNeed(False, why, synchronized=found == _BARRIER)
    known = {name: ir.constant(extent) or (sizes or {}).get(name) for name, extent in program.extents}
    awaited = frozenset[ir.Var]()
    if len(known) == 1 and None not in known.values():
        awaited = SignalArrivals(graph, {name: size for name, size in known.items() if size is not None}).awaited()

    def arrives(effects: Effects) -> bool:
        reads = [a for a in effects.reads if a.at is not None and not a.atomic]
        return bool(effects.releases) and not reads and all(one.flag.root in awaited for one in effects.releases)

    found = _EventSearch(graph, reverse=True, arrives=arrives).last()
    if isinstance(found, ir.Stmt):
        return RendezvousNeed(
            True, f"a device may access another one's memory after the call has ended there{_line(found)}"
        )
    return RendezvousNeed(False, "each device waits for the signals of all accesses to its memory")


def involves_others(program: Program, machine: Machine) -> bool:
    """Whether something in a program signals, waits, or reaches another device."""
    levels = [name for name, _ in program.extents]
    return any(_involves_others(step.effects, levels) for step in Dependence(program, machine).steps)


def only_phase_with_others(program: Program, machine: Machine) -> DevicePhase | GridPhase | None:
    """The one phase, executed once in a call, that has to do with other devices, or with flags; None if there is none,
    or several.

    Everything before and after it is device-local: arriving at that phase is equivalent to arriving at the call, and
    leaving it to ending the call.
    """
    graph = Dependence(program, machine)
    levels = [name for name, _ in program.extents]
    flags = {data for launch in program.launches for data in launch.flags}
    found = {
        id(step.phase): step
        for step in graph.steps
        if _involves_others(step.effects, levels)
        or step.effects.opaque
        or any(s.level in levels for s in step.effects.synchronizes)
        or any(access.root in flags for access in step.effects.accesses)
    }
    steps = list(found.values())
    if len(steps) != 1 or steps[0].phase is None:
        return None
    phase = steps[0].phase
    around = next(step.around for step in graph.steps if step.phase is phase)  # the first phase inside
    return None if around else phase


def _involves_others(effects: Effects, levels: Sequence[str]) -> bool:
    return bool(effects.releases or effects.acquires) or _reaches_out(effects, levels)


_ALONE = "no device accesses another one's memory"
_BARRIER = "barrier"


def _is_same(one: PeerUnit | None, other: PeerUnit | None) -> bool:
    if one is None or other is None or one.rank is None or other.rank is None:
        return False
    return one.level == other.level and ir.proves(ir.EQ(one.rank, other.rank), {})


def _line(stmt: ir.Stmt) -> str:
    where = location(stmt)
    return f": {where.file}:{where.line}" if where else ""


class _EventSearch:
    """Search for the first (from the end: last) event on any path through a program: a barrier of all devices, an
    access to a peer's memory (the statement), or neither (None)."""

    def __init__(self, graph: Dependence, *, reverse: bool, arrives: Callable[[Effects], bool] = lambda effects: False):
        self.graph, self.reverse, self.arrives = graph, reverse, arrives
        self.levels = [name for name, _ in graph.program.extents]
        self.seen = any(_reaches_out(step.effects, self.levels) for step in graph.steps)

    def last(self) -> Any:
        found = self._queued()
        return self.part(self.graph.program.body) if found is None else found

    def _queued(self) -> ir.Stmt | None:
        """An access of a copy queue without a known wait: no barrier orders it."""
        asynchronous = [s for s in self.graph.steps if s.effects.completes is Completion.QUEUED]
        return next((s.stmt for s in asynchronous if not self.arrives(s.effects)), None)

    def part(self, part: Part) -> Any:
        if isinstance(part, Launch):
            return self.part(part.body)
        if isinstance(part, DevicePhase | GridPhase):
            found = self.statement(part.stmt)
            # A grid that may have no program synchronizes with no unit.
            return None if found == _BARRIER and isinstance(part, GridPhase) and not self._has_programs(part) else found
        if isinstance(part, Control):
            return self._control(part.stmt, [self.part(inner) for inner in part.parts])
        return self._first(self.part, part.parts)

    def statement(self, stmt: ir.Stmt) -> Any:
        inner = list(ir.children(stmt))
        if isinstance(stmt, ir.For | ir.While) and ir.contains(stmt, leaves_loop):
            return stmt if self.seen else None
        if isinstance(stmt, ir.For | ir.While | ir.IfThenElse):
            return self._control(stmt, [self.statement(s) for s in inner])
        if is_scale(stmt) and not by_whole_programs(stmt, self.graph.machine):
            found = self._first(self.statement, inner)
            return None if found == _BARRIER else found  # some part of a program has synchronized, or of a cluster
        if isinstance(stmt, ir.SeqStmt) and self.reverse:
            inner = [one for number, one in enumerate(inner) if not self._is_signalled(one, inner[number + 1 :])]
        if inner:
            return self._first(self.statement, inner)
        return self._leaf(stmt)

    def _is_signalled(self, copy: ir.Stmt, behind: Sequence[ir.Stmt]) -> bool:
        """Whether one of the statements after a copy, executed by the same units, completes it and signals its peer,
        which waits for the signal."""
        effects = self.graph.names.effects(copy)
        if list(ir.children(copy)) or effects.completes is not Completion.DEFERRED or effects.releases:
            return False
        (to,) = (access.at for access in effects.writes)
        return any(self._completes(signal, copy, to) for signal in behind)

    def _completes(self, signal: ir.Stmt, copy: ir.Stmt, to: PeerUnit | None) -> bool:
        effects = self.graph.names.effects(signal)
        if list(ir.children(signal)) or not effects.releases or not self.arrives(effects):
            return False
        known = any(step.stmt.same_as(copy) for step in self.graph.complete_before(signal.value))
        return known and all(_is_same(release.flag.at, to) for release in effects.releases)

    def _first(self, search: Callable[[Any], Any], inside: Sequence[Any]) -> Any:
        for inner in reversed(inside) if self.reverse else inside:
            found = search(inner)
            if found is not None:
                return found
        return None

    def _control(self, stmt: ir.Stmt, found: list[Any]) -> Any:
        for result in found:
            if isinstance(result, ir.Stmt):
                return result
        if isinstance(stmt, ir.For):
            runs = (ir.constant(stmt.extent) or 0) > 0
        else:
            runs = isinstance(stmt, ir.IfThenElse) and len(found) == 2
        return _BARRIER if runs and all(result == _BARRIER for result in found) else None

    def _leaf(self, stmt: ir.Stmt) -> Any:
        effects = self.graph.names.effects(stmt)
        if effects.opaque and self.levels:
            return stmt
        if [m.level for m in effects.synchronizes if m.all_arrived] == self.levels and not _is_empty(effects):
            return _BARRIER
        return stmt if _reaches_out(effects, self.levels) and not self.arrives(effects) else None

    def _has_programs(self, phase: GridPhase) -> bool:
        launch = next(step.launch for step in self.graph.steps if step.phase is phase)
        return launch is not None and all((ir.constant(extent) or 0) > 0 for extent in launch.grid)


def _reaches_out(effects: Effects, levels: Sequence[str]) -> bool:
    """Whether a statement accesses memory of another unit of these levels."""
    return any(access.at is not None and access.at.level in levels for access in effects.accesses)


def _is_empty(effects: Effects) -> bool:
    """Whether a collective may have nothing to exchange: then no unit waits for another."""
    return any((ir.constant(n) or 0) <= 0 for access in effects.accesses for n in access.extents or ())
