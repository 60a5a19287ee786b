# SPDX-License-Identifier: MIT
"""TileLang's tile operations: copies, GEMMs, reductions, scans, im2col, tile atomics, reducers.

Asynchronous forms complete at once: a program may rely on their effect only after the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.tiles import Fill, Gemm, Im2col, Reduce, Scan, SparseGemm, TileCopy
from tilelang_core.uneven_copies import executed
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.execute.memory import PrivateBuffer
from tilescale.backends.emulator.execute.observe import DEVICE_ATOMIC, READ, WRITE
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.abstract import forgotten
from tilescale.backends.emulator.interpret.access import element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Block, Region
from tilescale.backends.emulator.interpret.registry import ignore, operation
from tilescale.backends.emulator.interpret.selections import located
from tilescale.backends.emulator.operations.barriers import BarrierReference
from tilescale.backends.emulator.operations.multicast import multicast
from tilescale.errors import ShapeError, TileScaleError, UnsupportedError, UsageError

ignore("tl.GemmWarpPolicy")


def fitted(tile: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`tile` with dimensions of extent 1 added or dropped to have `shape`.

    Raises ShapeError: the other extents differ.
    """
    if tile.shape == shape:
        return tile
    if [n for n in tile.shape if n != 1] != [n for n in shape if n != 1]:
        raise ShapeError(
            f"a copy between tiles of different extents: {tile.shape} and {shape}",
            hint="slice both to the same extents",
        )
    return tile.reshape(shape)


def copy_tile(
    source: Region, target: Region, frame: Frame, into: np.ndarray | None = None, unit: Unit | None = None
) -> None:
    """Copy between regions; `into` is another unit's instance of the target."""
    tile = source.read(frame)
    extents = target.block(frame, into).extents
    target.write(frame, fitted(tile, extents), into, unit)


@operation(tl.COPY, tl.ASYNC_COPY, tl.TMA_COPY)
def _copy(compiler: Compiler, call: ir.Call) -> Closure:
    alike = executed(call)
    assert alike is not None, "the analysis has refused it"
    notes, copy = call.annotations or {}, TileCopy.of(alike)
    source, target = Region(compiler, copy.source), Region(compiler, copy.target)
    if "gather4_rows" in notes:
        return rows_copy(compiler, source, target, notes)
    if source.home.private or target.home.private:
        return _private_copy(compiler, copy) if compiler.data else forgotten([target])
    if "dst_block" in notes:
        return _cluster_copy(compiler, source, target, notes)
    if not compiler.data:
        return lambda frame: None
    if "cluster_mask" in notes:
        mask = ir.integer(notes["cluster_mask"])
        return multicast(compiler, copy.source, mask, lambda from_, frame: copy_tile(from_, target, frame))
    return lambda frame: copy_tile(source, target, frame)


def _cluster_copy(compiler: Compiler, source: Region, target: Region, notes: Mapping[str, Any]) -> Closure:
    """Distributed shared memory: the target is another program's tile in the cluster; its barrier gets an arrival."""
    compiler.reached.add(target.home.root)
    peer = compiler.expr(notes["dst_block"])
    barrier = BarrierReference(compiler, notes["barrier"]) if "barrier" in notes else None

    def run(frame: Frame) -> None:
        rank = uniform(peer(frame), frame, "dst_block")
        program = frame.program.in_cluster(rank)
        if compiler.data:
            into = program.unit.owner(target.home.slot).storage[target.home.slot]
            copy_tile(source, target, frame, into, program.unit)
        if barrier is not None:
            barrier.of(frame, program).arrive(1, frame, barrier.where)

    return run


def _private_copy(compiler: Compiler, copy: TileCopy) -> Closure:
    """A copy from or to a thread-private buffer: element by element, for all threads at once."""
    steps, elements, extents = [], [], []
    for region in (copy.source, copy.target):
        buffer, begins, sizes = ir.region_parts(region)
        step = [ir.Var(f"step{i}", "int32") for i in range(len(begins))]
        steps.append([compiler.slot(v) for v in step])
        elements.append(element(compiler, buffer, [b + v for b, v in zip(begins, step, strict=True)]))
        extents.append([compiler.expr(n) for n in sizes])

    def run(frame: Frame) -> None:
        source, target = ([uniform(n(frame), frame, "an extent") for n in sizes] for sizes in extents)
        if [n for n in source if n != 1] != [n for n in target if n != 1]:
            raise ShapeError(f"a copy between tiles of different extents: {tuple(source)} and {tuple(target)}")
        indices = zip(product(*map(range, source)), product(*map(range, target)), strict=True)
        for from_, to in indices:
            for slots, index in zip(steps, (from_, to), strict=True):
                for slot, i in zip(slots, index, strict=True):
                    frame.slots[slot] = i
            elements[1].store(frame, elements[0].load(frame))

    return run


@operation(tl.TRANSPOSE)
def _transpose(compiler: Compiler, call: ir.Call) -> Closure:
    copy = TileCopy.of(call)
    source, target = Region(compiler, copy.source), Region(compiler, copy.target)
    return lambda frame: target.write(frame, source.read(frame).T.copy())


@operation(tl.FILL)
def _fill(compiler: Compiler, call: ir.Call) -> Closure:
    fill = Fill.of(call)
    target, value = Region(compiler, fill.target), compiler.expr(fill.value)

    def run(frame: Frame) -> None:
        array = target.home.array(frame)
        if isinstance(array, PrivateBuffer):
            _fill_private(array, target, value(frame), frame)
            return
        if not array.flags.writeable:
            return
        view = target.block(frame).view()
        target.home.written(frame)
        target.home.touched(frame, WRITE, view)
        view[...] = numerics.convert(uniform(value(frame), frame, "the value of a fill"), view.dtype)

    return run


def _fill_private(buffer: PrivateBuffer, target: Region, value: Any, frame: Frame) -> None:
    begins = [b(frame) for b in target.begins]
    extents = [uniform(e(frame), frame, "an extent") for e in target.extents]
    value = numerics.convert(value, target.home.dtype)
    for offsets in np.ndindex(*extents):
        index = tuple(b + i for b, i in zip(begins, offsets, strict=True))
        target.home.touched_private(frame, WRITE, buffer, index)
        buffer.store(index, value, frame)


# -- GEMM -------------------------------------------------------------------------------------------------------------


def matrix(tile: np.ndarray) -> np.ndarray:
    """A tile of extent 1 in all but its last two dimensions as a matrix, still a view."""
    return tile[(0,) * (tile.ndim - 2)]


def has_tf32(compiler: Compiler) -> bool:
    """Whether the machine multiplies float32 operands with the precision of tfloat32."""
    try:
        rates = compiler.machine.rates(compiler.machine.program_level.name)
    except TileScaleError:
        return False
    return any("tfloat32" in of and "float32" not in of for of in rates.values())


@operation(tl.GEMM, tl.WGMMA_GEMM, tl.TCGEN05_GEMM)
def _gemm(compiler: Compiler, call: ir.Call) -> Closure:
    if ir.attribute(call, "use_2cta", 0):
        raise UnsupportedError(
            "the emulator does not run GEMMs of two thread blocks written with use_2cta",
            hint='write T.gemm inside T.Scale("cta_cluster")',
        )
    product = Gemm.of(call)
    a, b, c = (Region(compiler, r) for r in product.operands)
    _check_types(*(str(ir.region_parts(r)[0].dtype) for r in (product.a, product.b)))
    clear, tf32, stacked = compiler.expr(product.clear), has_tf32(compiler), product.is_stacked

    def multiply(frame: Frame) -> None:
        clears = bool(uniform(clear(frame), frame, "clear_accum"))
        operands = a.read(frame), b.read(frame)
        with c.target(frame, reads=not clears) as result:
            for left, right, sums in zip(*operands, result, strict=True) if stacked else [(*operands, result)]:
                numerics.gemm(
                    matrix(left),
                    matrix(right),
                    matrix(sums),
                    transpose_a=product.transpose_a,
                    transpose_b=product.transpose_b,
                    clear=clears,
                    tf32=tf32,
                )

    return announced(compiler, product, multiply)


def _check_types(a: str, b: str) -> None:
    """Check types as TileLang: only floats of 8 bits and less are multiplied with other types."""
    if a != b and not all(dtype.startswith(("float8", "float6", "float4")) for dtype in (a, b)):
        raise UsageError(f"T.gemm of {a} and {b}", hint="make both of one type: T.copy into a tile of it converts")


def announced(compiler: Compiler, product: Gemm, multiply: Closure) -> Closure:
    """A GEMM, followed by an arrival at the mbarrier of its completion."""
    barrier = None if product.done is None else BarrierReference(compiler, product.done)

    def run(frame: Frame) -> None:
        if compiler.data:
            multiply(frame)
        if barrier is not None:
            barrier.of(frame).arrive(1, frame, barrier.where)

    return run


@operation(tl.GEMM_SP, tl.WGMMA_GEMM_SP, tl.TCGEN05_GEMM_SP)
def _gemm_sparse(compiler: Compiler, call: ir.Call) -> Closure:
    product = SparseGemm.of(call)
    a, e, b, c = (Region(compiler, r) for r in (product.a, product.metadata, product.b, product.c))
    clear, tf32 = compiler.expr(product.clear), has_tf32(compiler)

    def run(frame: Frame) -> None:
        clears = bool(uniform(clear(frame), frame, "clear_accum"))
        with c.target(frame, reads=not clears) as result:
            numerics.gemm_sparse(
                matrix(a.read(frame)),
                matrix(e.read(frame)),
                matrix(b.read(frame)),
                matrix(result),
                transpose_a=product.transpose_a,
                transpose_metadata=product.transpose_metadata,
                transpose_b=product.transpose_b,
                clear=clears,
                tf32=tf32,
            )

    return run


# -- reductions, scans, im2col -----------------------------------------------------------------------------------------


@operation(tl.REDUCE)
def _reduce(compiler: Compiler, call: ir.Call) -> Closure:
    made = Reduce.of(call)
    source, target = Region(compiler, made.source), Region(compiler, made.target)
    kind, dim, clear = made.kind, made.dim, made.clear
    propagate = bool(ir.attribute(call, "nan_propagate", False))
    if source.home.private or target.home.private:
        return lambda frame: _reduce_private(source, target, kind, dim, clear, frame)

    def run(frame: Frame) -> None:
        tile = source.read(frame)
        with target.target(frame, reads=not clear) as result:
            numerics.reduce(tile, result, kind, dim, clear, nan_propagate=propagate)

    return run


def _reduce_private(source: Region, target: Region, kind: str, dim: int, clear: bool, frame: Frame) -> None:
    """A reduction of thread-private buffers, by each thread separately."""
    values, result = source.home.array(frame), target.home.array(frame)
    for access, home, buffer in ((READ, source.home, values), (WRITE, target.home, result)):
        for index in np.ndindex(buffer.shape):
            home.touched_private(frame, access, buffer, index)
    if values.lead and values.lead != result.lead:
        result.data = np.broadcast_to(result.data, (*values.lead, *result.shape)).copy()
        result.lead = values.lead
    out = np.array(result.data)
    numerics.reduce(values.data, out, kind, dim % len(values.shape) + len(values.lead), clear)
    if frame.mask is not None and result.lead:
        keep = ~np.broadcast_to(frame.mask, result.lead)
        out[keep] = result.data[keep]
    result.data = out


def _scan(kind: str) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        scan = Scan.of(call)
        source, target = Region(compiler, scan.source), Region(compiler, scan.target)

        def run(frame: Frame) -> None:
            tile = source.read(frame).copy()
            with target.target(frame) as result:
                numerics.scan(tile, result, kind, scan.dim, scan.reverse)

        return run

    return rule


operation(tl.CUMSUM)(_scan("cumsum"))
operation(tl.CUMMAX)(_scan("cummax"))


@operation(tl.IM2COL, tl.C2D_IM2COL)
def _im2col(compiler: Compiler, call: ir.Call) -> Closure:
    made = Im2col.of(call)
    image, columns = Region(compiler, made.image), Region(compiler, made.patches)
    settings = [compiler.expr(a) for a in made.settings]

    def run(frame: Frame) -> None:
        values = [uniform(s(frame), frame, "an argument of im2col") for s in settings]
        tile = image.read(frame)
        with columns.target(frame) as result:
            numerics.im2col(tile, matrix(result), *values)

    return run


# -- atomics on tiles, reducers ----------------------------------------------------------------------------------------


def _updates(compiler: Compiler, update: TileCopy) -> Callable[[Frame, tuple[int, ...]], np.ndarray]:
    """The values that an update combines with a tile of some extents: another tile, or one number."""
    if update.is_of_tiles:
        source = Region(compiler, update.source)
        return lambda frame, extents: fitted(source.read(frame), extents)
    value = compiler.expr(update.source)
    return lambda frame, extents: np.full(extents, uniform(value(frame), frame, "the value of an atomic"))


def _tile_atomic(op: str) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        update = TileCopy.of(call)
        target, source = Region(compiler, update.target), _updates(compiler, update)

        def run(frame: Frame) -> None:
            block = target.block(frame)
            tile = source(frame, block.extents)
            target.home.written(frame)
            view = block.view()
            target.home.touched(frame, DEVICE_ATOMIC, view)
            numerics.atomic_update(*located(view), tile if block.within else tile[block.clip()], op)

        return run

    return rule


operation(tl.ATOMICADD)(_tile_atomic("add"))
operation(tl.ATOMICMAX)(_tile_atomic("max"))
operation(tl.ATOMICMIN)(_tile_atomic("min"))


def rows_copy(compiler: Compiler, source: Region, target: Region, notes: Mapping[str, Any]) -> Closure:
    """The closure of a copy whose annotations name rows of the tensor, and the first column."""
    rows, column = [compiler.expr(r) for r in notes["gather4_rows"]], compiler.expr(notes["gather4_col"])
    tensor, tile = (target, source) if "is_scatter4" in notes else (source, target)

    def run(frame: Frame) -> None:
        array, held, first = tensor.home.array(frame), tile.home.array(frame), uniform(column(frame), frame, "a column")
        for number, row in enumerate(rows):
            there = Block(array, (uniform(row(frame), frame, "a row"), first), (1, held.shape[1]))
            here = Block(held, (number, 0), (1, held.shape[1]))
            from_, to = (there, here) if tensor is source else (here, there)
            target.store(frame, to, source.load(frame, from_))

    return run if compiler.data else lambda frame: None
