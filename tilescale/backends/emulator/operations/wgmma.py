# SPDX-License-Identifier: MIT
"""GEMMs of a warpgroup: `T.ptx_wgmma_ss` and `T.ptx_wgmma_rs`, complete at once.

PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions": each warp has 16 of the 64 rows, and a
thread of it the elements of one 16 x 8 GEMM (mma.py) for every 8 columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.matrices import WarpGroupGemm
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, active, spread, uniform
from tilescale.backends.emulator.execute.observe import READ, WRITE
from tilescale.backends.emulator.interpret.abstract import forgotten
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.backends.emulator.operations.descriptors import Layouts, Matrices
from tilescale.backends.emulator.operations.mma import Places, fragments
from tilescale.backends.emulator.operations.pointers import elements_at
from tilescale.errors import UnsupportedError

_THREADS, _ROWS, _DEPTH_BYTES = 128, 64, 32
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")

Operand = Callable[[Frame, int], np.ndarray]
"""The matrix of a warpgroup, by its number."""


@operation(tl.PTX_WGMMA_SS, tl.PTX_WGMMA_RS)
def _product(compiler: Compiler, call: ir.Call) -> Closure:
    made = WarpGroupGemm.of(call)
    shape = _SHAPE.fullmatch(made.shape)
    assert shape is not None, f"wgmma of shape {made.shape}"
    columns, depth = int(shape[1]), int(shape[2])
    in_a, _, in_c = fragments(depth, 8 * _DEPTH_BYTES // depth)
    of_total = _of_group(in_c, columns // 8, (0, 8))
    total, adds = _Registers(compiler, *made.accumulator, columns // 2), compiler.expr(made.adds)
    if not compiler.data:
        return forgotten(total.private)
    matrices = Matrices(compiler)
    a = (
        _held(_Registers(compiler, *made.operands[0], depth // 2), _of_group(in_a, 1, (0, 0)), depth)
        if made.along_k[0] is None
        else _described(compiler, matrices, *made.operands[0], _ROWS, made.along_k[0])
    )
    b = _described(compiler, matrices, *made.operands[1], columns, made.along_k[1])
    negates = math.prod(made.signs) < 0

    def run(frame: Frame) -> None:
        acting = np.asarray(active(frame).reshape(-1, _THREADS).any(axis=1))
        clears = not uniform(adds(frame), frame, "scale_out")
        held = np.zeros((acting.size, _THREADS, columns // 2), total.dtype) if clears else total.load(frame).copy()
        for group in np.flatnonzero(acting).tolist():
            result, left = np.zeros((_ROWS, columns), total.dtype), a(frame, group)
            result[of_total] = held[group]
            numerics.gemm(-left if negates else left, b(frame, group), result, transpose_b=True)
            held[group] = result[of_total]
        total.store(frame, held, acting)

    return run


def _of_group(of_warp: Places, count: int, step: tuple[int, int]) -> Places:
    """Row and column of each element of each thread of a warpgroup. A warp has `count` matrices, `step` apart, 16 rows
    below those of the previous warp."""
    number, warp = np.arange(count)[:, None], np.arange(_THREADS // 32)[:, None, None]
    row, column = (
        (part[:, None] + number * distance).reshape(len(part), -1) for part, distance in zip(of_warp, step, strict=True)
    )
    rows = (row + 16 * warp).reshape(_THREADS, -1)
    return rows, np.broadcast_to(column, (len(warp), *column.shape)).reshape(rows.shape)


def _described(
    compiler: Compiler, matrices: Matrices, data: ir.Var, offset: ir.PrimExpr, rows: int, along_k: bool
) -> Operand:
    """The matrix that a descriptor names, at an offset."""
    (descriptor,), moved = elements_at(compiler, data, 0, 1), compiler.expr(offset)

    def of(frame: Frame, group: int) -> np.ndarray:
        number, behind = (
            int(spread(value, frame).reshape(-1, _THREADS)[group, 0])
            for value in (descriptor.load(frame), moved(frame))
        )
        return matrices.read(frame, number + behind, rows, _DEPTH_BYTES, along_k)

    return of


def _held(registers: _Registers, places: Places, depth: int) -> Operand:
    def of(frame: Frame, group: int) -> np.ndarray:
        found = np.zeros((_ROWS, depth), registers.dtype)
        found[places] = registers.load(frame)[group]
        return found

    return of


class _Registers:
    """Elements of each thread, from a position in its part of a tile in registers, or in its own buffer. `private`: the
    elements, where the buffer is thread-private."""

    def __init__(self, compiler: Compiler, data: ir.Var, position: ir.PrimExpr | int, count: int):
        buffer = compiler.buffer_named(data)
        if buffer is None:
            raise UnsupportedError(f"the emulator does not follow the pointer {data}")
        self._home, self._layout, self._count = Home(compiler, buffer), Layouts(compiler, buffer), count
        self.dtype = self._home.dtype
        self.private = elements_at(compiler, data, position, count) if self._home.private else []
        self._position = compiler.expr(position)
        if not (self.private or self._layout.is_distributed):
            raise UnsupportedError(
                f"wgmma of the tile {buffer.name!r} in registers, whose distribution over threads is unknown",
                hint="T.annotate_layout({tile: emitter.make_mma_store_layout(tile)}), or T.alloc_local",
            )

    def load(self, frame: Frame) -> np.ndarray:
        """The elements of each thread of each warpgroup."""
        if self.private:
            found = np.stack([spread(e.load(frame), frame) for e in self.private], axis=-1)
            return found.reshape(-1, _THREADS, self._count)
        array, index = self._home.array(frame), self._index(frame)
        self._home.touched(frame, READ, array, tuple(axis.reshape(-1) for axis in index))
        return array[index]

    def store(self, frame: Frame, values: np.ndarray, acting: np.ndarray) -> None:
        for place, element in enumerate(self.private):
            element.store(frame, values[..., place].reshape(frame.space))
        if not self.private:
            array, index = self._home.array(frame), tuple(axis[acting] for axis in self._index(frame))
            self._home.written(frame)
            self._home.touched(frame, WRITE, array, tuple(axis.reshape(-1) for axis in index))
            array[index] = values[acting]

    def _index(self, frame: Frame) -> tuple[np.ndarray, ...]:
        """The indices of each thread's elements, by warpgroup, thread, and element."""
        threads, positions = self._layout.threads(frame), self._layout.positions(frame)
        element = np.zeros((int(threads.max()) + 1, int(positions.max()) + 1), int)
        element[threads, positions] = np.arange(threads.size)
        first = uniform(self._position(frame), frame, "the position of an accumulator")
        chosen = element[:, first : first + self._count].reshape(-1, _THREADS, self._count)
        return np.unravel_index(chosen, self._home.array(frame).shape)
