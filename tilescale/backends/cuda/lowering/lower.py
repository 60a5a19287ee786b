# SPDX-License-Identifier: MIT
"""Lower one grid phase to a plain TileLang function.

Why: a remote tile copy is a plain tile copy once a tensor has a rank dimension, so the stock compiler does the rest.
Before: a phase with `T.Scale`, ranks, views, remote copies, signals, waits and collectives. After: a PrimFunc that has
a hidden scalar for each rank, a second parameter `(devices, *shape)` for each tensor reached on peers, and calls of the
prelude (headers/sync.cuh) for synchronisation. Declines what only finer levels can mean, with an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tilelang_core import ir, specialise
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.headers import header
from tilescale.backends.cuda.lowering import persistent
from tilescale.backends.cuda.lowering.arguments import Argument, Given, HostVariable, Peers
from tilescale.backends.cuda.lowering.clusters.unit import ClusterUnit
from tilescale.backends.cuda.lowering.completion import BULK, complete, flush
from tilescale.backends.cuda.lowering.deferred import COMPLETE, FLUSH
from tilescale.backends.cuda.lowering.lanes.lanes import LaneLowering
from tilescale.backends.cuda.lowering.lanes.ranges import check_ranges
from tilescale.backends.cuda.lowering.roles import assign, declined, fits
from tilescale.backends.cuda.lowering.signature import Signature, Site
from tilescale.backends.cuda.lowering.statements import is_pipelined, orders
from tilescale.backends.cuda.target import target_for
from tilescale.cost.choose import Choice
from tilescale.cost.operations import copy_choice
from tilescale.errors import Location, UnsupportedError
from tilescale.hda import Level
from tilescale.passes.structure import location
from tilescale.program import ops
from tilescale.program.extents import inside_expressions
from tilescale.program.model import GridPhase, Program
from tilescale.program.operations import Rank


@dataclass(frozen=True)
class LoweredKernel:
    """A grid phase as a TileLang function.

    Attributes:
        func: what stock TileLang compiles.
        arguments: what its parameters are, in order.
        sites: the waits, by number.
        notes: which implementation was chosen where, for people.
        where: the user's launch.
        reached: positions of parameters that peers reach.
        libraries: names of the device libraries that it calls.
        ahead: names of the tensors that a producer loads ahead of what the other threads wait for.
    """

    func: ir.PrimFunc
    arguments: tuple[Argument, ...]
    sites: tuple[Site, ...]
    notes: tuple[str, ...]
    where: tuple[Location, ...] = ()
    reached: frozenset[int] = frozenset()
    libraries: frozenset[str] = frozenset()
    ahead: frozenset[str] = frozenset()


@cache
def prelude(*headers: str) -> str:
    """The device functions that a kernel carries; part of its text, so of every cache key."""
    return "".join(header(name) + "\n" for name in ("sync.cuh", *headers))


_RULES: dict[tuple[str, str], Callable[[GridLowering, ir.Call], ir.Stmt]] = {}


def lowers(op: Any, kind: str = "unit") -> Callable:
    """Register the rule of one of our operations, for levels of a kind."""

    def register(rule: Callable) -> Callable:
        _RULES[op.name, kind] = rule
        return rule

    return register


@dataclass
class GridLowering(Signature):
    """The lowering of one phase: the walk over its statements, and what it needs so far.

    Attributes:
        around: variables of the host that the kernel is passed: those of loops around the phase, and extents.
        notes: which implementation was chosen where.
        tiles: what it allocates on chip beyond the program's own tiles.
        cluster: the cluster around a program, if the launch has clusters.
        libraries: names of device libraries that it calls, with the text that declares them.
        ordered: whether the order of its statements matters to peers, or branches on threads rule out others.
        enclose: puts the lowered body into what all blocks do around it.
        headers: files of device functions beside sync.cuh that it calls.
        may_specialise: whether loops may have a producer although the order of statements matters.
        is_complete: whether what is being lowered stands where all that it publishes is complete.
    """

    around: tuple[ir.Var, ...] = ()
    notes: list[str] = field(default_factory=list)
    tiles: list[ir.Buffer] = field(default_factory=list)
    cluster: ClusterUnit | None = None
    libraries: dict[str, str] = field(default_factory=dict)
    ordered: bool = False
    enclose: Callable[[GridLowering, ir.Stmt], ir.Stmt] | None = None
    headers: list[str] = field(default_factory=list)
    may_specialise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lanes = LaneLowering(self)
        self._in_program = self.is_complete = False
        if self.launch.cluster_size > 1:
            self.cluster = ClusterUnit(self)
        self.around = (*self.around, *inside_expressions(self.program))
        self._scalars = {p.var: i for i, p in enumerate(self.program.parameters) if p.buffer is None}
        self._sizes = {var: size for (_, var), (_, size) in zip(self.launch.extents, self.target.sizes, strict=True)}

    # -- result ------------------------------------------------------------------------------------------------------

    def lower(self, phase: GridPhase) -> LoweredKernel:
        """The phase as a function.

        Raises:
            UnsupportedError: something that has no lowering, with its line.
        """
        known = {v: ir.IntImm("int32", n) for v, n in self._sizes.items() if isinstance(v, ir.Var)}
        stmt = ir.substitute(phase.stmt, known) if known else phase.stmt
        if self.may_specialise:
            is_bulk = lambda call: self.choice(call).name == BULK  # noqa: E731
            self.roles = assign(stmt, self.program, self.launch, self.target.machine, is_bulk)
        else:
            self.roles = declined(stmt, "stock TileLang would not move all its loads and waits there")
        lowered = self._lower()
        return lowered if self._keeps_roles(lowered.func) else self._in_one_role().lower(phase)

    def _keeps_roles(self, func: ir.PrimFunc) -> bool:
        if not self.roles.specialised:
            return True
        branches = self.ordered or self.lanes.used
        return not branches and fits(self.roles, func, target_for(self.target.machine))

    def _rules_out_roles(self) -> bool:
        is_left = bool(self.sites or self.roles.tiles) and not self.roles.specialised
        return bool(self.ordered or self.lanes.used or is_left)

    def _in_one_role(self) -> GridLowering:
        """This lowering from its beginning, without producers beside orders."""
        fresh: dict[str, Any] = {"parameters": [], "arguments": [], "sites": [], "reached": set(), "notes": []}
        fresh |= {"tiles": [], "headers": [], "libraries": {}, "cluster": None}
        return replace(self, **fresh, ordered=False, may_specialise=False)

    def _lower(self) -> LoweredKernel:
        self.phase, self.where = self.roles.stmt, self.launch.where
        self.notes += self.roles.notes
        self.lanes.survey(self.phase)
        body = self.stmt(self.phase)
        check_ranges(self, body)
        if self.cluster is not None:
            body = self.cluster.enclose(body)
            self.ordered = self.ordered or self.cluster.meets
        body = self.lanes.pipelines.beside(body)
        if self.enclose is not None:
            self.where = self.launch.where
            body = self.enclose(self, body)
        nest = self._nest(_ordered(body))
        order = sorted(range(len(self.arguments)), key=lambda i: self.parameters[i][1] is not None)
        name = f"{self.program.name}_{self.number}"
        func = tir.function(
            name,
            [self.parameters[i] for i in order],
            nest,
            _attributes(self.program, self._rules_out_roles()),
        )
        if self.roles.specialised and not self.ordered and not self.lanes.used:
            func = self._with_kept_roles(func)
        arguments = tuple(self.arguments[i] for i in order)
        where = (self.launch.where,) if self.launch.where else ()
        reached = self.reached | {a.position for a in arguments if isinstance(a, Peers)}
        told = (tuple(self.sites), tuple(self.notes), where)
        ahead = frozenset(self.local(data).name for data in self.roles.ahead)
        return LoweredKernel(func, arguments, *told, frozenset(reached), frozenset(self.libraries), ahead)

    def _with_kept_roles(self, func: ir.PrimFunc) -> ir.PrimFunc:
        """A function whose persistent loop, if it has one, has warps that only load."""
        machine = self.target.machine
        room = machine.capacity(machine.layer_for("shared").name)
        made = persistent.scheduled(func, self.launch.thread_count, room, target_for(machine))
        if made is None:
            return func
        self.notes.append("the loop around T.Pipelined: warps keep their roles in all turns, a warpgroup only loads")
        return made

    def _nest(self, body: ir.Stmt) -> ir.Stmt:
        """The launch as TileLang writes it, around the new body."""
        used: set[ir.Var] = set()
        ir.walk(body, lambda n: used.add(n.buffer.data) if isinstance(n, ir.BufferLoad | ir.BufferStore) else None)
        own = (*self.tiles, *self.roles.tiles, *(kept.variable for kept in self.roles.kept))
        on_chip = [b for b in (*self.launch.buffers, *own) if b.scope() != "global" and b.data in used]
        annotations = {k: v for k, v in self.launch.notes if not k.startswith("tilescale.")}
        headers = [*self.headers, *(["cluster.cuh"] if self.cluster is not None else [])]
        texts = [prelude(*headers), *self.libraries.values(), self.lanes.prelude()]
        annotations["pragma_import_c"] = "".join(texts) + str(annotations.get("pragma_import_c", ""))
        if self.lanes.pipelines.loops:
            annotations["tl.launch_threads"] = [self.lanes.pipelines.threads(), 1, 1]
        if self.cluster is not None and self.cluster.added:
            annotations["tl.launch_threads"] = [self.launch.thread_count + self.cluster.added, 1, 1]
        made = {**self.lanes.pipelines.barriers, **(self.cluster.barriers if self.cluster is not None else {})}
        arrivals = {data: counts for data, counts in made.items() if data in used}
        if arrivals:
            annotations["barrier_init"] = {**annotations.get("barrier_init", {}), **arrivals}
        programs = list(zip(self.launch.programs, (self.expr(n) for n in self.launch.grid), strict=True))
        return tir.launch_nest(programs, self.launch.thread_vars, on_chip, annotations, body)

    # -- the walk ----------------------------------------------------------------------------------------------------

    def stmt(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement, lowered."""
        return tir.rewrite(stmt, enter=self._enter, leave=self._leave)

    def expr(self, expr: Any) -> Any:
        """An expression, lowered."""
        if not isinstance(expr, ir.PrimExpr):
            return expr
        return tir.rewrite(tir.evaluate(expr), enter=self._enter_expr, leave=self._leave).value

    def _enter_expr(self, node: Any) -> Any:
        return None

    def _enter(self, node: Any) -> Any:
        if isinstance(node, ir.Stmt):
            self.where = location(node) or self.where
            replaced = self.lanes.enter(node)
            if replaced is not None:
                return replaced
        if isinstance(node, ir.AttrStmt) and str(node.attr_key) == ops.SCALE:
            return self._scale(node)
        if isinstance(node, ir.AttrStmt) and str(node.attr_key) == FLUSH:
            return flush(self)
        if isinstance(node, ir.AttrStmt) and str(node.attr_key) == COMPLETE:
            return complete(self, ir.integer(node.value), node.body)
        if isinstance(node, ir.Bind):
            return self._bind(node)
        if isinstance(node, ir.Evaluate) and ir.op_name(node.value) in ops.ALL_OPS:
            return self._operation(node.value)
        if is_pipelined(node) and not self.roles.specialised and self.must_keep_order(node):
            return self._in_order(node)
        return None

    def must_keep_order(self, loop: ir.For) -> bool:
        """Pipelining would load before a wait of the loop, and has no place for a tile that is used outside it too."""
        inside = _shared_tiles(loop, written=True)
        outside = _shared_tiles(self.phase, besides=loop)
        return ir.contains(loop.body, orders) or bool(inside & outside)

    def _in_order(self, loop: ir.For) -> ir.Stmt:
        """A pipelined loop, one iteration after the other."""
        body = self.stmt(loop.body)
        return ir.For(loop.loop_var, self.expr(loop.min), self.expr(loop.extent), loop.kind, body)

    def _scale(self, node: ir.AttrStmt) -> ir.Stmt:
        level = self.target.machine.level(str(node.value.value))
        if level.kind == "cluster" and self.cluster is not None and not self._in_program:
            return self.cluster.execute(node.body)
        if level.kind in ("unit", "program", "cluster"):
            return self.member(node.body)
        raise self.unsupported(f"T.Scale({level.name!r}) has no CUDA lowering")

    def member(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement that programs execute, each for itself."""
        outer, self._in_program = self._in_program, True
        try:
            return self.stmt(stmt)
        finally:
            self._in_program = outer

    def _bind(self, node: ir.Bind) -> ir.Stmt | None:
        name = ir.op_name(node.value)
        if name == ops.VIEW.name:
            if node.var not in self._alias and (self.cluster is None or node.var not in self.cluster.views):
                raise self.unsupported("a view of a tile has no CUDA lowering")
            return tir.sequence([])
        if name == ops.RANK.name:
            return ir.Bind(node.var, self._rank_value(Rank.of(node.value).level))
        return None

    def _rank_value(self, name: str) -> ir.PrimExpr:
        level = self.target.machine.level(name)
        if level.kind == "unit":
            return self.rank(name)
        if level.kind == "program":
            return self.program_number() if self.cluster is None else self.cluster.rank
        if level.kind == "cluster" and self.cluster is not None:
            return self.cluster.number()
        raise self.unsupported(f"the rank of level {name!r} has no CUDA lowering")

    def _operation(self, call: ir.Call) -> ir.Stmt:
        name = ir.attribute(call, "level")
        rule = _RULES.get((call.op.name, self.target.machine.level(name).kind if name is not None else "unit"))
        if rule is None:
            of_level = f" of level {name!r}" if name is not None else ""
            raise self.unsupported(f"T.{call.op.name.removeprefix('tilescale.')}{of_level} has no CUDA lowering")
        return rule(self, call)

    def _leave(self, node: Any) -> Any:
        if isinstance(node, ir.Var) and node in self._sizes:
            return ir.IntImm("int32", self._sizes[node])
        if isinstance(node, ir.Var) and node in self._scalars:
            return self.scalar(Given(self._scalars[node]), node.name, str(node.dtype))
        if isinstance(node, ir.Var) and node in self.around:
            return self.scalar(HostVariable(node), node.name, str(node.dtype))
        if isinstance(node, ir.BufferLoad | ir.BufferStore) and node.buffer.scope() == "global":
            return self._on_local(node)
        if isinstance(node, ir.BufferLoad | ir.BufferStore) and self.cluster is not None:
            return self.cluster.on_tile(node)
        if isinstance(node, ir.IfThenElse) and _reads_memory(node.condition) and ir.contains(node, _is_extern):
            return _decided_once(node)
        return None

    def _on_local(self, node: Any) -> Any:
        if self.is_parameter(node.buffer):
            return None
        buffer = self.local(node.buffer.data)
        if isinstance(node, ir.BufferLoad):
            return ir.BufferLoad(buffer, list(node.indices))
        return ir.BufferStore(buffer, node.value, list(node.indices))

    def _own(self, name: str) -> str:
        return super()._own(name + self.lanes.unit_name())

    # -- pieces that rules share -------------------------------------------------------------------------------------

    def unsupported(self, found: str) -> UnsupportedError:
        """The error for something that has no lowering, at the current line."""
        return UnsupportedError(found, hint="run it with tilescale.emulate", where=self.where)

    def program_number(self) -> ir.PrimExpr:
        """The number of the executing program in its grid, the first axis fastest."""
        number: Any = ir.IntImm("int32", 0)
        for var, extent in reversed(list(zip(self.launch.programs, self.launch.grid, strict=True))):
            number = number * extent + var
        return number

    def programs(self) -> int:
        """Programs of the grid."""
        extents = ir.constants(self.expr(n) for n in self.launch.grid)
        if extents is None:
            raise self.unsupported("synchronisation across devices in a grid of symbolic extent has no CUDA lowering")
        return math.prod(extents)

    def choice(self, call: ir.Call) -> Choice:
        """The mechanism of a copy of tiles, by the machine model."""
        machine, grid = self.target.machine, ir.constants(self.expr(n) for n in self.launch.grid)
        units = machine.count(machine.program_level.name, machine.tensor_level.name)
        programs = units if grid is None else min(units, math.prod(grid))
        try:
            return copy_choice(call, machine, dict(self.target.sizes), programs)
        except UnsupportedError as error:
            raise error.at(self.where) if self.where else error from None

    def sync(self) -> ir.Stmt:
        """All threads of the program meet, or of the unit whose clone this is."""
        return self.lanes.barrier(self.lanes.unit or self.lanes.whole)

    def one_thread(self, body: ir.Stmt) -> ir.Stmt:
        """One thread of the program, or of the unit whose clone this is, runs `body`."""
        begin = self.lanes.first_thread()
        first = [
            var == (0 if axis else begin) for var, axis in self.launch.thread_vars if self.launch.threads[axis] > 1
        ]
        condition: Any = None
        for test in first:
            test = test.asobject() if hasattr(test, "asobject") else test
            condition = test if condition is None else ir.And(condition, test)
        return body if condition is None else ir.IfThenElse(condition, body, None)

    def after_wait(self, body: ir.Stmt) -> ir.Stmt:
        """`body`, in which one thread waits; then all threads see what it acquired."""
        return tir.sequence([body, self.sync(), tir.evaluate(tir.extern("tilescale::acquired"))])


def _attributes(program: Program, ordered: bool) -> dict[str, Any]:
    """Attributes of the function: the program's pass settings.

    Branches on the thread index and waits rule out TileLang's own specialisation of warps, which drops statements of
    one branch in silence and moves loads ahead of waits. A value that was read once stays what it was: inside an `if`
    TileLang reads it again where it is used, and sees no write by an atomic operation or a call in between
    (github.com/tile-ai/tilelang/issues/2594).
    """
    attrs = program.func.attrs
    given = dict(attrs["tilelang_pass_configs"]) if attrs and "tilelang_pass_configs" in attrs else {}
    settings = {**given, "tl.if_stmt_binding_inline_replayable_binds": False}
    return {"tilelang_pass_configs": {**settings, specialise.DISABLE: True} if ordered else settings}


def _ordered(body: ir.Stmt) -> ir.Stmt:
    """A body with the order of its blocks (`T.use_swizzle`) around all of it: what comes before would not know it."""
    orders: list[ir.AttrStmt] = []

    def leave(node: Any) -> Any:
        if not isinstance(node, ir.AttrStmt) or str(node.attr_key) != tir.BLOCK_ORDER:
            return None
        orders.append(node)
        return node.body

    plain = tir.rewrite(body, leave=leave)
    return ir.AttrStmt(orders[0].node, orders[0].attr_key, orders[0].value, plain) if orders else plain


def _is_extern(node: Any) -> bool:
    return ir.op_name(node) == "tirx.call_extern"


def _reads_memory(expr: ir.PrimExpr) -> bool:
    """Whether an expression depends on memory that others can change."""
    return ir.contains(expr, lambda n: isinstance(n, ir.BufferLoad) and ir.scope_kind(n.buffer) != "fragment")


def _decided_once(branch: ir.IfThenElse) -> ir.Stmt:
    """A branch whose condition is read once: TileLang reads it for each statement again, also after a call."""
    condition = ir.Var("condition", str(branch.condition.dtype))
    decided = ir.IfThenElse(condition, branch.then_case, branch.else_case)
    return tir.sequence([ir.Bind(condition, branch.condition), decided])


def _shared_tiles(stmt: ir.Stmt, *, written: bool = False, besides: ir.Stmt | None = None) -> set[ir.Var]:
    """Tiles in shared memory that a statement names (or writes by tile operations), one inner statement left out."""
    found: set[ir.Var] = set()

    def visit(node: Any) -> Any:
        if besides is not None and isinstance(node, ir.Stmt) and node.same_as(besides):
            return tir.sequence([])
        if ir.op_name(node) == "tl.region" and node.args[0].buffer.scope().startswith("shared"):
            if not written or ir.constant(node.args[1]) == 2:
                found.add(node.args[0].buffer.data)
        return None

    tir.rewrite(stmt, enter=visit)
    return found


def level_of(lowering: GridLowering, call: ir.Call) -> Level:
    """The level that an operation names."""
    return lowering.target.machine.level(ir.attribute(call, "level"))
