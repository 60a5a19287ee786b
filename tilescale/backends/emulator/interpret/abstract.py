# SPDX-License-Identifier: MIT
"""Runs without data: tiles and tensors have shapes only; flags, indices and thread-private variables have values.

Values that depend on the data of a tensor are unknown: an error only where one is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.memory import PrivateBuffer
from tilescale.backends.emulator.interpret.access import Element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.regions import Region
from tilescale.errors import NoDataError


class Unknown:
    """The value of a variable that depends on data; any use raises the error that explains why."""

    __slots__ = ("error",)

    def __init__(self, error: NoDataError):
        self.error = error

    def _fail(self, *_: Any) -> NoReturn:
        raise self.error

    __bool__ = __int__ = __index__ = __float__ = __neg__ = __invert__ = __array__ = _fail
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _fail
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __lt__ = __le__ = __gt__ = __ge__ = _fail
    __eq__ = __ne__ = __hash__ = __abs__ = __pow__ = __rpow__ = __lshift__ = __rshift__ = _fail
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _fail


def known_or_not(value: Closure) -> Closure:
    """A closure that yields Unknown where `value` depends on data."""

    def run(frame: Frame) -> Any:
        try:
            return value(frame)
        except NoDataError as error:
            return Unknown(error)

    return run


def store(target: Element, value: Closure) -> Closure:
    """A store to buffers that have values. It may make a thread-private variable unknown.

    Raises (when run):
        NoDataError: the value of a flag would depend on data.
    """

    def run(frame: Frame) -> None:
        array = target.home.array(frame)
        if not isinstance(array, PrivateBuffer) and not array.flags.writeable:
            return
        found = known_or_not(value)(frame)
        if isinstance(array, PrivateBuffer):
            array.known = not isinstance(found, Unknown)
            if not array.known:
                return
        target.store(frame, found)

    return run


def forgotten(targets: Sequence[Element | Region]) -> Closure:
    """The replacement of a store: thread-private buffers become unknown, tensors have no values anyway."""

    def run(frame: Frame) -> None:
        for target in targets:
            array = target.home.array(frame)
            if isinstance(array, PrivateBuffer):
                array.known = False

    return run
