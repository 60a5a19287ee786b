# SPDX-License-Identifier: MIT
"""Programs on NVIDIA GPUs through stock TileLang.

target.py       the compilation target of a machine
lower.py        one grid phase to a plain TileLang function: the rank dimension, hidden arguments, the walk
peers.py exchange.py combine.py   rules: between devices, collectives on tiles
lanes.py        units inside a program as exclusive branches: clones.py (one unit's text), holdings.py sharing.py (tiles
                that units hold parts of), meetings.py (what units do together), ranges.py (one range for each fragment)
nvshmem.py nvshmem_link.py        copies by NVSHMEM where a program asks for it, and how such kernels are linked
cluster.py dsmem.py       rules: between programs of a cluster, through each other's shared memory
cluster_unit.py cluster_parts.py cluster_loads.py cluster_pair.py    a cluster that executes as one unit
arguments.py signature.py    what a generated kernel takes
headers/        device functions for signals, waits and barriers
check.py        the generated text before it is compiled
plan.py spread.py         device phases taken apart into operations of the host and grids
support.py      what is lowered, found by trying; generated text without a GPU
execute.py phases.py nccl.py     running: kernels and device phases in order
guard.py        what keeps a program from hanging: timeouts.py and diagnosis.py (failed waits), barrier_kernel.py (all
                ranks meet), streams.py (order, waiting for the device), agreement.py and occupancy.py (before a launch)
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
        from tilescale.backends.cuda.execute import DeviceProgram

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
