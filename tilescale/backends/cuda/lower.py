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
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.arguments import Argument, HostVariable
from tilescale.backends.cuda.lanes import LaneLowering
from tilescale.backends.cuda.signature import Signature, Site
from tilescale.errors import UnsupportedError
from tilescale.hda import Level
from tilescale.passes.structure import location
from tilescale.program import ops
from tilescale.program.model import GridPhase, Program

C_TYPES = {"int32": "int", "uint32": "unsigned", "int64": "long", "uint64": "unsigned long"}
"""Types of flags, and what the prelude calls them."""


@dataclass(frozen=True)
class LoweredKernel:
    """A grid phase as a TileLang function.

    Attributes:
        func: what stock TileLang compiles.
        arguments: what its parameters are, in order.
        sites: the waits, by number.
        notes: which implementation was chosen where, for people.
    """

    func: ir.PrimFunc
    arguments: tuple[Argument, ...]
    sites: tuple[Site, ...]
    notes: tuple[str, ...]


@cache
def prelude() -> str:
    """The device functions that a kernel carries; part of its text, so of every cache key."""
    return resources.files(__package__).joinpath("headers/sync.cuh").read_text() + "\n"


_RULES: dict[str, Callable[[GridLowering, ir.Call], ir.Stmt]] = {}


def lowers(op: Any) -> Callable:
    """Register the rule of one of our operations."""

    def register(rule: Callable) -> Callable:
        _RULES[op.name] = rule
        return rule

    return register


@dataclass
class GridLowering(Signature):
    """The lowering of one phase: the walk over its statements, and what it needs so far.

    Attributes:
        around: variables of host-level loops that enclose the phase.
        notes: which implementation was chosen where.
        tiles: what it allocates on chip beyond the program's own tiles.
    """

    around: tuple[ir.Var, ...] = ()
    notes: list[str] = field(default_factory=list)
    tiles: list[ir.Buffer] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lanes: dict[str, LaneLowering] = {}
        self._inside: LaneLowering | None = None
        for level, base in self._replicated():
            self._lanes_of(level).copy_of(base, 0)
        self._sizes = {var: size for (_, var), (_, size) in zip(self.launch.extents, self.target.sizes, strict=True)}

    def _replicated(self) -> list[tuple[Level, ir.Buffer]]:
        """Tiles on chip of which units of a lanes level have copies: known before anything is lowered."""
        found: list[tuple[Level, ir.Buffer]] = []

        def visit(node: Any) -> None:
            if ir.op_name(node) == ops.VIEW.name and ir.attribute(node, "dim") is None:
                level, base = level_of(self, node), ir.region_parts(node.args[0])[0]
                if level.kind == "lanes" and base.scope() != "global":
                    found.append((level, base))

        ir.walk(self.program.func.body, visit)
        return found

    # -- result ------------------------------------------------------------------------------------------------------

    def lower(self, phase: GridPhase) -> LoweredKernel:
        """The phase as a function.

        Raises:
            UnsupportedError: something that has no lowering, with its line.
        """
        self._phase = phase.stmt
        body = self.stmt(phase.stmt)
        nest = self._nest(body)
        order = sorted(range(len(self.arguments)), key=lambda i: self.parameters[i][1] is not None)
        name = f"{self.program.name}_{self.number}"
        func = tir.function(
            name, [self.parameters[i] for i in order], nest, _attributes(self.program, bool(self._lanes or self.sites))
        )
        arguments = tuple(self.arguments[i] for i in order)
        return LoweredKernel(func, arguments, tuple(self.sites), tuple(self.notes))

    def _nest(self, body: ir.Stmt) -> ir.Stmt:
        """The launch as TileLang writes it, around the new body."""
        used: set[ir.Var] = set()
        ir.walk(body, lambda n: used.add(n.buffer.data) if isinstance(n, ir.BufferLoad | ir.BufferStore) else None)
        on_chip = [b for b in self.launch.buffers if b.scope() != "global" and b.data in used]
        annotations = {k: v for k, v in self.launch.notes if not k.startswith("tilescale.")}
        annotations["pragma_import_c"] = prelude() + str(annotations.get("pragma_import_c", ""))
        programs = list(zip(self.launch.programs, (self.expr(n) for n in self.launch.grid), strict=True))
        return tir.launch_nest(programs, self.launch.thread_vars, [*on_chip, *self.tiles], annotations, body)

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
        if isinstance(node, ir.AttrStmt) and str(node.attr_key) == ops.SCALE:
            return self._scale(node)
        if isinstance(node, ir.Bind):
            return self._bind(node)
        if isinstance(node, ir.Evaluate) and ir.op_name(node.value) in ops.ALL_OPS:
            return self._operation(node.value)
        if isinstance(node, ir.For) and "num_stages" in node.annotations and self._must_keep_order(node):
            return self._in_order(node)
        if isinstance(node, ir.Evaluate | ir.BufferStore | ir.For):
            return self._on_copies(node)
        return None

    def _must_keep_order(self, loop: ir.For) -> bool:
        """Pipelining would load before a wait of the loop, and has no place for a tile that is used outside it too."""
        inside = _shared_tiles(loop, written=True)
        outside = _shared_tiles(self._phase, besides=loop)
        return ir.contains(loop.body, _orders) or bool(inside & outside)

    def _in_order(self, loop: ir.For) -> ir.Stmt:
        """A pipelined loop, one iteration after the other."""
        body = self.stmt(loop.body)
        return ir.For(loop.loop_var, self.expr(loop.min), self.expr(loop.extent), loop.kind, body)

    def _on_copies(self, node: ir.Stmt) -> ir.Stmt | None:
        """A tile operation or parallel nest on a tile of which finer units have copies of their own."""
        if self._inside is not None or (isinstance(node, ir.For) and node.kind != ir.ForKind.PARALLEL):
            return None
        lanes = next((x for x in self._lanes.values() if ir.contains(node, x.names_copy)), None)
        return None if lanes is None else self._within(lanes, lambda: lanes.spread(node))

    def _lanes_of(self, level: Level) -> LaneLowering:
        if level.name not in self._lanes:
            self._lanes[level.name] = LaneLowering(self, level)
        return self._lanes[level.name]

    def _within(self, lanes: LaneLowering, lower: Callable[[], ir.Stmt]) -> ir.Stmt:
        """Lower clones: what they contain is not spread again."""
        self._inside = lanes
        try:
            return lower()
        finally:
            self._inside = None

    def _scale(self, node: ir.AttrStmt) -> ir.Stmt:
        level = self.target.machine.level(str(node.value.value))
        if level.kind in ("unit", "program"):
            return self.stmt(node.body)
        if level.kind == "lanes" and self._inside is None and level.threads > 1:
            lanes = self._lanes_of(level)
            return self._within(lanes, lambda: lanes.region(node.body))
        raise self.unsupported(f"T.Scale({level.name!r}) has no CUDA lowering")

    def _bind(self, node: ir.Bind) -> ir.Stmt | None:
        name = ir.op_name(node.value)
        if name == ops.VIEW.name:
            if node.var not in self._alias:
                raise self.unsupported("a view of a tile has no CUDA lowering")
            return tir.sequence([])
        if name == ops.RANK.name:
            return ir.Bind(node.var, self._rank_value(str(node.value.args[0].value)))
        return None

    def _rank_value(self, name: str) -> ir.PrimExpr:
        level = self.target.machine.level(name)
        if level.kind == "unit":
            return self.rank(name)
        if level.kind == "program" and self.launch.cluster_size == 1:
            return self.program_number()
        raise self.unsupported(f"the rank of level {name!r} has no CUDA lowering")

    def _operation(self, call: ir.Call) -> ir.Stmt:
        rule = _RULES.get(call.op.name)
        if rule is None:
            raise self.unsupported(f"T.{call.op.name.removeprefix('tilescale.')} has no CUDA lowering")
        return rule(self, call)

    def _leave(self, node: Any) -> Any:
        if isinstance(node, ir.Var) and node in self._sizes:
            return ir.IntImm("int32", self._sizes[node])
        if isinstance(node, ir.Var) and node in self.around:
            return self.scalar(HostVariable(node.name), node.name, str(node.dtype))
        if isinstance(node, ir.BufferLoad | ir.BufferStore) and node.buffer.scope() == "global":
            return self._on_local(node)
        return None

    def _on_local(self, node: Any) -> Any:
        if self.is_parameter(node.buffer):
            return None
        buffer = self.local(node.buffer.data)
        if isinstance(node, ir.BufferLoad):
            return ir.BufferLoad(buffer, list(node.indices))
        return ir.BufferStore(buffer, node.value, list(node.indices))

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
        extents = [ir.constant(self.expr(n)) for n in self.launch.grid]
        if None in extents:
            raise self.unsupported("synchronisation across devices in a grid of symbolic extent has no CUDA lowering")
        return math.prod(extents)

    def sync(self) -> ir.Stmt:
        """All threads of the program meet."""
        return tir.evaluate(tir.call("tirx.tvm_storage_sync", "shared", dtype="int32"))

    def one_thread(self, body: ir.Stmt) -> ir.Stmt:
        """One thread of the program runs `body`."""
        first = [var == 0 for var, axis in self.launch.thread_vars if self.launch.threads[axis] > 1]
        condition: Any = None
        for test in first:
            test = test.asobject() if hasattr(test, "asobject") else test
            condition = test if condition is None else ir.And(condition, test)
        return body if condition is None else ir.IfThenElse(condition, body, None)

    def published(self, body: ir.Stmt) -> ir.Stmt:
        """`body`, run by one thread after everything that the program wrote is complete at system scope."""
        drain = tir.evaluate(tir.extern("tilescale::drain"))
        return tir.sequence([drain, self.sync(), self.one_thread(body)])

    def after_wait(self, body: ir.Stmt) -> ir.Stmt:
        """`body`, a wait run by one thread; then all threads see what it acquired."""
        return tir.sequence([self.one_thread(body), self.sync(), tir.evaluate(tir.extern("tilescale::acquired"))])


def _attributes(program: Program, ordered: bool) -> dict[str, Any]:
    """Attributes of the function: the program's pass settings.

    Branches on the thread index and waits rule out TileLang's own specialisation of warps, which drops statements of
    one branch in silence and moves loads ahead of waits.
    """
    attrs = program.func.attrs
    given = dict(attrs["tilelang_pass_configs"]) if attrs and "tilelang_pass_configs" in attrs else {}
    settings = {**given, "tl.disable_warp_specialized": True} if ordered else given
    return {"tilelang_pass_configs": settings} if settings else {}


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


def _orders(node: Any) -> bool:
    """Whether a node is an operation that later loads must not overtake."""
    name = ir.op_name(node)
    return name in ops.COLLECTIVES or name in (ops.WAIT.name, ops.SIGNAL.name, ops.COPY.name)


def level_of(lowering: GridLowering, call: ir.Call) -> Level:
    """The level that an operation names."""
    return lowering.target.machine.level(ir.attribute(call, "level"))
