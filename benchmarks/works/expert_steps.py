# SPDX-License-Identifier: MIT
"""Experts of a Qwen3-MoE layer in a decode step, by PyTorch: gathered, or by grouped GEMMs; and how many are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear, rms_norm, silu

from tilescale.ops.decode_sizes import LayerSizes

Tensors = dict[str, torch.Tensor]
Experts = Callable[[LayerSizes, Tensors, torch.Tensor], torch.Tensor]
"""A rank's part of the experts: of the sizes, the weights of a layer and rows, the results of the rows."""

CANDIDATES = 32
"""Rows that one is drawn from: that whose chosen experts are the furthest from the others, so all choose the same."""


def chosen(sizes: LayerSizes, t: Tensors, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers of the experts of each row."""
    share, expert = linear(h, t["router"][: sizes.experts]).softmax(-1).topk(sizes.choices)
    return share / share.sum(-1, keepdim=True), expert


def gathered(sizes: LayerSizes, t: Tensors, h: torch.Tensor) -> torch.Tensor:
    """The weights of each row's experts, gathered; torch.compile may gather them within the products."""
    share, expert = chosen(sizes, t, h)
    gate, up = torch.einsum("nh,nkih->nki", h, t["Wup"][expert]).chunk(2, -1)
    return torch.einsum("nki,nkhi,nk->nh", silu(gate) * up, t["Wdown"][expert], share.to(h.dtype))


def grouped(sizes: LayerSizes, t: Tensors, h: torch.Tensor) -> torch.Tensor:
    """Rows sorted by experts, and grouped GEMMs."""
    share, expert = chosen(sizes, t, h)
    order = expert.flatten().argsort(stable=True)
    numbers = torch.arange(sizes.experts, device=h.device)
    ends = (expert.flatten()[:, None] <= numbers).sum(0, dtype=torch.int32)
    rows = h[order // sizes.choices]
    gate, up = torch._grouped_mm(rows, t["Wup"].transpose(-2, -1), ends).chunk(2, -1)
    made = torch._grouped_mm(silu(gate) * up, t["Wdown"].transpose(-2, -1), ends)
    weighted = made * share.flatten()[order, None].to(h.dtype)
    return torch.zeros_like(h).index_add(0, order // sizes.choices, weighted)


def distinct(sizes: LayerSizes, t: Tensors, x: torch.Tensor) -> torch.Tensor:
    """The candidates for the residual stream that have the clearest choice in each layer."""
    margins = []
    for layer in range(sizes.layers):
        logits = _logits(sizes, t, layer, x).sort(-1, descending=True).values
        margins.append(logits[:, sizes.choices - 1] - logits[:, sizes.choices])
    clearest = torch.stack(margins).amin(0).view(sizes.batch, -1).argmax(1)
    return x.view(sizes.batch, -1, sizes.hidden)[torch.arange(sizes.batch, device=x.device), clearest]


def read(sizes: LayerSizes, t: Tensors, x: torch.Tensor) -> list[int]:
    """Number of experts that rows choose in each layer; their sums hardly change from layer to layer."""
    best = (_logits(sizes, t, layer, x).topk(sizes.choices).indices for layer in range(sizes.layers))
    return [len(each.unique()) for each in best]


def _logits(sizes: LayerSizes, t: Tensors, layer: int, x: torch.Tensor) -> torch.Tensor:
    h = rms_norm(x, (sizes.hidden,), eps=sizes.epsilon) * t["norm2"][layer]
    return linear(h, t["router"][layer, : sizes.experts].to(h.dtype))
