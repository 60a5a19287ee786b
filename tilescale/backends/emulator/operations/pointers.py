# SPDX-License-Identifier: MIT
"""Arguments that point to elements: `T.access_ptr(x[i], ...)`, `T.address_of(x[i])`, and elements that follow them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, spread
from tilescale.backends.emulator.interpret.access import Element, element
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.errors import UnsupportedError


def pointed(compiler: Compiler, pointer: Any) -> Element:
    """The element that `T.access_ptr(x[i], ...)` or `T.address_of(x[i])` points to.

    Raises:
        UnsupportedError: another kind of pointer.
    """
    while isinstance(pointer, ir.Call) and ir.op_name(pointer) in ("tl.access_ptr", "tirx.address_of"):
        pointer = pointer.args[0]
    if not isinstance(pointer, ir.BufferLoad):
        raise UnsupportedError(f"the emulator does not follow the pointer {pointer}")
    return element(compiler, pointer.buffer, pointer.indices)


def neighbours(element: Element, count: int, frame: Frame) -> list[np.ndarray]:
    """The values of `count` elements that follow one another, for each element of the space."""
    array, index = element.home.array(frame), tuple(i(frame) for i in element.indices)
    return [spread(element.at(array, (*index[:-1], index[-1] + step), frame), frame) for step in range(count)]
