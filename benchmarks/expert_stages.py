# SPDX-License-Identifier: MIT
"""Stages of a layer of float8 experts, simulated one after the other: tokens to experts, both grouped GEMMs, sums back.

Every expert has as many tokens. Tables, and the quantization and sums on a rank, are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import tilescale
from tilescale.collectives import estimate
from tilescale.hda import Machine
from tilescale.ops.float8_wire import GROUP
from tilescale.ops.grouped_float8 import scaled_program
from tilescale.ops.moe_tables import ALIGN

sys.path.insert(0, str(Path(__file__).parent / "works"))

from expert_grids import scaled_gated_program  # noqa: E402 - found through the path above

FEATURES, INNER, EXPERTS, CHOICES = 4096, 2048, 256, 6
"""Of DeepSeek-V4-Flash."""

FLOAT8 = torch.float8_e4m3fn


def layer(machine: Machine, gpus: int, tokens: int) -> float:
    """Simulated microseconds of a layer with that many tokens on each GPU."""
    sent = tokens * gpus * (1 - (1 - 1 / gpus) ** CHOICES)  # to each GPU once
    bytes_of_rows = FEATURES + 4 * FEATURES // GROUP, 2 * FEATURES
    ways = (estimate(machine, "device", "all_to_all", "direct", sent * n).seconds for n in bytes_of_rows)
    return 1e6 * sum(ways) + sum(gemms(machine, EXPERTS // gpus, tokens * gpus * CHOICES // EXPERTS))


def gemms(machine: Machine, local: int, rows: int) -> list[float]:
    """Simulated microseconds of both grouped GEMMs of `local` experts with that many rows each."""
    tiles = -(-rows // ALIGN)
    owners, room = torch.arange(local, dtype=torch.int32).repeat_interleave(tiles), local * tiles * ALIGN
    given = (
        (scaled_gated_program(1, INNER, FEATURES), FEATURES, 2 * INNER, [empty(1, 1)]),
        (scaled_program(FEATURES, INNER, INNER), INNER, FEATURES, []),
    )
    made = [empty(room, INNER, dtype=FLOAT8), empty(INNER // GROUP, room, dtype=torch.float32)], [empty(room, FEATURES)]
    times = []
    with tilescale.use_machine(machine):
        for (program, deep, wide, kept), results in zip(given, made, strict=True):
            rows_of = [empty(room, deep, dtype=FLOAT8), empty(deep // GROUP, room, dtype=torch.float32)]
            weights = [empty(local, wide, deep, dtype=FLOAT8)]
            scales = [empty(local, wide // GROUP, deep // GROUP, dtype=torch.float32)]
            args = [*rows_of, *weights, *scales, empty(local * tiles, dtype=torch.int32), *kept, *results]
            how = {"machine": machine, "data": False, "progress": False, "assume": {"owners": owners}}
            times.append(tilescale.emulate(program, [args], **how).time_us)
    return times


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
