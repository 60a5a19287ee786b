# SPDX-License-Identifier: MIT
"""A layer of experts in float8: what `moe_layer` calls for weights with scales, and for those that it quantizes."""

from typing import Any

import torch

from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.ops.arguments import dense, two_scales
from tilescale.ops.expert_float8 import Float8Form, layer_float8_program
from tilescale.ops.float8 import Float8
from tilescale.ops.float8_wire import GROUP, WIRE
from tilescale.ops.grouped_float8 import check_scales
from tilescale.ops.kernels import kernel
from tilescale.ops.layout import dtype_of, more_rows, new_tensors
from tilescale.ops.moe_gradient import SAVED
from tilescale.ops.moe_low_latency import scales_of_groups
from tilescale.ops.moe_tables import DROPPED, arriving_choices, form_of_counts, forms_of_tables
from tilescale.ops.rounding import rounded_squares
from tilescale.ops.row_exchange import UNIT_BYTES, sharers
from tilescale.ops.workspace import workspace_of

WORDS = GROUP // 4
"""Words of a group of numbers."""

DTYPE = torch.bfloat16
"""Type of results, and of tokens without scales."""

RECIPE = Float8("blockwise", DTYPE)
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
            check_scales(name, x, tuple(weight.shape[:2]))
        return given
    of_gate_up, of_down = (_of_squares(*each) for each in zip(names, given, weights, strict=True))
    return of_gate_up, of_down


def _of_squares(name: str, scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    experts, rows, columns = weight.shape
    shape = experts, rows // GROUP, columns // GROUP
    if isinstance(scales, torch.Tensor) and scales.ndim == 1:
        check_scales(name, scales, (experts,))
        scales = scales[:, None, None].expand(shape)
    check_scales(name, scales, shape)
    return scales


def scales_of_tokens(scales: Any, x: torch.Tensor) -> Scale:
    """The scales of all groups of the rows of x, (tokens, groups); None for x without scales. Raises ArgumentError:
    unsupported scales."""
    if scales is None:
        return None
    shape = *x.shape[:-1], x.shape[-1] // GROUP
    if isinstance(scales, torch.Tensor) and scales.shape == x.shape[:-1]:
        scales = scales[..., None]
    if isinstance(scales, torch.Tensor) and (scales.ndim == 0 or scales.shape == (*x.shape[:-1], 1)):
        scales = scales.expand(shape)
    check_scales("x_scales", scales, shape)
    return scales.flatten(0, -2)


def float8_layer(
    x: torch.Tensor,
    choice: tuple[torch.Tensor, torch.Tensor],
    experts: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
    of_x: Scale,
    extents: tuple[int, int, int],
    narrow_sums: bool,
    keeps: bool,
    team: Team,
) -> list[torch.Tensor]:
    """`moe_layer` in float8, of weights and perhaps tokens with scales: other tokens are quantized."""
    (numbers, shares), (gate_up, down), (of_gate_up, of_down), (most, room, choices) = choice, experts, scales, extents
    (local, features, inner), size, groups = down.shape, team.size, most * down.shape[1] // GROUP
    form = Float8Form(of_down.ndim == 2, narrow_sums, keeps, of_x is not None)
    of_choices, wide_sums = arriving_choices(size, most, choices), (size, most, features * DTYPE.itemsize // 4)
    of_groups = (size, groups, WORDS), (size, groups)
    in_chosen, in_shares, in_rows, in_scales, in_sums, in_sum_scales = workspace_of(team).symmetric(
        torch.int32, of_choices, of_choices, *of_groups, *(of_groups if narrow_sums else (wide_sums, (1, 1)))
    )
    of_rows, of_inner, none = (room, features), (room, inner), (1, 1)
    forms = [
        *forms_of_tables(size, local, most, room, choices),
        *((of_rows if keeps else none, DTYPE), ((room, 2 * inner) if keeps else none, DTYPE)),
        *((of_rows, gate_up.dtype), ((features // GROUP, room), torch.float32)),
        *((of_inner, gate_up.dtype), ((inner // GROUP, room), torch.float32)),
        *((of_rows, DTYPE), form_of_counts(size, local, most, choices)),
    ]
    made = new_tensors(x, *forms, apart=range(SAVED) if keeps else (DROPPED,))
    *tables, wide, hidden, rows, of_row, active, of_active, products, counted = made
    result = x.new_empty(most, features, dtype=DTYPE)
    kernel(layer_float8_program, team, local, choices, features, inner, dtype_of(numbers), form)(
        *(more_rows(dense(x), most), scales_of_groups(x, of_x, most), numbers, shares),
        *(dense(gate_up), dense(of_gate_up), dense(down), dense(of_down)),
        *(in_chosen, in_shares.view(torch.float32), in_rows.view(gate_up.dtype), in_scales.view(torch.float32)),
        *(in_sums.view(gate_up.dtype if narrow_sums else DTYPE), in_sum_scales.view(torch.float32), counted, *tables),
        *(rows, of_row, wide, hidden, active, of_active, products, result),
        sharers(features, UNIT_BYTES // DTYPE.itemsize, most),
    )
    return [result, wide, hidden, *tables]


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
