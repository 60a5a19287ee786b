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

from tilescale.backends.cuda.running.plans import ALIGNED, span, tensor_at
from tilescale.backends.cuda.running.replay import GraphReplay, captured
from tilescale.errors import DeviceError

_MOVED = 1009 * ALIGNED
"""Bytes between addresses of one tensor in two captures, and how much more each further tensor moves: a multiple of the
alignment that a form has, and of no larger power of two."""

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


def gemm_settings() -> tuple[Any, ...]:
    """PyTorch's settings by which GEMMs of 16-bit types differ."""
    return _bf16(), _fp16(), _accumulation(), _carveout()


def gemm_graph(
    operator: Any, given: Sequence[Any], named: dict[str, Any], out: torch.Tensor
) -> tuple[GraphReplay, list[torch.Tensor]] | None:
    """The graph of a call of one of GEMMS, and its tensors in the order of its arguments, which ends with the result.

    It is launched once on the current stream, and writes the result again. None if it cannot be launched for tensors at
    other addresses, depends on more than `gemm_settings`, does nothing, or has an argument where the result is.
    """
    named = {name: x for name, x in named.items() if name != "out"}
    tensors = [x for x in (*given, *named.values()) if isinstance(x, torch.Tensor)]
    first, end = span(out)
    is_apart = all(last <= first or end <= begin for begin, last in map(span, tensors))
    tensors.append(out)
    if given[0].dtype is torch.float32 or not is_apart or not all(x.numel() for x in tensors):
        return None

    def launches(at: Sequence[torch.Tensor]) -> list[Any]:
        rest = iter(at)
        values = [next(rest) if isinstance(x, torch.Tensor) else x for x in given]
        by_name = {name: next(rest) if isinstance(x, torch.Tensor) else x for name, x in named.items()}
        return [lambda: GEMMS[operator](*values, **by_name, out=at[-1])]

    moved = [tensor_at(x.data_ptr() + (i + 1) * _MOVED, x) for i, x in enumerate(tensors)]
    kinds = [x.nbytes for x in tensors]
    # Both captures are made by this frame of C, as functions of Python called from here are: cuBLAS passes a kernel
    # that sums parts of K two pointers to the host's stack as well, which it does not read.
    replay = GraphReplay(captured(launches(moved), _pool()), _places(moved), kinds, _pool())
    stream = torch._C._cuda_getCurrentRawStream(out.device.index)
    try:
        is_launched = replay.launch(_places(tensors), lambda: launches(tensors), stream)
    except DeviceError:
        return None
    return (replay, tensors) if is_launched else None


def _pool() -> Any:
    """The memory of cuBLAS's workspaces, for captures alone. PyTorch frees workspaces now and then, as for its
    compiler's CUDA graphs; then no tensor gets this memory."""
    return _lasting_pool()[0]


@cache
def _lasting_pool() -> tuple[Any, torch.cuda.CUDAGraph]:
    """A pool, and a graph of it: with the last graph the pool would end."""
    pool = torch.cuda.graph_pool_handle()
    return pool, captured([lambda: torch.zeros(1, device="cuda")], pool)


def _places(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in tensors)
