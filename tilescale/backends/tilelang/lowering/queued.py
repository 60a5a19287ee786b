# SPDX-License-Identifier: MIT
"""The asynchronous operations for a device's copy queue, and the reasons against the others.

Why: a queue moves bytes and *stores* numbers into flags, it cannot add to them (CUDA 13 has no stream operation for
additions, and a kernel may find no free SM next to a grid that waits for it). The host knows a sum if the flag was zero
when the call began and one queue alone raises it. Before: operations of device phases. After: for each the reason why
it is not for the queue, or None. The senders of each flag are found by a walk over all devices and iterations of loops,
with constants where the host knows them; unknown values count as any number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilelang_core import ir
from tilescale.backends.tilelang.lowering.host_step import QUEUE, QUEUE_BETWEEN, HostStep
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.reach import reached, share_memory, split
from tilescale.cost.operations import copy_choice, network_of
from tilescale.errors import UnsupportedError
from tilescale.program import ops
from tilescale.program.effects import names_of, statements
from tilescale.program.extents import evaluate
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Program
from tilescale.program.operations import Collective, Copy, Rank, Signal, operation, signalled

FLAG_TYPES = frozenset(("int32", "uint32", "int64", "uint64"))
"""Types of flags that stream memory operations support."""

COMPARES = (">=", ">", "==")
"""Comparisons of stream waits: for integers `> n` is `>= n + 1`."""

_ROUNDS = 4096
"""Iterations of loops that are evaluated with constants, over all devices; in further ones indices are unknown."""

FlagWord = tuple[int | None, ...]
"""A flag: the device that owns it, and its indices; None for unknown ones."""


class QueuedOperations:
    """The asynchronous operations of a program.

    Attributes:
        waits: whether one of them waits for a flag before it starts.
        any: whether at least one is for the queue.
    """

    def __init__(self, program: Program, target: LoweringTarget):
        self._target, self._sizes = target, dict(target.sizes)
        self._zeroed = {data for launch in program.launches for data in launch.flags}
        self._raised = _raised(program, target)
        self._written = _written(program)
        self._known: dict[ir.Var, str | None] = {}
        calls = [call for stmt in _device_phases(program.body) for call in _calls(stmt) if _signals(call)]
        copies = [Copy.of(call) for call in calls if call.op.name == ops.COPY.name]
        self.waits = any(copy.after is not None for copy in copies)
        collectives = any(isinstance(operation(call), Collective) for call in calls)
        self.any = collectives or any(self.against_copy(copy) is None for copy in copies)

    def against_copy(self, copy: Copy) -> str | None:
        """The reason why a copy with a signal is not for the queue."""
        source, target = (ir.region_parts(r)[0] for r in (copy.source, copy.target))
        if source.dtype != target.dtype:
            return f"a copy engine does not convert {source.dtype} to {target.dtype}"
        apart = self._against_messages(copy.level, copy.impl)
        if apart is not None:
            return apart
        try:
            if reached(self._target, copy.level) > 1:
                copy_choice(copy.call, self._target.machine, self._sizes, None, starters=("host",))
        except UnsupportedError as error:
            return error.message
        if copy.after is not None and copy.after.compare not in COMPARES:
            return f"a stream waits for {', '.join(COMPARES)}, not for {copy.after.compare}"
        flags = [ir.region_parts(f)[0] for f in (copy.signal, *([copy.after.flag] if copy.after else []))]
        wrong = [f for f in flags if str(f.dtype) not in FLAG_TYPES]
        if wrong:
            return f"stream memory operations do not support flags of {wrong[0].dtype}"
        return None if copy.op == "set" else self._against_sums(flags[0])

    def against_collective(self, made: Collective) -> str | None:
        """The reason why a collective with flags is not for the queue."""
        apart = self._against_messages(made.level, made.impl)
        if apart is not None:
            return apart
        network = network_of(made.call, self._target.machine, self._sizes)
        able = [m for m in network.mechanisms if m.started_by == "host" and m.put] if network is not None else []
        alone = reached(self._target, made.level) == 1
        if not alone and (not able or made.impl is not None and made.impl not in [m.name for m in able]):
            asked = f"impl={made.impl!r}" if made.impl is not None else "every mechanism of the network"
            return f"{asked} is started by programs"
        flags = ir.region_parts(made.flags)[0]
        if str(flags.dtype) not in FLAG_TYPES:
            return f"stream memory operations do not support flags of {flags.dtype}"
        return self._against_sums(flags)

    def _against_messages(self, level: str, impl: str | None) -> str | None:
        """The reason why NCCL cannot send the queue's data to devices without shared memory."""
        if share_memory(self._target, level):
            return None
        if split(self._target, level) is None:
            return f"nodes have different numbers of {level}s"
        if not self._target.nccl:
            return "NCCL, which leads to other nodes, cannot join these ranks"
        return None if impl is None else f"impl={impl!r} does not lead to other nodes"

    def _against_sums(self, flags: ir.Buffer) -> str | None:
        """The reason why the host does not know the flags' values after the queue's additions."""
        if flags.data not in self._known:
            self._known[flags.data] = self._find(flags)
        return self._known[flags.data]

    def _find(self, flags: ir.Buffer) -> str | None:
        name = flags.name
        if flags.data not in self._zeroed:
            return f"{name!r} may hold anything when a call begins (T.alloc_flags makes flags that are zero then)"
        raised = self._raised.get(flags.data, {})
        if flags.data in self._written or None in raised:
            return f"the host does not know before a call what else is added to {name!r}"
        if _shared(raised):
            return f"several may raise the same flag of {name!r} (give every sender flags of its own)"
        return None


# -- senders of flags --------------------------------------------------------------------------------------------------


@dataclass
class _DeviceContext:
    """Context of the walk over a program: a device, with the variables of known value."""

    device: int
    ranks: Mapping[str, int]
    known: dict[ir.Var, int] = field(default_factory=dict)
    counted: bool = True
    """Whether the host knows the number of executions before the call."""


class _SignalWalk:
    """The signals of a program, device by device."""

    def __init__(self, target: LoweringTarget):
        self.target = target
        self.found: dict[ir.Var, dict[Any, set[FlagWord]]] = {}
        self._rounds = _ROUNDS

    def raised(self, call: ir.Call, sender: Any, words: Iterator[FlagWord], at: _DeviceContext) -> None:
        data = ir.region_parts(signalled(operation(call))[0])[0].data
        self.found.setdefault(data, {}).setdefault(sender if at.counted else None, set()).update(words)

    def part(self, part: Part, at: _DeviceContext) -> None:
        if isinstance(part, Launch):
            units = zip(part.extents, self.target.sizes, strict=True)
            open_ = {var: n for (_, var), (_, n) in units if isinstance(var, ir.Var)}
            self.part(part.body, replace(at, known={**at.known, **open_}))
        elif isinstance(part, Control):
            self._control(part.stmt, list(part.parts), at)
        elif isinstance(part, GridPhase):
            for call in _calls(part.stmt):
                if _signals(call):
                    self.raised(call, None, iter(()), at)
        elif isinstance(part, DevicePhase):
            self.stmt(part.stmt, at)
        else:
            for inner in part.parts:
                self.part(inner, at)

    def stmt(self, stmt: ir.Stmt, at: _DeviceContext) -> None:
        if isinstance(stmt, ir.Bind):
            value = self._bound(stmt.value, at)
            if value is not None:
                at.known[stmt.var] = value
        elif isinstance(stmt, ir.For | ir.While | ir.IfThenElse):
            self._control(stmt, list(ir.children(stmt)), at)
        elif isinstance(stmt, ir.Evaluate):
            self._operation(stmt.value, at)
        else:
            for inner in ir.children(stmt):
                self.stmt(inner, at)

    def _go(self, inner: Any, at: _DeviceContext) -> None:
        (self.stmt if isinstance(inner, ir.Stmt) else self.part)(inner, at)

    def _control(self, stmt: ir.Stmt, bodies: list[Any], at: _DeviceContext) -> None:
        if not ir.contains(stmt, _signals):
            return
        decides = [stmt.min, stmt.extent] if isinstance(stmt, ir.For) else [stmt.condition]
        inside = replace(at, counted=at.counted and not any(ir.reads_memory(e) for e in decides))
        values = [evaluate(e, at.known) for e in decides]
        known = [value for value in values if value is not None]
        if isinstance(stmt, ir.For) and len(known) == 2 and known[1] <= self._rounds:
            self._rounds -= known[1]
            for n in range(known[0], known[0] + known[1]):
                self._go(bodies[0], replace(inside, known={**at.known, stmt.loop_var: n}))
        elif isinstance(stmt, ir.IfThenElse) and values[0] is not None:
            for body in bodies[not values[0] :][:1]:
                self._go(body, inside)
        else:
            for body in bodies:
                self._go(body, replace(inside, known=dict(at.known)))

    def _bound(self, value: Any, at: _DeviceContext) -> int | None:
        if ir.op_name(value) == ops.RANK.name:
            return at.ranks.get(Rank.of(value).level)
        return evaluate(value, at.known) if ir.is_pure(value) else None

    def _operation(self, call: Any, at: _DeviceContext) -> None:
        found = operation(call)
        if isinstance(found, Signal):
            receiver = at.device if found.level is None else self._peer(found.level, found.peer, at)
            self.raised(call, ("program", at.device), iter([(receiver, *self._index(found.flag, at))]), at)
        elif isinstance(found, Copy) and found.signal is not None:
            word = (self._peer(found.level, found.peer, at), *self._index(found.signal, at))
            self.raised(call, at.device, iter([word]), at)
        elif isinstance(found, Collective) and found.flags is not None:
            peers = (self._peer(found.level, peer, at) for peer in range(self.target.mesh.count(found.level)))
            *lead, first, _ = self._index(found.flags, at)
            row = None if first is None else first + at.ranks[found.level]
            self.raised(call, at.device, ((peer, *lead, row, None) for peer in peers), at)

    def _index(self, flag: ir.Call, at: _DeviceContext) -> list[int | None]:
        return [evaluate(i, at.known) for i in ir.region_parts(flag)[1]]

    def _peer(self, level: str, peer: Any, at: _DeviceContext) -> int | None:
        rank = evaluate(peer, at.known)
        return None if rank is None else self.target.mesh.sibling(at.device, level, rank)


def leads_out(part: Part, target: LoweringTarget) -> bool:
    """Whether a copy queue sends messages to other nodes, which take SMs."""
    if isinstance(part, HostStep):
        made = None if isinstance(part.stmt, ir.Bind) else operation(part.call)
        gathers = part.impl == QUEUE and isinstance(made, Collective) and not share_memory(target, made.level)
        return part.impl == QUEUE_BETWEEN or gathers
    if isinstance(part, DevicePhase | GridPhase):
        return False
    return any(leads_out(inner, target) for inner in ([part.body] if isinstance(part, Launch) else part.parts))


def _raised(program: Program, target: LoweringTarget) -> dict[ir.Var, dict[Any, set[FlagWord]]]:
    """Data of each tensor of flags: sender -> its signals. A sender None may signal anything at any time."""
    walk = _SignalWalk(target)
    for device in range(target.devices):
        walk.part(program.body, _DeviceContext(device, target.mesh.ranks(device)))
    return walk.found


def _shared(raised: Mapping[Any, set[FlagWord]]) -> bool:
    """Whether two senders may raise the same flag: flags with different known indices are distinct."""
    words = [(sender, word) for sender, of_sender in raised.items() for word in of_sender]
    known = [i for i in range(len(words[0][1])) if all(word[i] is not None for _, word in words)] if words else []
    owners: dict[FlagWord, Any] = {}
    return any(owners.setdefault(tuple(word[i] for i in known), sender) != sender for sender, word in words)


# -- the program's text ------------------------------------------------------------------------------------------------


def _calls(stmt: ir.Stmt) -> list[ir.Call]:
    return ir.nodes(stmt, lambda node: ir.op_name(node) in ops.ALL_OPS)


def _device_phases(part: Part) -> Iterator[ir.Stmt]:
    if isinstance(part, DevicePhase):
        yield part.stmt
    elif not isinstance(part, GridPhase):
        for inner in [part.body] if isinstance(part, Launch) else part.parts:
            yield from _device_phases(inner)


def _written(program: Program) -> set[ir.Var]:
    """Data of tensors and tiles that operations other than signals may write, such as calls with their address."""
    names = names_of(program)
    found: set[ir.Var] = set()
    for stmt, _, _ in statements(program.body):
        effects = names.effects(stmt)
        found.update(a.root for a in effects.writes if all(a is not release.flag for release in effects.releases))
    return found


def _signals(node: ir.Node) -> bool:
    return bool(signalled(operation(node)))
