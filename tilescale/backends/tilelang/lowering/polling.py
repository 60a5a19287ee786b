# SPDX-License-Identifier: MIT
"""Polling and waiting loops: the unit polls as one, and every loop ends.

Why: threads that each load a flag may see different values, and diverge; a polling loop has no bound, and a waiting
loop has none once waits do not block any more. Before: atomic loads, and `while` loops with these or with waits. After:
one thread of a unit makes its atomic load and broadcasts the value (`T.invoke_one`), and such a loop checks in each
iteration whether it continues (headers/polling.cuh). A thread in a branch of its own does both by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.scalars import pointed
from tilescale.backends.tilelang.lowering.completion import C_TYPES
from tilescale.backends.tilelang.lowering.devices import VALUE, DeviceStage
from tilescale.backends.tilelang.lowering.markers import ATOMIC_LOAD, ITERATION, ONLY_ACQUIRES, located
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.passes.uniformity import TOGETHER, Uniformity, is_atomic_load, loads_atomically
from tilescale.program import ops

_WORDS, _IDLE = 8, 2
"""Number of words of a thread's state of a loop, and the index of the one that counts idle iterations (polling.cuh)."""

_ZERO = ir.IntImm("int32", 0)


def bounded(phase: Phase) -> Phase:
    """A phase whose units poll as one, and whose loops end."""
    if not ir.contains(phase.stmt, lambda n: isinstance(n, ir.While) or is_atomic_load(n)):
        return phase
    values = Uniformity(phase.launch, phase.target.machine)
    values.look(phase.stmt)
    made = _PollingRewrite(values.together)
    return replace(phase, stmt=made.stmt(phase.stmt), tiles=(*phase.tiles, *made.tiles))


class _PollingRewrite:
    """The rewrite at work.

    Attributes:
        together: statements that all threads of a unit execute, with one value.
        tiles: variables that it creates.
        loop: a thread's state of the innermost polling loop; None outside of one.
    """

    def __init__(self, together: list[ir.Stmt]):
        self.together = together
        self.tiles: list[ir.Buffer] = []
        self.loop: ir.Buffer | None = None

    def stmt(self, stmt: ir.Stmt) -> ir.Stmt:
        return tir.rewrite(stmt, enter=self._enter)

    def _enter(self, node: ir.Node) -> ir.Stmt | None:
        if isinstance(node, ir.While):
            return self._while(node)
        if isinstance(node, ir.For) and node.kind == ir.ForKind.PARALLEL:
            loads = ir.contains(node, is_atomic_load)
            return tir.rewrite(node, leave=self._load) if loads else self._progress(node)
        if isinstance(node, ir.Bind | ir.BufferStore | ir.Evaluate | ir.IfThenElse):
            own = node.condition if isinstance(node, ir.IfThenElse) else node.value
            if loads_atomically(own):
                return self._with_value(node, own)
        return self._progress(node) if isinstance(node, ir.Evaluate) else None

    def _with_value(self, node: ir.Node, own: ir.PrimExpr) -> ir.Stmt:
        reads, value = [], self._loads(own)
        if self._is_together(node):
            held = self._variable("polled_value", str(own.dtype))
            reads, value = [_by_one(value, held)], ir.BufferLoad(held, [_ZERO])
        if isinstance(node, ir.IfThenElse):
            otherwise = None if node.else_case is None else self.stmt(node.else_case)
            made: ir.Stmt = ir.IfThenElse(value, self.stmt(node.then_case), otherwise)
        elif isinstance(node, ir.BufferStore):
            made = ir.BufferStore(node.buffer, value, list(node.indices))
        else:
            made = ir.Bind(node.var, value) if isinstance(node, ir.Bind) else ir.Evaluate(value)
        return located(tir.sequence([*reads, made]), node)

    def _while(self, node: ir.While) -> ir.Stmt | None:
        if not ir.contains(node, _waits):
            return self._progress(node)
        polls = _polls_itself(node)
        outer, self.loop = self.loop, self._array("loop")
        goes_on = self._variable("goes_on", "int32")
        given = _first(self.loop), self._loads(node.condition), _decides(node.condition), polls
        outcome: Any = tir.call(ITERATION.name, *given, dtype="int32")
        asked = _by_one(outcome, goes_on) if self._is_together(node) else ir.BufferStore(goes_on, outcome, [_ZERO])
        is_on = ir.EQ(ir.BufferLoad(goes_on, [_ZERO]), ir.IntImm("int32", 1))
        body = tir.sequence([asked, ir.IfThenElse(is_on, self.stmt(node.body), None)])
        begin = tir.evaluate(tir.extern("tilescale::begins", _address(self.loop)))
        first = ir.BufferStore(goes_on, ir.IntImm("int32", 1), [_ZERO])
        self.loop = outer
        return located(tir.sequence([begin, first, ir.While(is_on, body), *self._busy()]), node)

    def _progress(self, node: ir.Node) -> ir.Stmt | None:
        """A progress mark in a loop: the iteration is not idle."""
        name = str(ir.op_name(getattr(node, "value", None)))
        works = not isinstance(node, ir.Evaluate) or name in TOGETHER or name.startswith(tl.TILE_OPERATIONS)
        return tir.sequence([*self._busy(), node]) if works and self.loop is not None else None

    def _busy(self) -> list[ir.Stmt]:
        none = ir.IntImm("int64", 0)
        return [] if self.loop is None else [ir.BufferStore(self.loop, none, [ir.IntImm("int32", _IDLE)])]

    def _is_together(self, node: ir.Stmt) -> bool:
        return any(node.same_as(stmt) for stmt in self.together)

    def _loads(self, expr: ir.PrimExpr) -> ir.PrimExpr:
        return tir.rewrite(tir.evaluate(expr), leave=self._load).value

    def _load(self, node: ir.Node) -> ir.PrimExpr | None:
        if not is_atomic_load(node):
            return None
        loop = [] if self.loop is None else [_first(self.loop)]
        return tir.call(ATOMIC_LOAD.name, node, *loop, dtype=str(node.dtype))

    def _variable(self, name: str, dtype: str) -> ir.Buffer:
        return self._made(tir.local_buffer(f"{name}{len(self.tiles)}", [1], dtype, ir.VARIABLE))

    def _array(self, name: str) -> ir.Buffer:
        return self._made(tir.local_buffer(f"{name}{len(self.tiles)}", [_WORDS], "int64", "local"))

    def _made(self, buffer: ir.Buffer) -> ir.Buffer:
        self.tiles.append(buffer)
        return buffer


def _by_one(value: ir.PrimExpr, held: ir.Buffer) -> ir.Stmt:
    """One thread of the unit evaluates a value for all."""
    result = tir.region(held, [_ZERO], [ir.IntImm("int32", 1)], "w")
    annotations = {ONLY_ACQUIRES: ir.IntImm("int32", 1)}
    return tir.evaluate(tir.call(ops.INVOKE_ONE.name, value, result, dtype="void", annotations=annotations))


def _waits(node: ir.Node) -> bool:
    return is_atomic_load(node) or ir.op_name(node) in TOGETHER


def _polls_itself(loop: ir.While) -> bool:
    """Whether a loop has an atomic load outside of the loops in it."""
    if loads_atomically(loop.condition):
        return True
    inner = [stmt for stmt in ir.statements(loop.body) if isinstance(stmt, ir.While)]
    nested = sum(_count(stmt) for stmt in inner if not any(_is_in(stmt, other) for other in inner))
    return _count(loop.body) > nested


def _is_in(stmt: ir.Stmt, other: ir.Stmt) -> bool:
    return not stmt.same_as(other) and any(stmt.same_as(inner) for inner in ir.statements(other))


def _count(node: ir.Node) -> int:
    return len(ir.nodes(node, is_atomic_load))


def _decides(condition: ir.PrimExpr) -> ir.PrimExpr:
    """A hash of the variables of a condition."""
    mixed: Any = ir.IntImm("int64", 0)
    for load in filter(_is_private, ir.instances(condition, ir.BufferLoad)):
        mixed = tir.extern("tilescale::mixed", mixed, load, dtype="int64")
    return mixed


def _is_private(load: ir.BufferLoad) -> bool:
    return ir.scope_kind(load.buffer) == "fragment"


def _first(buffer: ir.Buffer) -> ir.PrimExpr:
    return ir.BufferLoad(buffer, [_ZERO])


def _address(buffer: ir.Buffer) -> ir.PrimExpr:
    return tir.call(tl.ADDRESS_OF, _first(buffer))


# -- rules -------------------------------------------------------------------------------------------------------------


@lowers(ATOMIC_LOAD.name, VALUE)
def _atomic_load(stage: DeviceStage, call: ir.Call) -> ir.PrimExpr:
    load, *loop = ir.mark_arguments(call)
    element = pointed(ir.loaded_element(load))
    buffer, dtype = element.buffer, str(element.dtype)
    site = stage.site(f"T.atomic_load({buffer.name})", flag=buffer.name)
    index: Any = ir.IntImm("int64", 0)
    extent: Any = ir.IntImm("int64", 1)
    for begin, size in zip(element.indices, buffer.shape, strict=True):
        index, extent = index * size + begin, extent * size
    value: Any = load
    if ir.scope_kind(buffer) == "global" and dtype in C_TYPES:
        value = tir.extern("tilescale::look", tir.address_of(buffer), index, extent, stage.record(), site, dtype=dtype)
    stage.include("polling.cuh")
    return tir.extern("tilescale::noted", value, index, _address(loop[0].buffer), site, dtype=dtype) if loop else value


@lowers(ITERATION.name, VALUE)
def _iteration(stage: DeviceStage, call: ir.Call) -> ir.PrimExpr:
    loop, condition, decides, polls = ir.mark_arguments(call)
    stage.include("polling.cuh")
    operands = _address(loop.buffer), condition, decides, stage.limit(), stage.record()
    return tir.extern(f"tilescale::iteration<{ir.integer(polls)}>", *operands, dtype="int32")
