# SPDX-License-Identifier: MIT
"""What every rank and back end asks of the arguments of a call, and what a call that wrote tensors tells PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.errors import ArgumentError
from tilescale.program.model import Parameter


def scalar(parameter: Parameter, value: Any) -> Any:
    """`value`, for a parameter that is a number.

    Raises:
        ArgumentError: it is no number of the parameter's type, or beyond its range.
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
    import torch

    kind = ir.torch_dtype(dtype)
    if kind is torch.bool:
        return 0, 1
    info = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
    return info.min, info.max


def readable(value: Any) -> Any:
    """A tensor whose memory holds its values; not a lazy negative or conjugate of what is there."""
    return value.resolve_neg().resolve_conj() if hasattr(value, "resolve_neg") else value


def check_writable(parameter: Parameter, value: Any) -> None:
    """Raises ArgumentError for a tensor that cannot take results: elements that share memory, lazy negatives."""
    if value is None or not hasattr(value, "stride"):
        return
    if any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True)):
        found, hint = "expanded: several of its elements are one in memory", "pass a tensor of its own: x.clone()"
    elif value.is_neg() or value.is_conj():
        found, hint = "a lazy negative or conjugate of what is in memory", "resolve it: x.resolve_neg().resolve_conj()"
    else:
        return
    raise ArgumentError(f"{parameter.name!r} is written and {found}", hint=hint)


def count_writes(tensors: Iterable[Any]) -> None:
    """Count a change of each tensor, so that autograd notices if it has saved one for the backward pass."""
    import torch

    torch.autograd.graph.increment_version([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])
