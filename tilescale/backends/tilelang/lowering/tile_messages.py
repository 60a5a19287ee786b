# SPDX-License-Identifier: MIT
"""All-reduces of small tiles by messages of words: data with their number inside, which the receiver polls.

Why: a fence of the system waits until the stores of the SM have arrived, and flags and loads follow it; words take one
trip over the network. Before: an all-reduce of a tile of a program. After: a tile in shared memory, and a call of
headers/tile_messages.cuh between two barriers. Declines tiles of many bytes, for which threads would have no registers,
and programs that may rely on the order that a collective gives to other accesses: words order nothing but themselves.
"""

from __future__ import annotations

import math
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.markers import sync
from tilescale.backends.tilelang.lowering.reach import share_memory
from tilescale.backends.tilelang.lowering.signals import siblings_of
from tilescale.backends.tilelang.lowering.tile import TileRegion
from tilescale.program import ops
from tilescale.program.effects import statements
from tilescale.program.model import DevicePhase, bytes_of
from tilescale.program.operations import Collective, Signal, Wait, operation

C_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "int32": "int"}
"""Types of tiles, and their names in the prelude."""

WORD, WORDS = 8, 16
"""Bytes of data of a thread's store, and bytes of the store (headers/words.cuh)."""

MOST = 4
"""Stores of a thread, at most."""

SLOTS = 2
"""Messages of a sender that are kept (headers/short_messages.cuh)."""

HEADERS = ("words.cuh", "messages.cuh", "sums.cuh", "short_messages.cuh", "siblings.cuh", "tile_messages.cuh")


def is_able(stage: DeviceStage, made: Collective, tile: TileRegion) -> bool:
    """Whether words can carry an all-reduce of a tile."""
    nbytes, threads = bytes_of(tile.extents, tile.dtype) or 0, _threads(stage)[1]
    fits = 0 < nbytes <= MOST * WORD * threads and nbytes % WORD == 0
    known = made.combine is None and tile.dtype in C_TYPES and stage.target.messages
    flat = all(n == 1 for n in stage.launch.threads[1:])
    near = share_memory(stage.target, made.level)
    return fits and known and flat and near and not _relies_on_order(stage)


def is_dense(stage: DeviceStage, tile: TileRegion) -> bool:
    """Whether a tile is in shared memory in plain order, as nothing gives it a layout, and without gaps."""
    buffer, begins, nbytes = tile.buffer, ir.constants(tile.begins), ir.bits(tile.dtype) // 8
    if ir.scope_kind(buffer) != "shared" or begins is None:
        return False
    if buffer.data in dict(stage.launch.notes).get(tl.LAYOUTS, {}):
        return False
    shape = [ir.integer(n) for n in buffer.shape]
    behind = next((axis for axis, n in enumerate(tile.extents) if n != 1), len(shape))
    whole = tile.extents[behind + 1 :] == shape[behind + 1 :]
    first = sum(begin * math.prod(shape[axis + 1 :]) for axis, begin in enumerate(begins))
    return whole and first * nbytes % WORD == 0 and not _is_laid_out(stage, buffer)


def _is_laid_out(stage: DeviceStage, buffer: ir.Buffer) -> bool:
    """Whether a tile operation, other than copies from and to registers, may choose the order of a tile's elements."""

    def chooses(call: ir.Call) -> bool:
        tiles = [ir.region_parts(arg)[0] for arg in call.args if ir.op_name(arg) == tl.REGION]
        others = [tile for tile in tiles if not tile.data.same_as(buffer.data)]
        if len(others) == len(tiles) or ir.op_name(call) in ops.COLLECTIVES:
            return False
        return ir.op_name(call) != tl.COPY or not all(tile.scope() == "local.fragment" for tile in others)

    return any(map(chooses, ir.instances(stage.phase.stmt, ir.Call)))


def reduced(stage: DeviceStage, what: str, made: Collective, tile: TileRegion, name: str) -> list[ir.Stmt]:
    """A dense tile in shared memory becomes the sum over all siblings."""
    for header in HEADERS:
        stage.include(header)
    level, devices = made.level, dict(stage.target.sizes)[made.level]
    nbytes = bytes_of(tile.extents, tile.dtype) or 0
    stage.notes.append(f"{what}: {nbytes} bytes by words that carry their number")
    shape = (SLOTS * (devices - 1) * stage.window, nbytes // WORD * WORDS // 4)
    workspace = stage.workspace_peers(name, shape, "int32")
    program, counts = ir.Cast("int64", stage.place()), tir.address_of(_counts(stage, level))
    before, number = _following(stage, counts, program, level)
    begin, threads = _threads(stage)
    sizes = (C_TYPES[tile.dtype], f"tilescale::{made.reduction.upper()}", devices, nbytes, begin, threads)
    reduce = tir.extern(
        f"tilescale::reduce_tile<{', '.join(map(str, sizes))}>",
        tir.call(tl.ADDRESS_OF, ir.BufferLoad(tile.buffer, tile.begins)),
        tir.address_of(workspace),
        ir.IntImm("int64", stage.target.stride),
        siblings_of(stage, level),
        program,
        stage.window,
        counts,
        number,
        stage.limit(),
        stage.record(),
        stage.site(what),
    )
    return [*before, sync(), tir.evaluate(reduce), sync()]


def _counts(stage: DeviceStage, level: str) -> ir.Buffer:
    """Number of messages of this device's programs to their counterparts on the siblings of a level, at each slot."""
    return stage.workspace(f"messages_{level}", (stage.window,), "int32", symmetric=False)


def _following(
    stage: DeviceStage, counts: ir.PrimExpr, program: ir.PrimExpr, level: str
) -> tuple[list[ir.Stmt], ir.BufferLoad]:
    """The number of the program's next message, and the statements before. A register keeps it: a load takes as long as
    the message. Programs that share a slot read it in their turn.
    """
    unit = "" if stage.executing is None else stage.executing.name
    name, zero = f"message_{level}{unit}", [ir.IntImm("int32", 0)]
    known = next((tile for tile in stage.tiles if tile.name == name), None)
    variable = known or tir.local_buffer(name, [1], "uint32", ir.VARIABLE)
    number = ir.BufferLoad(variable, zero)
    last = ir.BufferStore(variable, tir.extern("tilescale::last_message", counts, program, dtype="uint32"), zero)
    following = ir.BufferStore(variable, tir.extern("tilescale::following", number, dtype="uint32"), zero)
    if known is None:
        stage.tiles.append(variable)
        stage.begins += [] if stage.is_shared else [last]
    return [*([last] if stage.is_shared else []), following], number


def _threads(stage: DeviceStage) -> tuple[int, int]:
    """The first thread that executes the current statement, and how many do."""
    unit = stage.executing
    return (0, stage.launch.thread_count) if unit is None else (unit.begin, unit.threads)


def _relies_on_order(stage: DeviceStage) -> bool:
    """Whether something may rely on the order that a collective gives to other accesses: operations of several units,
    functions from elsewhere, loops that poll. Waits for tasks of this device do not.
    """
    has_tasks = ops.TASKS in dict(stage.launch.notes)

    def relies(stmt: ir.Stmt, phase: Any) -> bool:
        if not isinstance(stmt, ir.Evaluate):
            return isinstance(stmt, ir.While)
        made = operation(stmt.value)
        of_tasks = has_tasks and isinstance(made, Signal | Wait)
        on_tiles = isinstance(made, Collective) and not isinstance(phase, DevicePhase)
        return tir.is_extern(stmt.value) or not (made is None or of_tasks or on_tiles)

    return any(relies(stmt, phase) for stmt, phase, _ in statements(stage.program.body))
