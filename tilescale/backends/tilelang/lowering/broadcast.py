# SPDX-License-Identifier: MIT
"""Broadcasts of a value from one thread of a unit to all: `T.invoke_one`, fetch-adds, waits for any of several.

A word of shared memory carries the value, between barriers of the unit. A thread that is a unit of its own has the
value already.
"""

from __future__ import annotations

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.markers import BY_THREAD, ONLY_ACQUIRES, acquired, sync
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.program import ops
from tilescale.program.operations import InvokeOne

_C_TYPES = {
    "bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short",
    "int32": "int", "uint32": "unsigned", "int64": "long", "uint64": "unsigned long", "float16": "half_t",
    "bfloat16": "bfloat16_t", "float32": "float", "float64": "double",
}  # fmt: skip


def broadcast_to_all(
    stage: DeviceStage,
    call: ir.Call,
    value: ir.PrimExpr,
    result: ir.Call,
    *,
    releases: bool = False,
    acquires: bool = False,
) -> ir.Stmt:
    """Evaluate a lowered expression in one thread, and broadcast the value to a variable of all threads of its unit.

    Args:
        call: the operation.
        releases: whether the evaluation publishes the unit's earlier writes; acquires: whether the unit then sees what
            others published.
    """
    variable, index, _ = ir.region_parts(result)
    if ir.attribute(call, BY_THREAD) is not None:
        own = ir.BufferStore(variable, value, list(index))
        return tir.sequence([*_completed(releases), own, *([acquired()] if acquires else [])])
    dtype = str(variable.dtype)
    if dtype not in _C_TYPES:
        raise stage.unsupported(f"a broadcast of a value of type {dtype} from one thread to all")
    stage.include("broadcast.cuh")
    place = f"{stage.next_number()}, {_C_TYPES[dtype]}"
    write = stage.one_thread(tir.evaluate(tir.extern(f"tilescale::broadcast<{place}>", value)))
    read = ir.BufferStore(variable, tir.extern(f"tilescale::broadcast_value<{place}>", dtype=dtype), list(index))
    barrier = acquired(sync()) if acquires else sync()
    return tir.sequence([*_completed(releases), sync(), write, barrier, read])


def _completed(releases: bool) -> list[ir.Stmt]:
    return [tir.evaluate(tir.extern("tilescale::complete_stores"))] if releases else []


@lowers(ops.INVOKE_ONE.name)
def _invoke_one(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = InvokeOne.of(call)
    value = stage.expr(made.value)
    if made.result is not None:
        releases = ir.attribute(call, ONLY_ACQUIRES) is None
        return broadcast_to_all(stage, call, value, made.result, releases=releases, acquires=True)
    if ir.attribute(call, BY_THREAD) is not None:
        return tir.evaluate(value)
    completed = _completed(True)
    return tir.sequence([*completed, sync(), stage.one_thread(tir.evaluate(value)), acquired(sync())])
