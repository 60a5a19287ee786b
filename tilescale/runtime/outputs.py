# SPDX-License-Identifier: MIT
"""The argument list of a call, and its outputs: those of `out_idx`, or tensors that the program declares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tilelang_core import ir
from tilescale.errors import ArgumentError, UsageError
from tilescale.program.arguments import in_storage
from tilescale.program.extents import evaluate, solve
from tilescale.program.model import Parameter, Program

KEPT = 1024
"""Choices of shapes whose outputs are kept in mind."""


def output_positions(program: Program, out_idx: Any) -> list[int]:
    """Positions of the parameters that the caller does not pass, in the order in which they are returned. Raises
    UsageError: `out_idx` names a parameter that does not exist, or is given in addition to outputs that the program
    declares."""
    declared = program.func.attrs.get("tilelang_out_idx") if program.func.attrs else None
    if declared is not None and out_idx is not None:
        raise UsageError(
            f"out_idx={out_idx}: {program.name!r} returns tensors that it declares with T.empty",
            hint="leave out_idx out, or declare the outputs as parameters",
        )
    chosen = declared if declared is not None else out_idx
    if chosen is None:
        return []
    count = len(program.parameters)
    chosen = [chosen] if isinstance(chosen, int) else [int(i) for i in chosen]
    if any(not -count <= i < count for i in chosen):
        raise UsageError(f"out_idx={out_idx}: {program.name!r} has {count} parameters", hint="count from 0")
    return [i % count for i in chosen]


def place_arguments(program: Program, outputs: Sequence[int], given: Sequence[Any]) -> list[Any]:
    """The given arguments at the positions of their parameters; None at those of the outputs. Raises ArgumentError:
    another number of arguments."""
    count = len(program.parameters)
    if len(given) + len(outputs) != count:
        names = [p.name for i, p in enumerate(program.parameters) if i not in outputs]
        raise ArgumentError(
            f"{program.name} was called with {len(given)} arguments", hint=f"it takes {len(names)}: {', '.join(names)}"
        )
    if not outputs:
        return list(given)
    inputs = iter(given)
    return [None if i in outputs else next(inputs) for i in range(count)]


class KernelOutputs:
    """The outputs of a program: new tensors for each call. `positions`: of their parameters, in the order in which they
    are returned."""

    def __init__(self, program: Program, positions: Sequence[int], device: str):
        self.positions = positions
        self._program, self._device = program, device
        asked = {var for i in positions for n in program.parameters[i].shape for var in ir.variables(n)}
        self._scalars = [(i, p.var) for i, p in enumerate(program.parameters) if p.var in asked]
        self._known: dict[Any, list[tuple[int, list[int], Any]]] = {}

    def allocate(self, values: list[Any]) -> list[Any]:
        """`values` with new tensors at the positions of the outputs.

        Raises ArgumentError: an output whose extent no argument determines.
        """
        if not self.positions:
            return values
        shapes = tuple(getattr(value, "shape", None) for value in values)
        scalars = tuple((var, values[i]) for i, var in self._scalars)
        made = self._known.get((shapes, scalars))
        if made is None:
            made = self._solve(shapes, scalars)
            if len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]  # the position found first is found again
            self._known[shapes, scalars] = made
        complete = list(values)
        for position, shape, dtype in made:
            complete[position] = torch.empty(shape, dtype=dtype, device=self._device)
        return complete

    def returned(self, values: Sequence[Any]) -> Any:
        """The return value of a call: the output, a list of several, or None."""
        outputs = [values[i] for i in self.positions]
        return outputs[0] if len(outputs) == 1 else outputs or None

    def _solve(self, shapes: tuple[Any, ...], given: Iterable[tuple[ir.Var, int]]) -> list[tuple[int, list[int], Any]]:
        sizes = solve(self._program.parameters, shapes, dict(given))
        parameters = [(i, self._program.parameters[i]) for i in self.positions]
        made = ((i, in_storage(p, _shape(p, sizes)), p.buffer) for i, p in parameters)
        return [(i, shape, ir.torch_dtype(str(buffer.dtype))) for i, shape, buffer in made if buffer is not None]


def _shape(parameter: Parameter, sizes: dict[ir.Var, float]) -> list[int]:
    shape = [n for n in (evaluate(n, sizes) for n in parameter.shape) if n is not None]
    if len(shape) < len(parameter.shape):
        raise ArgumentError(
            f"the shape of output {parameter.name!r} does not follow from the arguments: {tuple(parameter.shape)}",
            hint="pass the output tensor",
        )
    return shape
