# SPDX-License-Identifier: MIT
"""Inputs on which kernels are timed: of the declared shapes, where peers reach them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilelang_core import ir
from tilescale.comm import empty
from tilescale.errors import UsageError
from tilescale.program.model import Parameter
from tilescale.runtime.kernel import Kernel
from tilescale.runtime.outputs import output_positions

SUPPLIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "Auto": lambda x: x.normal_(0, 0.1) if x.is_floating_point() else x.zero_(),
    "Normal": lambda x: x.normal_() if x.is_floating_point() else x.random_(-2, 3),
    "Randn": lambda x: x.normal_() if x.is_floating_point() else x.random_(-2, 3),
    "Uniform": lambda x: x.uniform_(-1, 1) if x.is_floating_point() else x.random_(-2, 3),
    "Integer": lambda x: x.copy_(torch.randint(-2, 3, x.shape, device=x.device)),
    "Zero": lambda x: x.zero_(),
    "One": lambda x: x.fill_(1),
}
"""Name of TileLang's `TensorSupplyType` -> the function that fills a tensor. "Auto": small values, and flags at
zero."""


@dataclass(frozen=True)
class Supplied:
    """Description of an input for a `supply_prog`, under TileLang's names."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def torch_dtype(self) -> torch.dtype:
        return self.dtype


@dataclass(frozen=True)
class InputFill:
    """Generation of inputs.

    Attributes:
        supply: one of `SUPPLIES`.
        program: takes the list of `Supplied`, returns the tensors; None to fill new ones.
        given: the caller's own arguments, whose copies are taken; None without any.
        kept: tensors by request, to give kernels the same ones; None to make them anew.
    """

    supply: str = "Auto"
    program: Callable[[list[Supplied]], Sequence[Any]] | None = None
    given: Sequence[Any] | None = None
    kept: dict[Any, list[Any]] | None = None


def tensors_for(kernel: Kernel, fill: InputFill) -> list[Any]:
    """Inputs of a kernel on this rank; collective where peers reach them. Raises UsageError: an extent or a number that
    only a caller knows, and no `supply_prog` that makes the tensors."""
    outputs = output_positions(kernel.program, kernel.options.get("out_idx"))
    if fill.given is not None:
        return [_copied(kernel, value) for value in fill.given]
    supplied = tuple(_supplied(p) for i, p in enumerate(kernel.program.parameters) if i not in outputs)
    if fill.kept is None:
        return _made(kernel, supplied, fill)
    if supplied not in fill.kept:
        fill.kept[supplied] = _made(kernel, supplied, fill)
    return fill.kept[supplied]


def _made(kernel: Kernel, supplied: Sequence[Supplied], fill: InputFill) -> list[Any]:
    if fill.program is not None:
        return list(fill.program(list(supplied)))
    return [_filled(_empty(kernel, each.shape, each.dtype), fill.supply) for each in supplied]


def _supplied(parameter: Parameter) -> Supplied:
    shape = [ir.constant(extent) for extent in parameter.shape]
    if parameter.buffer is None or None in shape:
        raise UsageError(
            f"{parameter.name!r} is known at launch only, so its value cannot be generated",
            hint="give supply_prog=, which makes the inputs, or declare its extents",
        )
    return Supplied(parameter.name, tuple(int(n or 0) for n in shape), ir.torch_dtype(str(parameter.buffer.dtype)))


def _empty(kernel: Kernel, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Peers reach all tensors of a program over devices: which of them it lets them reach makes no difference here."""
    if kernel.program.is_hierarchical:
        return empty(tuple(shape), dtype=dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=kernel.device)


def _filled(tensor: torch.Tensor, supply: str) -> torch.Tensor:
    if tensor.itemsize == 1 and tensor.is_floating_point():  # no random numbers of such types in PyTorch
        return tensor.copy_(SUPPLIES[supply](torch.empty(tensor.shape, device=tensor.device)))
    SUPPLIES[supply](tensor)
    return tensor


def _copied(kernel: Kernel, value: Any) -> Any:
    return _empty(kernel, value.shape, value.dtype).copy_(value) if isinstance(value, torch.Tensor) else value
