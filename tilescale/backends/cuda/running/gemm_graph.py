# SPDX-License-Identifier: MIT
"""PyTorch's GEMMs as CUDA graphs: the host launches one in a third of the time that the operator takes.

cuBLAS's choice of a kernel depends on the form of the tensors, and on settings. What its kernels are passed depends on
the addresses as well, in descriptors of bulk copies among others, as in programs' kernels (replay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tilelang_core.lru import LruCache
from tilescale.backends.cuda.running.plans import ALIGNED, span, standing_at
from tilescale.backends.cuda.running.replay import GraphReplay, captured
from tilescale.errors import DeviceError

_MOVED = 1009 * ALIGNED
"""Bytes between addresses of one tensor in two captures, and how much more each further tensor moves: a multiple of the
alignment that a form has, and of no larger power of two."""

KEPT = 512
"""Graphs that are kept, those used last. Records keep theirs."""

_aten = torch.ops.aten

GEMMS = {
    _aten.mm.default: _aten.mm.out,
    _aten.mm.out: _aten.mm.out,
    _aten.addmm.default: _aten.addmm.out,
    _aten.addmm.out: _aten.addmm.out,
    _aten._scaled_mm.default: _aten._scaled_mm.out,
}
"""The operators, and each one's form that takes its result."""

_bf16, _fp16 = (getattr(torch._C, f"_get_cublas_allow_{name}_reduced_precision_reduction") for name in ("bf16", "fp16"))
_accumulation, _carveout = torch._C._get_cublas_allow_fp16_accumulation, torch._C._get_sm_carveout_experimental


_graphs: LruCache[Any, GraphReplay] = LruCache(KEPT)


def gemm_settings() -> tuple[Any, ...]:
    """PyTorch's settings by which GEMMs of 16-bit types differ."""
    return _bf16(), _fp16(), _accumulation(), _carveout()


def gemm_graph(
    operator: Any, given: Sequence[Any], named: dict[str, Any], out: torch.Tensor
) -> tuple[GraphReplay, list[torch.Tensor]] | None:
    """The graph for calls of this form of one of GEMMS; and this call's tensors, arguments in order, then the result.

    It is launched once on the current stream, and writes the result again. None if it cannot be captured, or launched
    for tensors at other addresses; if it depends on more than `gemm_settings`, does nothing, or has an argument where
    the result is.
    """
    named = {name: x for name, x in named.items() if name != "out"}
    values = [*given, *named.values(), out]
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    if not _is_able(tensors):
        return None

    def launches(at: Sequence[torch.Tensor]) -> list[Any]:
        rest = iter(at)
        *own, result = [next(rest) if isinstance(x, torch.Tensor) else x for x in values]
        by_name = dict(zip(named, own[len(given) :], strict=True))
        return [lambda: GEMMS[operator](*own[: len(given)], **by_name, out=result)]

    places = [x.data_ptr() for x in tensors]
    form = operator, gemm_settings(), *named, *map(_form, values), *map(places.index, places)
    stream = torch._C._cuda_getCurrentRawStream(out.device.index)
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


def _is_able(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a GEMM of these tensors, the last of which is the result, can be launched twice."""
    *given, (first, end) = map(span, tensors)
    is_apart = all(last <= first or end <= begin for begin, last in given)
    return is_apart and tensors[0].dtype is not torch.float32 and all(x.numel() for x in tensors)


def _pool() -> Any:
    """The memory of cuBLAS's workspaces, for captures alone. PyTorch frees workspaces now and then, as for its
    compiler's CUDA graphs; then no tensor gets this memory."""
    return _lasting_pool()[0]


@cache
def _lasting_pool() -> tuple[Any, torch.cuda.CUDAGraph]:
    """A pool, and a graph of it: with the last graph the pool would end."""
    pool = torch.cuda.graph_pool_handle()
    return pool, captured([lambda: torch.zeros(1, device="cuda")], pool)
