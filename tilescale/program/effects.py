# SPDX-License-Identifier: MIT
"""Effects of every statement, declared once: its reads, writes, signals and waits, and when it is complete.

`tilelang_core/accesses.py` knows TileLang's own statements; here our operations are added, views are resolved to their
tensors and tiles, and each access names the instance, the unit's own or a peer's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tilelang_core import accesses, ir
from tilelang_core.lru import LruCache
from tilescale.program.asynchronous import is_asynchronous
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Program
from tilescale.program.operations import (
    AtomicAdd,
    Barrier,
    Collective,
    Copy,
    InvokeOne,
    Signal,
    TileView,
    Wait,
    operation,
)
from tilescale.program.ops import ALL_OPS, RANK


class Completion(enum.Enum):
    """Completion of a statement's effects."""

    AT_ONCE = "before the next statement of its unit"
    DEFERRED = "at the peer before a signal or barrier of its unit, and at the end of its phase"
    QUEUED = "visible to waiters of its flag, and at the end of the call"


@dataclass(frozen=True)
class PeerUnit:
    """Another unit of a level, by its rank; None for all of them."""

    level: str
    rank: ir.PrimExpr | None


@dataclass(frozen=True)
class Access:
    """Some elements that a statement reads or writes.

    Attributes:
        root: the data of the tensor or tile, with all views resolved.
        buffer: in whose indices the region counts.
        begins, extents: the region; None where it may be anywhere.
        atomic: whether it may race with another atomic one.
        at: whose instance; None for that of the executing unit, or of the unit around it.
    """

    root: ir.Var
    buffer: ir.Buffer
    begins: tuple[ir.PrimExpr, ...] | None
    extents: tuple[ir.PrimExpr, ...] | None
    reads: bool
    writes: bool
    atomic: bool = False
    at: PeerUnit | None = None


@dataclass(frozen=True)
class Release:
    """An update of a flag that releases what its unit did before. `value`: the operand of the update, by `op`; None for
    the 1 that a collective adds."""

    flag: Access
    value: ir.PrimExpr | None
    op: str


@dataclass(frozen=True)
class Acquire:
    """A wait for `flag compare value`, which acquires the writes released with the flag."""

    flag: Access
    compare: str
    value: ir.PrimExpr


@dataclass(frozen=True)
class Synchronization:
    """A barrier or collective of a level: all its units come to it. `all_arrived`: whether each unit knows on return
    that all have arrived; after a broadcast only the root's arrival is known."""

    level: str
    all_arrived: bool


@dataclass(frozen=True)
class Effects:
    """Effects of a statement.

    Attributes:
        fixed: it orders threads of its unit, is done later, or leaves a loop: nothing may be moved across it.
        opaque: it may also read and write all that its unit reaches, and order units: nothing is known of it.
    """

    accesses: tuple[Access, ...] = ()
    releases: tuple[Release, ...] = ()
    acquires: tuple[Acquire, ...] = ()
    synchronizes: tuple[Synchronization, ...] = ()
    completes: Completion = Completion.AT_ONCE
    fixed: bool = False
    opaque: bool = False

    @property
    def orders(self) -> bool:
        """Whether it orders units or threads, or may."""
        return bool(self.releases or self.acquires or self.synchronizes or self.fixed or self.opaque)

    @property
    def flags(self) -> tuple[ir.Var, ...]:
        """The tensors of flags that it signals or waits for."""
        events: tuple[Release | Acquire, ...] = (*self.releases, *self.acquires)
        return tuple(event.flag.root for event in events)

    @property
    def reads(self) -> tuple[Access, ...]:
        return tuple(a for a in self.accesses if a.reads)

    @property
    def writes(self) -> tuple[Access, ...]:
        return tuple(a for a in self.accesses if a.writes)


def union(effects: Iterable[Effects]) -> Effects:
    """The effects of several statements together; it is complete when the last of them is."""
    parts = list(effects)
    order = list(Completion)
    return Effects(
        tuple(a for part in parts for a in part.accesses),
        tuple(t for part in parts for t in part.releases),
        tuple(w for part in parts for w in part.acquires),
        tuple(m for part in parts for m in part.synchronizes),
        max((part.completes for part in parts), key=order.index, default=Completion.AT_ONCE),
        any(part.fixed for part in parts),
        any(part.opaque for part in parts),
    )


class ProgramNames:
    """Names that the statements of a program use: views, and which of them are whole tensors of units.

    Keeps the effects of statements, which several passes ask for: `names_of` has those of the last programs.

    Args:
        program: any program, also one whose phases have been rewritten; its phases are looked at.
    """

    def __init__(self, program: Program):
        self.program = program
        self._effects: dict[tuple[ir.Stmt, bool], Effects] = {}
        self._units = {name for launch in program.launches for name, _ in launch.extents}
        self.views: dict[ir.Var, TileView] = {}
        for stmt, _, _ in statements(program.body):
            view = operation(stmt.value) if isinstance(stmt, ir.Bind) else None
            if isinstance(view, TileView):
                self.views[stmt.var] = view
        tensors = [p.buffer for p in program.parameters if p.buffer is not None]
        known = [*tensors, *(buffer for launch in program.launches for buffer in launch.buffers)]
        self.homes: dict[ir.Var, ir.Buffer] = {buffer.data: buffer for buffer in known}

    def root(self, data: ir.Var) -> ir.Var:
        """The data of the tensor or tile that a view refers to."""
        while data in self.views:
            data = self.views[data].base.data
        return data

    def replicas(self, root: ir.Var) -> list[str]:
        """The levels of whose units each has a copy of a tensor or tile."""
        return [v.level for data, v in self.views.items() if v.layout.is_replica and self.root(data) == root]

    def shared(self, root: ir.Var) -> bool:
        """Whether a tensor or tile is in device memory, where other programs and devices reach it."""
        home = self.homes.get(root)
        return home is None or home.scope() == "global"

    def resolved(self, access: accesses.BufferAccess, at: PeerUnit | None = None) -> Access:
        """An access of TileLang's as one of the tensor or tile that its view refers to."""
        buffer, begins, extents = access.buffer, access.begins, access.extents
        while buffer.data in self.views:
            view = self.views[buffer.data]
            base, first, count = ir.region_parts(view.region)
            if not self._is_tensor_of_units(view):
                begins, extents = tuple(first), tuple(count)  # a share of a tile: anywhere in the viewed tile
                buffer = base
            elif base.data in self.views:
                buffer = base
            else:
                break
        root = self.root(buffer.data)
        return Access(root, buffer, begins, extents, access.reads, access.writes, access.atomic, at)

    def _is_tensor_of_units(self, view: TileView) -> bool:
        """Whether each unit passes the view's shard as its own tensor, so that indices count within it."""
        return view.level in self._units and view.base.scope() == "global"

    def region(self, region: ir.Call, access: str, at: PeerUnit | None = None, *, atomic: bool = False) -> Access:
        """A region argument of our operations as an access; "r", "w" or "rw"."""
        buffer, begins, extents = ir.region_parts(region)
        reads, writes = "r" in access, "w" in access
        plain = accesses.BufferAccess(buffer, tuple(begins), tuple(extents), reads, writes, atomic)
        return self.resolved(plain, at)

    def effects(self, stmt: ir.Stmt, *, on_device: bool = False) -> Effects:
        """Effects of a statement itself, without the statements inside it: for a loop, the reads of its extent.
        `on_device`: whether it is in a phase of units that own a copy queue (`asynchronous.owns_a_queue`)."""
        known = self._effects.get((stmt, on_device))
        if known is None:
            known = self._effects[stmt, on_device] = self._effects_of(stmt, on_device)
        return known

    def _effects_of(self, stmt: ir.Stmt, on_device: bool) -> Effects:
        found = accesses.accesses_of(stmt, lambda name: name in ALL_OPS and name != RANK.name)
        handed = [self._anywhere(var) for var in found.handed if self.root(var) in self.homes]
        own = Effects((*map(self.resolved, found.accesses), *handed), fixed=found.fixed, opaque=found.opaque)
        return union([own, *(self._operation(call, on_device) for call in found.calls)])

    def _anywhere(self, data: ir.Var) -> Access:
        root = self.root(data)
        return Access(root, self.homes[root], None, None, reads=True, writes=True)

    def all_effects(self, stmt: ir.Stmt, *, on_device: bool = False) -> Effects:
        """Effects of a statement and all statements inside it."""
        return union(self.effects(inner, on_device=on_device) for inner in ir.statements(stmt))

    # -- our operations ----------------------------------------------------------------------------------------------

    def _operation(self, call: ir.Call, on_device: bool) -> Effects:
        made = operation(call)
        if isinstance(made, Copy):
            read = self._values([made.source, made.target, made.signal], made.peer, made.value)
            return union([self._copy(made, on_device), read])
        if isinstance(made, Signal):
            at = None if made.peer is None or made.level is None else PeerUnit(made.level, made.peer)
            flag = self.region(made.flag, "rw", at, atomic=True)
            signal = Effects((flag,), releases=(Release(flag, made.value, made.op),))
            return union([signal, self._values([made.flag], made.value, made.peer)])
        if isinstance(made, Wait):
            return self._wait(made)
        if isinstance(made, AtomicAdd):
            return self._atomic_add(made)
        if isinstance(made, InvokeOne):
            return union([self._values([], made.value), self._results(made.result)])
        if isinstance(made, Barrier):
            return Effects(synchronizes=(Synchronization(made.level, True),))
        if isinstance(made, Collective):
            return self._collective(made)
        return Effects()

    def _values(self, regions: Iterable[ir.Call | None], *expressions: ir.PrimExpr | None) -> Effects:
        """Reads of the indices of regions, and of expressions among an operation's arguments."""
        parts = [ir.region_parts(region) for region in regions if region is not None]
        indices = [expr for _, begins, extents in parts for expr in (*begins, *extents)]
        used = (ir.Evaluate(expr) for expr in (*indices, *expressions) if expr is not None)
        return union(self._effects_of(stmt, False) for stmt in used)

    def _wait(self, wait: Wait) -> Effects:
        flag = self.region(wait.flag, "r", atomic=True)
        waits = Effects((flag,), acquires=(Acquire(flag, wait.compare, wait.value),))
        return union([waits, self._values([wait.flag], wait.value), self._results(wait.index)])

    def _results(self, variable: ir.Call | None) -> Effects:
        """Write effect on the variable that receives an operation's result, if any."""
        return Effects() if variable is None else Effects((self.region(variable, "w"),))

    def _atomic_add(self, made: AtomicAdd) -> Effects:
        target = self.region(made.target, "rw", PeerUnit(made.level, made.peer), atomic=True)
        tile = made.value if made.is_of_tiles else None
        source = () if tile is None else (self.region(tile, "r"),)
        completes = Completion.DEFERRED if made.previous is None else Completion.AT_ONCE
        added = Effects((*source, target), completes=completes, fixed=made.order != "relaxed")
        read = self._values([made.target, tile], made.peer, made.value if tile is None else None)
        return union([added, read, self._results(made.previous)])

    def _copy(self, copy: Copy, on_device: bool) -> Effects:
        far = PeerUnit(copy.level, copy.peer)
        moved = (
            self.region(copy.source, "r", None if copy.to_peer else far),
            self.region(copy.target, "w", far if copy.to_peer else None),
        )
        completes = Completion.DEFERRED if copy.to_peer else Completion.AT_ONCE
        flags: tuple[Access, ...] = ()
        releases: tuple[Release, ...] = ()
        if copy.signal is not None:
            flags = (self.region(copy.signal, "rw", far, atomic=True),)
            releases = (Release(flags[0], copy.value, copy.op or "add"),)
        if on_device and is_asynchronous(copy.call):
            completes = Completion.QUEUED
        after = self._wait(copy.after) if copy.after is not None else Effects()
        return union([after, Effects((*moved, *flags), releases, completes=completes)])

    def _collective(self, made: Collective) -> Effects:
        if made.flags is not None:
            all_units = PeerUnit(made.level, None)
            flag = self.region(made.flags, "rw", all_units, atomic=True)
            moved = (self.region(made.source, "r"), self.region(made.target, "w", all_units), flag)
            return Effects(moved, (Release(flag, None, "add"),), completes=Completion.QUEUED)
        tiles = (
            [self.region(tile, "rw") for tile in made.tiles]
            if made.is_in_place
            else [self.region(made.source, "r"), self.region(made.target, "w")]
        )
        if made.sent is not None:
            tiles.append(self.region(made.sent, "r"))
        if made.received is not None:
            tiles.append(self.region(made.received, "w"))
        norm = made.norm
        if norm is not None:
            tiles += [self.region(tile, "r") for tile in norm.read]
            tiles += [self.region(tile, "w") for tile in norm.written]
        ends = [] if norm is None else [*norm.read, *norm.written]
        read = self._values([*made.tiles, made.sent, made.received, *ends], made.root)
        together = Synchronization(made.level, made.name != "broadcast")
        return union([read, Effects(tuple(tiles), synchronizes=(together,))])


KEPT = 64
"""Programs whose effects are kept, those used last: the kernels of a model are built in several passes over them."""

_recent: LruCache[int, ProgramNames] = LruCache(KEPT)


def names_of(program: Program) -> ProgramNames:
    """The names of a program, with the effects that earlier passes have asked for."""
    names = _recent.get(id(program))
    if names is None or names.program is not program:
        names = _recent[id(program)] = ProgramNames(program)
    return names


# -- walks over the phases of a program --------------------------------------------------------------------------------


def phases(part: Part) -> Iterator[tuple[DevicePhase | GridPhase, Launch | None]]:
    """All phases in program order, each with its launch; None between launches."""
    if isinstance(part, DevicePhase | GridPhase):
        yield part, None
        return
    for inner in (part.body,) if isinstance(part, Launch) else part.parts:
        for phase, launch in phases(inner):
            yield phase, launch or (part if isinstance(part, Launch) else None)


def statements(part: Part) -> Iterator[tuple[ir.Stmt, DevicePhase | GridPhase | None, Launch | None]]:
    """All statements in program order, each with its phase and launch; a loop around phases has no phase."""
    if isinstance(part, DevicePhase | GridPhase):
        yield from ((stmt, part, None) for stmt in ir.statements(part.stmt))
        return
    if isinstance(part, Control):
        yield part.stmt, None, None
    for inner in (part.body,) if isinstance(part, Launch) else part.parts:
        for stmt, phase, launch in statements(inner):
            yield stmt, phase, launch or (part if isinstance(part, Launch) else None)
