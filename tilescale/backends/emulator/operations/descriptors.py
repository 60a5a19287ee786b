# SPDX-License-Identifier: MIT
"""Matrix descriptors of shared memory: numbers that encode the addresses of core matrices of 8 x 16 bytes.

The emulator keeps tiles without a layout. To follow a descriptor it assigns each tile of a program an address, in the
order of their declarations, and uses the layout of `T.annotate_layout`, or row-major order without one. PTX ISA,
"Asynchronous warpgroup-level matrix shared memory layout".
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.layouts import TileLayout
from tilelang_core.matrices import MatrixDescriptor, bytes_behind, moved_descriptor
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.observe import READ
from tilescale.backends.emulator.interpret.access import element
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.backends.emulator.operations.pointers import pointed
from tilescale.errors import OutOfBoundsError, UnsupportedError

_UNIT = 16
"""Bytes of a row of a core matrix; the unit of all fields of descriptors."""
_FIELD = (1 << 14) - 1
_LEADING, _STRIDE, _SWIZZLE = 16, 32, 62
"""First bits of fields; the address begins at bit 0."""
_WIDTHS = (1, 8, 4, 2)
"""Number of units that a swizzle mode permutes: none, 128, 64, 32 bytes."""
_ALIGNMENT = 1024


class Layouts:
    """Positions of a tile's elements in the layout that the program gives it. `is_distributed`: whether the layout
    names the thread that holds each element."""

    def __init__(self, compiler: Compiler, buffer: ir.Buffer):
        self.buffer = buffer
        given = dict(compiler.launch.notes).get(tl.LAYOUTS, {}).get(buffer.data)
        self.layout = TileLayout.of(given) if given is not None else None
        self.is_distributed = self.layout is not None and self.layout.thread is not None
        if self.layout is not None:
            self._slots = [compiler.slot(var) for var in self.layout.indices]
            self._position = compiler.expr(self.layout.position)
            if self.layout.thread is not None:
                self._thread = compiler.expr(self.layout.thread)

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(map(ir.integer, self.buffer.shape))

    @property
    def width(self) -> int:
        """Number of positions in a row of memory."""
        return ir.integer(self.buffer.shape[-1]) if self.layout is None else self.layout.width

    def positions(self, frame: Frame) -> np.ndarray:
        """The position of each element, in row-major order of its indices."""
        return np.arange(self.size) if self.layout is None else self._of_all(self._position, frame)

    def threads(self, frame: Frame) -> np.ndarray:
        """The thread that holds each element of a fragment."""
        return self._of_all(self._thread, frame)

    def _of_all(self, closure: Closure, frame: Frame) -> np.ndarray:
        shape = [ir.integer(n) for n in self.buffer.shape]
        for slot, values in zip(self._slots, np.indices(shape, np.int32), strict=True):
            frame.slots[slot] = values.reshape(-1)
        return np.broadcast_to(closure(frame), self.size)


class _Tile:
    """A tile in shared memory. `begin`: its address, in bytes."""

    def __init__(self, compiler: Compiler, buffer: ir.Buffer, begin: int):
        self.home, self.layout, self.begin = Home(compiler, buffer), Layouts(compiler, buffer), begin
        self._elements: np.ndarray | None = None
        self.end = begin + self.layout.size * self.home.dtype.itemsize

    def elements(self, frame: Frame) -> np.ndarray:
        """The element at each position, as a row-major number; -1 for padding."""
        if self._elements is None:
            positions = self.layout.positions(frame)
            self._elements = np.full(int(positions.max()) + 1, -1)
            self._elements[positions] = np.arange(positions.size)
        return self._elements


def _tiles(compiler: Compiler) -> list[_Tile]:
    made: list[_Tile] = []
    for buffer in compiler.launch.buffers:
        if buffer.scope() in ir.SHARED and ir.constants(buffer.shape) is not None:
            begin = -(-made[-1].end // _ALIGNMENT) * _ALIGNMENT if made else 0
            made.append(_Tile(compiler, buffer, begin))
    return made


class Matrices:
    """Matrices in shared memory that descriptors name."""

    def __init__(self, compiler: Compiler):
        self._tiles = _tiles(compiler)

    def read(self, frame: Frame, descriptor: int, rows: int, nbytes: int, along_k: bool) -> np.ndarray:
        """The matrix of `rows` by K, which is `nbytes` long. Raises OutOfBoundsError: it does not lie wholly in one
        tile."""
        tile = self._tile(descriptor & _FIELD)
        array, size = tile.home.array(frame), tile.home.dtype.itemsize
        units = _units(descriptor, rows, nbytes, size, along_k)
        places = (units * _UNIT - tile.begin)[..., None] // size + np.arange(_UNIT // size)
        places = (places if along_k else places.swapaxes(1, 2)).reshape(rows, nbytes // size)
        elements = tile.elements(frame)
        inside = (places >= 0) & (places < elements.size)
        if not inside.all():
            raise tile.home.out_of_bounds(frame, [f"position {int(places[~inside][0])}"], array.shape)
        index = np.unravel_index(elements[places], array.shape)
        tile.home.touched(frame, READ, array, tuple(axis.reshape(-1) for axis in index))
        return array[index]

    def _tile(self, unit: int) -> _Tile:
        for tile in self._tiles:
            if tile.begin <= unit * _UNIT < tile.end:
                return tile
        raise OutOfBoundsError(f"a matrix descriptor names address {unit * _UNIT}, where no tile lies")


def _units(descriptor: int, rows: int, nbytes: int, size: int, along_k: bool) -> np.ndarray:
    """Addresses of the rows, or columns, of core matrices, in units."""
    begin, leading, stride = (descriptor >> bit & _FIELD for bit in (0, _LEADING, _STRIDE))
    width = _WIDTHS[descriptor >> _SWIZZLE]
    if along_k:
        row, unit = np.ogrid[:rows, : nbytes // _UNIT]
        found = row % 8 * width + row // 8 * stride + unit * (1 if width > 1 else leading)
    else:
        unit, k = np.ogrid[: rows * size // _UNIT, : nbytes // size]
        across, along = (stride, leading) if width == 1 else (leading, stride)
        found = unit % width + unit // width * across + k % 8 * width + k // 8 * along
    found = found + begin
    return found ^ (found >> 3 & width - 1)


@operation(tl.INITIALIZE_WGMMA_DESCRIPTOR, tl.INITIALIZE_TCGEN05_DESCRIPTOR, collective=False)
def _initialize(compiler: Compiler, call: ir.Call) -> Closure:
    made = MatrixDescriptor.of(call)
    if made.swizzle is None:
        raise UnsupportedError("the emulator follows matrix descriptors without a base offset, swizzled by 16 bytes")
    target = element(compiler, made.target.buffer, made.target.indices)
    pointer, offset = _start(compiler, made.start)
    first = pointed(compiler, pointer)
    tile = next((t for t in _tiles(compiler) if t.home.slot == first.home.slot), None)
    if tile is None:
        raise UnsupportedError(f"a descriptor of {first.home.name}, which is not in shared memory")
    fields = made.leading << _LEADING | made.stride << _STRIDE | made.swizzle << _SWIZZLE

    def run(frame: Frame) -> None:
        indices = tuple(np.asarray(index(frame)) for index in first.indices)
        place = tile.layout.positions(frame)[np.ravel_multi_index(indices, first.home.array(frame).shape)]
        address = tile.begin + place * tile.home.dtype.itemsize + offset(frame)
        target.store(frame, np.uint64(fields) | np.asarray(address // _UNIT & _FIELD, np.uint64))

    return run


def _start(compiler: Compiler, start: Any) -> tuple[Any, Closure]:
    """A pointer to an element, and the byte offset of a matrix from it."""
    start = compiler.deferred.get(start, start) if isinstance(start, ir.Var) else start
    if ir.op_name(start) == tl.HANDLE_ADD_BYTE_OFFSET:
        pointer, offset = bytes_behind(start)
        return pointer, compiler.expr(offset)
    return start, lambda frame: 0


@operation(tl.INCREASE_DESCRIPTOR_OFFSET, collective=False)
def _increase(compiler: Compiler, call: ir.Call) -> Closure:
    load, offset = moved_descriptor(call)
    target, increment = element(compiler, load.buffer, load.indices), compiler.expr(offset)

    def run(frame: Frame) -> None:
        target.store(frame, np.asarray(target.load(frame), np.uint64) + np.asarray(increment(frame) >> 4, np.uint64))

    return run
