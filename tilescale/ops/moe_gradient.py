# SPDX-License-Identifier: MIT
"""The gradients of a layer of experts: the transfers of its forward, and GEMMs of bfloat16 or float16.

Those of float8 experts as well. What was quantized is differentiated as if it had not been: tokens and GEMMs have
the values that the forward used, weights the values that were given.
"""

from typing import Any

import torch

from tilescale.ops import expert_programs
from tilescale.ops.arguments import dense
from tilescale.ops.gemm_tiles import at_once
from tilescale.ops.group import team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.layout import dtype_of, more_rows, new_tensors
from tilescale.ops.moe_tables import arriving_choices
from tilescale.ops.operator import operator
from tilescale.ops.row_exchange import UNIT_BYTES, sharers
from tilescale.ops.workspace import workspace_of

WORD_BYTES = 4

SAVED = 12
"""Tables, rows and pre-activations: what a backward needs."""


@operator("moe_layer_backward")
def gradients(
    grad: torch.Tensor,
    rows: torch.Tensor,
    hidden: torch.Tensor,
    tables: list[torch.Tensor],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    learns: bool,
    group: str,
) -> list[torch.Tensor]:
    """The gradients of x and of the weights of choices, in float32; and of gate_up and down, if it `learns`."""
    team, tokens, (experts, features, inner) = team_of(group), grad.shape[0], down.shape
    of_weights, counts, owners, order, sent, received, places, before, used = tables
    size, most, choices = places.shape
    of_tokens = words_of(features, rows.dtype, size, most)
    given = arriving_choices(size, most, choices), of_tokens, of_tokens
    in_shares, *inboxes = workspace_of(team).symmetric(torch.int32, *given)
    shapes = rows.shape, hidden.shape, rows.shape, (len(rows), inner)
    parts = inner // expert_programs.columns_of(inner), len(rows)
    far, of_hidden, of_rows, active, of_row_weights = new_tensors(
        rows, *((shape, rows.dtype) for shape in shapes), (parts, torch.float32)
    )
    of_x, of_choices = rows.new_empty(most, features), of_weights.new_empty(most, choices)
    of_gate_up, of_down = (rows.new_empty(w.shape if learns else (1, 1, 1)) for w in (gate_up, down))
    shape = experts, choices, features, inner, dtype_of(rows), at_once(), learns
    kernel(expert_programs.layer_gradient_program, team, *shape)(
        *(more_rows(dense(grad), most), dense(gate_up), dense(down), rows, hidden, of_weights, counts),
        *(owners, order, sent, received, places, before, used),
        *(in_shares.view(torch.float32), *(words.view(rows.dtype) for words in inboxes)),
        *(far, of_hidden, active, of_rows, of_row_weights, of_x, of_choices, of_gate_up, of_down),
        sharers(features, UNIT_BYTES // rows.itemsize, most),
    )
    return [of_x[:tokens], of_choices[:tokens], *([of_gate_up, of_down] if learns else [])]


@gradients.register_fake
def _(grad: torch.Tensor, *given: Any) -> list[torch.Tensor]:
    _, _, tables, *experts, learns, _ = given
    of_choices = grad.new_empty(grad.shape[0], tables[-3].shape[2], dtype=torch.float32)
    of_experts = [w.new_empty(w.shape) for w in experts] if learns else []
    return [grad.new_empty(grad.shape), of_choices, *of_experts]


def words_of(features: int, dtype: torch.dtype, size: int, most: int) -> tuple[int, int, int]:
    """The shape of all ranks' rows, in words."""
    return size, most, features * dtype.itemsize // WORD_BYTES
