# SPDX-License-Identifier: MIT
"""Reduce-scatter: the sum, maximum or minimum of the ranks' tensors, of which each rank is left with its part."""

from typing import Any

import torch

from tilescale.ops import whole_tensors
from tilescale.ops.arguments import COMBINES, check_dim, check_divides, check_op, check_out, check_tensor, dense
from tilescale.ops.float8_wire import check_wire, reduce_scatter_float8
from tilescale.ops.group import collective, group_name, size_of, team_of
from tilescale.ops.layout import delivered, place_in, shape_with, split
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.plain_calls import plain_calls_repeat


@plain_calls_repeat
@collective
def reduce_scatter(
    a: torch.Tensor,
    dim: int = 0,
    *,
    op: str = "sum",
    out: torch.Tensor | None = None,
    wire: str | None = None,
    group: Any = None,
) -> torch.Tensor:
    """This rank's part, along a dimension, of the sum of all ranks' tensors. Collective.

    Inside a node sums of bfloat16, float16 and float32 are made in float32, in the order of ranks, and rounded once.

    Args:
        a: of the same shape on all ranks, and of a type that `all_reduce` takes; the extent of `dim` is a multiple of
            their number.
        dim: along which the sum is cut.
        op: "sum", "max" or "min", as of `all_reduce`.
        out: the result's memory, as for `all_gather`.
        wire: None, or "float8_e4m3fn" for a sum: numbers are sent in float8, each 120 of a part with a scale; see
            docs/operators/float8.md for the error. bfloat16, float16 and float32.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        A tensor with the extent of `dim` through the number of ranks. A sum can be differentiated: `all_gather` is its
        backward.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=COMBINES)
    check_op(op, a)
    dim, name = check_dim("dim", dim, a), group_name(group)
    check_divides("a", a, dim, size_of(name))
    check_out(out, shape_with(a, dim, a.shape[dim] // size_of(name)), a)
    if wire is not None:
        check_wire(wire, a, op)
        return delivered(reduce_scatter_float8(a, dim, name), out)
    if out is None:
        return _operator(a, dim, op, name)
    return out.copy_(_operator(a, dim, op, name)) if _operator.is_seen else _operator.plain(a, dim, op, name, out=out)


@operator("reduce_scatter")
def _operator(a: torch.Tensor, dim: int, op: str, group: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    team = team_of(group)
    if not a.numel():
        return delivered(a.new_empty(shape_with(a, dim, a.shape[dim] // team.size)), out)
    return delivered(whole_tensors.scattered(dense(split(a, dim, team.size)), team, place_in(out, 0), op), out)


_operator.register_fake(lambda a, dim, op, group: a.new_empty(shape_with(a, dim, a.shape[dim] // size_of(group))))
_operator.register_autograd(lambda ctx, grad: operator_of("all_gather")(grad, ctx.dim, ctx.group))
