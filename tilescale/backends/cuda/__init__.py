# SPDX-License-Identifier: MIT
"""Programs on NVIDIA GPUs through stock TileLang.

target.py         the compilation target of a machine
limits.py         shapes that no lowering can distribute over a number of threads
ptx.py            constants of the PTX ISA and the driver for all GPUs
text.py           the CUDA text of a kernel, checked
lowered_cache.py  lowered programs on disk
support.py        a lowered program: generated text without a GPU, an executable with one
upstream_errors.py  errors of stock TileLang, with the user's line
nvshmem_link.py   linking and initialization of kernels that call NVSHMEM

Folders: `lowering` (a program to TileLang functions), `headers` (device functions), `running` (on the GPUs).
"""

from __future__ import annotations

from tilescale.backends.base import Backend
from tilescale.backends.cuda.support import check, collectives, lower, serves
from tilescale.backends.cuda.target import target_for
from tilescale.settings import settings


def _available() -> bool:
    import torch

    return torch.cuda.is_available() and not settings().emulate


BACKEND = Backend(
    "cuda",
    available=_available,
    lower=lower,
    priority=10,
    generates=True,
    serves=serves,
    target=target_for,
    collectives=collectives,
    check=check,
)
