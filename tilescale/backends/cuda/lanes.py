# SPDX-License-Identifier: MIT
"""Lower scales inside a program (warpgroups, warps) to TileLang's exclusive branches on the thread index.

Why: stock TileLang runs a tile operation on the threads of the branch it stands in, but a fragment belongs to one range
of threads, and what it cannot place it drops in silence. Before: a region that every unit runs, with views. After: one
clone of the region for each unit in `if tx < n ... else ...`, views as slices, one fragment for each unit that has a
copy of its own; collectives between the clones go through shared memory with all threads of the program.
Declines views that are neither slices nor copies, and collectives under a condition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.hda import Level
from tilescale.program import ops
from tilescale.program.layout import Layout

if TYPE_CHECKING:
    from tilescale.backends.cuda.lower import GridLowering

MEETINGS = frozenset(op.name for op in (ops.ALLREDUCE, ops.ALL_GATHER, ops.BARRIER))
"""Operations that the clones make together."""


@dataclass(frozen=True)
class Slice:
    """What a view is for one unit: a buffer and where in it the view begins."""

    buffer: ir.Buffer
    begins: tuple[Any, ...]


class LaneLowering:
    """The units of one lanes level in a program."""

    def __init__(self, lowering: GridLowering, level: Level):
        self.lowering, self.level = lowering, level
        self.count = lowering.launch.thread_count // level.threads
        self.copies: dict[ir.Var, list[ir.Buffer]] = {}
        self.views: dict[ir.Var, ir.Call] = {}
        self.ranks: list[ir.Var] = []

    # -- a scale's region --------------------------------------------------------------------------------------------

    def region(self, stmt: ir.Stmt) -> ir.Stmt:
        """The region of a `T.Scale` of this level."""
        if self.lowering.launch.threads[1:] != (1, 1):
            raise self.lowering.unsupported(f"T.Scale({self.level.name!r}) in a launch of 2-D threads")
        return tir.sequence([*self._lockstep(stmt), self.lowering.sync()])

    def _lockstep(self, stmt: ir.Stmt) -> list[ir.Stmt]:
        """Runs of statements that units make alone become branches; what they make together stands between."""
        if not ir.contains(stmt, lambda n: ir.op_name(n) in MEETINGS):
            only_binds = all(isinstance(s, ir.Bind) for s in (stmt.seq if isinstance(stmt, ir.SeqStmt) else [stmt]))
            self._survey(stmt)
            return [] if only_binds else [self._branches(stmt)]
        if isinstance(stmt, ir.SeqStmt):
            result, alone = [], []
            for inner in [*stmt.seq, None]:
                if inner is not None and not ir.contains(inner, lambda n: ir.op_name(n) in MEETINGS):
                    alone.append(inner)
                    continue
                if alone:
                    result += self._lockstep(tir.sequence(alone))
                    alone = []
                result += self._lockstep(inner) if inner is not None else []
            return result
        if isinstance(stmt, ir.For):
            body = tir.sequence(self._lockstep(stmt.body))
            return [ir.For(stmt.loop_var, stmt.min, self.lowering.expr(stmt.extent), stmt.kind, body)]
        if isinstance(stmt, ir.Evaluate):
            return self._meeting(stmt.value)
        raise self.lowering.unsupported(f"a collective of level {self.level.name!r} under this statement")

    def _branches(self, stmt: ir.Stmt) -> ir.Stmt:
        """`stmt` on every unit: an exclusive chain of branches, which TileLang runs side by side."""
        return self.chain([self._clone(stmt, unit) for unit in range(self.count)])

    def chain(self, clones: list[ir.Stmt | None]) -> ir.Stmt:
        """Clone i on unit i; None for a unit that does nothing."""
        tx = self.lowering.launch.thread_vars[0][0]
        result: ir.Stmt | None = None
        for unit in reversed(range(len(clones))):
            clone = clones[unit]
            if unit == len(clones) - 1:
                result = clone
                continue
            body = clone if clone is not None else tir.sequence([])
            result = ir.IfThenElse(tx < (unit + 1) * self.level.threads, body, result)
        return result if result is not None else tir.sequence([])

    # -- one unit's clone --------------------------------------------------------------------------------------------

    def _clone(self, stmt: ir.Stmt, unit: int) -> ir.Stmt:
        fresh: dict[ir.Var, ir.Var] = {}

        def enter(node: Any) -> Any:
            if isinstance(node, ir.Bind):
                if ir.op_name(node.value) in (ops.VIEW.name, ops.RANK.name):
                    return tir.sequence([])
                fresh[node.var] = ir.Var(node.var.name, str(node.var.dtype))
                return ir.Bind(fresh[node.var], self._expr(node.value, unit, fresh))
            if isinstance(node, ir.For):
                fresh[node.loop_var] = ir.Var(node.loop_var.name, str(node.loop_var.dtype))
            if isinstance(node, ir.Evaluate) and ir.op_name(node.value) in ops.ALL_OPS:
                raise self.lowering.unsupported(
                    f"T.{node.value.op.name.removeprefix('tilescale.')} inside T.Scale({self.level.name!r})"
                )
            return None

        cloned = tir.rewrite(stmt, enter=enter, leave=lambda node: self._leave(node, unit, fresh))
        return self.lowering.stmt(tir.rename_loops(cloned, fresh))

    def _expr(self, expr: Any, unit: int, fresh: dict[ir.Var, ir.Var]) -> Any:
        return tir.rewrite(tir.evaluate(expr), leave=lambda node: self._leave(node, unit, fresh)).value

    def _survey(self, stmt: ir.Stmt) -> None:
        """Note views and ranks that are bound in a statement; those bound before it are known already."""

        def visit(node: Any) -> None:
            name = ir.op_name(node.value) if isinstance(node, ir.Bind) else None
            if name == ops.VIEW.name:
                self.views[node.var] = node.value
            elif name == ops.RANK.name and str(node.value.args[0].value) == self.level.name:
                self.ranks.append(node.var)

        ir.walk(stmt, visit)

    def _leave(self, node: Any, unit: int, fresh: dict[ir.Var, ir.Var]) -> Any:
        if isinstance(node, ir.Var):
            if any(node.same_as(rank) for rank in self.ranks):
                return ir.IntImm("int32", unit)
            return fresh.get(node)
        if isinstance(node, ir.BufferLoad | ir.BufferStore):
            return self._on_slice(node, unit)
        return None

    def _on_slice(self, node: Any, unit: int) -> Any:
        data = node.buffer.data
        if data in self.views:
            place = self._slice(self.views[data], unit)
            indices = [i + b for i, b in zip(node.indices, place.begins, strict=True)]
            buffer = place.buffer
        elif data in self.copies or self._owned(node.buffer):
            buffer, indices = self.copy_of(node.buffer, unit), list(node.indices)
        else:
            return None
        if isinstance(node, ir.BufferLoad):
            return ir.BufferLoad(buffer, indices)
        return ir.BufferStore(buffer, node.value, indices)

    def _owned(self, buffer: ir.Buffer) -> bool:
        return any(
            data.same_as(buffer.data) and level == self.level.name for data, level in self.lowering.launch.owners
        )

    def _slice(self, view: ir.Call, unit: int) -> Slice:
        base, begins, _ = ir.region_parts(view.args[0])
        layout = Layout(ir.attribute(view, "dim"), ir.attribute(view, "block"))
        if layout.is_replica:
            return Slice(self.copy_of(base, unit), tuple(begins))
        if base.scope().startswith("local"):
            raise self.lowering.unsupported(f"a view that splits the fragment {base.name!r} over {self.level.name}s")
        share = ir.constant(view.args[1 + layout.dim])
        if layout.block not in (None, share):
            raise self.lowering.unsupported(f"a cyclic view of {base.name!r}")
        at = [b + (unit * share if axis == layout.dim else 0) for axis, b in enumerate(begins)]
        return Slice(base, tuple(at))

    def copy_of(self, buffer: ir.Buffer, unit: int) -> ir.Buffer:
        """A unit's own copy of a tile."""
        if buffer.data not in self.copies:
            shape, dtype = list(buffer.shape), str(buffer.dtype)
            self.copies[buffer.data] = [
                tir.local_buffer(f"{buffer.name}_{self.level.name}{u}", shape, dtype, buffer.scope())
                for u in range(self.count)
            ]
            self.lowering.tiles += self.copies[buffer.data]
        return self.copies[buffer.data][unit]

    # -- statements of the program on tiles of which units have copies -----------------------------------------------

    def spread(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement of the whole program that names such a tile: writers run on every unit, readers on the first."""
        writes = ir.contains(stmt, self._writes_copy)
        clones = [self._clone(stmt, unit) if writes or unit == 0 else None for unit in range(self.count)]
        return tir.sequence([self.chain(clones), self.lowering.sync()])

    def names_copy(self, node: Any) -> bool:
        """Whether a node is an access to a tile of which units have copies."""
        return isinstance(node, ir.BufferLoad | ir.BufferStore) and node.buffer.data in self.copies

    def _writes_copy(self, node: Any) -> bool:
        if isinstance(node, ir.BufferStore):
            return node.buffer.data in self.copies
        is_written = ir.op_name(node) == "tl.region" and ir.constant(node.args[1]) & 2
        return bool(is_written) and node.args[0].buffer.data in self.copies

    # -- collectives -------------------------------------------------------------------------------------------------

    def _meeting(self, call: ir.Call) -> list[ir.Stmt]:
        if ir.attribute(call, "level") != self.level.name:
            raise self.lowering.unsupported(f"a collective of another level inside T.Scale({self.level.name!r})")
        if call.op.name in (ops.BARRIER.name, ops.ALL_GATHER.name):
            return [self.lowering.sync()]
        view = self.views.get(ir.region_parts(call.args[0])[0].data)
        base = ir.region_parts(view.args[0])[0] if view is not None else None
        if base is None or ir.attribute(view, "dim") is not None or ir.attribute(call, "op") is None:
            raise self.lowering.unsupported(
                f"T.allreduce of level {self.level.name!r} but of a T.Replica view with op="
            )
        return self._allreduce(base, ir.attribute(call, "op"))

    def _allreduce(self, base: ir.Buffer, op: str) -> list[ir.Stmt]:
        """Copies meet one after another in shared memory at the first unit, which hands the result round."""
        from tilescale.backends.cuda.exchange import COMBINE

        shape = [ir.constant(n) for n in base.shape]
        staged = tir.local_buffer(f"{base.name}_staged", shape, str(base.dtype), "shared.dyn")
        self.lowering.tiles.append(staged)
        self.lowering.notes.append(
            f"T.allreduce of level {self.level.name!r}: through {base.name}_staged in shared memory"
        )
        begins = [0] * len(shape)
        copies = [self.copy_of(base, unit) for unit in range(self.count)]

        def copied(source: ir.Buffer, target: ir.Buffer) -> ir.Stmt:
            regions = tir.region(source, begins, shape, "r"), tir.region(target, begins, shape, "w")
            return tir.tile_call("copy", *regions)

        def only(unit: int, stmt: ir.Stmt) -> ir.Stmt:
            return self.chain([stmt if u == unit else None for u in range(self.count)])

        loops = [ir.Var(f"i{axis}", "int32") for axis in range(len(shape))]
        total = COMBINE[op](ir.BufferLoad(copies[0], loops), ir.BufferLoad(staged, loops))
        added = tir.parallel(loops, shape, ir.BufferStore(copies[0], total, loops))
        steps: list[ir.Stmt] = []
        for unit in range(1, self.count):
            steps += [
                only(unit, copied(copies[unit], staged)),
                self.lowering.sync(),
                only(0, added),
                self.lowering.sync(),
            ]
        steps += [only(0, copied(copies[0], staged)), self.lowering.sync()]
        others = [None, *(copied(staged, copy) for copy in copies[1:])]
        return [*steps, self.chain(others), self.lowering.sync()]
