# SPDX-License-Identifier: MIT
"""Python stand-ins for external functions, whose source only a C compiler understands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import DeclaredPointer
from tilescale.backends.emulator.execute.frame import Frame, active, is_vector, spread
from tilescale.backends.emulator.execute.memory import PrivateBuffer
from tilescale.backends.emulator.execute.observe import READ, WRITE
from tilescale.backends.emulator.interpret.abstract import forgotten
from tilescale.backends.emulator.interpret.access import Element, python_int
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.numerics import convert, numpy_dtype
from tilescale.backends.emulator.operations.pointers import is_pointer, pointed
from tilescale.errors import NoDataError, UnsupportedError, UsageError, check_type

Function = TypeVar("Function", bound=Callable[..., Any])

_STAND_INS: dict[str, Callable[..., Any]] = {}


def stand_in(name: str) -> Callable[[Function], Function]:
    """Register a Python function that does in the emulator what the external function `name` does on hardware.

    It is called once for each thread that calls the external one, with Python numbers for numbers, and for a pointer
    with a one-dimensional array that begins at the element pointed to and may be written. Its result is the value of
    the call. The checks see accesses through `T.access_ptr`, which gives the number of elements and the direction;
    accesses to thread-private variables are not checked::

        @tilescale.stand_in("saturating_add")
        def saturating_add(a, b):
            return min(a + b, 255)

    Args:
        name: as in `T.call_extern(dtype, name, ...)`. A second registration replaces the first.

    Raises:
        UsageError: no name is given. An exception in a call of the function becomes one, too.
    """
    check_type("name", name, 'the name of the external function: @tilescale.stand_in("saturating_add")', str)

    def register(function: Function) -> Function:
        _STAND_INS[name] = function
        return function

    return register


def call_stand_in(compiler: Compiler, name: str, args: Sequence[Any], dtype: str) -> Closure:
    """The closure of a call of an external function. Raises UnsupportedError: no stand-in is registered."""
    if name not in _STAND_INS:
        raise UnsupportedError(
            f"the emulator does not run the external function {name!r}",
            hint=f'say in Python what it does: @tilescale.stand_in("{name}"), or express it with TileLang operations',
        )
    given = [_Pointer(compiler, arg) if is_pointer(compiler, arg) else _Number(compiler, arg) for arg in args]
    wanted = None if dtype == "handle" else numpy_dtype(dtype)
    function = _with_located_errors(name, _STAND_INS[name], wanted)
    if not compiler.data:
        pointers = [argument.element for argument in given if isinstance(argument, _Pointer)]
        return forgotten(pointers) if wanted is None else _unknown(name)

    def run(frame: Frame) -> Any:
        for argument in given:
            argument.begin(frame)
        if wanted is not None and not any(argument.differs for argument in given):
            return python_int(function(*[argument.of(()) for argument in given]))
        found = np.zeros(frame.space, wanted or np.dtype(np.int32))
        for index in map(tuple, np.argwhere(active(frame))):
            value = function(*[argument.of(index) for argument in given])
            if wanted is not None:
                found[index] = value
        return found

    return run


def _with_located_errors(name: str, function: Callable[..., Any], wanted: np.dtype | None) -> Callable[..., Any]:
    """The function with its result converted; its exceptions become the user's errors with the line of the call."""

    def call(*given: Any) -> Any:
        try:
            value = function(*given)
            if wanted is None:
                return None
            if value is None:
                raise TypeError("it returned None, and the program uses its value")
            return convert(value, wanted)
        except Exception as error:
            raise UsageError(
                f"the stand-in for {name!r} failed: {type(error).__name__}: {error}",
                hint="its own lines are in the cause of this error",
            ) from error

    return call


def _unknown(name: str) -> Closure:
    def run(frame: Frame) -> Any:
        raise NoDataError(f"what {name} returns is unknown in a run without data", hint="leave data=False out")

    return run


class _Number:
    """A scalar argument, for each element of the space."""

    def __init__(self, compiler: Compiler, arg: ir.PrimExpr):
        self._closure = compiler.expr(arg)
        self.differs = False

    def begin(self, frame: Frame) -> None:
        self._value = self._closure(frame)
        self.differs = is_vector(self._value)
        if self.differs:
            self._value = spread(self._value, frame)

    def of(self, index: tuple[int, ...]) -> Any:
        """The argument of the space's element at `index`, as a Python number."""
        value = self._value[index] if self.differs else self._value
        return value.item() if isinstance(value, np.generic) else value


class _Pointer:
    differs = True

    def __init__(self, compiler: Compiler, arg: ir.PrimExpr):
        self.element: Element = pointed(compiler, arg)
        declared = DeclaredPointer.of(arg) if ir.op_name(arg) == tl.DECLARED_PTR else None
        self._extent = compiler.expr(declared.extent) if declared is not None else None
        self._mask = declared.mask if declared is not None else 0

    def begin(self, frame: Frame) -> None:
        home = self.element.home
        self._array = home.array(frame)
        self._indices = [spread(i(frame), frame) for i in self.element.indices]
        self._count = spread(self._extent(frame), frame) if self._extent is not None else None
        writes = bool(self._mask & 2) or self._extent is None
        if isinstance(self._array, PrivateBuffer):
            self._array.part(frame)
            for index in np.ndindex(self._array.shape) if writes else ():
                home.touched_private(frame, WRITE, self._array, index)
        elif writes:
            home.written(frame)
        self._frame = frame

    def of(self, index: tuple[int, ...]) -> np.ndarray:
        """The elements from the address of one element of the space."""
        place = [int(i[index]) for i in self._indices]
        array = self._array.data[index] if isinstance(self._array, PrivateBuffer) else self._array
        if not all(0 <= i < n for i, n in zip(place, array.shape, strict=True)):
            raise self.element.home.out_of_bounds(self._frame, place, array.shape)
        view = array.reshape(-1)[np.ravel_multi_index(place, array.shape) :]
        if self._count is not None and not isinstance(self._array, PrivateBuffer):
            view = view[: int(self._count[index])]
            for bit, kind in ((1, READ), (2, WRITE)):
                if self._mask & bit:
                    self.element.home.touched(self._frame, kind, view)
        return view
