# SPDX-License-Identifier: MIT
"""Argument checks shared by all ranks and back ends, and the effects of a call that PyTorch has to know."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from tilelang_core import ir
from tilescale.errors import ArgumentError
from tilescale.hda.units import format_count
from tilescale.program.effects import statements
from tilescale.program.extents import evaluate, solve
from tilescale.program.model import Parameter, Program

TWO_IN_A_BYTE = ("float4_e2m1fn", "int4", "uint4")
"""Types of which PyTorch holds two elements in a byte."""


def bind(
    program: Program,
    unit: int,
    values: Sequence[Any],
    units: Mapping[ir.Var, int],
    device: torch.device | None,
    written: frozenset[int],
) -> dict[ir.Var, float]:
    """Bind a unit's arguments: the values of scalars, and of extents, which their shapes determine. Raises
    ArgumentError: count, type, data type, device or shape differ from the program's, or a tensor cannot take results.

    Args:
        units: numbers of units that the launch leaves open.
        device: where tensors have to be; None where arguments have a shape, and need not have anything else.
        written: positions of the tensors that take results.
    """
    try:
        return _bound(program, values, units, device, written)
    except ArgumentError as error:
        level = program.extents[-1][0] if program.extents else "unit"
        found = f"{program.name}, arguments of {level} {unit}: {error.message}"
        raise ArgumentError(found, hint=error.hint) from None


def _bound(
    program: Program,
    values: Sequence[Any],
    units: Mapping[ir.Var, int],
    device: torch.device | None,
    written: frozenset[int],
) -> dict[ir.Var, float]:
    parameters = program.parameters
    if len(values) != len(parameters):
        names = ", ".join(p.name for p in parameters)
        found = f"{format_count(len(values), 'argument')} given"
        raise ArgumentError(found, hint=f"it takes {len(parameters)}: {names}")
    check_present(program, values)
    given: dict[ir.Var, float] = dict(units)
    shapes: list[tuple[int, ...] | None] = []
    for position, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
        if position in written:
            check_writable(parameter, value)
        if parameter.buffer is None:
            given[parameter.var] = scalar(parameter, value)
        is_tensor = parameter.buffer is not None and value is not None
        shapes.append(_shape(parameter, value, device) if is_tensor else None)
    known = solve(parameters, shapes, given)
    for parameter, shape in zip(parameters, shapes, strict=True):
        _check_known(parameter, known)
        if shape is not None:
            _check_shape(parameter, shape, known)
    return known


# -- which of them there have to be ------------------------------------------------------------------------------------


def used_parameters(program: Program) -> frozenset[int]:
    """Positions of the tensors that some statement names, whether or not a call reaches it."""
    used = {var for stmt, _, _ in statements(program.body) for var in ir.uses(stmt)}
    return frozenset(
        i
        for i, p in enumerate(program.parameters)
        if p.buffer is not None and used & {p.buffer.data, *(view.data for view in p.views)}
    )


def check_present(program: Program, values: Sequence[Any], outputs: Sequence[int] = ()) -> None:
    """Check that a call passes all tensors that the program uses; other tensors may be None, as in TileLang. Raises
    ArgumentError: None for a tensor that the program uses. `outputs`: positions that the call fills."""
    absent = {i for i, value in enumerate(values) if value is None} - set(outputs)
    missing = absent & used_parameters(program) if absent else absent
    if missing:
        names = ", ".join(repr(program.parameters[i].name) for i in sorted(missing))
        raise ArgumentError(
            f"{names} is None, and {program.name!r} uses it",
            hint="pass a tensor; one that no statement names may be None",
        )


# -- numbers -----------------------------------------------------------------------------------------------------------


def scalar(parameter: Parameter, value: Any) -> Any:
    """`value`, for a parameter that is a number.

    Raises ArgumentError: not a number of the parameter's type, or out of its range.
    """
    dtype = str(parameter.var.dtype)
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, bool | int | float):
        raise ArgumentError(f"{parameter.name!r} is {type(value).__name__}", hint=f"pass a number ({dtype})")
    if "float" not in dtype and not float(number).is_integer():
        raise ArgumentError(f"{parameter.name!r} is {number}, the program declares {dtype}", hint="pass an integer")
    least, most = _range(dtype)
    if not least <= number <= most and math.isfinite(number):
        raise ArgumentError(
            f"{parameter.name!r} is {number}, {dtype} goes from {least} to {most}", hint="declare a wider type"
        )
    return number if "float" in dtype else int(number)


@cache
def _range(dtype: str) -> tuple[float, float]:
    kind = ir.torch_dtype(dtype)
    if kind is torch.bool:
        return 0, 1
    info = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
    return info.min, info.max


# -- tensors -----------------------------------------------------------------------------------------------------------


def shape_of(parameter: Parameter, value: Any) -> tuple[int, ...]:
    """The shape of an argument in elements, as the program declares it; a non-tensor has no bytes."""
    shape = tuple(value.shape)
    holds_pairs = str(_tensor(parameter).dtype) in TWO_IN_A_BYTE and hasattr(value, "dtype")
    return (*shape[:-1], 2 * shape[-1]) if holds_pairs and shape else shape


def in_storage(parameter: Parameter, shape: list[int]) -> list[int]:
    """The storage shape of a tensor with `shape` elements: the inverse of `shape_of`."""
    return [*shape[:-1], shape[-1] // 2] if str(_tensor(parameter).dtype) in TWO_IN_A_BYTE and shape else shape


def check_dense(parameter: Parameter, value: Any) -> None:
    """Raises ArgumentError for a tensor of another layout than strides, a sparse or nested one, and for a fake one."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # without loading it
    if fake is not None and isinstance(value, fake.FakeTensor):
        raise ArgumentError(
            f"{parameter.name!r} is a FakeTensor, which has no data",
            hint='pass a tensor with data; for simulated time alone, one on the device "meta"',
        )
    if getattr(value, "is_nested", False):
        raise ArgumentError(f"{parameter.name!r} is a nested tensor", hint="pass its values: x.values()")
    layout = getattr(value, "layout", None)
    if str(layout) not in ("None", "torch.strided"):
        raise ArgumentError(
            f"{parameter.name!r} is a tensor of layout {layout}", hint="pass a dense tensor: x.to_dense()"
        )


def check_device(parameter: Parameter, value: Any, device: torch.device) -> None:
    """Raises ArgumentError for a tensor on another device than the program's."""
    check_dense(parameter, value)
    if isinstance(value, torch.Tensor) and value.device != device:
        raise ArgumentError(
            f"{parameter.name!r} is on {value.device}, this program runs on {device}",
            hint=f"pass a {device.type.upper()} tensor: x.to('{device}')",
        )


def _shape(parameter: Parameter, value: Any, device: torch.device | None) -> tuple[int, ...]:
    """The shape of a tensor that matches the program's declaration."""
    if device is not None:
        _check_tensor(parameter, value, device)
    shape = shape_of(parameter, value)
    if len(shape) != len(parameter.shape):
        raise ArgumentError(
            f"{parameter.name!r} has shape {shape}", hint=f"the program declares {_declared(parameter)}"
        )
    return shape


def _check_tensor(parameter: Parameter, value: Any, device: torch.device) -> None:
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{parameter.name!r} is {type(value).__name__}", hint="pass a torch.Tensor")
    check_device(parameter, value, device)
    if value.dtype not in _held_by(str(_tensor(parameter).dtype)):
        raise ArgumentError(
            f"{parameter.name!r} is {value.dtype}, the program declares {_tensor(parameter).dtype}",
            hint="convert the tensor: x.to(...)",
        )


@cache
def _held_by(declared: str) -> frozenset[torch.dtype]:
    """The types of tensors that hold elements of a declared one: none, if PyTorch has none."""
    try:
        own = frozenset([ir.torch_dtype(declared)])
    except ValueError:
        own = frozenset()
    return own | {torch.int8, torch.uint8} if declared in ("bool", *TWO_IN_A_BYTE) else own


def _check_known(parameter: Parameter, known: Mapping[ir.Var, float]) -> None:
    unknown = {var for extent in parameter.shape for var in ir.variables(extent)} - known.keys()
    if unknown:
        names = ", ".join(sorted(var.name for var in unknown))
        raise ArgumentError(
            f"{names} in the shape of {parameter.name!r} does not follow from the arguments",
            hint=f"pass a tensor, not None, of which {names} is an extent",
        )


def _check_shape(parameter: Parameter, shape: tuple[int, ...], known: Mapping[ir.Var, float]) -> None:
    wanted = tuple(evaluate(n, known) for n in parameter.shape)
    if any(w is not None and w != n for w, n in zip(wanted, shape, strict=True)):
        is_split = any(not v.layout.is_replica for v in parameter.views)
        here = f", here {wanted}" if list(map(str, wanted)) != list(map(str, _tensor(parameter).shape)) else ""
        what = f", of which each unit has its shard, {wanted}" if is_split else here
        raise ArgumentError(
            f"{parameter.name!r} has shape {shape}", hint=f"the program takes {_declared(parameter)}{what}"
        )


def _declared(parameter: Parameter) -> str:
    tensor = _tensor(parameter)
    return f"{parameter.name}: ({', '.join(str(n) for n in tensor.shape)}) {tensor.dtype}"


def _tensor(parameter: Parameter) -> ir.Buffer:
    assert parameter.buffer is not None, "it is not a number"
    return parameter.buffer


def readable(value: Any) -> Any:
    """A tensor whose memory holds its values; not a lazily negated or conjugated view."""
    return value.resolve_neg().resolve_conj() if hasattr(value, "resolve_neg") else value


def check_writable(parameter: Parameter, value: Any) -> None:
    """Raises ArgumentError for a tensor that cannot take results: elements that share memory, lazy negatives."""
    if value is None or not hasattr(value, "stride"):
        return
    check_dense(parameter, value)
    if any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True)):
        found, hint = "expanded: several of its elements are one in memory", "pass a tensor of its own: x.clone()"
    elif value.is_neg() or value.is_conj():
        found, hint = "a lazy negative or conjugate of what is in memory", "resolve it: x.resolve_neg().resolve_conj()"
    else:
        return
    raise ArgumentError(f"{parameter.name!r} is written and {found}", hint=hint)


def count_writes(tensors: Iterable[Any]) -> None:
    """Count a change of each tensor, so that autograd notices if it has saved one for the backward pass."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])
