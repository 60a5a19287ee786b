# SPDX-License-Identifier: MIT
"""All-reduce, residual and LayerNorm (Ba, Kiros, Hinton, arXiv:1607.06450), as they follow in a transformer.

For few rows one kernel does all of it, as for RMSNorm. More rows are summed as a whole, then normalised by PyTorch.
"""

from collections.abc import Sequence
from typing import Any

import torch

import tilescale.language as T
from tilescale.ops import whole_tensors
from tilescale.ops.all_reduce_rms_norm import algorithm_of, algorithms_of, check_outs, checked, rows_in
from tilescale.ops.arguments import SUMS, dense
from tilescale.ops.group import collective, group_name, team_of
from tilescale.ops.kernels import kernel, kernels
from tilescale.ops.layout import delivered, dtype_of
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.runtime.ahead import also_needed, is_dry


@plain_calls_repeat
@collective
def all_reduce_layer_norm(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    out: Sequence[torch.Tensor | None] | None = None,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of all ranks' tensors, plus the residual; and that after LayerNorm, row by row. Collective.

    Args:
        a, weight, residual, out, group: as `all_reduce_rms_norm` takes them.
        bias: (features,), the same on all ranks; None for zeros.
        eps: is added to the variance.

    Returns:
        (y - mean(y)) * weight / sqrt(var(y) + eps) + bias, and y, the sum with the residual: the next residual. Rounded
        as there. Both can be differentiated.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    flat, given = checked(a, weight, residual, SUMS, eps, bias=bias)
    check_outs(out, [(a.shape, a.dtype)] * 2, a, weight, bias, residual)
    options = flat, weight, bias, given, eps, group_name(group)
    if out is None or _operator.is_seen:
        made = _operator(*options)
    else:
        made = _operator.plain(*options, places=rows_in(out, flat))
    normed, y = (delivered(x.view(a.shape), place) for x, place in zip(made, out or (None, None), strict=True))
    return normed, y


@operator("all_reduce_layer_norm")
def _operator(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    group: str,
    *,
    places: Sequence[torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised rows of matrices, and the sums that they are made of."""
    team = team_of(group)
    algorithm = algorithm_of(a, team) if len(a) else None
    how = a.shape[1], dtype_of(a), bias is not None, residual is not None, eps
    choice = lambda name: (by_one_kernel, team, *how, name)  # noqa: E731
    if is_dry():
        also_needed(kernels, *map(choice, algorithms_of(a, team)), *whole_tensors.choices("allreduce", a.dtype, team))
    if algorithm is None:
        y = operator_of("all_reduce").function(a, "sum", group)
        y = y if residual is None else y.add_(residual)
        return torch.nn.functional.layer_norm(y, y.shape[1:], weight, bias, eps), y
    normed, y = (a.new_empty(a.shape) if place is None else place for place in places)
    made = kernel(*choice(algorithm))
    added = weight[:1, None] if residual is None else dense(residual)
    shift = weight[:1] if bias is None else dense(bias)
    made(dense(a), added, dense(weight), shift, normed, y)
    return normed, y


_operator.register_fake(lambda a, *_: (a.new_empty(a.shape), a.new_empty(a.shape)))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, weight, bias, residual, ctx.eps, ctx.group = inputs
    ctx.save_for_backward(weight, output[1])
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None


def _backward(ctx: Any, of_normed: torch.Tensor, of_y: torch.Tensor) -> tuple[Any, ...]:
    """dy = r (g - mean(g) - n mean(g n)) with n = r (y - mean(y)), r = 1 / std(y), g = w d; and the gradient of y."""
    weight, y = ctx.saved_tensors
    centered = y.float() - y.float().mean(1, keepdim=True)
    scale = torch.rsqrt(centered.pow(2).mean(1, keepdim=True) + ctx.eps)
    n, d = centered * scale, of_normed.float()
    g = d * weight.float()
    dy = scale * (g - g.mean(1, keepdim=True) - n * (g * n).mean(1, keepdim=True))
    dy = (dy + of_y.float()).to(y.dtype)
    da = operator_of("all_reduce")(dy, "sum", ctx.group)
    shift = d.sum(0).to(weight.dtype) if ctx.has_bias else None
    return da, (d * n).sum(0).to(weight.dtype), shift, dy if ctx.has_residual else None, None, None


_operator.register_autograd(_backward, setup_context=_setup)


def by_one_kernel(size: int, N: int, dtype: str, has_bias: bool, has_residual: bool, eps: float, algorithm: str) -> Any:
    """All of it, for any number of rows."""
    M = T.dynamic("M")

    @T.prim_func
    def all_reduce_layer_norm(
        X: T.Tensor((M, N), dtype),
        R: T.Tensor((M, N) if has_residual else (1, 1), dtype),
        W: T.Tensor((N,), dtype),
        B: T.Tensor((N,) if has_bias else (1,), dtype),
        Out: T.Tensor((M, N), dtype),
        Y: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(device=size):
            with T.Scale("device"):
                shift, added = B if has_bias else None, R if has_residual else None
                T.allreduce_layer_norm(X, W, shift, Out, Y, residual=added, eps=eps, impl=algorithm)

    return all_reduce_layer_norm
