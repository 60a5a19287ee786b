# SPDX-License-Identifier: MIT
"""Programs on NVIDIA GPUs through stock TileLang.

target.py       the compilation target of a machine
lower.py        one grid phase to a plain TileLang function: the rank dimension, hidden arguments, the walk
peers.py exchange.py lanes.py     rules: between devices, collectives on tiles, warpgroups and warps
arguments.py    what a generated kernel takes
headers/        device functions for signals, waits and barriers
execute.py phases.py nccl.py barrier_kernel.py timeouts.py     running: kernels and device phases in order
"""

from __future__ import annotations

from typing import Any

from tilelang_core import compile as stock
from tilescale.backends.base import Backend, Executable
from tilescale.backends.cuda import support
from tilescale.backends.cuda.support import source
from tilescale.hda import Machine
from tilescale.program.model import Program
from tilescale.settings import settings


def _available() -> bool:
    import torch

    return torch.cuda.is_available() and not settings().emulate


def _build(program: Program, machine: Machine, options: dict[str, Any]) -> Executable:
    if program.is_hierarchical:
        from tilescale.backends.cuda.execute import DeviceProgram

        own = DeviceProgram(program, machine, options)
        return Executable(lambda per_unit: own(per_unit[0]), gathers=False, device="cuda")
    kernel = stock.compile_kernel(program.func, **{k: v for k, v in options.items() if v is not None})
    return Executable(lambda per_unit: kernel(*per_unit[0]), gathers=False, device="cuda")


__all__ = ["BACKEND", "source"]

BACKEND = Backend("cuda", available=_available, accepts=support.reason_against, build=_build, priority=10)
