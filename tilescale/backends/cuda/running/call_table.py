# SPDX-License-Identifier: MIT
"""Calls of a function by the form of their arguments, and recorded calls, which C executes (native/calls.c)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined]

from tilescale.backends.cuda.running.native import ReplayRecord, loaded_code, ranges

CUDA = 2
"""DLPack's number of CUDA devices. Calls with tensors of other devices have no form."""

_CAPSULE = b"dlpack_exchange_api"


class TensorNumber(NamedTuple):
    """An argument or result: a tensor by its number, among those of the caller and those made by steps."""

    number: int


class TensorView(NamedTuple):
    """An argument or result: a view of a tensor, by its number; strides and offset are in elements of the tensor."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Reading(NamedTuple):
    """An argument or result: the result of a function of the list of all tensors."""

    read: Callable[[list[torch.Tensor]], Any]


class CallStep(NamedTuple):
    """A step that calls a function.

    Attributes:
        arguments: a TensorNumber, a TensorView, a Reading, or the value itself for each one; or lists and tuples of
            these, which are made anew in each call if they have tensors, or are lists.
        named: further arguments, by name.
        keeps: whether the results are tensors of later steps.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    named: dict[str, Any]
    keeps: bool


class LaunchStep(NamedTuple):
    """A step that launches programs; `is_later`: after something that cannot be undone."""

    record: ReplayRecord
    is_later: bool


class _Argument(ctypes.Structure):
    pass


_Argument._fields_ = (
    ("kind", ctypes.c_int64),
    ("number", ctypes.c_int64),
    ("value", ctypes.py_object),
    ("parts", ctypes.POINTER(_Argument)),
)


class _Step(ctypes.Structure):
    _fields_ = (
        ("record", ctypes.c_void_p),
        ("function", ctypes.py_object),
        ("arguments", ctypes.POINTER(_Argument)),
        ("count", ctypes.c_int64),
        ("names", ctypes.py_object),
        ("keeps", ctypes.c_int64),
        ("is_later", ctypes.c_int64),
    )


class _Recorded(ctypes.Structure):
    _fields_ = (
        ("owner", ctypes.py_object),
        ("steps", ctypes.POINTER(_Step)),
        ("count", ctypes.c_int64),
        ("result", _Argument),
        ("begin", ctypes.py_object),
        ("end", ctypes.py_object),
        ("refused", ctypes.py_object),
    )


class RecordedCall:
    """A call as C executes it: its steps, in order. `address`: that of its description."""

    def __init__(
        self,
        steps: Sequence[CallStep | LaunchStep],
        result: Any,
        begin: Callable[[], int | None],
        end: Callable[[], None],
        refused: Callable[[int], None],
        keeps: Any = None,
    ):
        """`result` is as an argument of a step.

        Args:
            begin: returns the stream to launch on; None if the call cannot be replayed now.
            end: ends a call that has begun.
            refused: raises the error of a launch that failed, given minus the driver's status.
            keeps: what must live as long as the call.
        """
        self._kept: list[Any] = [steps, result, begin, end, refused, keeps]
        made = (_Step * len(steps))(*map(self._step, steps))
        self._record = _Recorded(self, made, len(made), _argument(result), begin, end, refused)
        self.address = ctypes.addressof(self._record)

    def _step(self, step: CallStep | LaunchStep) -> _Step:
        if isinstance(step, LaunchStep):
            return _Step(record=step.record.address, is_later=step.is_later)
        values = [*step.arguments, *step.named.values()]
        given, names = (_Argument * len(values))(*map(_argument, values)), tuple(step.named)
        self._kept += [given, names]
        made = _Step(function=step.function, arguments=given, count=len(given), keeps=step.keeps)
        if names:
            made.names = names
        return made


_TENSOR, _VIEW, _READING, _VALUE, _TUPLE, _LIST = range(6)


def _argument(x: Any) -> _Argument:
    if x.__class__ is list or (x.__class__ is tuple and not _is_constant(x)):
        parts = (_Argument * len(x))(*map(_argument, x))
        return _Argument(_LIST if isinstance(x, list) else _TUPLE, len(x), None, parts)
    if isinstance(x, TensorNumber):
        return _Argument(_TENSOR, x.number)
    if isinstance(x, TensorView):
        return _Argument(_VIEW, x.number, tuple(x[1:]))
    return _Argument(_READING, 0, x.read) if isinstance(x, Reading) else _Argument(_VALUE, 0, x)


def _is_constant(x: Any) -> bool:
    """Whether all calls may have the same object: there are no tensors and lists in it."""
    if isinstance(x, list | TensorNumber | TensorView | Reading):
        return False
    return not isinstance(x, tuple) or all(map(_is_constant, x))


class CallTable:
    """The forms of a function's calls.

    Attributes:
        replay: takes a call's arguments, tensors among them also in tuples, lists and dictionaries. Returns the result
            of the recorded call; NotImplemented, and nothing done, if there is none.
        form: takes them, and returns the object that is kept for the form of the call, which may be new, and the
            tensors; None for arguments without a form: tensors of another class or device, values that cannot be
            hashed, and tensors for autograd to see if the table has no such forms.
    """

    def __init__(
        self,
        symmetric: Sequence[tuple[int, int]],
        state: Callable[[], Any],
        make: Callable[[], Any],
        sees_gradients: bool = False,
    ):
        """`state` returns further facts on which a call depends, `make` the object of a new form.

        Args:
            symmetric: begin and end of addresses that are a part of a form.
            sees_gradients: whether calls for autograd to see have forms, of their own.
        """
        code = _loaded()
        self._kept = ranges(symmetric), state, make
        given = ctypes.addressof(_python()), self._kept[0], len(symmetric), state, make, sees_gradients
        self._table = code.calls_new(*given)
        self.replay, self.form = (_builtin(code, name, self._table) for name in ("replay_method", "form_method"))
        self._record = code.calls_record
        weakref.finalize(self, code.calls_free, self._table).atexit = False  # others' functions may call, too

    def record(self, kept: Any, call: RecordedCall | None) -> None:
        """Replay calls of the form that this object is kept for; None: no longer."""
        self._record(self._table, kept, None if call is None else call.address)


def set_busy(is_busy: bool) -> None:
    """Replay nothing while a call is recorded."""
    _loaded().set_busy(is_busy)


class _Python(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.py_object) for name in ("tensor", "parameter", "tuple", "list", "dict", "none")),
        *((name, ctypes.py_object) for name in ("not_replayed", "records_grads", "is_negative", "is_conjugate")),
        ("requires_grad", ctypes.py_object),
        ("view_of", ctypes.py_object),
        ("exchange", ctypes.c_void_p),
        ("device_type", ctypes.c_int64),
    )


@cache
def _python() -> _Python:
    """Objects of Python and PyTorch for the code in C, which reads tensors by DLPack's DLPackExchangeAPI."""
    # Views as in inductor's graphs, without the dispatcher: to autograd, which forbids changes of views, plain tensors.
    types = torch.Tensor, torch.nn.Parameter, tuple, list, dict
    functions = torch.is_grad_enabled, torch.Tensor.is_neg, torch.Tensor.is_conj
    pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    exchange = pointer_in(("PyCapsule_GetPointer", ctypes.pythonapi))(torch.Tensor.__dlpack_c_exchange_api__, _CAPSULE)
    return _Python(*types, None, NotImplemented, *functions, "requires_grad", _reinterpret_tensor, exchange, CUDA)


@cache
def _loaded() -> ctypes.PyDLL:
    """The code, whose functions handle Python's objects. Raises as `loaded_code`."""
    code = ctypes.PyDLL(loaded_code().plain._name)
    address, number, object_ = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
    for name, result, *given in (
        ("calls_new", address, address, address, number, object_, object_, number),
        ("calls_record", None, address, object_, address),
        ("calls_free", None, address),
        ("set_busy", None, ctypes.c_int32),
    ):
        function = getattr(code, name)
        function.restype, function.argtypes = result, given
    return code


def _builtin(code: ctypes.PyDLL, name: str, table: int) -> Callable[[Any], Any]:
    """A function in C of one argument, for a table."""
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    new = make(("PyCFunction_NewEx", ctypes.pythonapi))
    made: Callable[[Any], Any] = new(ctypes.addressof(ctypes.c_char.in_dll(code, name)), table, None)
    return made
