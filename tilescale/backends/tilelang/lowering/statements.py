# SPDX-License-Identifier: MIT
"""Predicates on statements of a grid phase, as far as their order with others matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang_core import ir, tiles, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.ptx import BOX_DIMENSIONS, BULK_BYTES
from tilescale.program import ops
from tilescale.program.footprint import stages_of
from tilescale.program.operations import AtomicAdd, Copy, InvokeOne, Wait, operation

_TILE_OP = tl.TILE_OPERATIONS
_WITHOUT_WORKSPACE = (tl.COPY, tl.FILL)

_DIMENSIONS = BOX_DIMENSIONS - 1
"""Dimensions of a bulk copy, except that of devices."""


def is_pipelined(node: ir.Node) -> bool:
    return stages_of(node) > 0


def orders(node: ir.Node) -> bool:
    """Whether peers may observe the order of an operation relative to others."""
    name = ir.op_name(node)
    return name in ops.ALL_OPS - {ops.RANK.name, ops.VIEW.name}


def is_of_unit(node: ir.Node) -> bool:
    """Whether all threads of a unit synchronize for an operation, so that none of them can be a producer."""
    made = operation(node)
    return isinstance(made, AtomicAdd | InvokeOne) or isinstance(made, Wait) and not made.is_of_one_flag


def is_wait(stmt: ir.Stmt) -> bool:
    """Whether a statement is a wait for one flag, or a branch with only a wait."""
    if isinstance(stmt, ir.IfThenElse) and stmt.else_case is None:
        return all(is_wait(inner) for inner in flat(stmt.then_case))
    made = operation(stmt.value) if isinstance(stmt, ir.Evaluate) else None
    return isinstance(made, Wait) and made.is_of_one_flag


def acquires(node: ir.Node) -> bool:
    """Whether a node is a wait, or a collective."""
    return ir.op_name(node) == ops.WAIT.name or ir.op_name(node) in ops.COLLECTIVES


def is_movable(stmt: ir.Stmt) -> bool:
    """Whether stock TileLang moves a wait into the producer: nothing in it reads registers or shared memory."""
    return not ir.contains(stmt, lambda n: isinstance(n, ir.BufferLoad) and ir.scope_kind(n.buffer) != "global")


def in_device_memory(stmt: ir.Stmt) -> bool:
    """Whether a statement reads or writes elements of tensors in device memory."""
    return ir.contains(
        stmt, lambda n: isinstance(n, ir.BufferLoad | ir.BufferStore) and ir.scope_kind(n.buffer) == "global"
    )


def is_scalar(stmt: ir.Stmt) -> bool:
    """Whether a statement binds a value that depends on nothing on the chip, or does nothing."""
    return tir.is_nothing(stmt) or isinstance(stmt, ir.Bind) and is_movable(stmt)


def is_setting(stmt: ir.Stmt) -> bool:
    """Whether a statement sets the register counts of roles."""
    return isinstance(stmt, ir.Evaluate) and ir.op_name(stmt.value) in (tl.PRODUCER_REGISTERS, tl.CONSUMER_REGISTERS)


def is_fill(stmt: ir.Stmt) -> bool:
    """Whether a statement fills registers."""
    if not isinstance(stmt, ir.Evaluate) or ir.op_name(stmt.value) != tl.FILL:
        return False
    return ir.scope_kind(ir.region_parts(tiles.Fill.of(stmt.value).target)[0]) == "fragment"


def loads_registers(stmt: ir.Stmt) -> bool:
    """Whether a statement only loads registers from device memory."""

    def is_more(node: ir.Node) -> bool:
        if isinstance(node, ir.BufferLoad | ir.BufferStore):
            return ir.scope_kind(node.buffer) != ("global" if isinstance(node, ir.BufferLoad) else "fragment")
        return orders(node) or str(ir.op_name(node)).startswith(_TILE_OP)

    if is_copy(stmt, "global", "fragment"):
        return True
    return isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL and not ir.contains(stmt.body, is_more)


def is_load(stmt: ir.Stmt) -> bool:
    """Whether a statement copies a tile from device to shared memory."""
    return is_copy(stmt, "global", "shared")


def is_copy(stmt: ir.Stmt, source: str, target: str) -> bool:
    """Whether a statement copies a tile from one kind of memory to another."""
    if not (isinstance(stmt, ir.Evaluate) and ir.op_name(stmt.value) == tl.COPY):
        return False
    copy = tiles.TileCopy.of(stmt.value)
    kinds = [ir.scope_kind(ir.region_parts(region)[0]) for region in (copy.source, copy.target)]
    return kinds == [source, target]


def is_pull(stmt: ir.Stmt) -> bool:
    """Whether a statement copies a peer's tile to shared memory, with at most the dimensions of a bulk copy."""
    made = operation(stmt.value) if isinstance(stmt, ir.Evaluate) else None
    if not isinstance(made, Copy) or made.to_peer or made.signal is not None:
        return False
    near, far = (ir.region_parts(region)[0] for region in (made.near, made.far))
    is_bulk = len(far.shape) <= _DIMENSIONS
    return is_bulk and ir.scope_kind(near) == "shared" and ir.scope_kind(far) == "global"


def reads_memory(stmt: ir.Stmt) -> bool:
    """Whether a statement that sets scalars or registers reads memory that others may change."""
    return isinstance(stmt, ir.Bind) and ir.reads_memory(stmt.value)


def flat(stmt: ir.Stmt) -> list[ir.Stmt]:
    """The statements of a list in order; regions of the executing programs or devices are spliced in."""
    if isinstance(stmt, ir.SeqStmt) or is_region(stmt):
        return [inner for child in ir.children(stmt) for inner in flat(child)]
    return [stmt]


def is_region(stmt: ir.Stmt) -> bool:
    """Whether a statement is a region of units around the program, or of programs."""
    return isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == ops.SCALE


def tiles_named(stmt: ir.Stmt, besides: ir.Stmt | None = None) -> set[ir.Buffer]:
    """Tiles in shared memory that a statement names, except in one inner statement."""
    return _named(stmt, besides, lambda n: n.buffer if isinstance(n, ir.BufferLoad | ir.BufferStore) else None)


def _named(stmt: ir.Stmt, besides: ir.Stmt | None, tile_of: Callable[[Any], ir.Buffer | None]) -> set[ir.Buffer]:
    found: set[ir.Buffer] = set()

    def visit(node: ir.Node) -> ir.Stmt | None:
        if besides is not None and isinstance(node, ir.Stmt) and node.same_as(besides):
            return tir.sequence([])
        tile = tile_of(node)
        if tile is not None and ir.scope_kind(tile) == "shared":
            found.add(tile)
        return None

    tir.rewrite(stmt, enter=visit)
    return found


def writes_tiles(stmt: ir.Stmt) -> bool:
    """Whether a statement writes shared memory, or may need scratch there, as reductions do."""

    def writes(node: ir.Node) -> bool:
        if isinstance(node, ir.BufferStore):
            return ir.scope_kind(node.buffer) == "shared"
        if str(ir.op_name(node)).startswith(_TILE_OP) and ir.op_name(node) not in _WITHOUT_WORKSPACE:
            return True
        is_target = tiles.is_region(node) and tiles.is_written(node)
        return is_target and ir.scope_kind(ir.region_parts(node)[0]) == "shared"

    return ir.contains(stmt, writes)


def is_bulk_store(call: ir.Call) -> bool:
    """Whether a copy is one of a whole tile from shared to device memory that a bulk store can make."""
    (source, _, extents), (target, _, others) = map(ir.region_parts, tiles.regions_of(call)[:2])
    if ir.scope_kind(source) != "shared" or ir.scope_kind(target) != "global" or source.dtype != target.dtype:
        return False
    sizes = [ir.constant(n) for n in (*extents, *others, *source.shape, target.shape[-1])]
    if None in sizes or len(others) > _DIMENSIONS:
        return False
    whole = [ir.constant(n) for n in source.shape] == [ir.constant(n) for n in extents]
    row = [ir.integer(n) * ir.bits(str(source.dtype)) // 8 for n in (extents[-1], others[-1], target.shape[-1])]
    return whole and all(size % BULK_BYTES == 0 for size in row)


def must_keep_order(loop: ir.For, phase: ir.Stmt) -> bool:
    """Whether a loop must not be pipelined: it would load before one of its waits, or has a tile that is used outside
    it too."""
    outside = {tile.data for tile in _named(phase, loop, _tile_of)}
    written = _named(loop, None, lambda n: _tile_of(n) if tiles.is_region(n) and tiles.access_of(n) == "w" else None)
    return ir.contains(loop.body, orders) or any(tile.data in outside for tile in written)


def _tile_of(node: ir.Node) -> ir.Buffer | None:
    return ir.region_parts(node)[0] if tiles.is_region(node) else None


def in_order(loop: ir.For, body: ir.Stmt) -> ir.Stmt:
    """A pipelined loop as a sequential one."""
    return tir.relooped(loop, body=body, annotations={})
