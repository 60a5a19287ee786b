# SPDX-License-Identifier: MIT
"""Programs on NVIDIA GPUs through stock TileLang.

target.py         the compilation target of a machine
support.py        what is lowered, found by trying; generated text without a GPU
nvshmem_link.py   how kernels that call NVSHMEM are linked and started

Folders: `lowering` (a program to TileLang functions), `headers` (device functions), `running` (on the GPUs).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilelang_core import compile as stock
from tilescale.backends.base import Backend, Executable
from tilescale.backends.cuda import support
from tilescale.hda import Machine
from tilescale.program.model import Program
from tilescale.settings import settings


def _available() -> bool:
    import torch

    return torch.cuda.is_available() and not settings().emulate


def _build(program: Program, machine: Machine, options: dict[str, Any]) -> Executable:
    if program.is_hierarchical:
        from tilescale.backends.cuda.running.execute import DeviceProgram

        own = DeviceProgram(program, machine, options)
        run = Executable(lambda per_unit: own(per_unit[0]), gathers=False, device="cuda")
        return replace(run, synchronize=own.synchronize, reset=own.reset)
    given = {k: v for k, v in options.items() if v is not None and k != "wait_s"}
    kernel = stock.compile_kernel(program.func, **given)
    run = Executable(lambda per_unit: kernel(*per_unit[0]), gathers=False, device="cuda")
    return replace(run, synchronize=_synchronize)


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def _source(program: Program, machine: Machine, options: dict[str, Any]) -> str:
    return support.source(program, machine, options.get("target"), options.get("pass_configs"))


BACKEND = Backend(
    "cuda",
    available=_available,
    accepts=support.reason_against,
    build=_build,
    priority=10,
    source=_source,
    notes=support.notes,
)
