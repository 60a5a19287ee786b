# SPDX-License-Identifier: MIT
"""Rewrite independent programs of a grid into one that executes a statement of many of them at a time.

Why: a statement takes microseconds to interpret, however small its tiles are, and grids have thousands of programs.
Before:                               After, for `programs` of them, from the index `first` on:

    T.copy(X[bx, 0], x)                   for p, i in T.Parallel(programs, 64): xs[p, i] = X[first + p, i]
    T.reduce_max(x, m)                    T.reduce_max(xs, ms, dim=1)
    for i in T.Parallel(64):              for p, i in T.Parallel(programs, 64):
        Y[bx, i] = x[i] - m[0]                Y[first + p, i] = xs[p, i] - ms[p, 0]

What each thread executes for itself gets loops over the threads as well, where it differs between them.

Declines programs that are not independent (independence.py), control flow that differs between programs, addresses and
conditions that depend on data, without which the simulated time is not known, operations that are not listed here, and
programs whose tiles are so large that statements take long anyway.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.scalars import Atomic
from tilelang_core.tiles import Fill, Gemm, Reduce, TileCopy, access_of, is_region
from tilelang_core.uneven_copies import COPIES, executed
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.independence import are_independent, is_barrier, only_phase
from tilescale.backends.emulator.interpret.symbols import POINTERS
from tilescale.backends.emulator.numerics import INTRINSICS, lanes_of
from tilescale.passes.declined import Declined
from tilescale.program.model import GridPhase, Launch, bytes_of

MOST_BYTES = 1 << 22
"""Bytes of the tiles of all programs that run in lockstep: they should stay in the CPU's caches."""

FEWEST, MOST = 4, 128
"""Number of programs in lockstep: fewer do not pay, and more run again one by one where one of them is unusual."""

ZERO = ir.IntImm("int32", 0)

_BEYOND = {"gather4_rows", "dst_block", "cluster_mask", "barrier"}
_NOTES = ("safe_value_map", "reducer_info", "reducer_info_v2")
_LOOPS = (ir.ForKind.SERIAL, ir.ForKind.UNROLLED, ir.ForKind.VECTORIZED)
_PRIVATE = ("local", ir.VARIABLE)
_SCOPES = (*ir.SHARED, "local.fragment", *_PRIVATE)
_CALLS = (tl.IF_THEN_ELSE, tl.REINTERPRET, tl.REGION, tl.ADDRESS_OF, tl.DECLARED_PTR)
_ATOMICS = tuple(map(tl.atomic, ("add", "max", "min")))


@dataclass(frozen=True)
class Lockstep:
    """Programs of a phase in lockstep.

    Attributes:
        stmt: what executes them.
        axis: the axis of the grid along which they follow one another.
        first: variable of the index of the first of them; `programs`, of their number.
        most: the largest number of programs at once.
        buffers: the tiles of all of them together, and those that they have in common.
    """

    stmt: ir.Stmt
    axis: int
    first: ir.Var
    programs: ir.Var
    most: int
    buffers: tuple[ir.Buffer, ...]


def lockstep(compiler: Compiler) -> Lockstep | None:
    """The program's grid in lockstep; None where that is declined."""
    found = None if compiler.program.is_hierarchical else only_phase(compiler.program.body)
    if found is None:
        return None
    launch, phase = found
    most = _most(launch)
    if most < FEWEST or not are_independent(compiler, launch, phase):
        return None
    try:
        return _Rewriter(compiler, launch).phase(phase, most)
    except Declined:
        return None


def _most(launch: Launch) -> int:
    """Number of programs in lockstep along the longest axis of the grid, as the size of their tiles allows."""
    if any(b.scope() not in _SCOPES or lanes_of(str(b.dtype)) > 1 for b in launch.buffers):
        return 0
    copies = [launch.thread_count if b.scope() in _PRIVATE else 1 for b in launch.buffers]
    size = 0
    for n, buffer in zip(copies, launch.buffers, strict=True):
        nbytes = bytes_of((n, *buffer.shape), buffer.dtype)
        if nbytes is None:
            return 0
        size += nbytes
    return int(min(MOST_BYTES // max(size, 1), _extent(launch, _longest(launch)), MOST))


def _longest(launch: Launch) -> int:
    return max(range(len(launch.grid)), key=lambda axis: _extent(launch, axis))


def _extent(launch: Launch, axis: int) -> float:
    """Number of programs along an axis; infinite where it is not known."""
    extent = ir.constant(launch.grid[axis])
    return math.inf if extent is None else extent


class _Rewriter:
    """One phase.

    Attributes:
        stacked: data of a tile -> the tiles of all programs, along a dimension more.
        values: bound variable -> its values in all programs.
        common: tiles that are the same in all programs, by data.
        apart: thread-private buffers and bound variables that differ between threads.
        loaded: bound variables that depend on data.
    """

    def __init__(self, compiler: Compiler, launch: Launch):
        self.compiler, self.launch = compiler, launch
        self.axis = _longest(launch)
        self.first, self.programs = ir.Var("first", "int32"), ir.Var("programs", "int32")
        self.homes = {buffer.data: buffer for buffer in launch.buffers}
        self.threads = {var for var, _ in launch.thread_vars}
        self.apart: set[ir.Var] = set()
        self.loaded: set[ir.Var] = set()
        self.stacked: dict[ir.Var, ir.Buffer] = {}
        self.values: dict[ir.Var, ir.Buffer] = {}
        self.common: dict[ir.Var, ir.Buffer] = {}

    def phase(self, phase: GridPhase, most: int) -> Lockstep:
        """The phase in lockstep. Raises Declined."""
        if any(key in dict(self.launch.notes) for key in _NOTES) or ir.contains(phase.stmt, self._is_strange):
            raise Declined("an access that lockstep does not cover")
        self._find_apart(phase.stmt)
        zeroed = [self._of_all(_zeroed(b)) for b in self.launch.buffers if b.scope() == ir.VARIABLE]
        stmt = tir.sequence([*zeroed, self.statement(phase.stmt)])
        buffers = (*self.stacked.values(), *self.common.values())
        return Lockstep(stmt, self.axis, self.first, self.programs, most, buffers)

    def _is_strange(self, node: ir.Node) -> bool:
        """Whether a node is a view of a tile, a vector, a loop of unknown length, or depends on data in its place."""
        if isinstance(node, ir.BufferLoad | ir.BufferStore):
            home, form = self.homes.get(node.buffer.data), (str(node.buffer.shape), node.buffer.dtype)
            differs = home is not None and (str(home.shape), home.dtype) != form
            return differs or any(map(self._depends_on_data, node.indices))
        if isinstance(node, ir.Bind) and self._depends_on_data(node.value):
            self.loaded.add(node.var)
        if isinstance(node, ir.IfThenElse):
            return self._depends_on_data(node.condition)
        return isinstance(node, ir.While | ir.Ramp | ir.Broadcast | ir.Shuffle | ir.Let)

    def _depends_on_data(self, expr: ir.PrimExpr) -> bool:
        return ir.reads_memory(expr) or bool(ir.variables(expr) & self.loaded)

    def _find_apart(self, stmt: ir.Stmt) -> None:
        """Find the variables and private buffers whose values differ between threads."""
        known = -1
        while known < len(self.apart):
            known = len(self.apart)
            self._look(stmt, False)

    def _look(self, stmt: ir.Stmt, differs: bool) -> None:
        if isinstance(stmt, ir.IfThenElse):
            differs = differs or self._differs(stmt.condition)
        if isinstance(stmt, ir.Bind) and self._differs(stmt.value):
            self.apart.add(stmt.var)
        if isinstance(stmt, ir.BufferStore) and self._is_private(stmt.buffer) and (differs or self._differs(stmt)):
            self.apart.add(stmt.buffer.data)
        for inner in ir.children(stmt):
            self._look(inner, differs)

    def _differs(self, node: ir.Node) -> bool:
        """Whether a statement or expression differs between threads."""
        own = self.threads | self.apart

        def differs(node: ir.Node) -> bool:
            var = node.buffer.data if isinstance(node, ir.BufferLoad | ir.BufferStore) else node
            return isinstance(var, ir.Var) and var in own

        return ir.contains(node, differs)

    def _is_private(self, buffer: ir.Buffer) -> bool:
        return buffer.scope() in _PRIVATE

    # -- statements ----------------------------------------------------------------------------------------------------

    def statement(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement of all programs. Raises Declined."""
        if isinstance(stmt, ir.SeqStmt):
            return tir.sequence([self.statement(inner) for inner in stmt.seq])
        if isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
            if self._differs(stmt) or ir.contains(stmt, self._stores_privately):
                raise Declined("thread-private memory in a loop that threads share")
            return self._of_all(stmt)
        if isinstance(stmt, ir.For):
            return self._loop(stmt)
        if isinstance(stmt, ir.IfThenElse):
            return self._branch(stmt)
        if isinstance(stmt, ir.BufferStore):
            return self._of_all(stmt)
        if isinstance(stmt, ir.Bind):
            return self._bind(stmt)
        if isinstance(stmt, ir.Evaluate):
            return self._operation(stmt)
        raise Declined(f"{type(stmt).__name__} in lockstep")

    def _loop(self, stmt: ir.For) -> ir.Stmt:
        if stmt.kind not in _LOOPS or not self._is_uniform(stmt.min, stmt.extent):
            raise Declined("a loop that differs between programs")
        body = self.statement(stmt.body)
        return tir.relooped(stmt, body=body, annotations={})

    def _branch(self, stmt: ir.IfThenElse) -> ir.Stmt:
        sides = [side for side in (stmt.then_case, stmt.else_case) if side is not None]
        if self._is_uniform(stmt.condition):
            cases = [None if side is None else self.statement(side) for side in (stmt.then_case, stmt.else_case)]
            return tir.at(ir.IfThenElse(stmt.condition, *cases), like=stmt)
        if not ir.contains(stmt, _is_shared_out):
            return self._of_all(stmt)
        if not ir.variables(stmt.condition) <= self.threads or ir.contains(stmt.condition, _loads):
            raise Declined("a condition that differs between programs")
        if not self._are_apart(sides):
            raise Declined("threads that take one side of a branch use tiles of the other side")
        taken = [side for side, runs in zip(sides, self._taken(stmt.condition), strict=False) if runs]
        if any(self._differs(side) or ir.contains(side, is_barrier) for side in taken):
            raise Declined("a branch in which each thread has its own values")
        return tir.sequence([self.statement(side) for side in taken])

    def _taken(self, condition: ir.PrimExpr) -> tuple[bool, bool]:
        """Whether some thread takes the first side of a branch, and whether some thread takes the second one."""
        indices = itertools.product(*(range(n) for n in self.launch.threads))
        threads = ({var: ir.IntImm("int32", index[axis]) for var, axis in self.launch.thread_vars} for index in indices)
        holds = {ir.constant(ir.substitute(condition, thread)) for thread in threads}
        return holds != {0}, holds != {1}

    def _are_apart(self, sides: list[ir.Stmt]) -> bool:
        """Whether no side writes a tile that another one accesses."""
        effects = [self.compiler.surroundings.all_effects(side) for side in sides]
        written = [{access.root for access in found.writes} for found in effects]
        used = [{access.root for access in found.accesses} for found in effects]
        return all(not written[one] & used[1 - one] for one in range(len(sides)) if len(sides) == 2)

    def _bind(self, stmt: ir.Bind) -> ir.Stmt:
        if self.compiler.is_alias_only(stmt):
            return tir.sequence([])
        if ir.op_name(stmt.value) in POINTERS:
            raise Declined("a pointer")
        if self._is_uniform(stmt.value):
            return stmt
        values = tir.local_buffer(stmt.var.name, [1], stmt.var.dtype, "local.fragment")
        self.homes[values.data] = values
        if stmt.var in self.apart:
            self.apart.add(values.data)
        made = self._of_all(tir.at(ir.BufferStore(values, stmt.value, [ZERO]), like=stmt))
        self.values[stmt.var] = values
        return made

    def _operation(self, stmt: ir.Evaluate) -> ir.Stmt:
        call, name = stmt.value, ir.op_name(stmt.value)
        if isinstance(call, ir.IntImm):
            return stmt
        if is_barrier(call):
            return tir.sequence([])
        if name in _ATOMICS:
            return self._of_all(stmt)
        if name in COPIES:
            return tir.at(self._copy(stmt, executed(call)), like=stmt)
        if name == tl.FILL and self._has_fixed_size(Fill.of(call).target):
            return self._of_all(tir.at(tir.copy_nest(call), like=stmt))
        if name == tl.REDUCE:
            made = Reduce.of(call)
            return tir.at(made.stacked(self._stacked(made.source), self._stacked(made.target)), like=stmt)
        if name == tl.GEMM and Gemm.of(call).is_plain:
            product = Gemm.of(call)
            return tir.at(product.stacked(list(map(self._stacked, product.operands))), like=stmt)
        raise Declined(f"{name} in lockstep")

    def _copy(self, stmt: ir.Evaluate, call: ir.Call | None) -> ir.Stmt:
        """A copy, element by element. A tile that is the same in all programs is copied once before."""
        if call is None or _BEYOND & set(call.annotations or {}) or not is_region(TileCopy.of(call).source):
            raise Declined("a copy of another kind")
        copy = TileCopy.of(call)
        if not self._has_fixed_size(copy.target) or not self._has_fixed_size(copy.source):
            raise Declined("a copy of unknown size")
        (source, begins, _), (target, to, extents) = map(ir.region_parts, (copy.source, copy.target))
        private = self._is_private(source) or self._is_private(target)
        if source.data is target.data or (self._differs(stmt) and not private):
            raise Declined("a copy within a tile, or one that differs between threads")
        if private or source.data in self.homes or target.data not in self.homes or not self._is_uniform(*begins):
            return self._of_all(tir.at(tir.copy_nest(call), like=stmt))
        if target.data not in self.common:
            self.common[target.data] = tir.local_buffer(target.name, target.shape, target.dtype, target.scope())
        once = tir.region(self.common[target.data], to, extents, access_of(copy.target))
        first = tir.at(copy.between(copy.source, once), like=stmt)
        spread = tir.at(tir.copy_nest(copy.between(once, copy.target).value), like=stmt)
        return tir.sequence([first, self._of_all(spread)])

    def _has_fixed_size(self, region: ir.Call) -> bool:
        return ir.constants(ir.region_parts(region)[2]) is not None

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _of_all(self, stmt: ir.Stmt) -> ir.Stmt:
        """A store, or control flow around stores, in every program and where it differs, in every thread: in parallel
        loops over them."""
        if ir.contains(stmt, self._acts):
            raise Declined("an operation inside a loop over elements")
        lane, extents = ir.Var("program", "int32"), self.launch.threads[::-1]
        threads = tir.loop_variables(extents) if self._differs(stmt) else []
        index = dict(zip("zyx", threads or [ZERO] * 3, strict=True))
        names = {var: index["xyz"[axis]] for var, axis in self.launch.thread_vars}
        values = {var: ir.BufferLoad(buffer, [ZERO]) for var, buffer in self.values.items()}
        named = ir.substitute(stmt, {self.launch.programs[self.axis]: self.first + lane, **names, **values})

        def leave(node: ir.Node) -> Any:
            if not isinstance(node, ir.BufferLoad | ir.BufferStore) or node.buffer.data not in self.homes:
                return None
            own = threads if node.buffer.data in self.apart else []
            buffer, indices = self._tiles(node.buffer), [lane, *own, *node.indices]
            if isinstance(node, ir.BufferLoad):
                return ir.BufferLoad(buffer, indices)
            return tir.at(ir.BufferStore(buffer, node.value, indices), like=node)

        space = [self.programs, *map(ir.int_node, extents[: len(threads)])]
        return tir.at(tir.parallel([lane, *threads], space, tir.rewrite(named, leave=leave)), like=stmt)

    def _acts(self, node: ir.Node) -> bool:
        """Whether a node does more than compute and store elements, or update them."""
        name = ir.op_name(node)
        if isinstance(node, ir.Evaluate):
            return ir.op_name(node.value) not in _ATOMICS or Atomic.of(node.value).order != 0
        return isinstance(node, ir.Call) and name not in INTRINSICS and name not in (*_CALLS, *_ATOMICS)

    def _stores_privately(self, node: ir.Node) -> bool:
        return isinstance(node, ir.BufferStore) and self._is_private(node.buffer)

    def _tiles(self, buffer: ir.Buffer) -> ir.Buffer:
        """The tiles of all programs, and of all threads where they differ."""
        if buffer.data not in self.stacked:
            threads = self.launch.threads[::-1] if buffer.data in self.apart else ()
            shape = [self.programs, *threads, *buffer.shape]
            scope = "local.fragment" if self._is_private(buffer) else buffer.scope()
            self.stacked[buffer.data] = tir.local_buffer(buffer.name, shape, buffer.dtype, scope)
        return self.stacked[buffer.data]

    def _stacked(self, region: ir.Call) -> ir.Call:
        """A part of a tile, in all programs."""
        buffer, begins, extents = ir.region_parts(region)
        if buffer.data not in self.homes or self._is_private(buffer) or not self._is_uniform(*begins, *extents):
            raise Declined("an operand that differs between programs in more than its values")
        return tir.region(self._tiles(buffer), [ZERO, *begins], [self.programs, *extents], access_of(region))

    def _is_uniform(self, *exprs: ir.PrimExpr) -> bool:
        """Whether expressions have the same values in all programs and threads."""
        differ = {self.launch.programs[self.axis], *self.values, *self.threads}
        return not any(differ & ir.variables(expr) or ir.contains(expr, _loads) for expr in exprs)


def _zeroed(buffer: ir.Buffer) -> ir.Stmt:
    """A fill with 0, of a variable when a program begins."""
    loops = tir.loop_variables(buffer.shape)
    return tir.parallel(loops, buffer.shape, ir.BufferStore(buffer, ir.Cast(buffer.dtype, ZERO), loops))


def _is_shared_out(node: ir.Node) -> bool:
    """Whether threads execute a node together."""
    if isinstance(node, ir.For):
        return node.kind == ir.ForKind.PARALLEL
    return isinstance(node, ir.Evaluate) and ir.op_name(node.value) not in _ATOMICS


def _loads(node: ir.Node) -> bool:
    return isinstance(node, ir.BufferLoad | ir.Call)
