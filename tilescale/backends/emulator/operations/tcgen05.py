# SPDX-License-Identifier: MIT
"""GEMMs in tensor memory: `T.ptx_tcgen05_mma_ss` and `T.ptx_tcgen05_mma_ts` of 128 rows, by one thread block.

PTX ISA, "Instruction descriptor" and "Data Path Layout D": row i lies in lane i, a column in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.matrices import TensorMemoryGemm
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.execute.observe import READ, WRITE
from tilescale.backends.emulator.interpret.abstract import forgotten
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.backends.emulator.operations.descriptors import Layouts, Matrices
from tilescale.backends.emulator.operations.pointers import elements_at
from tilescale.errors import UnsupportedError

_ROWS, _DEPTH_BYTES, _COLUMN_BITS = 128, 32, 32
_LANE = 16
"""First bit of the lane in an address of tensor memory."""


@operation(tl.PTX_TCGEN05_MMA_SS, tl.PTX_TCGEN05_MMA_TS)
def _product(compiler: Compiler, call: ir.Call) -> Closure:
    made = TensorMemoryGemm.of(call)
    if made.is_special:
        raise UnsupportedError(
            f"the emulator does not run {ir.op_name(call)} of two thread blocks, or with masks",
            hint="multiply the tiles: T.tcgen05_gemm, which does not wait",
        )
    total = _TensorMemory(compiler, made.total)
    if not compiler.data:
        return forgotten(())
    form, adds, begin = (compiler.expr(value) for value in (made.form, made.adds, made.total_at))
    a, b = (_operand(compiler, Matrices(compiler), *operand) for operand in (made.a, made.b))

    def run(frame: Frame) -> None:
        said = uniform(form(frame), frame, "an instruction descriptor")
        negates = (said >> 13 ^ said >> 14) & 1
        along_k = [not said >> bit & 1 for bit in (15, 16)]
        rows, columns = (said >> 24 & 0x1F) * 16, (said >> 17 & 0x3F) * 8
        if rows != _ROWS:
            raise UnsupportedError(
                f"the emulator runs GEMMs of {_ROWS} rows in tensor memory, this one has {rows}"
            )
        left, right = a(frame, rows, along_k[0]), b(frame, columns, along_k[1])
        clears = not uniform(adds(frame), frame, "scale_out")
        index = total.index(frame, uniform(begin(frame), frame, "an address of tensor memory"), rows, columns)
        result = np.zeros((rows, columns), total.home.dtype) if clears else total.load(frame, index)
        numerics.gemm(-left if negates else left, right, result, transpose_b=True)
        total.store(frame, index, result)

    return run


Operand = Callable[[Frame, int, bool], np.ndarray]
"""A matrix of some rows; a flag says whether elements are consecutive along K."""


def _operand(compiler: Compiler, matrices: Matrices, data: ir.Var, offset: ir.PrimExpr) -> Operand:
    moved, buffer = compiler.expr(offset), compiler.buffer_named(data)
    if buffer is not None and buffer.scope() == ir.TENSOR_MEMORY:
        memory = _TensorMemory(compiler, data)

        def held(frame: Frame, rows: int, along_k: bool) -> np.ndarray:
            begin = uniform(moved(frame), frame, "an address of tensor memory")
            return memory.load(frame, memory.index(frame, begin, rows, _DEPTH_BYTES // memory.home.dtype.itemsize))

        return held
    (descriptor,) = elements_at(compiler, data, 0, 1)

    def described(frame: Frame, rows: int, along_k: bool) -> np.ndarray:
        number, nbytes = (
            uniform(value, frame, "a matrix descriptor") for value in (descriptor.load(frame), moved(frame))
        )
        return matrices.read(frame, number + (nbytes >> 4), rows, _DEPTH_BYTES, along_k)

    return described


class _TensorMemory:
    def __init__(self, compiler: Compiler, data: ir.Var):
        buffer = compiler.buffer_named(data)
        if buffer is None:
            raise UnsupportedError(f"the emulator does not follow the pointer {data}")
        self.home, self._layout = Home(compiler, buffer), Layouts(compiler, buffer)

    def index(self, frame: Frame, address: int, rows: int, columns: int) -> tuple[np.ndarray, ...]:
        """The indices of the elements at an address, for each row and column. Raises OutOfBoundsError: some elements
        are outside the tile."""
        positions, width = self._layout.positions(frame), self._layout.width
        element = np.full((int(positions.max()) // width + 1, width), -1)
        element[positions // width, positions % width] = np.arange(positions.size)
        lane, column = address >> _LANE, (address & 0xFFFF) * _COLUMN_BITS // (8 * self.home.dtype.itemsize)
        chosen = element[lane : lane + rows, column : column + columns]
        shape = self.home.array(frame).shape
        if chosen.shape != (rows, columns) or (chosen < 0).any():
            place = [f"lanes {lane}:{lane + rows}", f"columns {column}:{column + columns}"]
            raise self.home.out_of_bounds(frame, place, shape)
        return np.unravel_index(chosen, shape)

    def load(self, frame: Frame, index: tuple[np.ndarray, ...]) -> np.ndarray:
        array = self.home.array(frame)
        self.home.touched(frame, READ, array, tuple(axis.reshape(-1) for axis in index))
        return array[index]

    def store(self, frame: Frame, index: tuple[np.ndarray, ...], values: np.ndarray) -> None:
        array = self.home.array(frame)
        self.home.written(frame)
        self.home.touched(frame, WRITE, array, tuple(axis.reshape(-1) for axis in index))
        array[index] = values
