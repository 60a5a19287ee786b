# SPDX-License-Identifier: MIT
"""Rules for atomic additions at peers: of an element by one thread, of a tile element by element, or by TMA."""

from __future__ import annotations

from functools import reduce
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.broadcast import broadcast_to_all
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.markers import BY_THREAD, by_nvshmem
from tilescale.backends.tilelang.lowering.reach import BULK, STORES
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.backends.tilelang.lowering.signals import first_of, place_of
from tilescale.backends.tilelang.lowering.statements import is_bulk_store
from tilescale.program import ops
from tilescale.program.operations import AtomicAdd

_KINDS = {
    "int32": "S32", "uint32": "U32", "int64": "U64", "uint64": "U64", "float32": "F32", "float64": "F64",
    "float16": "F16", "bfloat16": "BF16",
}  # fmt: skip
"""Types of elements, and the names of their additions in the prelude."""


@lowers(ops.ATOMIC_ADD.name)
def _atomic_add(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = AtomicAdd.of(call)
    if by_nvshmem(call):
        raise stage.unsupported(
            f"T.atomic_add between {made.level}s that share no memory",
            "put the values with T.copy(dst=), and let the receiver add them; or run it with tilescale.emulate",
        )
    stage.include("adders.cuh")
    stage.include("atomics.cuh")
    return _tile(stage, made) if made.is_of_tiles else _element(stage, made)


def _element(stage: DeviceStage, made: AtomicAdd) -> ir.Stmt:
    """One update for the unit; threads of a level, and elements of a parallel loop, make their own."""
    site = _site(stage, made)
    if made.previous is None and made.order == "relaxed":
        add = tir.evaluate(_addition(stage, made, made.target, stage.expr(made.value), site))
        is_own = stage.in_parallel or ir.attribute(made.call, BY_THREAD) is not None
        return add if is_own else stage.one_thread(add)
    buffer = ir.region_parts(made.target)[0]
    kind = f"tilescale::{_KINDS[str(buffer.dtype)]}, tilescale::{made.order.upper()}"
    fetch = _call(stage, made, f"tilescale::fetch_add<{kind}>", made.target, stage.expr(made.value), site)
    previous = _unused(stage, buffer) if made.previous is None else made.previous
    return broadcast_to_all(
        stage,
        made.call,
        fetch,
        previous,
        releases=made.order in ("release", "acq_rel"),
        acquires=made.order in ("acquire", "acq_rel"),
    )


def _unused(stage: DeviceStage, buffer: ir.Buffer) -> ir.Call:
    """A variable for an unused result of an addition, which keeps its order."""
    variable = tir.local_buffer(f"{buffer.name}_before{stage.next_number()}", [1], str(buffer.dtype), ir.VARIABLE)
    stage.tiles.append(variable)
    return tir.region(variable, [0], [1], "w")


def _tile(stage: DeviceStage, made: AtomicAdd) -> ir.Stmt:
    near, far = (ir.region_parts(region)[0].name.removesuffix("_view") for region in (made.value, made.target))
    what = f"T.atomic_add({far}, {near}, dst=)"
    if made.impl == BULK:
        stage.notes.append(f"{what}: {BULK} (cp.reduce.async.bulk)")
        return _by_bulk(stage, made)
    stage.notes.append(f"{what}: {STORES}, element by element")
    return _by_elements(stage, made)


def _by_bulk(stage: DeviceStage, made: AtomicAdd) -> ir.Stmt:
    copy = tir.tile_call("copy", made.value, made.target).value
    if not is_bulk_store(copy) or not stage.target.machine.has(BULK):
        raise stage.unsupported(
            f"T.atomic_add(impl={BULK!r}) of {ir.region_parts(made.value)[0].name!r}",
            "it takes a whole tile in shared memory, with rows of a multiple of 16 bytes; leave impl out",
        )
    buffer, begins, extents = ir.region_parts(made.target)
    slot = _slot(stage, made)
    begins, extents = ([stage.expr(n) for n in part] for part in (begins, extents))
    remote = tir.region(stage.far(buffer), [slot, *begins], [1, *extents], "w")
    return tir.tile_call("atomicadd", stage.expr(made.value), remote, use_tma=1)


def _by_elements(stage: DeviceStage, made: AtomicAdd) -> ir.Stmt:
    (near, at_near, sizes), (far, at_far, extents) = map(ir.region_parts, (made.value, made.target))
    spans = [n for n in extents if ir.constant(n) != 1] or [ir.IntImm("int32", 1)]
    loops = tir.loop_variables(spans)
    source = ir.BufferLoad(near, _along(at_near, sizes, loops))
    places = _along(at_far, extents, loops)
    add = tir.evaluate(
        _addition(stage, made, tir.beginning(made.target, places), stage.expr(source), _site(stage, made))
    )
    inside = [
        test
        for place, size in zip(places, far.shape, strict=True)
        for test in (ir.GE(place, ir.IntImm("int32", 0)), ir.LT(place, size))
        if not ir.proves(test, {var: (0, n) for var, n in zip(loops, spans, strict=True)})
    ]
    if inside:
        add = ir.IfThenElse(stage.expr(reduce(ir.And, inside)), add, None)
    return tir.parallel(loops, [stage.expr(n) for n in spans], add)


def _along(begins: Any, extents: Any, loops: list[ir.Var]) -> list[ir.PrimExpr]:
    """The element of a region at a position along its dimensions of more than one element."""
    left = iter(loops)
    return [b if ir.constant(n) == 1 else b + next(left) for b, n in zip(begins, extents, strict=True)]


def _site(stage: DeviceStage, made: AtomicAdd) -> int:
    name = ir.region_parts(made.target)[0].name
    return stage.site(f"T.atomic_add({name}, dst=)", flag=name)


def _slot(stage: DeviceStage, made: AtomicAdd) -> ir.PrimExpr:
    return stage.slot(stage.device_number(made.level, stage.expr(made.peer)))


def _addition(stage: DeviceStage, made: AtomicAdd, region: ir.Call, value: ir.PrimExpr, site: int) -> ir.PrimExpr:
    kind = _KINDS[str(ir.region_parts(region)[0].dtype)]
    return _call(stage, made, f"tilescale::add<tilescale::{kind}>", region, value, site, dtype="handle")


def _call(
    stage: DeviceStage,
    made: AtomicAdd,
    name: str,
    region: ir.Call,
    value: ir.PrimExpr,
    site: int,
    dtype: str | None = None,
) -> ir.PrimExpr:
    """A call of a device function for the first element of a region of the peer."""
    buffer, index, extent = place_of(stage, region)
    first = first_of(stage.far(buffer), _slot(stage, made))
    return tir.extern(name, first, index, extent, value, stage.record(), site, dtype=dtype or str(buffer.dtype))
