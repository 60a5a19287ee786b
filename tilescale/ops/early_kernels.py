# SPDX-License-Identifier: MIT
"""Kernels of a model's parallel layers, whose compilation begins when the layers are made.

Between that and the first step a program loads weights and data, and makes an optimizer. A layer's kernels depend on
its sizes and types, and on whether there are many rows; they are found by a dry call of one row, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilescale import backends
from tilescale.ops.dtensors import local_tensor, split_over
from tilescale.ops.group import size_of, team_of
from tilescale.ops.linear import TOKENS, ColumnParallelLinear, ParallelLinear
from tilescale.ops.operator import operator_of
from tilescale.ops.row_counts import GemmKernels
from tilescale.runtime import early
from tilescale.runtime.ahead import Finder, done_file, dry_run, is_dry
from tilescale.runtime.kernel import Kernel


def begin_compiling(model: nn.Module) -> None:
    """Begin to compile the kernels of a model's layers in the background, those of many rows first. Collective.

    For gradients too, in training mode. Leaves out layers whose weights are not on a GPU, or are in float32: only a
    call determines the type of their GEMMs.
    """
    layers = {_form(each): each for each in model.modules() if isinstance(each, ParallelLinear) and _is_on_gpu(each)}
    if not layers or is_dry() or not backends.compiles():
        return
    team = team_of(next(iter(layers.values())).group)
    listing = done_file(begin_compiling, (team, model.training, *layers))
    if all(team.all_gather(early.are_compiled(listing))):
        return
    with dry_run(early.MetKernels()) as met, torch.set_grad_enabled(model.training):
        for layer in layers.values():
            _call(layer)
    many = [kernel for find, given in met.later for kernel in _of_many_rows(find, given)]
    early.begin(many, met.later, listing)


def _form(layer: ParallelLinear) -> tuple[Any, ...]:
    """A layer's sizes and types, on which its kernels depend."""
    alike = [tuple(each.weight.shape) for each in _together(layer)]
    weight = layer.weight.dtype, layer.weight.requires_grad, layer.bias is None
    return layer.cut, *alike, *weight, layer.group, layer.sequence, layer.float8, layer.keep_gathered


def _is_on_gpu(layer: ParallelLinear) -> bool:
    return local_tensor(layer.weight).is_cuda and layer.weight.dtype is not torch.float32


def _together(layer: ParallelLinear) -> list[ParallelLinear]:
    """The layers that one call multiplies for."""
    siblings = layer._siblings if isinstance(layer, ColumnParallelLinear) else None
    return [layer] if siblings is None else [*siblings.layers]


def _call(layer: ParallelLinear) -> None:
    """Call a layer with a row of each rank, without the hooks of its module."""
    size = size_of(layer.group)
    given = local_tensor(layer.weight).new_zeros(size, layer.in_features)
    if not isinstance(layer, ColumnParallelLinear):
        layer.forward(given)
        if layer.sequence and torch.is_grad_enabled():
            operator_of("all_reduce")(given[0], "sum", layer.group)  # as of norms between the layers, for each token
    elif layer.sequence:
        weight: Any = layer.weight  # a DTensor
        layer.forward(split_over(given[:1], weight.device_mesh, TOKENS, size))
    else:
        layer.forward(given)


def _of_many_rows(find: Finder, given: tuple[Any, ...]) -> list[Kernel]:
    return GemmKernels.of_many_rows(*given) if find is GemmKernels.of_any_rows else [*find(*given)]
