# SPDX-License-Identifier: MIT
"""All-gather: every rank's tensor, joined along a dimension."""

from typing import Any

import torch

from tilescale.ops import whole_tensors
from tilescale.ops.arguments import BYTES, as_moved, as_numbers, check_dim, check_out, check_tensor, dense
from tilescale.ops.float8_wire import all_gather_float8, check_wire
from tilescale.ops.group import collective, group_name, size_of, team_of
from tilescale.ops.layout import delivered, join, place_in, shape_with
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.plain_calls import plain_calls_repeat


@plain_calls_repeat
@collective
def all_gather(
    a: torch.Tensor, dim: int = 0, *, out: torch.Tensor | None = None, wire: str | None = None, group: Any = None
) -> torch.Tensor:
    """The tensors of all ranks, one after the other along a dimension. Collective.

    Args:
        a: of the same shape on all ranks.
        dim: along which they are joined.
        out: the result's memory, where no gradients are recorded. Contiguous, and with dim 0 and parts of whole 16
            bytes, it is written without a copy.
        wire: None, or "float8_e4m3fn": numbers are sent in float8, each 120 of a part with a scale; see
            docs/operators/float8.md for the error. bfloat16, float16 and float32.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        A tensor with as many times the extent of `dim`. It can be differentiated: `reduce_scatter` is its backward.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=BYTES)
    dim, name = check_dim("dim", dim, a), group_name(group)
    check_out(out, shape_with(a, dim, a.shape[dim] * size_of(name)), a)
    if wire is not None:
        check_wire(wire, a)
        return delivered(all_gather_float8(a, dim, name), out)
    if out is None:
        return as_moved(_operator, a, dim, name)
    given, place = as_numbers(a.resolve_conj()), as_numbers(out)
    if _operator.is_seen:
        place.copy_(_operator(given, dim, name))
    else:
        _operator.plain(given, dim, name, out=place)
    return out


@operator("all_gather")
def _operator(a: torch.Tensor, dim: int, group: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    team = team_of(group)
    if not a.numel():
        return delivered(join(a.new_empty(team.size * a.shape[0], *a.shape[1:]), dim, team.size), out)
    rows = whole_tensors.gathered(dense(a), team, place_in(out, dim))
    return delivered(join(rows, dim, team.size), out)


_operator.register_fake(lambda a, dim, group: a.new_empty(shape_with(a, dim, a.shape[dim] * size_of(group))))
_operator.register_autograd(lambda ctx, grad: operator_of("reduce_scatter")(grad, ctx.dim, "sum", ctx.group))
