# SPDX-License-Identifier: MIT
"""Copies between units of a program: a sibling's shared memory is accessed in place, registers through slots."""

from __future__ import annotations

from tilelang_core import ir, trace
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.groups.clones import KIND, UnitClone
from tilescale.backends.tilelang.lowering.groups.collectives import in_steps, operand, slots_for
from tilescale.backends.tilelang.lowering.groups.slots import copied
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.program import ops
from tilescale.program.operations import Copy


@lowers(ops.COPY.name, KIND)
def _copy(clone: UnitClone, call: ir.Call) -> ir.Stmt:
    """A sibling's tile in memory is accessed in place; one in registers after a barrier of all units."""
    copy = Copy.of(call)
    moved = _direct(clone, copy) if operand(clone, copy.far).in_memory else _through_slots(clone, copy)
    if copy.signal is None:
        return moved
    update = trace.call(ops.SIGNAL, copy.signal, copy.value, op=copy.op)
    return tir.sequence([moved, clone.stmt(tir.evaluate(update))])


def _direct(clone: UnitClone, copy: Copy) -> ir.Stmt:
    peer = clone.expr(copy.peer)
    number = ir.constant(peer)
    if number is not None:
        return _to(clone, copy, number)
    result: ir.Stmt | None = None
    for candidate in range(clone.unit.siblings):
        is_peer = ir.EQ(peer, ir.int_node(candidate))
        result = ir.IfThenElse(is_peer, _to(clone, copy, candidate), result)
    return result


def _to(clone: UnitClone, copy: Copy, number: int) -> ir.Stmt:
    buffer, begins, extents = ir.region_parts(copy.far)
    if clone.strided(copy.far):
        raise clone.stage.unsupported(f"a copy to or from a cyclic view of a sibling, {buffer.name!r}")
    at = [clone.expr(b) for b in begins]
    placed, at = clone.place(buffer, at, clone.unit.sibling(number))
    there = tir.region(placed, at, extents, "w" if copy.to_peer else "r")
    pair = (copy.source, there) if copy.to_peer else (there, copy.target)
    return clone.stmt(copied(*pair))


def _through_slots(clone: UnitClone, copy: Copy) -> ir.Stmt:
    if clone.apart:
        raise clone.stage.unsupported(
            "T.copy to or from the registers of a sibling that only some units reach; copy through a shared tile"
        )
    source, target = operand(clone, copy.source), operand(clone, copy.target)
    slots = slots_for(clone, source)
    if not copy.to_peer:
        peer = clone.expr(copy.peer)
        taken = copied(slots.place(peer, "r"), target.region("r"))
        return in_steps(clone, slots.put(source.region("r")), None, taken, None)
    peers = [clone.rank_of(copy.peer, clone.unit.sibling(n)) for n in range(clone.unit.siblings)]
    if None in peers:
        raise clone.stage.unsupported("T.copy(dst=) to the registers of a sibling whose rank is not a constant")
    senders = [n for n, peer in enumerate(peers) if peer == clone.unit.number]
    takes = [copied(slots.place(n, "r"), target.region("r")) for n in senders[-1:]]
    return in_steps(clone, slots.put(source.region("r")), None, *takes, None)
