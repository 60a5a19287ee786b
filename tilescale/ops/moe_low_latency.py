# SPDX-License-Identifier: MIT
"""The low-latency form of a layer of experts, and the choice between it and the throughput form by the machine model.

See `low_latency_program.py`. Three grids become one, tokens leave together with the choices, and GEMMs load hardly more
than weights. But all tokens go to all ranks, every block counts the choices, and each 32 rows of an expert load its
weights again: so it is for up to as many on average.
"""

import math
from functools import lru_cache

import torch

from tilescale.collectives import estimate
from tilescale.comm import Team
from tilescale.cost.calibrated import in_force
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.ops.arguments import dense, unread
from tilescale.ops.expert_programs import LayerForm
from tilescale.ops.few_rows_gemm import ROWS
from tilescale.ops.float8_wire import GROUP
from tilescale.ops.gemm_tiles import at_once
from tilescale.ops.kernels import kernel, kernels
from tilescale.ops.layout import dtype_name, dtype_of, more_rows, new_tensors
from tilescale.ops.low_latency_program import COUNTED, HIGH, RESIDENT, low_latency_program, padded
from tilescale.ops.moe_float8 import Scale
from tilescale.ops.moe_tables import ALIGN, padded_choices
from tilescale.ops.whole_tensors import is_split
from tilescale.ops.workspace import workspace_of
from tilescale.passes.overlap.tile_cost import bandwidth_of
from tilescale.runtime import ahead

KEPT = 4096
"""Decisions that are kept, those used last."""

CHOICE_BYTES, WORD_BYTES = 8, 4
"""Bytes of an expert's number and its weight, and of a word."""


TABLES = 40
"""Dependent accesses to memory of both grids that make tables: 10 us on an H200."""


@lru_cache(KEPT)
def _takes_few(
    machine: Machine, size: int, most: int, choices: int, local: int, row_bytes: int, sum_bytes: int, expert_bytes: int
) -> bool:
    """Whether the low-latency form is faster. Three grids become one, choices and tokens leave together, and GEMMs load
    fewer rows; but all tokens go to all ranks, every block counts the choices, and experts with more than `ROWS` rows
    load their weights again. Experts have rows at random."""
    if is_split(machine, size):
        return False
    known, level, memory = in_force(machine), machine.tensor_level, machine.layer_for("global")
    cache = memory.cache_bandwidth or bandwidth_of(machine)

    def exchanged(row: float) -> float:
        """Seconds of an exchange of all tokens, of `row` bytes each."""
        if size == 1:
            return 0.0
        return estimate(known, level.name, "all_to_all", "direct", size * most * row, units=range(size)).seconds

    rows = most * choices / local  # of an expert, on average
    loaded = local * (1 - math.exp(-rows))
    again = local * math.erfc((ROWS + 0.5 - rows) / math.sqrt(2 * rows)) / 2

    def cached(again: float, high: int) -> float:
        """Seconds of loads from the cache: of weights `again`, and of the rows of all tiles of `high` rows."""
        return (again + (loaded + again) * high / (2 * GROUP)) * expert_bytes / cache

    shared = 1 - (1 - 1 / size) ** choices  # of the tokens, that a rank needs
    blocks = size * most * sum_bytes // (2 * GROUP * HIGH)
    waves = math.ceil(blocks / (RESIDENT * machine.program_units))
    counting = waves * size * math.ceil(most * choices / COUNTED) * memory.latency
    by_tables = choices * CHOICE_BYTES, shared * row_bytes, shared * sum_bytes
    few = level.launch + counting + exchanged(row_bytes) + exchanged(sum_bytes) + cached(again, ROWS)
    tables = 3 * level.launch + TABLES * memory.latency + sum(map(exchanged, by_tables)) + cached(0, ALIGN)
    return few < tables


def layer_of_few(
    x: torch.Tensor,
    choice: tuple[torch.Tensor, torch.Tensor],
    experts: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[Scale, Scale, Scale],
    most: int,
    room: int,
    team: Team,
) -> list[torch.Tensor] | None:
    """The sums, and the number of dropped choices; None if the throughput form takes less time, by the machine model.

    Args:
        choice: numbers of experts, and their weights.
        experts: gate_up and down.
        scales: of gate_up and down, if they are float8; and of groups of x, if that is.
    """
    (chosen, weights), (gate_up, down), (of_gate_up, of_down, of_x) = choice, experts, scales
    (local, features, inner), choices, size = down.shape, chosen.shape[1], team.size
    dtype, by_rows = (x.dtype, None) if of_down is None else (torch.bfloat16, of_down.ndim == 2)
    bytes_of = features * down.itemsize, features * dtype.itemsize, 3 * features * inner * down.itemsize
    is_few = most * choices <= local * ROWS and _takes_few(current_machine(), size, most, choices, local, *bytes_of)
    if features % GROUP or not (is_few or ahead.is_dry()):
        return None
    form = LayerForm(dtype_name(dtype), by_rows, quantized=of_x is not None)
    made = low_latency_program, team, local, choices, features, inner, dtype_of(chosen), form, at_once()
    if ahead.is_dry():
        ahead.also_needed(kernels, made)
        return None
    groups, sent, words = most * features // GROUP, padded(most * choices), GROUP // WORD_BYTES
    in_chosen, in_shares, in_rows, in_scales, in_sums = workspace_of(team).symmetric(
        torch.int32,
        *((size, sent), (size, sent), (size, groups, words * down.itemsize), form.shape(size, groups)),
        (size, groups, words * dtype.itemsize),
    )
    dropped, owners, places, *memory = new_tensors(
        x,
        *(((local,), torch.int32), ((room // ROWS,), torch.int32), ((size, most, choices), torch.int32)),
        *(((room, features), down.dtype), (form.shape(features // GROUP, room), torch.float32)),
        *(((room, inner), down.dtype), (form.shape(inner // GROUP, room), torch.float32), ((room, features), dtype)),
        apart=(0,),
    )
    result = x.new_empty(most, features, dtype=dtype)
    kernel(*made)(
        *(more_rows(dense(x), most).view(groups, GROUP), scales_of_groups(x, of_x, most)),
        *(padded_choices(chosen, most, -1), padded_choices(weights.float(), most, 0)),
        *(dense(gate_up), scales_or_dummy(of_gate_up, x.device), dense(down), scales_or_dummy(of_down, x.device)),
        *(in_chosen, in_shares.view(torch.float32), in_rows.view(down.dtype), in_scales.view(torch.float32)),
        *(in_sums.view(dtype), dropped, owners, places, *memory, result.view(groups, GROUP)),
    )
    return [result[: len(x)], dropped]


def scales_of_groups(x: torch.Tensor, of_x: Scale, most: int) -> torch.Tensor:
    """The scales of all groups of `most` tokens, one after the other; one number for tokens without scales."""
    return unread(torch.float32, x.device)[0] if of_x is None else more_rows(dense(of_x), most).view(-1)


def scales_or_dummy(scales: Scale, device: torch.device) -> torch.Tensor:
    """The scales of weights; one number for weights without scales."""
    return unread(torch.float32, device)[1][None] if scales is None else dense(scales)
