# SPDX-License-Identifier: MIT
"""Costs of operations: one rule each, separate from the rules that execute them.

A rule's closure records, before the operation runs, its demands on the machine: arithmetic, bytes of each memory,
links. Numbers come from the machine description (`tilescale/timing/rates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import AsyncCopy, Atomic, LoadMatrix, WordStore, groups_left
from tilelang_core.tiles import Fill, Gemm, SparseGemm, TileCopy, read_and_written
from tilescale.backends.emulator.execute.frame import Frame, spread, uniform
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Region
from tilescale.backends.emulator.interpret.symbols import PRIVATE
from tilescale.backends.emulator.operations.pointers import pointed
from tilescale.backends.emulator.record.recorder import Recorder
from tilescale.backends.emulator.record.registry import CostRule, cost
from tilescale.backends.emulator.record.tally import Tally, points
from tilescale.timing.steps import WorkPart, merged

Demands = dict[Any, float]


class Traffic:
    """One end of a tile's transfer: the memory that it is read from or written to.

    `each`: whether each thread moves a tile of its own, from or to a thread-private buffer.
    """

    def __init__(self, recorder: Recorder, compiler: Compiler, region: ir.Call, writes: bool, each: bool = False):
        self.region, self.writes, self.each = Region(compiler, region), writes, each
        self.kind = ir.scope_kind(self.region.home.buffer)
        self.root = compiler.root(self.region.home.slot)
        self.recorder = recorder
        layer = recorder.rates.layers[self.kind]
        self.latency = 0.0 if writes else layer.latency
        self.per_program = layer.per_program
        self.itemsize = self.region.home.dtype.itemsize
        self.is_whole = self.root in compiler.held_whole

    def instances(self, frame: Frame) -> int:
        """Number of programs that hold the tile: all of a cluster's if each holds all of it."""
        return len(frame.program.cluster.programs) if self.is_whole else 1

    def demands(self, frame: Frame, instances: int = 1) -> tuple[Demands, float, int]:
        """The demands, the minimum seconds, and the bytes of the access. `instances`: number of programs that each get
        all of it: memory is read once for all of them."""
        if self.region.home.private:
            return {}, 0.0, 0
        if self.kind != "global":
            _, nbytes = self._tile(frame)
            return self.recorder.rates.on_chip(self.kind, nbytes * instances), self.latency, nbytes
        demands, nbytes = self.recorder.touches(frame, self._tile, self.writes)
        return demands, at_least(frame, nbytes * instances, self.per_program) + self.latency, nbytes

    def _tile(self, frame: Frame) -> tuple[Hashable, int]:
        """The identity of the elements, and their bytes."""
        if self.each:
            return self._tiles_of_threads(frame)
        block = self.region.block(frame)
        return (self.root, block.begins, block.extents), block.nbytes

    def _tiles_of_threads(self, frame: Frame) -> tuple[Hashable, int]:
        """Threads with the same first element move one tile."""
        extents = tuple(uniform(n(frame), frame, "a tile's extent") for n in self.region.extents)
        active = spread(True if frame.mask is None else frame.mask, frame)
        begins = np.unique([spread(b(frame), frame)[active] for b in self.region.begins], axis=1)
        return (self.root, begins.tobytes(), extents), begins.shape[1] * math.prod(extents) * self.itemsize


def at_least(frame: Frame, nbytes: float, per_program: float | None) -> float:
    """Minimum seconds for `nbytes` bytes through the resources of each participating program."""
    return nbytes / per_program / executing(frame) if per_program and frame.program is not None else 0.0


def executing(frame: Frame) -> int:
    """Number of programs that execute as the frame's unit."""
    cluster = frame.program.cluster
    return len(cluster.programs) if frame.unit is cluster.unit else 1


def _moves(
    recorder: Recorder, compiler: Compiler, name: str, sides: list[Traffic], asynchronous: bool = False
) -> Closure:
    """A step that moves tiles; a transfer if one of them lies in device memory."""
    where = compiler.where
    kind = "transfer" if any(side.kind == "global" for side in sides) else "compute"

    def record(frame: Frame) -> None:
        instances = sides[-1].instances(frame)
        found = [side.demands(frame, instances) for side in sides]
        nbytes = max(size for _, _, size in found)
        floor = max(seconds for _, seconds, _ in found)
        part = WorkPart(name, kind, where, merged([demands for demands, _, _ in found]), nbytes)
        recorder.work(frame, part, floor, asynchronous=asynchronous)

    return record


def _copies(name: str, asynchronous: bool) -> CostRule:
    def rule(recorder: Recorder, compiler: Compiler, call: ir.Call) -> Closure:
        copy = TileCopy.of(call)
        each = any(ir.region_parts(region)[0].scope() in PRIVATE for region in (copy.source, copy.target))
        sides = [
            Traffic(recorder, compiler, copy.source, False, each),
            Traffic(recorder, compiler, copy.target, True, each),
        ]
        return _moves(recorder, compiler, name, sides, asynchronous)

    return rule


cost(tl.COPY, runs=True)(_copies("copy", False))
cost(tl.ASYNC_COPY, tl.TMA_COPY, runs=True)(_copies("async copy", True))
cost(tl.TRANSPOSE)(_copies("transpose", False))
cost(tl.IM2COL, tl.C2D_IM2COL)(_copies("im2col", False))


@cost(tl.FILL, runs=True)
def _fill(recorder: Recorder, compiler: Compiler, call: ir.Call) -> Closure:
    return _moves(recorder, compiler, "fill", [Traffic(recorder, compiler, Fill.of(call).target, True)])


@cost(tl.PTX_WAIT_GROUP, tl.WAIT_TMA_STORES, runs=True)
def _settle(recorder: Recorder, compiler: Compiler, call: ir.Call) -> Closure:
    left = groups_left(call)
    return lambda frame: recorder.settle(left)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _product(view: type[Gemm] | type[SparseGemm]) -> CostRule:
    def rule(recorder: Recorder, compiler: Compiler, call: ir.Call) -> Closure:
        where, product = compiler.where, view.of(call)
        left, result = Region(compiler, product.a), Region(compiler, product.c)
        operands = [Traffic(recorder, compiler, operand, False) for operand in (product.a, product.b)]
        # A structured-sparse operand holds every second element of its rows.
        dense = 2 if isinstance(product, SparseGemm) else 1

        def record(frame: Frame) -> None:
            shape, out = left.block(frame).extents[-2:], result.block(frame).extents[-2:]
            flops = 2 * math.prod(out) * shape[0 if product.transpose_a else 1] * dense
            arithmetic = recorder.rates.product(flops / dense, str(left.home.buffer.dtype))
            moved = [side.demands(frame, side.instances(frame))[0] for side in operands if side.kind == "shared"]
            recorder.work(frame, WorkPart("gemm", "compute", where, merged([arithmetic, *moved]), flops=flops))

        return record

    return rule


cost(tl.GEMM, tl.WGMMA_GEMM, tl.TCGEN05_GEMM, runs=True)(_product(Gemm))
cost(tl.GEMM_BLOCKSCALED, tl.TCGEN05_GEMM_BLOCKSCALED, runs=True)(_product(Gemm))
cost(tl.GEMM_SP, tl.WGMMA_GEMM_SP, tl.TCGEN05_GEMM_SP)(_product(SparseGemm))


def _elements(name: str) -> CostRule:
    """An operation that reads each element of its first tile once, and writes its second."""

    def rule(recorder: Recorder, compiler: Compiler, call: ir.Call) -> Closure:
        where = compiler.where
        read, written = read_and_written(call)
        sides = [Traffic(recorder, compiler, read, False)] if read is not None else []
        sides += [Traffic(recorder, compiler, written, True)] if written is not None else []

        def record(frame: Frame) -> None:
            found = [side.demands(frame) for side in sides]
            count = max([size // side.itemsize for side, (_, _, size) in zip(sides, found, strict=True)], default=0)
            dtype = str(sides[0].region.home.buffer.dtype) if sides else "float32"
            arithmetic = recorder.rates.arithmetic({("vector", dtype): 2 * count})
            demands = merged([arithmetic, *(demands for demands, _, _ in found)])
            floor = max([seconds for _, seconds, _ in found], default=0.0)
            kind = "transfer" if any(side.kind == "global" for side in sides) else "compute"
            recorder.work(frame, WorkPart(name, kind, where, demands, flops=count), floor)

        return record

    return rule


for _name in ("reduce", "cumsum", "cummax", "atomicadd", "atomicmax", "atomicmin", "reducer_init"):
    cost(tl.TILE_OPERATIONS + _name)(_elements(_name))
cost(*tl.FINALIZE_REDUCER)(_elements("finalize_reducer"))
cost(tl.REDUCER_UPDATE)(lambda recorder, compiler, call: lambda frame: None)


def _access(
    name: str, nbytes: Callable[[ir.Call, int], int], pointer: Callable[[ir.Call], Any], returns: bool = False
) -> CostRule:
    """An access to elements by each active thread.

    Args:
        nbytes: bytes that a thread moves, from a call and the size of an element.
        pointer: the pointer argument of a call.
        returns: whether the thread waits for the value.
    """

    def rule(recorder: Recorder, compiler: Compiler, call: ir.Call) -> Closure:
        where = compiler.where
        home = pointed(compiler, pointer(call)).home
        scope, root = ir.scope_kind(home.buffer), compiler.root(home.slot)
        far = scope == "global"
        latency = recorder.rates.latency(scope) if returns else 0.0
        each = nbytes(call, home.dtype.itemsize)

        def record(frame: Frame) -> None:
            total = each * frame.active()
            moved = recorder.rates.on_chip(scope, total)
            if far:
                moved, _ = recorder.touches(frame, lambda _: ((root, where), total), True)
            recorder.work(frame, WorkPart(name, "transfer" if far else "compute", where, moved, total), latency)

        return record

    return rule


def _constant(nbytes: int) -> Callable[[ir.Call, int], int]:
    return lambda call, itemsize: nbytes


def _atomic(width: int = 1, returns: bool = False) -> CostRule:
    """An update of one element, or of neighbouring ones: read, and written."""
    return _access("atomic", lambda call, itemsize: 2 * width * itemsize, lambda call: Atomic.of(call).pointer, returns)


for _name in ("add", "max", "min"):
    cost(tl.atomic(_name), runs=True)(_atomic())
    cost(tl.atomic(_name, returns=True), runs=True)(_atomic(returns=True))
cost(tl.atomic("or"), tl.atomic("store"), runs=True)(_atomic())
cost(tl.atomic("load"), runs=True)(_atomic(returns=True))
cost(tl.atomic("addx2"), runs=True)(_atomic(width=2))
cost(tl.atomic("addx4"), runs=True)(_atomic(width=4))
for _width in (32, 64, 128, 256):
    _store = _access("store", _constant(_width // 8), lambda call: WordStore.of(call).pointer)
    cost(f"{tl.TL}stg{_width}", f"{tl.TL}sts{_width}", runs=True)(_store)
cost(tl.PTX_CP_ASYNC, runs=True)(
    _access("cp.async", lambda call, size: AsyncCopy.of(call).count * size, lambda call: AsyncCopy.of(call).source)
)
cost(tl.PTX_LDMATRIX, runs=True)(
    _access("ldmatrix", lambda call, size: 4 * LoadMatrix.of(call).count, lambda call: LoadMatrix.of(call).row)
)


def loop_cost(
    recorder: Recorder, compiler: Compiler, found: Tally, name: str
) -> Callable[[Frame, tuple[int, ...]], None]:
    """A closure that records the cost of a statement on single elements over a space of points."""
    where = compiler.where
    flops = sum(found.operations.values())
    slots = [(compiler.root(compiler.slot(access.buffer.data)), access) for access in found.accesses]
    layer = recorder.rates.layers["global"]
    kind = "transfer" if slots else "compute"
    one = merged([recorder.rates.arithmetic(found.operations), recorder.rates.on_chip("shared", found.shared)])

    def record(frame: Frame, space: tuple[int, ...]) -> None:
        every = math.prod(space)
        parts = [merged([one], every)]
        total = 0
        for slot, access in slots:
            nbytes = access.nbytes * access.times * points(space, access.axes)
            total += nbytes
            moved, _ = recorder.touches(frame, _mine(slot, nbytes), access.writes)
            parts.append(moved)
        floor = layer.latency if any(not access.writes for _, access in slots) else 0.0
        floor += at_least(frame, total, layer.per_program)
        recorder.work(frame, WorkPart(name, kind, where, merged(parts), total, flops * every), floor)

    programs = [compiler.slot(var) for var in compiler.launch.programs] if compiler.is_in_launch else []

    def _mine(slot: int, nbytes: int) -> Callable[[Frame], tuple[Hashable, int]]:
        return lambda frame: ((slot, where, tuple(frame.slots[s] for s in programs)), nbytes)

    return record
