# SPDX-License-Identifier: MIT
"""Layers with one input: the first one that is called computes for all of them, the others take their results.

Where tokens are split over the ranks, this saves gathers; where each rank has them all, GEMMs and sums of gradients.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.dtensors import is_dtensor, with_own_storage
from tilescale.ops.linear import ColumnParallelLinear, ParallelLinear


def gather_once(*layers: ColumnParallelLinear) -> None:
    """Let layers that are called with one tensor, one after the other, share one gather of it, or one GEMM.

    The first that is called multiplies for all of them; every other one, called with the same tensor, takes its result,
    if gradients and autocast are as they were, and neither that tensor nor a weight was changed in place meanwhile,
    which cannot be detected in inference mode or in a compiled graph. A result that no layer has taken is kept as long
    as the tensor. Layers whose tokens are not split over the ranks are separated once one of them is called with
    another tensor.

    Args:
        layers: of one group, with one input size, their tokens over its ranks or not, all rounded alike or not.

    Raises:
        ArgumentError: something else is among them.
    """
    for i, layer in enumerate(layers):
        if not isinstance(layer, ColumnParallelLinear):
            raise ArgumentError(
                f"layers[{i}] is {type(layer).__name__}", hint="pass layers of ColumnParallelLinear.shard(...)"
            )
        for what in ("group", "in_features", "sequence", "float8", "keep_gathered"):
            one, other = getattr(layer, what), getattr(layers[0], what)
            if one != other:
                raise ArgumentError(f"layers[{i}] has {what} {one!r}, layers[0] {other!r}", hint="pass layers alike")
    if layers and not layers[0].sequence and layers[0].float8 is not None:
        return  # each layer has separate scales
    siblings = SiblingResults(list(layers))
    for layer in layers:
        object.__setattr__(layer, "_siblings", siblings)


@torch.no_grad()
def lay_side_by_side(*layers: ParallelLinear) -> None:
    """Move the weights of newly made layers to adjacent memory, and their biases, so that all of them are one matrix
    without a copy. The first one's storage has them all."""
    for name in ("weight", "bias"):
        given = [getattr(layer, name) for layer in layers]
        if all(x is not None for x in given):
            parts = [x._local_tensor if is_dtensor(x) else x for x in given]
            for part, place in zip(parts, torch.cat(parts).split(list(map(len, parts))), strict=True):
                part.set_(with_own_storage(place))


class SiblingResults:
    """Results of layers with the same input, until each layer has taken its own, or the input is no more."""

    _input: ref[torch.Tensor] | None
    _state: tuple[Any, ...]
    _results: dict[int, torch.Tensor]
    _traced: tuple[torch.Tensor, tuple[Any, ...], dict[int, torch.Tensor]] | None

    def __init__(self, layers: list[ColumnParallelLinear]):
        self.layers, self._traced = layers, None
        self._forget()

    def __getstate__(self) -> list[ColumnParallelLinear]:
        return self.layers

    def __setstate__(self, layers: list[ColumnParallelLinear]) -> None:
        SiblingResults.__init__(self, layers)

    def result(self, layer: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        """A layer's output for a tensor."""
        number = [other is layer for other in self.layers].index(True)
        if torch.compiler.is_compiling():
            # In a checkpoint the compiler refuses changes of an input, except by a function that is called so.
            allowed = torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer
            return allowed(self._result_in_graph, number, layer, x)
        state = self._state_of(x)
        if self._input is None or self._input() is not x or self._state != state or number not in self._results:
            if number in self._results and not layer.sequence and (self._input is None or self._input() is not x):
                return self._alone(layer, x)
            self._forget()  # results of before may be the last to hold their input, which then calls this
            self._results = dict(enumerate(layer.outputs(x, self.layers)))
            self._input, self._state = ref(x, self._forget), state
        result = self._results.pop(number)
        if not self._results:
            self._forget()
        return result

    def _result_in_graph(self, number: int, layer: ColumnParallelLinear, x: Any) -> torch.Tensor:
        """The result under a compiler's trace. A graph leaves nothing behind once each layer has taken its own: neither
        the tensor, which may be one of the user's, nor a guard changes from call to call."""
        modes = _modes(x)
        kept = self._traced
        if kept is None or kept[0] is not x or kept[1] != modes or number not in kept[2]:
            self._traced = kept = x, modes, dict(enumerate(layer.outputs(x, self.layers)))
        results = kept[2]
        made = results.pop(number)
        if not results:
            self._traced = None
        return made

    def _alone(self, layer: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        """A layer's output for another tensor than its siblings': from now on each layer is called separately."""
        self._forget()
        for each in self.layers:
            object.__setattr__(each, "_siblings", None)
        return layer.outputs(x, [layer])[0]

    def _forget(self, _: Any = None) -> None:
        self._input, self._state, self._results = None, (), {}

    def _state_of(self, x: torch.Tensor) -> tuple[Any, ...]:
        """State that results depend on, in addition to the tensor itself: another state, another result."""
        given = [x, *(each for layer in self.layers for each in (layer.weight, layer.bias) if each is not None)]
        return *_modes(x), *((id(each), version_of(each)) for each in given)


def _modes(x: torch.Tensor) -> tuple[Any, ...]:
    """Whether gradients are recorded, and the type to which autocast converts."""
    kind = x.device.type
    return torch.is_grad_enabled(), torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)


def version_of(x: torch.Tensor) -> int:
    """Number of in-place changes of a tensor; 0 where PyTorch does not count, in inference mode."""
    return 0 if x.is_inference() else x._version
