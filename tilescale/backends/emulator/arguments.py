# SPDX-License-Identifier: MIT
"""Arguments of an emulated launch: checked against the program and each other, bound to slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.memory import meta_array
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.numerics import numpy_dtype, to_numpy
from tilescale.backends.emulator.pairs import Pairs, shape_of
from tilescale.errors import ArgumentError, RankMismatchError
from tilescale.hda.units import format_count
from tilescale.passes.present import check_present
from tilescale.program.arguments import check_writable, readable, scalar
from tilescale.program.extents import evaluate, solve
from tilescale.program.lengths import agreed
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
        pairs: takes those that hold two elements in a byte.
    Raises:
        ArgumentError: count, type, data type or shape differ from the program's, or a tensor cannot take results.
        RankMismatchError: units disagree about a symbolic extent.
    """
    sizes = {
        extent: size
        for (_, extent), (_, size) in zip(program.extents, extents, strict=False)
        if isinstance(extent, ir.Var)
    }
    result = []
    for rank, values in enumerate(per_unit):
        result.append(_Binder(compiler, program, rank, sizes, pairs).bind(values, written))
    _check_agreement(compiler, program, result)
    return result


class _Binder:
    """Binds the arguments of one unit."""

    def __init__(self, compiler: Compiler, program: Program, rank: int, sizes: dict[ir.Var, int], pairs: Pairs):
        self.compiler, self.program, self.rank, self.known = compiler, program, rank, sizes
        self.pairs = pairs
        self.slots: dict[int, Any] = {}

    def bind(self, values: list[Any], written: frozenset[int]) -> dict[int, Any]:
        parameters = self.program.parameters
        if len(values) != len(parameters):
            names = ", ".join(p.name for p in parameters)
            raise self._error(f"{format_count(len(values), 'argument')} given", f"it takes {len(parameters)}: {names}")
        try:
            self._bind(values, written)
        except ArgumentError as error:
            raise self._error(error.message, error.hint) from None
        return self.slots

    def _bind(self, values: list[Any], written: frozenset[int]) -> None:
        check_present(self.program, values)
        parameters = self.program.parameters
        shapes: list[tuple[int, ...] | None] = []
        for position, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
            if position in written:
                check_writable(parameter, value)
            if parameter.buffer is None:
                self.slots[self.compiler.slot(parameter.var)] = self._scalar(parameter, value)
            elif value is not None:
                self._tensor(parameter, value, position in written)
            is_tensor = parameter.buffer is not None and value is not None
            shapes.append(shape_of(parameter, value) if is_tensor else None)
        self.known = solve(parameters, shapes, self.known)
        self.slots |= {self.compiler.slot(var): size for var, size in self.known.items()}
        for parameter, shape in zip(parameters, shapes, strict=True):
            self._check_known(parameter)
            if shape is not None:
                self._check_shape(parameter, shape)

    def _error(self, found: str, hint: str | None) -> ArgumentError:
        return ArgumentError(f"{self.program.name}, arguments of unit {self.rank}: {found}", hint=hint)

    def _scalar(self, parameter: Parameter, value: Any) -> Any:
        number = scalar(parameter, value)
        dtype = numpy_dtype(str(parameter.var.dtype))
        return float(dtype.type(number)) if isinstance(number, float) else number

    def _tensor(self, parameter: Parameter, value: Any, written: bool) -> None:
        if not self.compiler.data:
            self._bound(parameter, self._without_data(parameter, value))
            return
        self._bound(parameter, self._array(parameter, value, written))

    def _without_data(self, parameter: Parameter, value: Any) -> np.ndarray:
        """An array of the argument's shape: without data, but for flags, which are a copy of it or zero."""
        import torch

        dtype = numpy_dtype(str(parameter.buffer.dtype))
        shape = shape_of(parameter, value)
        data = {self.compiler.slot(b) for b in (parameter.buffer.data, *(view.data for view in parameter.views))}
        if not any(self.compiler.root(slot) in self.compiler.flags for slot in data):
            return meta_array(shape, dtype)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return to_numpy(value.detach()).astype(dtype)
        return np.zeros(shape, dtype)

    def _array(self, parameter: Parameter, value: Any, written: bool) -> np.ndarray:
        import torch

        if not isinstance(value, torch.Tensor):
            raise ArgumentError(f"{parameter.name!r} is {type(value).__name__}", hint="pass a torch.Tensor")
        if value.device.type != "cpu":
            raise ArgumentError(
                f"{parameter.name!r} is on {value.device}", hint="pass CPU tensors to the emulator: x.cpu()"
            )
        array = to_numpy(readable(value.detach()))
        elements = self.pairs.elements(parameter, array, written)
        if elements is not None:
            return elements
        wanted = numpy_dtype(str(parameter.buffer.dtype))
        if array.dtype != wanted and array.dtype.itemsize == wanted.itemsize and wanted.kind == "b":
            array = array.view(wanted)
        if array.dtype != wanted:
            raise ArgumentError(
                f"{parameter.name!r} is {value.dtype}, the program declares {parameter.buffer.dtype}",
                hint="convert the tensor: x.to(...)",
            )
        return array

    def _bound(self, parameter: Parameter, array: np.ndarray) -> None:
        if array.ndim != len(parameter.shape):
            raise ArgumentError(
                f"{parameter.name!r} has shape {array.shape}", hint=f"the program declares {self._declared(parameter)}"
            )
        self.slots[self.compiler.slot(parameter.buffer.data)] = array
        for view in parameter.views:
            self.slots[self.compiler.slot(view.data)] = array

    def _check_known(self, parameter: Parameter) -> None:
        unknown = {var for extent in parameter.shape for var in ir.variables(extent)} - self.known.keys()
        if unknown:
            names = ", ".join(sorted(var.name for var in unknown))
            raise ArgumentError(
                f"{names} in the shape of {parameter.name!r} does not follow from the arguments",
                hint=f"pass a tensor, not None, of which {names} is an extent",
            )

    def _check_shape(self, parameter: Parameter, shape: tuple[int, ...]) -> None:
        wanted = tuple(evaluate(n, self.known) for n in parameter.shape)
        if any(w is not None and w != n for w, n in zip(wanted, shape, strict=True)):
            is_split = any(not v.layout.is_replica for v in parameter.views)
            here = f", here {wanted}" if list(map(str, wanted)) != list(map(str, parameter.buffer.shape)) else ""
            what = f", of which each unit has its shard, {wanted}" if is_split else here
            raise ArgumentError(
                f"{parameter.name!r} has shape {shape}", hint=f"the program takes {self._declared(parameter)}{what}"
            )

    def _declared(self, parameter: Parameter) -> str:
        return f"{parameter.name}: ({', '.join(str(n) for n in parameter.buffer.shape)}) {parameter.buffer.dtype}"


def _check_agreement(compiler: Compiler, program: Program, bound: list[dict[int, Any]]) -> None:
    """Symbolic extents are one number for the whole program, but for `lengths`."""
    first, variables = bound[0], agreed(program)
    for rank, slots in enumerate(bound[1:], start=1):
        for parameter, var in variables:
            slot = compiler.slot(var)
            if slots.get(slot) != first.get(slot):
                raise RankMismatchError(
                    f"{program.name}: {parameter.name!r} makes {var} = {first.get(slot)} on unit 0 and "
                    f"{slots.get(slot)} on unit {rank}",
                    hint="all units pass tensors of the same shapes",
                )
