# SPDX-License-Identifier: MIT
"""Whether something keeps a graph of autograd alive: the nodes that the gradients of its leaves end in."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_MARK = "tilescale"


@contextmanager
def no_graph_is_kept(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Assert that graphs of these leaves, made meanwhile, are gone at the end, without a garbage collection.

    A leaf has one node as long as anything refers to that, and another one afterwards.
    """
    nodes = [_node(x) for x in leaves]
    for x in nodes:
        x.metadata[_MARK] = True
    gc.disable()
    try:
        yield
        del nodes, x
        kept = [i for i, x in enumerate(leaves) if _MARK in _node(x).metadata]
    finally:
        gc.enable()
    assert not kept, f"something keeps the graphs of leaves {kept}"


def _node(x: torch.Tensor) -> Any:
    return x.expand_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
