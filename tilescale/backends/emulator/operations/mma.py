# SPDX-License-Identifier: MIT
"""GEMMs of a warp's registers: `T.ptx_mma` as called by TileLang's emitters of tensor core instructions; no other
forms.

PTX ISA, "Matrix Fragments for mma": in a GEMM of 16 x 8 x k, lane 4 g + t holds, of each 32-bit register, the elements
of row g (of a, in every other register row g + 8) whose columns begin at t times the elements of a register.
"""

from __future__ import annotations

import re

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.matrices import WarpGemm
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, spread
from tilescale.backends.emulator.interpret.abstract import forgotten
from tilescale.backends.emulator.interpret.access import Element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.backends.emulator.operations.pointers import elements_at
from tilescale.errors import UnsupportedError

_SHAPE = re.compile(r"m16n8k(\d+)")
_REGISTER_BITS = 32
_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4}

Places = tuple[np.ndarray, np.ndarray]
"""Row and column in a matrix of each lane's elements."""


def fragments(depth: int, bits: int) -> tuple[Places, Places, Places]:
    """Positions of the elements of a, of b and of the accumulator."""
    per_register = _REGISTER_BITS // bits
    lane = np.arange(32)[:, None]
    group, thread = lane >> 2, lane & 3

    def along(count: int, registers_side_by_side: int) -> tuple[np.ndarray, np.ndarray]:
        register, element = np.divmod(np.arange(count), per_register)
        block, part = np.divmod(register, registers_side_by_side)
        return part, thread * per_register + element + block * 4 * per_register

    lower, column = along(depth // 2, 2)
    _, row = along(depth // 4, 1)
    pair = np.arange(4)
    return (
        (group + 8 * lower, column),
        (row, np.broadcast_to(group, row.shape)),
        (group + 8 * (pair // 2), 2 * thread + pair % 2),
    )


@operation(tl.PTX_MMA)
def _warp_product(compiler: Compiler, call: ir.Call) -> Closure:
    made = WarpGemm.of(call)
    shape = _SHAPE.fullmatch(made.shape)
    buffers = [compiler.buffer_named(data) for data, _ in made.fragments]
    held = buffers[0]
    if shape is None or made.layouts != ("row", "col") or held is None or None in buffers:
        raise UnsupportedError(
            f"the emulator does not run mma of shape {made.shape}, layouts {made.layouts}",
            hint="it runs GEMMs of 16 x 8 x k of registers, row by column; T.gemm chooses an instruction by itself",
        )
    depth, kind = int(shape[1]), str(held.dtype)
    bits = _BITS.get(kind, 8 * numerics.numpy_dtype(kind).itemsize)
    places = fragments(depth, bits)
    a, b, c = (
        elements_at(compiler, data, position, rows.shape[1])
        for (data, position), (rows, _) in zip(made.fragments, places, strict=True)
    )
    if not compiler.data:
        return forgotten(c)
    in_a, in_b, in_c = places

    def run(frame: Frame) -> None:
        lefts, rights, totals = (_by_warp(part, frame) for part in (a, b, c))
        for left, right, total in zip(lefts, rights, totals, strict=True):
            result = _matrix(total, in_c, (16, 8))
            numerics.gemm(_matrix(left, in_a, (16, depth)), _matrix(right, in_b, (depth, 8)), result)
            total[...] = result[in_c]
        for target, values in zip(c, totals.reshape(-1, len(c)).T, strict=True):
            target.store(frame, values)

    return run


def _by_warp(elements: list[Element], frame: Frame) -> np.ndarray:
    """The elements of all threads: warp, lane, element."""
    return np.stack([spread(e.load(frame), frame) for e in elements], axis=-1).reshape(-1, 32, len(elements))


def _matrix(lanes: np.ndarray, places: Places, shape: tuple[int, int]) -> np.ndarray:
    made = np.zeros(shape, lanes.dtype)
    made[places] = lanes
    return made
