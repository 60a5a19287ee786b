# SPDX-License-Identifier: MIT
"""Software-pipelined epilogue: stores at the end of a loop's body are drained one iteration later.

Why: a bulk store takes as long as its data take to arrive, and a signal after it must wait for that; done at once, all
threads stall. Before: copies out of shared memory and signals that end an iteration. After: the same copies issued and
not awaited, the signals deferred, and a flush (completion, then the deferred signals) where the next iteration reaches
its own end, and after the loop. Signals are never deferred across a wait, so no device waits for a signal that another
one holds until its own wait is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import TileCopy
from tilescale.backends.tilelang.lowering.markers import by_nvshmem
from tilescale.backends.tilelang.lowering.role_graph.graph import COMPUTE, LATER, Channel
from tilescale.backends.tilelang.lowering.statements import flat, is_bulk_store, is_region, orders, writes_tiles
from tilescale.program import ops
from tilescale.program.operations import Copy, Signal

KEPT = "kept"
"""Annotation of a copy or signal: the number of the deferred signal; `NO_SIGNAL` for a copy without one."""

NO_SIGNAL = -1

FLUSH = "tilescale.flush"
"""AttrStmt key: complete pending copies and send deferred signals here."""

COMPLETE = "tilescale.complete"
"""AttrStmt key: complete all copies except the last `value`, then send the signals inside."""


LOADED = "tilescale.loaded"
"""AttrStmt key: asynchronous loads of tiles are complete, except the last `value`."""


@dataclass(frozen=True)
class DeferredSignal:
    """A deferred signal: a variable has the flag's address, 0 for none. `flag`, `value`, `op`: the operands of the
    signal."""

    variable: ir.Buffer
    flag: ir.Call
    value: int
    op: str


@dataclass(frozen=True)
class _LaterStatements:
    """The rest of an iteration after a statement: whether it needs all signals sent, or overwrites tiles."""

    bars_signals: bool = False
    writes_tiles: bool = False

    def or_(self, other: _LaterStatements) -> _LaterStatements:
        return _LaterStatements(self.bars_signals or other.bars_signals, self.writes_tiles or other.writes_tiles)


@dataclass
class DeferredStores:
    """The end of one loop's body.

    Attributes:
        signals: whether signals may be deferred: the next iteration waits for nothing before its own end.
        kept: the deferred signals, in the order in which they are sent.
        tiles: tiles whose copies are issued and not awaited.
    """

    signals: bool
    kept: list[DeferredSignal] = field(default_factory=list)
    tiles: list[ir.Buffer] = field(default_factory=list)

    def end(self, stmts: list[ir.Stmt]) -> list[ir.Stmt]:
        """The statements that end an iteration, after the flush of the previous iteration."""
        made = self._list(stmts, _LaterStatements())[0]
        return [flush(), *made] if self.is_open else stmts

    @property
    def is_open(self) -> bool:
        """Whether anything is deferred."""
        return bool(self.tiles or self.kept)

    def _list(self, stmts: list[ir.Stmt], later: _LaterStatements) -> tuple[list[ir.Stmt], _LaterStatements]:
        made: list[ir.Stmt] = []
        for stmt in reversed(stmts):
            new, later = self._statement(stmt, later)
            made.insert(0, new)
        return made, later

    def _statement(self, stmt: ir.Stmt, later: _LaterStatements) -> tuple[ir.Stmt, _LaterStatements]:
        if isinstance(stmt, ir.SeqStmt) or is_region(stmt):
            made, later = self._list(flat(stmt), later)
            return tir.sequence(made), later
        if isinstance(stmt, ir.IfThenElse):
            then_case, after = self._statement(stmt.then_case, later)
            else_case = None
            if stmt.else_case is not None:
                else_case, other = self._statement(stmt.else_case, later)
                after = after.or_(other)
            return tir.at(ir.IfThenElse(stmt.condition, then_case, else_case), stmt), after
        new = self._operation(stmt, later)
        if new is not None:
            return tir.at(new, stmt), later
        return stmt, later.or_(_LaterStatements(ir.contains(stmt, orders), writes_tiles(stmt)))

    def _operation(self, stmt: ir.Stmt, later: _LaterStatements) -> ir.Stmt | None:
        """A copy that is not awaited, or a deferred signal; None for all others."""
        if not is_sent(stmt):
            return None
        call = stmt.value
        if ir.op_name(call) == ops.SIGNAL.name:
            signal = Signal.of(call)
            return self._kept(call, signal.flag, signal.value, signal.op, later)
        if later.writes_tiles:
            return None
        if ir.op_name(call) == tl.COPY:
            self.tiles.append(ir.region_parts(TileCopy.of(call).source)[0])
            return tir.tile_call("tma_copy", *call.args)
        copy = Copy.of(call)
        if copy.signal is not None:
            assert copy.op is not None
            return self._kept(call, copy.signal, copy.value, copy.op, later)
        self.tiles.append(ir.region_parts(copy.source)[0])
        return tir.evaluate(noted(call, NO_SIGNAL))

    def channel(self) -> Channel:
        """The deferred operations, as a channel to the next iteration."""
        return Channel("late", list(dict.fromkeys(self.tiles)), 1, COMPUTE, LATER, signals=len(self.kept))

    def _kept(
        self, call: ir.Call, flag: ir.Call, value: ir.PrimExpr, op: str, later: _LaterStatements
    ) -> ir.Stmt | None:
        """A copy or signal with its signal deferred, if it may be."""
        if not self.signals or later.bars_signals or ir.constant(value) is None:
            return None
        variable = tir.local_buffer(f"kept{len(self.kept)}", [1], "int64", "local.var")
        self.kept.append(DeferredSignal(variable, flag, ir.integer(value), op))
        return tir.evaluate(noted(call, len(self.kept) - 1))


def is_sent(stmt: ir.Stmt) -> bool:
    """Whether a statement is a bulk store of a whole tile, to a peer too, or a signal."""
    call: Any = stmt.value if isinstance(stmt, ir.Evaluate) else None
    name = ir.op_name(call)
    if name == tl.COPY:
        return not call.annotations and is_bulk_store(call)
    if name == ops.COPY.name:
        return Copy.of(call).to_peer and not by_nvshmem(call) and is_bulk_store(call)
    return name == ops.SIGNAL.name and not by_nvshmem(call)


def flush() -> ir.Stmt:
    """The mark at which deferred operations are completed."""
    return tir.marker(FLUSH)


def complete(left: int, signals: ir.Stmt) -> ir.Stmt:
    """The mark at which all copies but the last `left` are completed and then signalled; without signals, their tiles
    are free."""
    return ir.AttrStmt(ir.StringImm(COMPLETE), COMPLETE, ir.IntImm("int32", left), signals)


def loaded(left: int) -> ir.Stmt:
    """The mark at which all threads' asynchronous loads of tiles are complete, except the last `left`."""
    return ir.AttrStmt(ir.StringImm(LOADED), LOADED, ir.IntImm("int32", left), tir.sequence([]))


def noted(call: ir.Call, number: int) -> ir.Call:
    """A copy or signal annotated with the number of its deferred signal."""
    return ir.Call(call.dtype, call.op, list(call.args), {**dict(call.annotations), KEPT: ir.IntImm("int32", number)})
