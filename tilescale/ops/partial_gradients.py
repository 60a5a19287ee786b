# SPDX-License-Identifier: MIT
"""Gradients of replicated values between a column-parallel and a row-parallel layer, where a rank has some features.

A value that all ranks have, such as the weight of a norm per head, meets this rank's features there, so a rank computes
a part of its gradient. The column-parallel layers sum the gradients of their inputs. Other edges of the autograd graph
by which gradients leave the sharded features are found in front of the row-parallel layer, and summed over the ranks.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from tilescale.ops.dtensors import is_dtensor
from tilescale.ops.replicated import summed_alike

_Node = torch.autograd.graph.Node


def sum_partial_gradients(block: nn.Module, rows: Iterable[nn.Module], group: str) -> None:
    """Let gradients that leave the sharded features of a block be summed over the ranks.

    Args:
        block: a module with column-parallel layers.
        rows: the row-parallel layers in it whose input is split along its features.
        group: the ranks.
    """
    names = [name for name, parameter in block.named_parameters() if not is_dtensor(parameter)]
    if names:
        torch.compiler.assume_constant_result(_warn_of_compilation)  # a mark, which loads the compiler
        region = _ShardedRegion(names, group)
        block.register_forward_pre_hook(region.enter, with_kwargs=True)
        block.register_forward_hook(region.leave)
        for row in rows:
            row.register_forward_pre_hook(region.end, with_kwargs=True, prepend=True)


class _ShardedRegion:
    """The part of a block's autograd graph in which a rank has some of the features."""

    def __init__(self, names: list[str], group: str):
        self._names, self._group = names, group
        self._inputs: set[_Node] = set()
        self._summed: set[tuple[_Node, int]] = set()

    def __reduce__(self) -> Any:
        """A copy has no graph, also of a model whose call has failed."""
        return _ShardedRegion, (self._names, self._group)

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep the autograd nodes that the block's inputs come from."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            self._inputs = {x.grad_fn for x in leaves if isinstance(x, torch.Tensor) and x.grad_fn is not None}

    def end(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Sum the gradients that leave the graph behind the input of a row-parallel layer."""
        if not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            _warn_of_compilation(self._names)
            return
        x = next(iter((*args, *kwargs.values())))
        if is_dtensor(x) or x.grad_fn is None:
            return
        for node, i in _leaving_edges(x.grad_fn, self._inputs) - self._summed:
            node.register_hook(partial(_sum_gradient, i, self._group))
            self._summed.add((node, i))

    def leave(self, *_: Any) -> None:
        """Release the graph."""
        self._inputs, self._summed = set(), set()


def _leaving_edges(first: _Node, inputs: set[_Node]) -> set[tuple[_Node, int]]:
    """Edges, as a node and the number of its input, from nodes with partial gradients to those with whole ones."""
    kinds: dict[_Node, str] = {}
    left = [(first, _PART)]
    while left:
        node, kind = left.pop()
        kind = _WHOLE if node in inputs or _takes_whole(node) else kind
        if kinds.get(node) not in (kind, _WHOLE):  # a sum of whole gradients and parts has to be of whole ones
            kinds[node] = kind
            passed = None if node in inputs else _passed_on(node, kind)
            left += [(each, passed) for each, _ in node.next_functions if each is not None and passed is not None]
    parts = [node for node, kind in kinds.items() if kind == _PART and _passed_on(node, kind) == _PART]
    edges = ((node, i, each) for node in parts for i, (each, _) in enumerate(node.next_functions))
    return {(node, i) for node, i, each in edges if each is not None and kinds.get(each) == _WHOLE}


_PART, _WHOLE, _DTENSOR = "part", "whole", "dtensor"
"""Gradients that a node takes: a rank's part of a sum, the whole, or with placements of their own."""


def _takes_whole(node: Any) -> bool:
    """Whether a node is one of a parameter or another leaf, or of a value that a layer replicates."""
    if hasattr(node, "variable"):
        return not is_dtensor(node.variable)
    if node.name() == "_ToTorchTensorBackward":
        return node.grad_placements is None and _lies_whole(node.dtensor_spec.placements)
    return _operator(node) == "row_parallel"


def _passed_on(node: Any, kind: str) -> str | None:
    """Gradients of the inputs of a node that takes some; None: they are of another block."""
    name = node.name()
    if name == "_ToTorchTensorBackward" or hasattr(node, "variable"):
        return _DTENSOR
    if kind == _DTENSOR:
        if name != "_FromTorchTensorBackward":
            return _DTENSOR
        name = "forward_input_placements" if hasattr(node, "forward_input_placements") else "previous_placement"
        return _WHOLE if _lies_whole(getattr(node, name)) else _PART
    if kind == _PART:
        return _WHOLE if name == "_ReplicatedInputBackward" or _operator(node) == "column_parallel" else _PART
    return None if _operator(node) == "row_parallel" else _WHOLE


def _lies_whole(placements: Any) -> bool:
    return all(each.is_replicate() for each in placements)


def _operator(node: Any) -> str | None:
    return node.operator.name if node.name() == "_AutogradStepBackward" else None


def _sum_gradient(i: int, group: str, grads: tuple[Any, ...], _: Any) -> tuple[Any, ...] | None:
    if grads[i] is None:
        return None
    return *grads[:i], summed_alike(grads[i].contiguous(), group), *grads[i + 1 :]


def _warn_of_compilation(names: list[str]) -> None:
    _warn_once(", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)))


@cache
def _warn_once(names: str) -> None:
    warnings.warn(
        f"a compiled graph does not sum the gradients of {names} over the ranks. If they are applied to a rank's "
        "heads, name their modules in the plan, SequenceParallel(sequence_dim=2, use_local_output=True)",
        stacklevel=2,
    )
