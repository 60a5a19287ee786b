# SPDX-License-Identifier: MIT
"""PyTorch's GEMMs as CUDA graphs: the host launches one in a third of the time that the operator takes.

cuBLAS's choice of a kernel depends on the form of the tensors, and on settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilescale.backends.cuda.running.kernel_graph import KernelLaunch, kernel_graph
from tilescale.backends.cuda.running.plans import span

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


def gemm_graph(operator: Any, given: Sequence[Any], named: dict[str, Any], out: torch.Tensor) -> KernelLaunch | None:
    """The graph of one of the GEMMs, and the tensors that are its arguments, the result `out` last.

    It is launched once on the current stream, and writes the result again. None if it cannot be captured, or launched
    for tensors at other addresses; if it depends on more than `gemm_settings`, does nothing, or has an argument where
    the result is.
    """
    names, count = [name for name in named if name != "out"], len(given)
    values = [*given, *(named[name] for name in names), out]
    if not _is_able([x for x in values if isinstance(x, torch.Tensor)]):
        return None

    def gemm(*values: Any) -> None:
        *own, result = values
        GEMMS[operator](*own[:count], **dict(zip(names, own[count:], strict=True)), out=result)

    return kernel_graph((operator, gemm_settings(), *names), gemm, values)


def _is_able(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a GEMM of these tensors, the last of which is the result, can be launched twice."""
    *given, (first, end) = map(span, tensors)
    is_apart = all(last <= first or end <= begin for begin, last in given)
    return is_apart and tensors[0].dtype is not torch.float32
