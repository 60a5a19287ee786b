# SPDX-License-Identifier: MIT
"""Collectives that send float8 as bytes, where the network does not deliver a kernel's lines: over PCIe, between nodes,
and between ranks that share a GPU.

PyTorch rounds the floats and adds them up, any algorithm moves the lines in between. Results are those of the kernel of
float8_wire.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from tilescale.comm import Team
from tilescale.ops.layout import dtype_name
from tilescale.ops.whole_tensors import exchanged, gathered
from tilescale.program.wire import BIAS, FRACTION, INFINITY, LARGEST, LEAST, UNIT_BYTES, last_of, line_floats

FLOATS = line_floats()
"""Numbers of a line, which share a scale."""

SCALE, BYTES = slice(FLOATS, FLOATS + 4), 128
"""Position of the scale, and bytes, of a line."""


def all_gather(a: torch.Tensor, team: Team) -> torch.Tensor:
    """The numbers of all ranks, one rank after the other, of a contiguous tensor of one dimension."""
    every = gathered(_narrowed(a[None]), team)
    return _widened(every, a.numel()).flatten().to(a.dtype)


def reduce_scatter(a: torch.Tensor, team: Team) -> torch.Tensor:
    """This rank's part of the sum, in float32 and in the order of the ranks; its own contribution is exact."""
    parts = a.view(team.size, -1)
    arrived = _widened(exchanged(_narrowed(parts), team), parts.shape[1])
    arrived[team.rank] = parts[team.rank]
    total: Any = sum(arrived)
    return total.to(a.dtype)


def all_reduce(a: torch.Tensor, team: Team) -> torch.Tensor:
    """The sum, of which each rank makes a part."""
    part = -(-a.nbytes // (team.size * UNIT_BYTES)) * UNIT_BYTES // a.itemsize
    total = reduce_scatter(pad(a, (0, team.size * part - a.numel())), team)
    return all_gather(total, team)[: a.numel()]


def _narrowed(x: torch.Tensor) -> torch.Tensor:
    """Lines, (parts, lines, BYTES) of bytes, of floats (parts, numbers)."""
    lines = pad(x.float(), (0, -x.shape[1] % FLOATS)).unflatten(1, (-1, FLOATS))
    top = lines.abs().view(torch.int32).amax(2, keepdim=True)
    exponent = ((top.clamp(min=LEAST) - LARGEST - 1) >> FRACTION) + 1
    scale, inverse = (((BIAS + sign * exponent) << FRACTION).view(torch.float32) for sign in (1, -1))
    end = torch.where(top > last_of(dtype_name(x.dtype)), 240 * scale, torch.inf)
    narrow = (lines.clamp(-end, end) * inverse).to(torch.float8_e4m3fn)
    scale = torch.where(top < INFINITY, scale, torch.nan)
    return pad(torch.cat([narrow.view(torch.uint8), scale.view(torch.uint8)], 2), (0, BYTES - SCALE.stop))


def _widened(lines: torch.Tensor, numbers: int) -> torch.Tensor:
    """Such a number of float32 of each part."""
    wide = lines[..., :FLOATS].view(torch.float8_e4m3fn).float() * lines[..., SCALE].view(torch.float32)
    return wide.flatten(1)[:, :numbers]
