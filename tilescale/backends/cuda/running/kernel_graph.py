# SPDX-License-Identifier: MIT
"""Kernels of one device as CUDA graphs: those of PyTorch's GEMMs, and TileLang's plain ones.

What they are passed depends on the form of the tensors and on the addresses, in descriptors of bulk copies among
others, as in programs' kernels (replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch

from tilelang_core.lru import LruCache
from tilescale.backends.cuda.running.graphs import captured
from tilescale.backends.cuda.running.plans import ALIGNED, standing_at
from tilescale.backends.cuda.running.replay import GraphReplay
from tilescale.errors import DeviceError

_MOVED = 1009 * ALIGNED
"""Bytes between addresses of one tensor in two captures, and how much more each further tensor moves: a multiple of the
alignment that a form has, and of no larger power of two."""

KEPT = 512
"""Graphs that are kept, those used last. Records keep theirs."""

KernelLaunch = tuple[GraphReplay, Sequence[torch.Tensor]]
"""A graph, and the tensors that are its arguments."""


_graphs: LruCache[Any, GraphReplay] = LruCache(KEPT)


def kernel_graph(key: Hashable, kernel: Callable[..., Any], given: Sequence[Any]) -> KernelLaunch | None:
    """Launch `kernel(*given)` on the current stream, as a graph that accepts other addresses of the tensors among the
    arguments. None, and nothing is launched, if there is no such graph, or if a tensor has no elements.

    Args:
        key: equal for calls that launch the same for tensors of one form and equal further arguments.
    """
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    if not all(x.numel() for x in tensors):
        return None

    def launches(at: Sequence[torch.Tensor]) -> list[Any]:
        rest = iter(at)
        own = [next(rest) if isinstance(x, torch.Tensor) else x for x in given]
        return [lambda: kernel(*own)]

    places = [x.data_ptr() for x in tensors]
    form = key, *map(_form, given), *map(places.index, places)
    stream = torch._C._cuda_getCurrentRawStream(tensors[-1].device.index)
    try:
        if (replay := _graphs.get(form)) is None:
            moved = [standing_at(x.data_ptr() + (i + 1) * _MOVED, x) for i, x in enumerate(tensors)]
            kinds = [x.nbytes for x in tensors]
            # Both captures are made by this frame of C, as functions of Python called from here are: cuBLAS passes a
            # kernel that sums parts of K two pointers to the host's stack as well, which it does not read.
            graph = captured(launches(moved), _pool())
            replay = _graphs[form] = GraphReplay(graph, tuple(x.data_ptr() for x in moved), kinds, _pool())
        is_launched = replay.launch(tuple(places), lambda stand_ins: launches(tensors), stream)
    except (DeviceError, RuntimeError):
        return None
    return (replay, tensors) if is_launched else None


def _form(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNED) if isinstance(x, torch.Tensor) else x


@cache
def _pool() -> torch.cuda.MemPool:
    """The memory of cuBLAS's workspaces, for captures alone. PyTorch frees workspaces now and then, as for its
    compiler's CUDA graphs; then no tensor gets this memory."""
    return torch.cuda.MemPool()
