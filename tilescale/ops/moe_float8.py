# SPDX-License-Identifier: MIT
"""A layer of float8 experts: what `moe_layer` calls for weights with scales."""

from typing import Any

import torch

from tilescale.errors import UnsupportedError
from tilescale.ops.arguments import dense, two_scales
from tilescale.ops.expert_float8 import layer_float8_program
from tilescale.ops.float8_wire import GROUP
from tilescale.ops.group import team_of
from tilescale.ops.grouped_float8 import check_scales
from tilescale.ops.kernels import kernel
from tilescale.ops.layout import dtype_of, more_rows, new_tensors
from tilescale.ops.moe_tables import DROPPED, arriving_choices, form_of_counts, forms_of_tables, padded_choices
from tilescale.ops.operator import operator
from tilescale.ops.row_exchange import UNIT_BYTES, sharers
from tilescale.ops.workspace import workspace_of

WORDS = GROUP // 4
"""Words of a group of numbers."""


def scaled_layer(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: Any,
    most: int,
    room: int,
    differentiates: bool,
    group: str,
) -> list[torch.Tensor]:
    """The sums, and the number of dropped choices.

    Raises:
        ArgumentError: unsupported scales.
        UnsupportedError: a gradient is needed.
    """
    if differentiates:
        raise UnsupportedError(
            "float8 experts have no gradients, and an input requires one",
            hint="call it under torch.no_grad(), or train with bfloat16 experts",
        )
    given = two_scales(scales, "of gate_up, and of down")
    names = zip(("scales[0]", "scales[1]"), given, (gate_up, down), strict=True)
    return _layer(x, chosen, weights, gate_up, down, *(_of_squares(*each) for each in names), most, room, group)


def _of_squares(name: str, scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The scale of each square of weights."""
    experts, rows, columns = weight.shape
    shape = experts, rows // GROUP, columns // GROUP
    if isinstance(scales, torch.Tensor) and scales.ndim == 1:
        check_scales(name, scales, (experts,))
        scales = scales[:, None, None].expand(shape)
    check_scales(name, scales, shape)
    return scales


@operator("moe_layer_float8")
def _layer(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    of_gate_up: torch.Tensor,
    of_down: torch.Tensor,
    most: int,
    room: int,
    group: str,
) -> list[torch.Tensor]:
    """The sums, and the number of dropped choices."""
    team, (experts, features, inner), choices = team_of(group), down.shape, chosen.shape[1]
    size, groups = team.size, most * features // GROUP
    numbers, shares = padded_choices(chosen, most, -1), padded_choices(weights.float(), most, 0)
    of_choices, of_sums = arriving_choices(size, most, choices), (size, most, features * x.itemsize // 4)
    in_chosen, in_shares, in_rows, in_scales, in_sums = workspace_of(team).symmetric(
        torch.int32, of_choices, of_choices, (size, groups, WORDS), (size, groups), of_sums
    )
    result = x.new_empty(most, features)
    *tables, counted, rows, of_rows, active, of_active, made = new_tensors(
        x,
        *forms_of_tables(size, experts, most, room, choices),
        form_of_counts(size, experts, most, choices),
        *(((room, features), gate_up.dtype), ((features // GROUP, room), torch.float32)),
        *(((room, inner), gate_up.dtype), ((inner // GROUP, room), torch.float32)),
        ((room, features), x.dtype),
        apart=(DROPPED,),
    )
    kernel(layer_float8_program, team, experts, choices, features, inner, dtype_of(numbers))(
        *(more_rows(dense(x), most), numbers, shares),
        *(dense(gate_up), dense(of_gate_up), dense(down), dense(of_down)),
        *(in_chosen, in_shares.view(torch.float32)),
        *(in_rows.view(gate_up.dtype), in_scales.view(torch.float32), in_sums.view(x.dtype), counted, *tables),
        *(rows, of_rows, active, of_active, made, result, sharers(features, UNIT_BYTES // x.itemsize, most)),
    )
    return [result[: x.shape[0]], tables[DROPPED]]


@_layer.register_fake
def _(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, *_: Any) -> Any:
    return [x.new_empty(x.shape), chosen.new_empty(len(gate_up), dtype=torch.int32)]
