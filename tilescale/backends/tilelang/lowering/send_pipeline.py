# SPDX-License-Identifier: MIT
"""Send pipelines: loops that only forward tiles to peers get several tiles in flight.

Why: with one tile after the other, a block waits for each to arrive before it loads the next, and reaches a fraction of
its link's bandwidth. Before: a loop of a load into a tile, bulk copies of it to peers, and their signals. After: the
loads go to the slots of a ring, and the copies are issued and not awaited. A slot is loaded again when the copies out
of it are complete, and only then their flags are raised, some iterations late; those of the last iterations after the
loop. A tile is loaded by asynchronous copies (`cp.async`) while that of the previous iteration is sent, if possible: by
16 bytes, unconverted.

Worth: "put" of `benchmarks/results/asynchrony.json`, at 0.92 of the copy engine's rate; a block sends 41 GB/s, one tile
after the other 30 (docs/notes/gemm-experiments.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilelang_core import ir, tiles, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import TileCopy
from tilescale.backends.tilelang.lowering.deferred_stores import NO_SIGNAL, complete, loaded, noted
from tilescale.backends.tilelang.lowering.role_graph.graph import COMPUTE, PEERS, Channel
from tilescale.backends.tilelang.lowering.statements import flat, is_bulk_store, tiles_named
from tilescale.program import ops
from tilescale.program.model import bytes_of
from tilescale.program.operations import Copy

SLOTS = 4
"""Maximum tiles in flight: more than a link's round trip takes at the rate of one block."""

_CP_ASYNC = 16
"""Bytes of an asynchronous copy of a thread (PTX ISA, `cp.async`)."""


@dataclass
class SendPipelines:
    """The loops of one phase that only send.

    Attributes:
        is_bulk: whether the machine model lets a copy to a peer be a bulk copy.
        shared: bytes of shared memory of a program.
        channels: the rings through which tiles are forwarded.
    """

    is_bulk: Callable[[ir.Call], bool]
    shared: int
    channels: list[Channel] = field(default_factory=list)

    def phase(self, stmt: ir.Stmt) -> ir.Stmt:
        """A phase whose loops that only send have rings."""
        return tir.rewrite(stmt, enter=lambda node: self._loop(node, stmt))

    def _loop(self, node: ir.Node, phase: ir.Stmt) -> ir.Stmt | None:
        found = _SendLoop.of(node) if isinstance(node, ir.For) and node.kind == ir.ForKind.SERIAL else None
        if found is None or not all(self.is_bulk(call) for call in found.copies):
            return None
        tile, _, _ = ir.region_parts(TileCopy.of(found.load).target)
        if not _is_dead_after(node, tile, phase):
            return None
        size = bytes_of(tile.shape, tile.dtype)
        assert size is not None, "extents of tiles are constant"
        slots = min(SLOTS, self._free(node, phase) // size)
        if slots < 2:
            return None
        ring = tir.local_buffer(tile.name, [slots, *tile.shape], str(tile.dtype), tile.scope())
        self.channels.append(Channel("slots", [ring], slots, COMPUTE, PEERS))
        return found.with_ring(ring, slots)

    def _free(self, loop: ir.For, phase: ir.Stmt) -> int:
        """Bytes of shared memory for a loop's ring: those that no other tile uses at the same time."""
        branch = next((s for s in ir.statements(phase) if isinstance(s, ir.IfThenElse) and _has(s, loop)), None)
        arms = [] if branch is None else [branch.then_case, branch.else_case]
        arm = next((arm for arm in arms if arm is not None and _has(arm, loop)), None)
        if arm is not None and not tiles_named(phase, besides=branch) | tiles_named(arm, besides=loop):
            return self.shared
        others = tiles_named(phase, besides=loop)
        return self.shared - SLOTS * sum(bytes_of(b.shape, b.dtype) or self.shared for b in others)


def _is_dead_after(loop: ir.For, tile: ir.Buffer, phase: ir.Stmt) -> bool:
    """Whether a tile is dead after a loop: the first later statement that names it, if any, writes all of it."""
    in_order = list(ir.statements(phase))
    if any(isinstance(s, ir.For | ir.While) and not s.same_as(loop) and _has(s, loop) for s in in_order):
        return False
    at = next(i for i, s in enumerate(in_order) if s.same_as(loop)) + len(list(ir.statements(loop)))
    for stmt in in_order[at:]:
        is_leaf = not any(True for _ in ir.children(stmt))
        if is_leaf and tile in tiles_named(stmt, besides=loop):
            source, target = _copied(stmt)
            return source is not None and target is not None and target.same_as(tile) and not source.same_as(tile)
    return True


def _has(stmt: ir.Stmt, loop: ir.For) -> bool:
    return any(inner.same_as(loop) for inner in ir.statements(stmt))


@dataclass(frozen=True)
class _SendLoop:
    """A loop that loads a tile and sends it: its scalars, the load, and the sends."""

    loop: ir.For
    scalars: tuple[ir.Bind, ...]
    load: ir.Call
    sends: tuple[ir.Stmt, ...]
    copies: tuple[ir.Call, ...]
    count: int

    @staticmethod
    def of(loop: ir.For) -> _SendLoop | None:
        """The parts of a loop that only sends; None if it does anything else."""
        body = flat(loop.body)
        scalars = [s for s in body if isinstance(s, ir.Bind)]
        rest = [s for s in body if not isinstance(s, ir.Bind)]
        if not rest or not all(_is_pure(s.value) for s in scalars) or not _is_load(rest[0]):
            return None
        load = rest[0].value
        tile, _, _ = ir.region_parts(TileCopy.of(load).target)
        copies: list[ir.Call] = []
        count = _sum(_sends(s, tile, copies) for s in rest[1:])
        if not copies or count is None:
            return None
        return _SendLoop(loop, tuple(scalars), load, tuple(rest[1:]), tuple(copies), count)

    def with_ring(self, ring: ir.Buffer, slots: int) -> ir.Stmt:
        loop, iteration = self.loop, self.loop.loop_var - self.loop.min
        has_signals = any(Copy.of(call).signal is not None for call in self.copies)
        before = self._signals(loop.loop_var - slots) if has_signals else []
        ahead = 1 if self._is_asynchronous() else 0
        reused = complete((slots - 1 - ahead) * self.count, tir.sequence(before))
        reuse = ir.IfThenElse(ir.GE(iteration, ir.IntImm("int32", slots)), reused, None)
        load = _in_slot(ir.Evaluate(self.load), ring, iteration % slots)
        sends = [_in_slot(stmt, ring, iteration % slots) for stmt in self.sends]
        body = self._ahead([reuse, load], sends) if ahead else [*self.scalars, reuse, load, *sends]
        made = tir.relooped(loop, extent=loop.extent + ahead, body=tir.sequence(body), annotations={})
        last: list[ir.Stmt] = []
        if has_signals:
            number = ir.Var("left", "int32")
            left = ir.Min(loop.extent, ir.IntImm("int32", slots))
            signals = tir.sequence(self._signals(loop.min + loop.extent - left + number))
            last = [ir.For(number, ir.IntImm("int32", 0), left, ir.ForKind.SERIAL, signals)]
        return tir.sequence([made, complete(0, tir.sequence(last))])

    def _ahead(self, loads: Sequence[ir.Stmt], sends: Sequence[ir.Stmt]) -> list[ir.Stmt]:
        """The asynchronous load of an iteration, and the sends of the previous iteration's tile."""
        loop = self.loop
        copies = [_asynchronous(stmt) for stmt in loads]
        next_one = tir.sequence([*self.scalars, *copies, loaded(1)])
        earlier = ir.substitute(tir.sequence([*self.scalars, *sends]), {loop.loop_var: loop.loop_var - 1})
        is_over = ir.GE(loop.loop_var, loop.min + loop.extent)
        return [
            ir.IfThenElse(is_over, loaded(0), next_one),
            ir.IfThenElse(ir.GT(loop.loop_var, loop.min), tir.renamed(earlier), None),
        ]

    def _is_asynchronous(self) -> bool:
        """Whether threads can load the tile by asynchronous copies of 16 bytes."""
        copy = TileCopy.of(self.load)
        (source, begins, extents), (tile, _, _) = map(ir.region_parts, (copy.source, copy.target))
        size = ir.bits(str(tile.dtype)) // 8
        if str(source.dtype) != str(tile.dtype) or not size:
            return False
        begin = ir.substitute(ir.int_node(begins[-1]), _values(self.scalars, {}))
        numbers = [begin, extents[-1], *([source.shape[-1]] if len(source.shape) > 1 else [])]
        return all(ir.proves(ir.EQ(ir.int_node(n) * size % _CP_ASYNC, 0), {}) for n in numbers)

    def _signals(self, iteration: ir.PrimExpr) -> list[ir.Stmt]:
        """The signals of an iteration's copies."""
        inner = [stmt for send in self.sends for stmt in ir.statements(send)]
        bound = (*self.scalars, *(s for s in inner if isinstance(s, ir.Bind)))
        values = _values(bound, {self.loop.loop_var: iteration})
        alone = [ir.substitute(tir.rewrite(s, enter=_signal_alone), values) for s in self.sends]
        return [tir.renamed(stmt) for stmt in alone]


def _values(scalars: Iterable[ir.Bind], values: dict[ir.Var, ir.PrimExpr]) -> dict[ir.Var, ir.PrimExpr]:
    found = dict(values)
    for scalar in scalars:
        found[scalar.var] = ir.substitute(scalar.value, found)
    return found


def _is_pure(value: ir.PrimExpr) -> bool:
    return ir.is_pure(value) and not ir.reads_memory(value)


def _is_load(stmt: ir.Stmt) -> bool:
    """Whether a statement copies from device memory into a whole tile in shared memory."""
    source, target = _copied(stmt)
    return target is not None and ir.scope_kind(source) == "global" and ir.scope_kind(target) == "shared"


def _asynchronous(stmt: ir.Stmt) -> ir.Stmt:
    """A load by asynchronous copies; other statements unchanged."""
    call: Any = stmt.value if isinstance(stmt, ir.Evaluate) else None
    return stmt if ir.op_name(call) != tl.COPY else tir.tile_call("async_copy", *tiles.regions_of(call))


def _copied(stmt: ir.Stmt) -> tuple[ir.Buffer | None, ir.Buffer | None]:
    """Source and target of a copy into a whole tile; None for other statements."""
    call: Any = stmt.value if isinstance(stmt, ir.Evaluate) else None
    if ir.op_name(call) != tl.COPY:
        return None, None
    copy = TileCopy.of(call)
    (source, _, _), (target, _, extents) = (ir.region_parts(region) for region in (copy.source, copy.target))
    is_whole = [ir.constant(n) for n in extents] == [ir.constant(n) for n in target.shape]
    return (source, target) if is_whole else (None, None)


def _sum(counts: Iterable[int | None]) -> int | None:
    """A sum; None if a summand is."""
    total: int | None = 0
    for count in counts:
        total = None if total is None or count is None else total + count
    return total


def _sends(stmt: ir.Stmt, tile: ir.Buffer, copies: list[ir.Call]) -> int | None:
    """Number of copies of a tile to peers that a statement makes, which are collected; None if it does more."""
    if isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.SERIAL:
        inner = [s for s in flat(stmt.body) if not isinstance(s, ir.Bind)]
        pure = all(_is_pure(s.value) for s in flat(stmt.body) if isinstance(s, ir.Bind))
        count, times = _sum(_sends(s, tile, copies) for s in inner), ir.constant(stmt.extent)
        return None if not pure or times is None or count is None else times * count
    call: Any = stmt.value if isinstance(stmt, ir.Evaluate) else None
    if ir.op_name(call) != ops.COPY.name or not Copy.of(call).to_peer or not is_bulk_store(call):
        return None
    if not ir.region_parts(Copy.of(call).source)[0].same_as(tile):
        return None
    copies.append(call)
    return 1


def _in_slot(stmt: ir.Stmt, ring: ir.Buffer, slot: ir.PrimExpr) -> ir.Stmt:
    """A load or a send with its tile in a slot, without signals."""

    def leave(node: ir.Node) -> Any:
        if ir.op_name(node) == ops.COPY.name:
            copy = Copy.of(node)
            alone = tir.recall(node, [_slot_of(copy.source, ring, slot, "r"), copy.target, copy.peer])
            return noted(alone, NO_SIGNAL)
        if ir.op_name(node) == tl.COPY:
            load = TileCopy.of(node)
            return tir.recall(node, [load.source, _slot_of(load.target, ring, slot, "w")])
        return None

    return tir.rewrite(stmt, leave=leave)


def _slot_of(region: ir.Call, ring: ir.Buffer, slot: ir.PrimExpr, access: str) -> ir.Call:
    _, begins, extents = ir.region_parts(region)
    return tir.region(ring, [slot, *begins], [1, *extents], access)


def _signal_alone(node: ir.Node) -> Any:
    """The signal of a copy without the copy, with scalars substituted."""
    if isinstance(node, ir.Bind):
        return tir.sequence([])
    if not isinstance(node, ir.Evaluate) or ir.op_name(node.value) != ops.COPY.name:
        return None
    call, copy = node.value, Copy.of(node.value)
    if copy.signal is None:
        return tir.sequence([])
    notes = {name: call.annotations[name] for name in ("level", "op")}
    return tir.evaluate(ir.Call(call.dtype, ops.SIGNAL, [copy.signal, copy.value, copy.peer], notes))
