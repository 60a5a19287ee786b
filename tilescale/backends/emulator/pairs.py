# SPDX-License-Identifier: MIT
"""Four-bit numbers, two in a byte in PyTorch: unpacked for a run, packed after it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.numerics import element_type, lane_axis, numpy_dtype
from tilescale.program.arguments import TWO_IN_A_BYTE

_HALF = 4
"""Bits of an element; the first of two is the lower half of their byte."""


class Pairs:
    """The arguments of a run that hold two elements in a byte."""

    def __init__(self) -> None:
        # Data pointer and shape of a tensor -> its bytes, its elements, whether they are written.
        self._known: dict[Any, tuple[np.ndarray, np.ndarray, bool]] = {}

    def elements(self, buffer: ir.Buffer, array: np.ndarray, written: bool) -> np.ndarray | None:
        """The elements of an argument, one in each array element; None if it holds no pairs."""
        declared = str(buffer.dtype)
        if element_type(declared) not in TWO_IN_A_BYTE or array.dtype not in (np.uint8, np.int8):
            return None
        given = array.view(np.uint8)
        key = given.__array_interface__["data"][0], given.shape, given.strides, declared
        found = self._known.get(key)
        if found is None:
            halves = np.stack([given & 0xF, given >> _HALF], axis=-1)
            shape = given.shape if lane_axis(declared) else given.shape[:-1]
            elements = halves.reshape(*shape, -1).view(numpy_dtype(element_type(declared)))
        else:
            elements, written = found[1], written or found[2]
        self._known[key] = given, elements, written
        return elements

    def put_together(self) -> None:
        """Pack the written elements into their bytes after the run."""
        for given, elements, written in self._known.values():
            if written:
                halves = elements.view(np.uint8).reshape(*given.shape, 2) & 0xF
                given[...] = halves[..., 0] | halves[..., 1] << _HALF
