# SPDX-License-Identifier: MIT
"""A layer of float8 experts in float64, with the same quantization of tokens and activations."""

from __future__ import annotations

import torch

GROUP, END, LEAST = 128, 448.0, 2.0**-117

EMULATED, ON_GPUS = (2.0**-7, 2.0**-5), (2.0**-6, 2.0**-4)
"""Error bounds relative to a result's norm, and to its largest element: a rounding to bfloat16 of each expert's result,
of the sums of a rank and of the sum. Tensor cores add up 128 products in fewer bits than float32 has, so some
activations become the next number of float8."""

GRADIENTS = 2.0**-6, 2.0**-4
"""The same for gradients, of GEMMs of bfloat16 matrices, and of rounded products."""

ON_THE_WIRE = 2.0**-5, 2.0**-4
"""The same for sums that travel as float8: a further rounding, by up to 2^-4 of a number."""


def quantized(x: torch.Tensor) -> torch.Tensor:
    """Each 128 numbers of a row rounded to float8 by the least power of two that keeps them below 448."""
    groups = x.double().unflatten(-1, (-1, GROUP))
    exponent = torch.frexp(groups.abs().amax(-1, keepdim=True).clamp(min=LEAST) / END).exponent
    scale = torch.ldexp(torch.ones_like(groups[..., :1]), exponent)
    return ((groups / scale).to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def whole(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A weight (..., rows, columns) of float8 in float64, with scales of squares, or of rows."""
    if scales.ndim < weight.ndim:
        return weight.double() * scales.double()[..., None]
    return weight.double() * scales.double().repeat_interleave(GROUP, -2).repeat_interleave(GROUP, -1)


def random_expert(features: int, inner: int, *, by_rows: bool = False, **where: object) -> list[torch.Tensor]:
    """gate_up and down of an expert, and the scales of squares or rows, which differ by up to three times."""
    made = []
    for shape in ((2 * inner, features), (features, inner)):
        squares = shape[0] // GROUP, shape[1] // GROUP
        scales = torch.rand(shape[:1] if by_rows else squares, **where) + 0.5
        made += [torch.randn(shape, **where).to(torch.float8_e4m3fn), scales * shape[1] ** -0.5]
    return [made[0], made[2], made[1], made[3]]


def expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The result of an expert with float64 weights for quantized tokens."""
    gate, up = (x @ gate_up.t()).chunk(2, -1)
    return quantized(torch.nn.functional.silu(gate) * up) @ down.t()


def wanted(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: list[list[torch.Tensor]]
) -> torch.Tensor:
    """The weighted sums of tokens (n, features) by experts as `random_expert` makes them, by their numbers."""
    tokens, y = quantized(x), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for number, (gate_up, down, of_gate_up, of_down) in enumerate(experts):
        token, choice = (chosen == number).nonzero(as_tuple=True)
        if len(token):
            made = expert(tokens[token], whole(gate_up, of_gate_up), whole(down, of_down))
            y.index_add_(0, token, made * weights[token, choice].double()[:, None])
    return y


def quantized_squares(weight: torch.Tensor) -> torch.Tensor:
    """Each square of 128 x 128 numbers of a matrix rounded to float8, in float64, by such a power of two."""
    squares = weight.double().unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    exponent = torch.frexp(squares.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / END).exponent
    scale = torch.ldexp(torch.ones_like(squares[:, :1, :, :1]), exponent)
    return ((squares / scale).to(torch.float8_e4m3fn).double() * scale).view(weight.shape)


def trained(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: list[tuple[torch.Tensor, torch.Tensor]],
    used: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """The weighted sums of tokens by the quantized experts that are `used`, in float64, with the gradients of GEMMs of
    quantized tokens, of activations and of weights as they are."""
    rows, y = _with_value(x, quantized(x.detach())), torch.zeros_like(x)
    for number, ((gate_up, down), (used_up, used_down)) in enumerate(zip(experts, used, strict=True)):
        token, choice = (chosen == number).nonzero(as_tuple=True)
        products = _with_value(rows[token] @ gate_up.t(), rows[token] @ used_up.t())
        gate, up = products.chunk(2, -1)
        active, share = torch.nn.functional.silu(gate) * up, weights[token, choice][:, None]
        made = _with_value(active @ down.t() * share, quantized(active) @ used_down.t() * share)
        y = y.index_add(0, token, made)
    return y


def _with_value(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value with the gradient of x."""
    return x + (value - x).detach()


def near(what: str, got: torch.Tensor, want: torch.Tensor, bounds: tuple[float, float] = EMULATED) -> None:
    """Raises ValueError if a result is further from the reference than the bounds."""
    error = got.double() - want
    norms = float(error.norm()), float(want.norm())
    tops = (float(error.abs().max()), float(want.abs().max())) if want.numel() else (0.0, 0.0)
    if got.shape != want.shape or not all(
        off <= bound * of + 1e-9 for bound, (off, of) in zip(bounds, (norms, tops), strict=True)
    ):
        raise ValueError(f"{what}: {norms[0]:.3g} of a norm of {norms[1]:.3g}, {tops[0]:.3g} of at most {tops[1]:.3g}")
