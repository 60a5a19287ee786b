# SPDX-License-Identifier: MIT
"""Arguments of an emulated launch: checked against the program and each other, bound to slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tilelang_core import ir
from tilescale.backends.emulator.execute.memory import meta_array
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.numerics import element_type, lane_axis, numpy_dtype, to_numpy
from tilescale.backends.emulator.pairs import Pairs
from tilescale.errors import RankMismatchError, UnsupportedError
from tilescale.program.arguments import bind, shape_of
from tilescale.program.extents import agreed
from tilescale.program.model import Parameter, Program


@dataclass(frozen=True)
class Shape:
    """An argument of which only the shape is known."""

    shape: tuple[int, ...]


def bind_arguments(
    compiler: Compiler,
    program: Program,
    extents: list[tuple[str, int]],
    per_unit: list[list[Any]],
    written: frozenset[int],
    pairs: Pairs,
) -> list[dict[int, Any]]:
    """For each unit, slot -> array or scalar; symbolic extents are bound from the shapes.

    Args:
        written: positions of the parameters whose tensors the run changes.
        pairs: unpacks tensors that hold two elements in a byte.
    Raises:
        ArgumentError: count, type, data type or shape differ from the program's, or a tensor cannot take results.
        RankMismatchError: units disagree about a symbolic extent.
    """
    units = {
        extent: size
        for (_, extent), (_, size) in zip(program.extents, extents, strict=False)
        if isinstance(extent, ir.Var)
    }
    device = torch.device("cpu") if compiler.data else None
    result = []
    for rank, values in enumerate(per_unit):
        known = bind(program, rank, values, units, device, written)
        slots: dict[int, Any] = {compiler.slot(var): size for var, size in known.items()}
        for position, (parameter, value) in enumerate(zip(program.parameters, values, strict=True)):
            if parameter.buffer is None:
                slots[compiler.slot(parameter.var)] = _rounded(parameter, known[parameter.var])
            elif value is not None:
                places = [parameter.buffer.data, *(view.data for view in parameter.views)]
                if compiler.data:
                    array = _array(parameter.buffer, value, position in written, pairs)
                else:
                    keeps = any(compiler.root(compiler.slot(data)) in compiler.flags for data in places)
                    array = _without_data(compiler, parameter, parameter.buffer, value, rank, keeps)
                slots |= {compiler.slot(data): array for data in places}
        result.append(slots)
    _check_agreement(compiler, program, result)
    return result


def _rounded(parameter: Parameter, number: float) -> float:
    dtype = numpy_dtype(str(parameter.var.dtype))
    return float(dtype.type(number)) if isinstance(number, float) else number


def _without_data(
    compiler: Compiler, parameter: Parameter, buffer: ir.Buffer, value: Any, rank: int, keeps: bool
) -> np.ndarray:
    """An array of the argument's shape without data. Assumed values have data, and those that the run `keeps` (flags):
    a copy of the argument, or zeros."""
    declared = str(buffer.dtype)
    dtype = numpy_dtype(element_type(declared))
    shape = (*shape_of(parameter, value), *lane_axis(declared))
    values = compiler.assumptions.of(buffer.name, rank, shape, dtype) if compiler.assumptions is not None else None
    if values is not None:
        return values
    if not keeps:
        return meta_array(shape, dtype)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return to_numpy(value).astype(dtype)
    return np.zeros(shape, dtype)


def _array(buffer: ir.Buffer, value: Any, written: bool, pairs: Pairs) -> np.ndarray:
    """The elements of a tensor, sharing its memory where possible."""
    array = to_numpy(value)
    elements = pairs.elements(buffer, array, written)
    if elements is not None:
        return elements
    wanted = numpy_dtype(element_type(str(buffer.dtype)))
    if wanted.kind == "b":
        return array.view(wanted)
    if array.dtype != wanted:
        raise UnsupportedError(
            f"the emulator takes no tensor of {buffer.dtype}: {buffer.name!r}",
            hint="pass bytes, and take the elements out of them in the program",
        )
    return array


def _check_agreement(compiler: Compiler, program: Program, bound: list[dict[int, Any]]) -> None:
    """Check that symbolic extents agree on all ranks, except for `lengths`."""
    first, variables = bound[0], agreed(program) if len(bound) > 1 else []
    for rank, slots in enumerate(bound[1:], start=1):
        for parameter, var in variables:
            slot = compiler.slot(var)
            if slots.get(slot) != first.get(slot):
                raise RankMismatchError(
                    f"{program.name}: {parameter.name!r} makes {var} = {first.get(slot)} on rank 0 and "
                    f"{slots.get(slot)} on rank {rank}",
                    hint="all ranks pass tensors of the same shapes",
                )
