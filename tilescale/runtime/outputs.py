# SPDX-License-Identifier: MIT
"""Outputs that a call allocates: `out_idx` of the factory, or tensors that the program declares with `T.empty`."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilescale.errors import ArgumentError
from tilescale.program.model import Parameter, Program


def output_positions(program: Program, out_idx: Any) -> list[int]:
    """Positions of the parameters that the caller does not pass."""
    declared = program.func.attrs.get("tilelang_out_idx") if program.func.attrs else None
    chosen = declared if declared is not None else out_idx
    if chosen is None:
        return []
    chosen = [chosen] if isinstance(chosen, int) else [int(i) for i in chosen]
    return [i % len(program.parameters) for i in chosen]


def allocate_outputs(program: Program, positions: list[int], given: list[Any]) -> list[Any]:
    """The full argument list: what was given, and new CPU tensors at `positions`.

    Raises:
        ArgumentError: another number of arguments, or an output whose extent no argument determines.
    """
    expected = len(program.parameters) - len(positions)
    if len(given) != expected:
        names = [p.name for i, p in enumerate(program.parameters) if i not in positions]
        raise ArgumentError(
            f"{program.name} was called with {len(given)} arguments", hint=f"it takes {expected}: {', '.join(names)}"
        )
    inputs = iter(given)
    values = [None if i in positions else next(inputs) for i in range(len(program.parameters))]
    sizes = _sizes(program, values)
    for i in positions:
        values[i] = _empty(program.parameters[i], sizes)
    return values


def _sizes(program: Program, values: list[Any]) -> dict[ir.Var, ir.PrimExpr]:
    sizes: dict[ir.Var, ir.PrimExpr] = {}
    for parameter, value in zip(program.parameters, values, strict=True):
        if parameter.buffer is not None and hasattr(value, "shape"):
            for extent, size in zip(parameter.shape, value.shape, strict=False):
                if isinstance(extent, ir.Var):
                    sizes[extent] = ir.int_node(int(size))
    return sizes


def _empty(parameter: Parameter, sizes: dict[ir.Var, ir.PrimExpr]) -> Any:
    import torch

    from tilescale.backends.emulator.numerics import from_numpy, numpy_dtype

    shape = [ir.constant(ir.substitute(n, sizes)) for n in parameter.shape]
    if None in shape:
        raise ArgumentError(
            f"the shape of output {parameter.name!r} does not follow from the arguments: {tuple(parameter.shape)}",
            hint="pass the output tensor",
        )
    import numpy as np

    empty = from_numpy(np.zeros((), numpy_dtype(str(parameter.buffer.dtype))))
    return torch.empty(shape, dtype=empty.dtype)
