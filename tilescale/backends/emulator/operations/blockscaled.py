# SPDX-License-Identifier: MIT
"""GEMMs of operands with a scale for each block along K, and the copies of scales into tensor memory.

Four scales share a word of 32 bits. In shared memory or fragments a row's words follow one another. In tensor memory
the words of 128 rows lie in 4 columns of 32 lanes, each lane four times (PTX ISA, "tcgen05.mma Scale Factor Layout"):
row m is in lane m % 32, column m // 32. `tcgen05.cp.warpx4` copies transposed words there.
"""

from __future__ import annotations

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import ScaleCopy, operand_of
from tilelang_core.tiles import ScaledGemm
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.execute.observe import READ, WRITE
from tilescale.backends.emulator.interpret.access import Element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Region
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.backends.emulator.operations.pointers import pointed
from tilescale.backends.emulator.operations.tiles import announced, matrix
from tilescale.errors import UnsupportedError

_CHUNK, _LANES, _WARPS = 128, 32, 4
"""Words that are moved at once; lanes of tensor memory of one warp, and warps."""

_NVF4_BLOCK = 16
"""Elements of a block of float4 whose scale is e4m3; other blocks have powers of two (OCP Microscaling Formats)."""


@operation(tl.GEMM_BLOCKSCALED, tl.TCGEN05_GEMM_BLOCKSCALED)
def _gemm(compiler: Compiler, call: ir.Call) -> Closure:
    if ir.attribute(call, "use_2cta", 0) or ir.attribute(call, "sf_layout", "rowmajor") != "rowmajor":
        raise UnsupportedError("the emulator runs block-scaled GEMMs of one thread block with scales row by row")
    product = ScaledGemm.of(call)
    a, b, c = (Region(compiler, r) for r in product.operands)
    flips = product.transpose_a, product.transpose_b
    clear, start = compiler.expr(product.clear), compiler.expr(product.first)
    sides = [
        _Scales(compiler, scales, ir.attribute(call, f"sf_{side}_granularity_k"))
        for scales, side in zip(product.scales, "ab", strict=True)
    ]

    def multiply(frame: Frame) -> None:
        clears, first = bool(uniform(clear(frame), frame, "clear_accum")), uniform(start(frame), frame, "k_start")
        left, right = matrix(a.read(frame)), matrix(b.read(frame))
        rows = left.shape[1 if flips[0] else 0], right.shape[0 if flips[1] else 1]
        depth = left.shape[0 if flips[0] else 1]
        scales = [side.of(frame, count, first, depth) for side, count in zip(sides, rows, strict=True)]
        with c.target(frame, reads=not clears) as result:
            numerics.gemm_blockscaled(
                left,
                right,
                matrix(result),
                *scales,
                k_start=0,
                granularity_a=1,
                granularity_b=1,
                transpose_a=flips[0],
                transpose_b=flips[1],
                clear=clears,
            )

    return announced(compiler, product, multiply)


class _Scales:
    def __init__(self, compiler: Compiler, region: ir.Call, granularity: int):
        self.region, self.granularity = Region(compiler, region), granularity
        self.in_tensor_memory = self.region.home.buffer.scope() == ir.TENSOR_MEMORY
        self.dtype = numerics.numpy_dtype("float8_e4m3fn" if granularity == _NVF4_BLOCK else "float8_e8m0fnu")

    def of(self, frame: Frame, rows: int, first: int, depth: int) -> np.ndarray:
        """The scale of each element along K of each row, from the scales of the period of K that contains `first`."""
        tile = matrix(self.region.read(frame)) if self.region.home.buffer.shape[1:] else self.region.read(frame)
        if self.in_tensor_memory:
            tile = _rows_of(tile, rows)
        scales = np.ascontiguousarray(tile.reshape(rows, -1)).view(self.dtype)
        return scales[:, (first + np.arange(depth)) // self.granularity % scales.shape[1]]


def _rows_of(tile: np.ndarray, rows: int) -> np.ndarray:
    """Tensor memory -> the words of each row."""
    chunks = [tile[:_LANES, column : column + 4].T.reshape(-1) for column in range(0, rows // _LANES, 4)]
    return np.concatenate(chunks)[:rows]


@operation(tl.PTX_TCGEN05_SF_WARP_TRANSPOSE)
def _transpose(compiler: Compiler, call: ir.Call) -> Closure:
    """Transpose words: 4 rows of 32 become 32 rows of 4."""
    first = pointed(compiler, operand_of(call))

    def run(frame: Frame) -> None:
        words = _words(first, frame)
        first.home.written(frame)
        for kind in (READ, WRITE):
            first.home.touched(frame, kind, words)
        words[:] = words.reshape(4, _LANES).T.reshape(-1).copy()

    return run if compiler.data else lambda frame: None


@operation(tl.PTX_TCGEN05_CP_WARPX4)
def _copy(compiler: Compiler, call: ir.Call) -> Closure:
    """Copy words into four columns of tensor memory."""
    made = ScaleCopy.of(call)
    source, column = pointed(compiler, made.source), compiler.expr(made.column)
    target = compiler.buffer_named(made.target)
    if target is None:
        raise UnsupportedError(f"the emulator does not follow the pointer {made.target}")
    region = Region(compiler, ir.BufferLoad(target, [ir.int_node(0)] * len(target.shape)))

    def run(frame: Frame) -> None:
        words, begin = _words(source, frame), uniform(column(frame), frame, "a column of tensor memory")
        source.home.touched(frame, READ, words)
        array = region.home.array(frame)
        view = array[:, begin : begin + 4]
        if view.shape != (_WARPS * _LANES, 4):
            raise region.home.out_of_bounds(frame, [f"0:{_WARPS * _LANES}", f"{begin}:{begin + 4}"], array.shape)
        region.home.written(frame)
        region.home.touched(frame, WRITE, view)
        view[...] = np.tile(words.reshape(_LANES, 4), (_WARPS, 1))

    return run if compiler.data else lambda frame: None


def _words(first: Element, frame: Frame) -> np.ndarray:
    array = first.home.array(frame)
    place = [uniform(i(frame), frame, "where scales begin") for i in first.indices]
    flat = array.reshape(-1)
    begin = int(np.ravel_multi_index(place, array.shape))
    if begin + _CHUNK > flat.size:
        raise first.home.out_of_bounds(frame, [f"{begin}:{begin + _CHUNK}"], flat.shape)
    return flat[begin : begin + _CHUNK]
