# SPDX-License-Identifier: MIT
"""GEMMs of bfloat16 matrices in float8: rounding of operands, forward and backward.

Float8 training as in Micikevicius et al., arXiv:2209.05433, and the recipes of torchao and Transformer Engine: operands
of the forward GEMM are rounded to e4m3, gradients of the inputs to e5m2, which has more range. Scales are powers of
two, so that scaling itself rounds nothing. The gradients of weights use the unrounded matrices, since optimisers add up
many of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.arguments import BLOCK, MULTIPLE, dense
from tilescale.ops.group import team_of
from tilescale.ops.layout import delivered
from tilescale.ops.operator import operator
from tilescale.ops.padding import padded, trimmed
from tilescale.ops.rounding import rounded_groups, rounded_rows, rounded_squares
from tilescale.ops.unfused import Scales, gemm

FORWARD = torch.float8_e4m3fn
"""Type of rounded operands; the weight also where gradients are multiplied with it."""

BLOCKWISE = "blockwise"

SCALINGS = ("rowwise", "tensorwise", BLOCKWISE)

GRADIENTS = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16)


@dataclass(frozen=True)
class Float8:
    """Recipe by which a GEMM rounds its bfloat16 operands to float8.

    Attributes:
        scaling: "rowwise", a scale for each row of a and each column of b; "tensorwise", one for each matrix of a rank;
            or "blockwise", one for each 128 numbers of a row of a, and for each 128 x 128 of b (DeepSeek-V3,
            arXiv:2412.19437, section 3.3.2).
        gradients: torch.float8_e5m2 or torch.float8_e4m3fn, to which the gradient of the result is rounded where that
            of `a` is made of it; or torch.bfloat16, which it has: then that GEMM is one of bfloat16. The gradient of
            `b` is always one of bfloat16 matrices.

    Raises:
        ArgumentError: another scaling, or type of gradients.
    """

    scaling: str = "rowwise"
    gradients: torch.dtype = torch.float8_e5m2

    def __post_init__(self) -> None:
        for name, supported in (("scaling", SCALINGS), ("gradients", GRADIENTS)):
            if getattr(self, name) not in supported:
                raise ArgumentError(
                    f"{name} is {getattr(self, name)!r}", hint=f"supported: {', '.join(map(str, supported))}"
                )


def spelled(recipe: Float8 | None) -> str:
    """A recipe as operators of `torch.library` take it: scaling, type of a, type of gradients; "" for none. Raises
    ArgumentError: it is something else."""
    if recipe is None:
        return ""
    if not isinstance(recipe, Float8):
        raise ArgumentError(f"float8 is {recipe!r}", hint="pass tilescale.ops.Float8(), or None for bfloat16")
    return _words(recipe.scaling, FORWARD, recipe.gradients)


def recipe_of(text: str) -> Float8 | None:
    """The recipe of a text; None for an empty one."""
    if not text:
        return None
    scaling, _, gradients = _read(text)
    return Float8(scaling, gradients)


def multiple_of(recipe: str) -> int:
    """The unit of N and K of operands that are rounded; "" for no rounding."""
    if not recipe:
        return 1
    return BLOCK if _read(recipe)[0] == BLOCKWISE else 2 * MULTIPLE


def of_gradients(recipe: str) -> str:
    """The recipe of the GEMM that makes the gradient of a; "" if that is one of bfloat16."""
    if not recipe:
        return ""
    scaling, _, gradients = _read(recipe)
    return "" if gradients == torch.bfloat16 else _words(scaling, gradients, gradients)


def rounded(
    a: torch.Tensor, weights: list[torch.Tensor], recipe: str
) -> tuple[torch.Tensor, list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The operands in float8, and their factors: for each row of a, and for each column of all weights; or for blocks.

    Each weight is the transpose of a contiguous matrix, as tensor cores take it.
    """
    scaling, kind, _ = _read(recipe)
    if scaling == BLOCKWISE:
        left, of_a = rounded_groups(a, kind)
        squares = [rounded_squares(weight.t(), FORWARD) for weight in weights]
        return left, [right.t() for right, _ in squares], (of_a, torch.cat([scales for _, scales in squares]))
    left, of_a = rounded_rows(dense(a), kind, scaling)
    columns = [rounded_rows(weight.t(), FORWARD, scaling) for weight in weights]
    of_b = columns[0][1] if len(columns) == 1 else torch.cat([scale for _, scale in columns])
    return left, [right.t() for right, _ in columns], (of_a, of_b)


def of_any_size(
    multiply: Callable[..., torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scales: Scales,
    group: str,
    float8: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `multiply(a, b, bias, scales, team, out)` for any N and K, rounded by a recipe if there is one; in `out`,
    if that is given."""
    left, (right,), bias, scales = padded(a, [b], bias, scales, multiple_of(float8))
    if float8:
        left, (right,), scales = rounded(left, [right], float8)
    return delivered(trimmed(multiply(left, right, bias, scales, team_of(group), out), b.shape[1]), out)


@operator("matmul_float8")
def times(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, float8: str) -> torch.Tensor:
    """Quantized a @ b + bias on this rank alone, by PyTorch."""
    left, rights, bias, _ = padded(a, [b], bias, None, multiple_of(float8))
    left, (right,), scales = rounded(left, rights, float8)
    return trimmed(gemm(left, right, bias, scales), b.shape[1])


times.register_fake(lambda a, b, *_: a.new_empty(a.shape[0], b.shape[1]))


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a, b = ctx.saved_tensors
    return *gradients_of_times(grad, a, b, ctx.float8), grad.sum(0) if ctx.bias else None


times.register_autograd(_backward, saves="a b")


def gradients_of_times(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, recipe: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of a, by the recipe, and of b, as the transpose of (N, K), the layout of the weight of a
    torch.nn.Linear."""
    back = of_gradients(recipe)
    da = times(grad, b.t(), None, back) if back else grad @ b.t()
    return da, (grad.t() @ a).t()


def _words(scaling: str, *kinds: torch.dtype) -> str:
    return " ".join((scaling, *map(str, kinds)))


def _read(recipe: str) -> tuple[str, torch.dtype, torch.dtype]:
    scaling, *kinds = recipe.split()
    a, gradients = (getattr(torch, kind.removeprefix("torch.")) for kind in kinds)
    return scaling, a, gradients
