# SPDX-License-Identifier: MIT
"""Linear layers with float8 weights and scales, as transformers loads them, that PyTorch executes anywhere."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

DEPTH, END = 128, 448.0


class Float8Linear(nn.Module):
    """A linear layer whose weights are rounded to float8, with scales of 128 x 128 of them or of each output."""

    def __init__(self, weight: torch.Tensor, squares: bool):
        super().__init__()
        rows, columns = weight.shape
        high, wide = (DEPTH, DEPTH) if squares else (1, columns)
        tiles = weight.float().view(rows // high, high, columns // wide, wide)
        scales = tiles.abs().amax((1, 3), keepdim=True) / END
        self.weight = nn.Parameter((tiles / scales).view(rows, columns).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("weight_scale_inv" if squares else "weight_scale", scales.view(rows // high, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the weights in the type of x."""
        (scales,) = self.buffers()
        tiles = self.weight.float().view(len(scales), -1, scales.shape[1], self.weight.shape[1] // scales.shape[1])
        return linear(x, (tiles * scales[:, None, :, None]).view(self.weight.shape).to(x.dtype))


def to_float8(model: Any, squares: bool = True) -> Any:
    """A model whose decoder layers have such linear layers."""
    for layer in model.model.layers:
        for block in layer.self_attn, layer.mlp:
            for name, inner in list(block.named_children()):
                if isinstance(inner, nn.Linear):
                    setattr(block, name, Float8Linear(inner.weight.data, squares))
    return model
