# SPDX-License-Identifier: MIT
"""The products of the layers of linear.py, tokens and weights as layers have them: an operator for each kind of layer.

Between a layer and its product stand views, transpositions and the parameters' shards. An operator around all of them
is one step of autograd, where each would be one by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tilescale.ops.ag_gemm import all_gather_matmul
from tilescale.ops.all_gather import all_gather
from tilescale.ops.flat import plain
from tilescale.ops.float8 import gradients_of_times, of_gradients, recipe_of
from tilescale.ops.gemm_ar import matmul_all_reduce
from tilescale.ops.gemm_rs import matmul_reduce_scatter
from tilescale.ops.group import size_of
from tilescale.ops.operator import operator, operator_of


@operator("column_parallel")
def column_parallel(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], group: str, float8: str
) -> list[torch.Tensor]:
    """What layers with weights (N, K), and a bias each or none, make of the tokens of all ranks: (..., tokens, N).

    x is (..., tokens / ranks, K).
    """
    flat, given = _rows(x), biases or None
    made = all_gather_matmul(flat, [w.t() for w in weights], bias=given, float8=recipe_of(float8), group=group)
    return [_gathered_tokens(y, x.shape, size_of(group)) for y in made]


@column_parallel.register_fake
def _(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], group: str, float8: str
) -> list[torch.Tensor]:
    before, tokens = x.shape[:-2], size_of(group) * x.shape[-2]
    return [x.new_empty(*before, tokens, weight.shape[0]) for weight in weights]


def _column_setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, biases, ctx.group, ctx.float8 = inputs
    ctx.biased = bool(biases)
    ctx.save_for_backward(x, *weights)


def _column_backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    """dx = scatter(sum of dy w); dw = dy^T gather(x); the gather is repeated rather than kept."""
    x, *weights = ctx.saved_tensors
    rows = [_scattered_rows(grad, size_of(ctx.group)) for grad in grads]
    joined, weight = (rows[0], weights[0]) if len(rows) == 1 else (torch.cat(rows, 1), torch.cat(weights))
    back = of_gradients(ctx.float8)
    dx = operator_of("matmul_reduce_scatter")(joined, weight, None, ctx.group, back).view(x.shape)
    gathered = all_gather(_rows(x), group=ctx.group)
    biases = [each.sum(0) for each in rows] if ctx.biased else []
    return dx, [each.t() @ gathered for each in rows], biases, None, None


column_parallel.register_autograd(_column_backward, setup_context=_column_setup)


@operator("row_parallel")
def row_parallel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str, sequence: bool, float8: str
) -> torch.Tensor:
    """The sum over the ranks of what a layer with weight (N, K) makes of (..., tokens, K): of this rank's tokens, or of
    all (not `sequence`)."""
    how = {"bias": bias, "float8": recipe_of(float8), "group": group}
    if not sequence:
        return matmul_all_reduce(_rows(x), weight.t(), **how).view(*x.shape[:-1], weight.shape[0])
    size = size_of(group)
    made = matmul_reduce_scatter(_scattered_rows(x, size), weight.t(), **how)
    return made.view(*x.shape[:-2], x.shape[-2] // size, weight.shape[0])


@row_parallel.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str, sequence: bool, float8: str
) -> torch.Tensor:
    before = (*x.shape[:-2], x.shape[-2] // size_of(group)) if sequence else x.shape[:-1]
    return x.new_empty(*before, weight.shape[0])


def _row_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, ctx.group, ctx.sequence, ctx.float8 = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight)


def _row_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """dx = gather(dy) w; dw = gather(dy)^T x; the bias was added once, so its gradient is that of all rows."""
    x, weight = ctx.saved_tensors
    rows, size = _rows(grad), size_of(ctx.group)
    if ctx.sequence:
        how = True, ctx.group, "", False, of_gradients(ctx.float8)
        made, rows = operator_of("all_gather_matmul")(rows, [weight], None, *how)
        dx, dw = _gathered_tokens(made, grad.shape, size), rows.t() @ _scattered_rows(x, size)
    else:
        made, across = gradients_of_times(rows, _rows(x), weight.t(), ctx.float8)
        dx, dw = made.view(x.shape), across.t()
    return dx, dw, rows.sum(0) if ctx.biased else None, None, None, None


row_parallel.register_autograd(_row_backward, setup_context=_row_setup)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(..., K) as rows."""
    return x.reshape(-1, x.shape[-1])


def _gathered_tokens(rows: torch.Tensor, shape: Sequence[int], size: int) -> torch.Tensor:
    """Rows that come rank by rank as (..., ranks * tokens, N), where each rank has (..., tokens, K) of a shape."""
    before, tokens, features = shape[:-2], shape[-2], rows.shape[-1]
    sequences = rows.view(size, math.prod(before), tokens, features).transpose(0, 1)
    return plain(sequences.reshape(*before, size * tokens, features))


def _scattered_rows(x: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse: (..., ranks * tokens, N) as rows, those of one rank together."""
    return x.reshape(-1, size, x.shape[-2] // size, x.shape[-1]).transpose(0, 1).reshape(-1, x.shape[-1])
