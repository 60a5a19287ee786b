# SPDX-License-Identifier: MIT
"""All-reduce: the sum of the ranks' tensors, or their maximum or minimum, on every rank.

By `T.allreduce`, for which the machine model chooses the algorithm. Its kernels were at least as fast as every
alternative from 4 KiB to 256 MiB (docs/collectives.md), so no copy queue takes part.
"""

from typing import Any

import torch

from tilescale.ops import whole_tensors
from tilescale.ops.arguments import COMBINES, check_op, check_out, check_tensor, dense
from tilescale.ops.float8_wire import all_reduce_float8, check_wire
from tilescale.ops.group import collective, group_name, team_of
from tilescale.ops.layout import delivered, place_in
from tilescale.ops.operator import operator
from tilescale.ops.plain_calls import plain_calls_repeat


@plain_calls_repeat
@collective
def all_reduce(
    a: torch.Tensor,
    *,
    op: str = "sum",
    out: torch.Tensor | None = None,
    wire: str | None = None,
    group: Any = None,
) -> torch.Tensor:
    """The sum of all ranks' tensors, or their maximum or minimum, as a new tensor. Collective.

    Args:
        a: of the same shape on all ranks; bfloat16, float16, float32, float64, int64, int32, int8 or uint8. Values of
            bfloat16 and float16 that a rank adds at once are added in float32, and rounded. Sums of integers wrap
            around as PyTorch's.
        op: "sum", "max" or "min", element by element. A NaN of any rank stays.
        out: the result's memory, where no gradients are recorded; `a` itself for a sum in place.
        wire: None, or "float8_e4m3fn" for a sum: parts and their sums are sent in float8, each 120 numbers with a
            scale; see docs/operators/float8.md for the error. bfloat16, float16 and float32.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        A tensor like `a`. A sum can be differentiated: its backward is the sum of the gradients.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=COMBINES)
    check_op(op, a)
    name = group_name(group)
    check_out(out, a.shape, a)
    if wire is not None:
        check_wire(wire, a, op)
        return delivered(all_reduce_float8(a, name), out)
    if out is None:
        return _operator(a, op, name)
    return out.copy_(_operator(a, op, name)) if _operator.is_seen else _operator.plain(a, op, name, out=out)


@operator("all_reduce")
def _operator(a: torch.Tensor, op: str, group: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    if not a.numel():
        return torch.empty_like(a, memory_format=torch.contiguous_format) if out is None else out
    place = place_in(out, 0)
    made = a.new_empty(a.shape) if place is None else place
    return delivered(whole_tensors.summed(dense(a), team_of(group), made, op), out)


_operator.register_fake(lambda a, *_: torch.empty_like(a, memory_format=torch.contiguous_format))
_operator.register_autograd(lambda ctx, grad: _operator(grad, ctx.op, ctx.group))
