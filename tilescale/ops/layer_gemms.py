# SPDX-License-Identifier: MIT
"""The GEMMs of the layers of linear.py, tokens and weights as layers have them: an operator for each kind of layer.

Between a layer and its GEMM are views, transpositions and the parameters' shards. One operator around all of them is
one step of autograd instead of one each.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tilescale.ops.ag_gemm import all_gather_matmul
from tilescale.ops.all_gather import all_gather
from tilescale.ops.dtensors import DTensorPlacement, is_dtensor, local_tensor, with_own_storage
from tilescale.ops.float8 import gradients_of_times, of_gradients, recipe_of
from tilescale.ops.gemm_ar import matmul_all_reduce
from tilescale.ops.gemm_rs import matmul_reduce_scatter
from tilescale.ops.group import size_of
from tilescale.ops.layout import adjacent
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.replicated import summed_alike, used_in_parts


@operator("column_parallel")
def column_parallel(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], group: str, float8: str, keeps: bool
) -> list[torch.Tensor]:
    """Outputs of layers with weights (N, K), and a bias each or none, for the rows of all ranks: (..., rows, N).

    x is (..., rows / ranks, K), its other dimensions 1. The gathered rows, (rows, K), follow the results if they are to
    be kept.
    """
    _warn_of_float32(x.dtype)
    how = {"bias": biases or None, "float8": recipe_of(float8), "group": group, "return_gathered": keeps}
    made = all_gather_matmul(_rows(x), [w.t() for w in weights], **how)
    made, kept = (made[0], [made[1]]) if keeps else (made, [])
    return [*(y.view(*x.shape[:-2], *y.shape) for y in made), *kept]


@column_parallel.register_fake
def _(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], group: str, float8: str, keeps: bool
) -> list[torch.Tensor]:
    rows = size_of(group) * x.shape[-2]
    made = [x.new_empty(*x.shape[:-2], rows, weight.shape[0]) for weight in weights]
    return [*made, x.new_empty(rows, x.shape[-1])] if keeps else made


def _column_setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, biases, ctx.group, ctx.float8, ctx.keeps = inputs
    ctx.biased, ctx.shape = bool(biases), x.shape
    ctx.set_materialize_grads(False)  # kept rows and unused results have none
    ctx.save_for_backward(output[-1] if ctx.keeps else x, *weights)


def _column_backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    """dx = scatter(sum of dy w); dw = dy^T gather(x); the gather is repeated unless it was kept."""
    x, *weights = ctx.saved_tensors
    joined, used = _joined_gradients(grads, weights)
    dx = input_gradient(joined, list(used.values()), ctx.group, of_gradients(ctx.float8)).view(ctx.shape)
    gathered = x if ctx.keeps else all_gather(_rows(x), group=ctx.group)
    # Parts of the joined gradients, not those that came: a compiler writes them once, for both GEMMs.
    parts = dict(zip(used, joined.split(list(map(len, used.values())), 1), strict=True))
    dw = [parts[i].t() @ gathered if i in parts else None for i in range(len(weights))]
    db = [parts[i].sum(0) if i in parts else None for i in range(len(weights))] if ctx.biased else []
    return dx, dw, db


column_parallel.register_autograd(_column_backward, setup_context=_column_setup)


def _joined_gradients(
    grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The rows of gradients of the results that are used, side by side; and the weights of these, by their numbers."""
    rows = {i: _rows(grad) for i, grad in zip(range(len(weights)), grads, strict=False) if grad is not None}
    joined = torch.cat(list(rows.values()), 1) if len(rows) > 1 else rows[next(iter(rows))]
    return joined, {i: weights[i] for i in rows}


@operator("column_parallel_input_gradient")
def input_gradient(grad: torch.Tensor, weights: list[torch.Tensor], group: str, float8: str) -> torch.Tensor:
    """scatter(sum of the parts of dy times their weights): dy (M, sum of N), weights (N, K) each -> (M / ranks, K)."""
    return operator_of("matmul_reduce_scatter")(grad, _joined(weights), None, [], group, float8)


@input_gradient.register_fake
def _(grad: torch.Tensor, weights: list[torch.Tensor], group: str, float8: str) -> torch.Tensor:
    return grad.new_empty(grad.shape[0] // size_of(group), weights[0].shape[1])


def _input_gradient_backward(ctx: Any, given: torch.Tensor) -> tuple[Any, ...]:
    grad, *weights = ctx.saved_tensors
    how = True, ctx.group, "", False, of_gradients(ctx.float8)
    back, gathered = operator_of("all_gather_matmul")(given, [torch.cat(weights).t()], None, [], *how)
    return back, list((grad.t() @ gathered).split([len(w) for w in weights]))


input_gradient.register_autograd(_input_gradient_backward, saves="grad weights")


@operator("side_by_side")
def side_by_side(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    """Outputs of layers with weights (N, K), and a bias each or none, for (..., K) on this rank: (..., sum of N)."""
    rows, widths = _rows(x), list(map(len, weights))
    weight, bias = adjacent(weights), adjacent(biases) if biases else None
    if weight is not None and (bias is not None or not biases):
        made = torch.nn.functional.linear(rows, weight, bias)
    else:  # a copy of the weights would take longer than the GEMMs
        made = rows.new_empty(len(rows), sum(widths))
        added: Sequence[torch.Tensor | None] = biases or [None] * len(weights)
        for part, w, b in zip(made.split(widths, 1), weights, added, strict=True):
            torch.mm(rows, w.t(), out=part) if b is None else torch.addmm(b, rows, w.t(), out=part)
    return made.view(*x.shape[:-1], sum(widths))


side_by_side.register_fake(lambda x, weights, *_: x.new_empty(*x.shape[:-1], sum(len(weight) for weight in weights)))


def _side_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    rows, widths = _rows(grad), [len(weight) for weight in weights]
    dx, dw = side_input_gradient(rows, weights).view(x.shape), (rows.t() @ _rows(x)).split(widths)
    return dx, list(dw), list(rows.sum(0).split(widths)) if ctx.biases else []


side_by_side.register_autograd(_side_backward, saves="x weights")


def parts_side_by_side(x: torch.Tensor, weights: list[Any], biases: list[Any]) -> list[torch.Tensor]:
    """`side_by_side` with a result for each layer, for gradients: the parameters of a layer whose result is not used
    have none. The results lie in one matrix, as those of an operator of PyTorch may not."""
    return list(_PartsSideBySide.apply(len(weights), x, *weights, *biases))


class _PartsSideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:  # noqa: D102
        weights, biases = list(given[:count]), list(given[count:])
        ctx.save_for_backward(x, *weights)
        ctx.biases = biases
        ctx.set_materialize_grads(False)
        made, widths = side_by_side(x, weights, biases), [len(local_tensor(weight)) for weight in weights]
        return tuple(part.data for part in made.split(widths, -1))  # no views, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:  # noqa: D102
        x, *weights = ctx.saved_tensors
        joined, used = _joined_gradients(grads, list(map(local_tensor, weights)))
        widths = list(map(len, used.values()))
        dx = side_input_gradient(joined, list(used.values())).view(x.shape)
        dw = dict(zip(used, (joined.t() @ _rows(x)).split(widths), strict=True))
        db = dict(zip(used, joined.sum(0).split(widths), strict=True)) if ctx.biases else {}
        of_weights = [_lying_as(dw.get(i), weight) for i, weight in enumerate(weights)]
        return None, dx, *of_weights, *(_lying_as(db.get(i), bias) for i, bias in enumerate(ctx.biases))


def _lying_as(grad: torch.Tensor | None, parameter: Any) -> Any:
    """The gradient of a parameter, which may be a DTensor."""
    if grad is None or not is_dtensor(parameter):
        return grad
    return DTensorPlacement.of(parameter).made_of(with_own_storage(grad))


@operator("side_by_side_input_gradient")
def side_input_gradient(grad: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the parts of dy times their weights: dy (M, sum of N), weights (N, K) each -> (M, K)."""
    return grad @ _joined(weights)


side_input_gradient.register_fake(lambda grad, weights: grad.new_empty(grad.shape[0], weights[0].shape[1]))


def _side_gradient_backward(ctx: Any, given: torch.Tensor) -> tuple[Any, ...]:
    grad, *weights = ctx.saved_tensors
    dw = (grad.t() @ given).split([len(weight) for weight in weights])
    return side_by_side(given, weights, []), list(dw)


side_input_gradient.register_autograd(_side_gradient_backward, saves="grad weights")


def _joined(weights: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all matrices: a view where they are adjacent in memory, else a copy."""
    found = adjacent(weights)
    return torch.cat(weights) if found is None else found


@operator("row_parallel")
def row_parallel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str, sequence: bool, float8: str
) -> torch.Tensor:
    """The sum over the ranks of a layer's outputs, with weight (N, K), for (..., rows, K): of this rank's rows, where
    other dimensions are 1; or of all (not `sequence`)."""
    _warn_of_float32(x.dtype)
    how = {"bias": bias, "float8": recipe_of(float8), "group": group}
    if not sequence:
        return matmul_all_reduce(_rows(x), weight.t(), **how).view(*x.shape[:-1], weight.shape[0])
    made = matmul_reduce_scatter(_rows(x), weight.t(), **how)
    return made.view(*x.shape[:-2], *made.shape)


@row_parallel.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str, sequence: bool, float8: str
) -> torch.Tensor:
    before = (*x.shape[:-2], x.shape[-2] // size_of(group)) if sequence else x.shape[:-1]
    return x.new_empty(*before, weight.shape[0])


def _row_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """dx = gather(dy) w; dw = gather(dy)^T x; the bias was added once, so its gradient is that of all rows."""
    x, weight = ctx.saved_tensors
    own, has_gradients = _rows(grad), torch.is_grad_enabled()  # of the gradients
    if ctx.sequence:
        how = True, ctx.group, "", False, of_gradients(ctx.float8)
        made, rows = operator_of("all_gather_matmul")(own, [weight], None, [], *how)
        dw = rows.t() @ _rows(x)
        # All ranks have the bias's gradient alike: autograd would count it once for each rank that gathers rows for it.
        db = (summed_alike(own.sum(0), ctx.group) if has_gradients else rows.sum(0)) if ctx.bias else None
    else:
        rows = used_in_parts(own, ctx.group) if has_gradients else own
        made, across = gradients_of_times(rows, _rows(x), weight.t(), ctx.float8)
        dw, db = across.t(), own.sum(0) if ctx.bias else None
    return made.view(x.shape), dw, db


row_parallel.register_autograd(_row_backward, saves="x weight")


@cache
def _warn_of_float32(dtype: torch.dtype) -> None:
    if dtype is torch.float32:
        warnings.warn(
            "parallel layers compute in float32: GEMMs are PyTorch's and do not overlap with communication. Compute in "
            "bfloat16: model.bfloat16(), torch.autocast, or FSDP2's MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
            stacklevel=3,
        )


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
