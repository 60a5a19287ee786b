# SPDX-License-Identifier: MIT
"""Float8 weights and tokens of a layer of experts: their scales, checked and completed."""

from typing import Any

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.arguments import dense, two_scales
from tilescale.ops.float8 import Float8
from tilescale.ops.float8_wire import GROUP, WIRE
from tilescale.ops.grouped_float8 import check_scales
from tilescale.ops.rounding import rounded_squares

RECIPE = Float8("blockwise", torch.bfloat16)
"""Recipe of training: experts are quantized in the call."""

Scale = torch.Tensor | None


def check_recipe(float8: Float8 | None, scales: Any, wire: str | None) -> None:
    """Raise ArgumentError unless experts are quantized so, or given so, or neither."""
    if float8 not in (None, RECIPE):
        raise ArgumentError(f"float8 is {float8!r}", hint=f"supported for experts: {RECIPE!r}")
    if float8 is not None and scales is not None:
        raise ArgumentError(
            "scales and float8 are given", hint="float8 quantizes weights, scales are of quantized ones"
        )
    if wire is not None and (wire != WIRE or (float8 is None and scales is None)):
        raise ArgumentError(f"wire is {wire!r}", hint=f"supported: {WIRE!r} for experts in float8, or None")


def scales_of_experts(scales: Any, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[Scale, Scale]:
    """The scales of all squares of the weights, or of all their rows; None for weights without scales. Raises
    ArgumentError: unsupported scales."""
    if scales is None:
        return None, None
    given = two_scales(scales, "of gate_up, and of down")
    names, weights = ("scales[0]", "scales[1]"), (gate_up, down)
    if all(isinstance(x, torch.Tensor) and x.shape[:2] == w.shape[:2] for x, w in zip(given, weights, strict=True)):
        given = tuple(x.squeeze(2) if x.shape[2:] == (1,) else x for x in given)
        for name, x, weight in zip(names, given, weights, strict=True):
            check_scales(name, x, tuple(weight.shape[:2]), weight)
        return given
    of_gate_up, of_down = (_of_squares(*each) for each in zip(names, given, weights, strict=True))
    return of_gate_up, of_down


def _of_squares(name: str, scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    experts, rows, columns = weight.shape
    shape = experts, rows // GROUP, columns // GROUP
    if isinstance(scales, torch.Tensor) and scales.ndim == 1:
        check_scales(name, scales, (experts,), weight)
        scales = scales[:, None, None].expand(shape)
    check_scales(name, scales, shape, weight)
    return scales


def scales_of_tokens(scales: Any, x: torch.Tensor) -> Scale:
    """The scales of all groups of the rows of x, (tokens, groups); None for x without scales. Raises ArgumentError:
    unsupported scales."""
    if scales is None:
        return None
    shape = *x.shape[:-1], x.shape[-1] // GROUP
    if isinstance(scales, torch.Tensor) and scales.numel() == 1:
        scales = scales.reshape(()).expand(shape)
    elif isinstance(scales, torch.Tensor) and scales.shape in (x.shape[:-1], (*x.shape[:-1], 1)):
        scales = scales.reshape(*x.shape[:-1], 1).expand(shape)
    check_scales("x_scales", scales, shape, x)
    return scales.flatten(0, -2)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of experts in float8, and the scale of each square."""
    made, scales = rounded_squares(dense(weight).flatten(0, 1), torch.float8_e4m3fn)
    return made.view(weight.shape), scales.view(len(weight), -1, scales.shape[1])


def dequantized(weight: torch.Tensor, scales: Scale) -> torch.Tensor:
    """Weights with scales of rows or squares as bfloat16; weights without scales."""
    if scales is None:
        return weight
    if scales.ndim == 2:
        return (weight.float() * scales[..., None]).bfloat16()
    squares = weight.float().unflatten(2, (-1, GROUP)).unflatten(1, (-1, GROUP))
    return (squares * scales[:, :, None, :, None]).bfloat16().view(weight.shape)
