# SPDX-License-Identifier: MIT
"""The argument list of a call, and its outputs: those of `out_idx`, or tensors that the program declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang_core import ir
from tilescale.errors import ArgumentError, UsageError
from tilescale.program.extents import evaluate, solve
from tilescale.program.model import Parameter, Program


def output_positions(program: Program, out_idx: Any) -> list[int]:
    """Positions of the parameters that the caller does not pass, in the order in which they are returned.

    Raises:
        UsageError: `out_idx` names a parameter that does not exist.
    """
    declared = program.func.attrs.get("tilelang_out_idx") if program.func.attrs else None
    chosen = declared if declared is not None else out_idx
    if chosen is None:
        return []
    count = len(program.parameters)
    chosen = [chosen] if isinstance(chosen, int) else [int(i) for i in chosen]
    if any(not -count <= i < count for i in chosen):
        raise UsageError(f"out_idx={out_idx}: {program.name!r} has {count} parameters", hint="count from 0")
    return [i % count for i in chosen]


def place_arguments(program: Program, outputs: list[int], given: Sequence[Any]) -> list[Any]:
    """What was given, at the position of its parameter; None at those of the outputs.

    Raises:
        ArgumentError: another number of arguments.
    """
    names = [p.name for i, p in enumerate(program.parameters) if i not in outputs]
    if len(given) != len(names):
        raise ArgumentError(
            f"{program.name} was called with {len(given)} arguments", hint=f"it takes {len(names)}: {', '.join(names)}"
        )
    inputs = iter(given)
    return [None if i in outputs else next(inputs) for i in range(len(program.parameters))]


def allocate_outputs(program: Program, outputs: list[int], values: list[Any], device: str) -> list[Any]:
    """`values` with new tensors on `device` at the positions of the outputs.

    Raises:
        ArgumentError: an output whose extent no argument determines.
    """
    parameters = program.parameters
    sizes = solve(parameters, [getattr(value, "shape", None) for value in values]) if outputs else {}
    return [_empty(parameters[i], sizes, device) if i in outputs else value for i, value in enumerate(values)]


def _empty(parameter: Parameter, sizes: dict[ir.Var, int], device: str) -> Any:
    import torch

    shape = [evaluate(n, sizes) for n in parameter.shape]
    if None in shape:
        raise ArgumentError(
            f"the shape of output {parameter.name!r} does not follow from the arguments: {tuple(parameter.shape)}",
            hint="pass the output tensor",
        )
    return torch.empty(shape, dtype=ir.torch_dtype(str(parameter.buffer.dtype)), device=device)
