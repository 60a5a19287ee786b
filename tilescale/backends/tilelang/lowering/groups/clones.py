# SPDX-License-Identifier: MIT
"""One unit's clone of a region: its rank is a constant, its views are resolved, its tiles are local.

Why: with a constant rank, roles by rank need no branches, so a fragment of a role belongs to one unit. Before:
statements that every unit of a level runs. After: those that this unit runs; statements that no longer name a unit are
lowered like the program's own, where a barrier is one of this unit's threads. Declines tile operations on single
threads, and statements that it cannot place.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir, tiles, tl, trace
from tilelang_core import rewrite as tir
from tilelang_core.scalars import NamedBarrier
from tilescale.backends.tilelang.lowering.groups.state import GroupStage
from tilescale.backends.tilelang.lowering.groups.unit import UnitThreads, branches
from tilescale.backends.tilelang.lowering.markers import THREADS_OWN, by_thread, located, sync
from tilescale.backends.tilelang.lowering.registry import rule_for
from tilescale.backends.tilelang.lowering.statements import must_keep_order
from tilescale.backends.tilelang.ptx import WARP
from tilescale.passes.structure import location
from tilescale.program import ops
from tilescale.program.operations import AtomicAdd, Rank, Signal, TileView, operation

KIND = "thread_group"
"""The kind of level whose operations have rules for one unit's part."""

_REDUCTIONS = (tl.REDUCE, *tl.FINALIZE_REDUCER)


_ARRIVE = tl.ARRIVE_BARRIER
"""At a barrier that the program has allocated: roles hand each other tiles through it."""

_LEAVE_LOOPS = tl.LEAVE_LOOP


class UnitClone:
    """The statements of one unit.

    Args:
        around: the clone of the loop, or of the unit, around it.
        line: the statement of the program that it clones, where it has no location itself.

    Attributes:
        values: variables of the region -> their values on this unit.
        views: data variables of views -> the view.
        origins: unit-dependent variables -> their bound values; ranks -> themselves.
        apart: number of unit-dependent conditions around the current statement.
        loops: number of loops of the clone around it.
    """

    def __init__(
        self, stage: GroupStage, unit: UnitThreads, around: UnitClone | None = None, line: ir.Stmt | None = None
    ):
        self.stage, self.unit = stage, unit
        self.values: dict[ir.Var, Any] = dict(around.values) if around else {}
        self.views: dict[ir.Var, TileView] = dict(around.views) if around else {}
        self.origins: dict[ir.Var, ir.PrimExpr] = dict(around.origins) if around else {}
        self.ranks: dict[ir.Var, str] = dict(around.ranks) if around else {}
        self.apart: int = around.apart if around else 0
        self.loops: int = around.loops if around else 0
        self._line: ir.Stmt | None = line if around is None else around._line

    # -- statements --------------------------------------------------------------------------------------------------

    def stmt(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement, as this unit runs it."""
        if location(stmt) is not None:
            self.stage.where, self._line = location(stmt), stmt
        if isinstance(stmt, ir.SeqStmt):
            return tir.sequence([self.stmt(inner) for inner in stmt.seq])
        if isinstance(stmt, ir.Bind):
            return self._bind(stmt)
        if isinstance(stmt, ir.For):
            return self._for(stmt)
        if isinstance(stmt, ir.IfThenElse):
            return self._if(stmt)
        if isinstance(stmt, ir.While):
            return self._while(stmt)
        if isinstance(stmt, ir.AttrStmt):
            if str(stmt.attr_key) == ops.SCALE:
                return self.scale(stmt)
            return ir.AttrStmt(stmt.node, stmt.attr_key, self.expr(stmt.value), self.stmt(stmt.body))
        if isinstance(stmt, ir.Evaluate):
            return self._evaluate(stmt)
        return self._leaf(stmt)

    def expr(self, expr: ir.PrimExpr) -> ir.PrimExpr:
        """An expression on this unit; not lowered."""
        return tir.rewrite(tir.evaluate(expr), leave=self._leave).value if isinstance(expr, ir.PrimExpr) else expr

    def _leaf(self, stmt: ir.Stmt) -> ir.Stmt:
        return self._at(tir.rewrite(stmt, leave=self._leave))

    def _at(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement with the location of the user's statement that it is a part of."""
        return stmt if self._line is None else located(stmt, self._line)

    def _bind(self, stmt: ir.Bind) -> ir.Stmt:
        name = ir.op_name(stmt.value)
        if name == ops.VIEW.name:
            self.views[stmt.var] = TileView.of(stmt.value)
            return tir.sequence([])
        if name == ops.RANK.name and self._level(Rank.of(stmt.value).level).kind == "thread_group":
            level = Rank.of(stmt.value).level
            self.values[stmt.var], self.ranks[stmt.var] = self._rank(level), level
            return tir.sequence([])
        if self.is_divergent(stmt.value):
            self.origins[stmt.var] = stmt.value
        value = self.expr(stmt.value)
        number = ir.constant(value) if ir.is_pure(value) else None
        if number is not None:
            self.values[stmt.var] = ir.IntImm(str(stmt.var.dtype), number)
            return tir.sequence([])
        self.values[stmt.var] = fresh = ir.Var(stmt.var.name, str(stmt.var.dtype))
        return self._at(ir.Bind(fresh, value))

    def _for(self, stmt: ir.For) -> ir.Stmt:
        fresh = ir.Var(stmt.loop_var.name, str(stmt.loop_var.dtype))
        self.values[stmt.loop_var] = fresh
        begin, extent = (self.expr(n) for n in (stmt.min, stmt.extent))
        keep_order = "num_stages" in stmt.annotations and must_keep_order(stmt, self.stage.phase.stmt)
        body = self._repeated(stmt.extent, stmt.body)
        notes = {} if keep_order else stmt.annotations
        return tir.relooped(stmt, loop_var=fresh, min=begin, extent=extent, body=body, annotations=notes)

    def _while(self, stmt: ir.While) -> ir.Stmt:
        return ir.While(self.expr(stmt.condition), self._repeated(stmt.condition, stmt.body))

    def _repeated(self, condition: ir.PrimExpr, body: ir.Stmt) -> ir.Stmt:
        self.loops += 1
        result = self._under(condition, body)
        self.loops -= 1
        return result

    def _if(self, stmt: ir.IfThenElse) -> ir.Stmt:
        condition = self.expr(stmt.condition)
        holds = ir.constant(condition)
        if holds is not None:
            arm = stmt.then_case if holds else stmt.else_case
            return self._under(stmt.condition, arm) if arm is not None else tir.sequence([])
        arms = [
            self._under(stmt.condition, arm) if arm is not None else None for arm in (stmt.then_case, stmt.else_case)
        ]
        return tir.at(ir.IfThenElse(condition, *arms), stmt)

    def _under(self, condition: ir.PrimExpr, body: ir.Stmt) -> ir.Stmt:
        apart = self.is_divergent(condition)
        self.apart += apart
        result = self.stmt(body)
        self.apart -= apart
        return result

    def is_divergent(self, expr: ir.PrimExpr) -> bool:
        """Whether an expression may differ between siblings."""
        if not isinstance(expr, ir.PrimExpr):
            return False
        known = {*self.ranks, *self.origins}
        return bool(ir.variables(expr) & known) or ir.contains(
            expr, lambda n: isinstance(n, ir.BufferLoad) and self._is_own(n.buffer)
        )

    def _is_own(self, buffer: ir.Buffer) -> bool:
        own = self.stage.owner(buffer) or self.stage.distributions.of(buffer)
        return buffer.data in self.views or own is not None

    def scale(self, stmt: ir.AttrStmt) -> ir.Stmt:
        """A scale inside this unit: a finer level forks, a coarser one only selects."""
        level = self._level(str(stmt.value.value))
        if level.kind != "thread_group" or level.threads >= self.unit.threads and self.unit.level:
            return self.stmt(stmt.body)
        if level.threads == 1:
            return self._threads(stmt.body)
        units = self.unit.units(level)
        return branches(self.stage.thread, units, [UnitClone(self.stage, unit, self).stmt(stmt.body) for unit in units])

    def _threads(self, body: ir.Stmt) -> ir.Stmt:
        """Every thread on its own: plain code, in which a barrier is one of the unit's threads."""

        def works_on_tiles(node: ir.Node) -> bool:
            name = ir.op_name(node) or ""
            made = operation(node)
            of_elements = {ops.RANK.name, ops.BARRIER.name, *THREADS_OWN}
            is_tile = isinstance(made, AtomicAdd) and made.is_of_tiles
            return is_tile or name.startswith(tl.TILE_OPERATIONS) or name in ops.ALL_OPS - of_elements

        if ir.contains(body, works_on_tiles):
            raise self.stage.unsupported("a tile operation on single threads")
        return ThreadClone(self.stage, self.unit, self).stmt(body)

    # -- names -------------------------------------------------------------------------------------------------------

    def _level(self, name: str) -> Any:
        return self.stage.level(name)

    def _rank(self, name: str) -> Any:
        level = self._level(name)
        unit = self.unit.at(name)
        return ir.IntImm("int32", unit.number if unit is not None else self.unit.begin // level.threads)

    def rank_of(self, expr: ir.PrimExpr, unit: UnitThreads) -> int | None:
        """The value of an expression on a sibling, if it is a constant."""
        while isinstance(expr, ir.PrimExpr) and (names := ir.variables(expr) & self.origins.keys()):
            expr = ir.substitute(expr, {var: self.origins[var] for var in names})
        ranks = {v: ir.IntImm("int32", unit.rank(level)) for v, level in self.ranks.items() if unit.at(level)}
        return ir.constant(ir.substitute(expr, ranks) if isinstance(expr, ir.PrimExpr) else expr)

    def _leave(self, node: ir.Node) -> Any:
        if isinstance(node, ir.Var):
            owned = self.stage.owned(node)
            return self.values.get(node) if owned is None else self.stage.copy_of(owned, self.unit).data
        if isinstance(node, ir.BufferLoad | ir.BufferStore):
            buffer, indices = self.place(node.buffer, node.indices)
            if buffer is node.buffer:
                return None
            if isinstance(node, ir.BufferLoad):
                return ir.BufferLoad(buffer, indices)
            return ir.BufferStore(buffer, node.value, indices)
        return None

    def place(self, buffer: ir.Buffer, indices: Any, unit: UnitThreads | None = None) -> tuple[ir.Buffer, list[Any]]:
        """The location of an element that a unit (this one) names."""
        unit = unit or self.unit
        view = self.views.get(buffer.data)
        if view is None:
            return self._instance(buffer, unit), list(indices)
        base, begins, _ = ir.region_parts(view.region)
        layout, at = view.layout, list(indices)
        if layout.dim is not None:
            if self.stage.distributions.of(base) is not None:
                return self.stage.copy_of(base, unit), at
            share, holder = ir.integer(view.shape[layout.dim]), unit.inside(view.level)
            if layout.block in (None, share):
                at[layout.dim] = at[layout.dim] + holder.number * share
            elif layout.block == 1:
                at[layout.dim] = at[layout.dim] * holder.siblings + holder.number
            else:
                raise self.stage.unsupported(f"a block-cyclic view of {base.name!r}")
        return self.place(base, [self.expr(b) + i for b, i in zip(begins, at, strict=True)], unit)

    def _instance(self, buffer: ir.Buffer, unit: UnitThreads) -> ir.Buffer:
        held = self.stage.distributions.of(buffer)
        if held is not None and held.axis is not None:
            return self.stage.whole_of(buffer, unit)
        if held is not None or self.stage.owner(buffer) is not None:
            return self.stage.copy_of(buffer, unit)
        return buffer

    def strided(self, region: Any) -> bool:
        """Whether an argument is a region of a cyclic view in memory, which is not a region of the tile itself."""
        if not tiles.is_region(region):
            return False
        buffer, _, extents = ir.region_parts(region)
        view = self.views.get(buffer.data)
        while view is not None:
            is_held = view.layout.is_replica or self.stage.distributions.of(view.base) is not None
            if not is_held and ir.constant(extents[view.axis]) != 1:
                if view.layout.block not in (None, ir.constant(view.shape[view.axis])):
                    return True
            view = self.views.get(view.base.data)
        return False

    # -- operations --------------------------------------------------------------------------------------------------

    def _evaluate(self, stmt: ir.Evaluate) -> ir.Stmt:
        name = ir.op_name(stmt.value)
        level = ir.attribute(stmt.value, "level") if name in ops.ALL_OPS else None
        if level is not None and self._level(str(level)).kind == "thread_group":
            return self._between(stmt.value, str(level))
        if name in _REDUCTIONS:
            self.stage.reduces(self.unit)
        if name == tl.GEMM:
            self._check_product(tiles.Gemm.of(stmt.value))
        if name == tl.STORAGE_SYNC and NamedBarrier.of(stmt.value).number is None:
            return sync((self.unit if self.apart else self.stage.whole).executing)
        if name == _ARRIVE:
            # Stock TileLang looks for the fence's place within one branch, and here another one reads the tile.
            return tir.sequence([tir.evaluate(tir.extern("tilescale::acquired")), self._leaf(stmt)])
        if name in _LEAVE_LOOPS and not self.loops:
            raise self.stage.unsupported("one unit leaves a loop around the scale, while its siblings go on")
        if name is not None and name.startswith(tl.TILE_OPERATIONS) and any(map(self.strided, stmt.value.args)):
            return self.stmt(self._element_wise(stmt.value))
        return self._leaf(stmt)

    def _check_product(self, product: tiles.Gemm) -> None:
        """Stock TileLang gives each warp at least 16 rows and 8 columns."""
        rows, columns = (ir.integer(n) for n in product.sizes[:2])
        warps = max(self.unit.threads // WARP, 1)
        if rows // 16 * (columns // 8) < warps:
            raise self.stage.unsupported(
                f"a product of {rows} x {columns} on a {self.unit.level}: each of {warps} warps takes 16 x 8 at least"
            )

    def _element_wise(self, call: ir.Call) -> ir.Stmt:
        if call.op.name not in (tl.COPY, tl.FILL):
            raise self.stage.unsupported(f"{call.op.name.rpartition('.')[2]} on a cyclic view")
        return tir.copy_nest(call)

    def _between(self, call: ir.Call, level: str) -> ir.Stmt:
        if call.op.name == ops.SIGNAL.name:
            # Units of one device share its flags.
            signal = Signal.of(call)
            return self.stmt(tir.evaluate(trace.call(ops.SIGNAL, signal.flag, signal.value, op=signal.op)))
        if level != self.unit.level:
            name = call.op.name.removeprefix("tilescale.")
            raise self.stage.unsupported(f"T.{name} of level {level!r} inside a unit of level {self.unit.level!r}")
        rule = rule_for(call.op.name, KIND, ir.attribute(call, "impl"))
        assert rule is not None, f"{call.op.name} is an operation between units"
        return rule(self, call)


class ThreadClone(UnitClone):
    """Statements that every thread of a unit runs on its own."""

    def _rank(self, name: str) -> Any:
        level = self._level(name)
        if level.threads > 1:
            return super()._rank(name)
        return self.stage.thread - self.unit.begin

    def _evaluate(self, stmt: ir.Evaluate) -> ir.Stmt:
        return by_thread(super()._evaluate(stmt))

    def _between(self, call: ir.Call, level: str) -> ir.Stmt:
        return sync(self.unit.executing) if call.op.name == ops.BARRIER.name else super()._between(call, level)
