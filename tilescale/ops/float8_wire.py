# SPDX-License-Identifier: MIT
"""Collectives that send numbers as float8: lines of 120 with a scale each, sums in float32.

One kernel quantizes, sends, sums and dequantizes (`wire=` of `T.all_gather` and others), so that a tensor is read and
written once; where networks do not deliver its lines, float8_lines.py has the steps. Local parts are quantized as well
where other ranks receive them: all ranks have the same bits.

Scales are powers of two, so scaling itself rounds nothing. A line with an infinity or a NaN becomes NaN as a whole.
"""

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.cost.reach import delivers_lines
from tilescale.errors import ArgumentError
from tilescale.hda.current import current_machine
from tilescale.ops import float8_lines
from tilescale.ops.arguments import SUMS, check_tensor, dense, plain
from tilescale.ops.group import size_of, team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.layout import dtype_of, join, shape_with, split
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.rounding import FRACTION, largest, power
from tilescale.ops.whole_tensors import compare_counts, program, spans_nodes, sum_program
from tilescale.program.wire import WIRE

GROUP = 128
"""Numbers of a tile's row that share a scale."""

MAGNITUDE, LEAST = 0x7FFFFFFF, (127 - 117) << FRACTION
"""The bits of a float32 number without its sign; those of 2^-117, the least that the largest magnitude of a group is
taken to be: the scale and one over it are normal numbers."""

MOST = largest(WIRE)

END, NEXT = 448.0, 240.0
"""The largest number of float8, and the largest one below half the next power of two."""


def check_wire(wire: Any, a: torch.Tensor, op: str = "sum") -> None:
    """Raise ArgumentError unless numbers of `a` can be sent as float8."""
    if wire != WIRE:
        raise ArgumentError(f"wire is {wire!r}", hint=f"supported: {WIRE!r}, or None for numbers as they are")
    if op != "sum":
        raise ArgumentError(f"wire is {wire!r}, op is {op!r}", hint="leave wire out: it is for sums")
    check_tensor("a", a, served=SUMS)


@operator("all_gather_float8")
def all_gather_float8(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """The gathered tensor."""
    team, x = team_of(group), dense(a).view(-1)
    how = program, "all_gather", dtype_of(a), "direct"
    made = _exchanged(float8_lines.all_gather, x, team, team.size * a.numel(), *how)
    return plain(join(made.view(team.size * a.shape[0], *a.shape[1:]), dim, team.size))


@operator("reduce_scatter_float8")
def reduce_scatter_float8(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """This rank's part of the sum."""
    team = team_of(group)
    how, x = (program, "reduce_scatter", dtype_of(a), "direct"), split(a, dim, team.size).reshape(-1)
    made = _exchanged(float8_lines.reduce_scatter, x, team, a.numel() // team.size, *how)
    return plain(made.view(shape_with(a, dim, a.shape[dim] // team.size)))


@operator("all_reduce_float8")
def all_reduce_float8(a: torch.Tensor, group: str) -> torch.Tensor:
    """The sum."""
    how, x = (sum_program, dtype_of(a), "sum", "two_shot"), dense(a).view(-1)
    return plain(_exchanged(float8_lines.all_reduce, x, team_of(group), a.numel(), *how).view(a.shape))


def _exchanged(
    by_moves: Callable[..., torch.Tensor], a: torch.Tensor, team: Team, count: int, build: Any, *how: str
) -> torch.Tensor:
    """The result, of a number of elements, of a contiguous tensor of one dimension: by one kernel, or by moves."""
    if team.size == 1:
        return a.clone()
    compare_counts(a, team)
    if a.numel() and not _has_lines(team):
        return by_moves(a, team)
    made = a.new_empty(count)
    if a.numel():
        kernel(build, team, *how, WIRE)(a, made)
    return made


def _has_lines(team: Team) -> bool:
    """Whether kernels can send lines between all ranks."""
    machine = current_machine()
    return delivers_lines(machine.network(machine.tensor_level.name)) and not spans_nodes(team)


@T.macro
def quantize(x, sizes, top, scale, inverse, end, q, last):
    """q = x / scale, a scale for each row: the least power of two by which the largest magnitude fits the type; NaN for
    all of a row with an infinity or a NaN. A row with a magnitude above `last`, given by its bits, ends where q times
    the scale is still a number of the type of the result."""
    for i, j in T.Parallel(x.shape[0], x.shape[1]):
        sizes[i, j] = T.reinterpret(x[i, j], "int32") & MAGNITUDE
    T.reduce_max(sizes, top, dim=1)
    for i in T.Parallel(x.shape[0]):
        exponent = ((T.max(top[i], LEAST) - MOST) >> FRACTION) + 1
        scale[i] = power(exponent, top[i])
        inverse[i] = power(-exponent, top[i])
        end[i] = T.if_then_else(top[i] > last, NEXT, END)
    for i, j in T.Parallel(x.shape[0], x.shape[1]):
        q[i, j] = T.cast(T.max(T.min(x[i, j] * inverse[i], end[i]), -end[i]), WIRE)


all_gather_float8.register_fake(
    lambda a, dim, group: a.new_empty(shape_with(a, dim, a.shape[dim] * size_of(group)))
)
reduce_scatter_float8.register_fake(
    lambda a, dim, group: a.new_empty(shape_with(a, dim, a.shape[dim] // size_of(group)))
)
all_reduce_float8.register_fake(lambda a, *_: torch.empty_like(a, memory_format=torch.contiguous_format))
all_gather_float8.register_autograd(
    lambda ctx, grad: operator_of("reduce_scatter")(grad, ctx.dim, "sum", ctx.group)
)
reduce_scatter_float8.register_autograd(lambda ctx, grad: operator_of("all_gather")(grad, ctx.dim, ctx.group))
all_reduce_float8.register_autograd(lambda ctx, grad: operator_of("all_reduce")(grad, "sum", ctx.group))
