# SPDX-License-Identifier: MIT
"""Shared memory through which the units of a program pass tiles to each other, a slot for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.groups.state import GroupStage
from tilescale.backends.tilelang.lowering.groups.unit import UnitThreads


class UnitSlots:
    """Shared memory with a slot for each unit, which all barriers with the same slots use one after another.

    Args:
        apart: elements between rows.
    """

    def __init__(
        self,
        stage: GroupStage,
        unit: UnitThreads,
        shape: Sequence[int],
        dtype: str,
        *,
        one: bool = False,
        number: int = 0,
        apart: int = 0,
    ):
        self.unit, self.shape, self.devices = unit, list(shape), 1 if one else unit.siblings
        self.stage, self.dtype, self.number, self.apart = stage, dtype, number, apart

    @cached_property
    def buffer(self) -> ir.Buffer:
        """The slots, side by side."""
        around = self.unit.around.name if self.unit.around is not None else ""
        rows = [self.devices, *self.shape[:-1], self.shape[-1] + self.apart] if self.shape else [self.devices]
        key = ("slots", around, self.unit.siblings, tuple(rows), self.dtype, self.number)
        return self.stage.make(key, f"slots{around}", rows, self.dtype, "shared.dyn")

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return math.prod(self.shape) * self.devices * ir.bits(self.dtype) // 8

    def place(self, slot: Any, access: str, begin: Sequence[Any] = (), extents: Sequence[Any] = ()) -> ir.Call:
        """A slot, or a part of it, as the argument of a tile operation."""
        return tir.region(self.buffer, [slot, *(begin or [0] * len(self.shape))], [1, *(extents or self.shape)], access)

    def put(self, region: ir.Call, slot: Any = None) -> ir.Stmt:
        """Lay a tile down in a slot, this unit's if none is named."""
        return copied(region, self.place(self.unit.number if slot is None else slot, "w"))

    def received(self, sender: Any, index: Sequence[Any]) -> ir.PrimExpr:
        return ir.BufferLoad(self.buffer, [sender, *index])

    def all(self, index: Sequence[Any]) -> list[ir.PrimExpr]:
        """An element of every slot."""
        return [self.received(sender, index) for sender in range(self.devices)]


def copied(source: ir.Call, target: ir.Call) -> ir.Stmt:
    """A copy between two regions of tiles."""
    call = tir.tile_call("copy", _as(source, "r"), _as(target, "w"))
    single = all(ir.constant(n) == 1 for n in ir.region_parts(source)[2])
    return tir.copy_nest(call.value) if single else call


def _as(region: ir.Call, access: str) -> ir.Call:
    buffer, begins, extents = ir.region_parts(region)
    return tir.region(buffer, begins, extents, access)


def exchange(
    stage: GroupStage, unit: UnitThreads, region: ir.Call, loops: list[ir.Var], finish: Callable[[list[Any]], ir.Stmt]
) -> ir.Stmt:
    """Every unit lays a tile down; then `finish` gets its element at `loops` from all of them."""
    buffer, _, extents = ir.region_parts(region)
    slots = UnitSlots(stage, unit, [ir.integer(n) for n in extents], str(buffer.dtype))
    return tir.sequence([slots.put(region), unit.barrier(), finish(slots.all(loops)), unit.barrier()])


def gather(stage: GroupStage, unit: UnitThreads, part: ir.Call, axis: int, target: ir.Call) -> ir.Stmt:
    """Every unit lays its part along an axis down; then it has the whole."""
    buffer, _, extents = ir.region_parts(part)
    extents = [ir.integer(n) for n in extents]
    whole = [n * unit.siblings if a == axis else n for a, n in enumerate(extents)]
    slots = UnitSlots(stage, unit, whole, str(buffer.dtype), one=True)
    begin = [unit.number * n if a == axis else 0 for a, n in enumerate(extents)]
    laid_down, taken = copied(part, slots.place(0, "w", begin, extents)), copied(slots.place(0, "r"), target)
    return tir.sequence([laid_down, unit.barrier(), taken, unit.barrier()])
