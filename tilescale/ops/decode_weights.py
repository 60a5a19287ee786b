# SPDX-License-Identifier: MIT
"""Weights of a model of transformers as the parameters of a decode step: this rank's part, of all layers together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilescale.ops.decode_expert_weights import stacked_experts
from tilescale.ops.decode_sizes import DEPTH, LayerSizes

Linears = dict[str, tuple[tuple[str, ...], int]]
"""Parameter of the program -> the linear layers that it has side by side, and the dimension that ranks split."""

ATTENTION: Linears = {
    "Wqkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), 0),
    "Wo": (("self_attn.o_proj",), 1),
}

LINEARS: Linears = ATTENTION | {
    "Wup": (("mlp.gate_proj", "mlp.up_proj"), 0),
    "Wdown": (("mlp.down_proj",), 1),
}
"""Those of layers with one MLP for all tokens."""

NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}

SCALES = "weight_scale_inv", "weight_scale"
"""Attributes of float8 linear layers in transformers: numbers that weights are multiplied by."""

FORMS = {
    (torch.bfloat16, "without scales"): ("bfloat16", False),
    (torch.float8_e4m3fn, "with scales of squares"): ("float8_e4m3fn", True),
    (torch.float8_e4m3fn, "with scales of rows"): ("float8_e4m3fn", False),
}
"""Type of the weights and kind of their scales, where supported -> the fields of LayerSizes."""


def form_of(layers: Any, given: Linears) -> tuple[str, bool] | str:
    """The form of the weights of linear layers of all layers; where it is not one of FORMS, what it is."""
    linears = [layer.get_submodule(name) for layer in layers for names, _ in given.values() for name in names]
    found = {(linear.weight.dtype, _kind(linear)) for linear in linears}
    supported = [FORMS[form] for form in found if form in FORMS]
    if len(found) == len(supported) == 1:
        return supported[0]
    return ", ".join(sorted(f"{dtype} {kind}" for dtype, kind in found))


def _kind(linear: Any) -> str:
    """The kind of a linear layer's scales."""
    (outputs, inputs), scale = linear.weight.shape, scale_of(linear)
    if scale is None:
        return "without scales"
    kinds = {(outputs // DEPTH, inputs // DEPTH): "squares", (outputs, 1): "rows", (outputs,): "rows"}
    shape = tuple(scale.shape)
    return f"with scales of {kinds[shape]}" if shape in kinds else f"with scales of shape {shape}"


def scale_of(linear: Any) -> torch.Tensor | None:
    """The scales of a linear layer's weights."""
    return next((scale for name in SCALES if (scale := getattr(linear, name, None)) is not None), None)


@dataclass(frozen=True)
class RankWeights:
    """A rank's part of the weights."""

    sizes: LayerSizes
    rank: int

    def of(self, layers: Any) -> dict[str, torch.Tensor]:
        """Weights of all layers, by the program's parameters."""
        linears = ATTENTION if self.sizes.experts else LINEARS
        found = {name: self._stacked(layers, *where) for name, where in linears.items()}
        if self.sizes.experts:
            found |= stacked_experts(layers, self.sizes, self.rank)
        if self.sizes.is_float8:
            found |= {f"of_{name}": self._scales(layers, *where) for name, where in linears.items()}
        for name, where in NORMS.items():
            found[name] = torch.stack([layer.get_submodule(where).weight for layer in layers]).float()
        if self.sizes.head_norms:
            each = [(layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight) for layer in layers]
            found["heads"] = torch.stack([torch.stack(pair) for pair in each]).float()
        return found

    def part(self, x: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
        """This rank's part of a tensor that is whole, or this part already."""
        return x if x.shape[dim] == extent else x.chunk(self.sizes.devices, dim)[self.rank]

    def _stacked(self, layers: Any, names: Sequence[str], dim: int) -> torch.Tensor:
        """The weights of some linear layers of all decoder layers; whole ones become views of the result."""
        found: list[torch.Tensor] = []
        made = torch.empty(0)
        for number, layer in enumerate(layers):
            linears = [layer.get_submodule(name) for name in names]
            shares = map(self._share, names)
            found = [self.part(each.weight, dim, n) for each, n in zip(linears, shares, strict=True)]
            if not number:
                rows = sum(map(len, found))
                made = found[0].new_empty(len(layers), rows, found[0].shape[1])
            begins = [sum(map(len, found[:i])) for i in range(len(found))]
            for linear, part, begin in zip(linears, found, begins, strict=True):
                view = made[number, begin : begin + len(part)]
                view.copy_(part)
                if part.shape == linear.weight.shape:
                    linear.weight.data = view
        return made

    def _scales(self, layers: Any, names: Sequence[str], dim: int) -> torch.Tensor:
        """The scales of these weights. Ranks that split the columns of scaled rows have the same ones."""
        each, is_split = (DEPTH, True) if self.sizes.squares else (1, not dim)
        found = []
        for layer in layers:
            scales = [scale_of(layer.get_submodule(name)) for name in names]
            given = [scale.view(len(scale), -1) for scale in scales if scale is not None]
            if is_split:
                given = [self.part(x, dim, self._share(name) // each) for x, name in zip(given, names, strict=True)]
            found.append(torch.cat(given).float())
        return torch.stack(found)

    def _share(self, name: str) -> int:
        """This rank's features of a linear layer: of its outputs or of its inputs."""
        s = self.sizes
        extents = {"q_proj": s.heads * s.width, "o_proj": s.heads * s.width}
        extents |= {"k_proj": s.groups * s.width, "v_proj": s.groups * s.width}
        return extents.get(name.rpartition(".")[2], s.inner)
