# SPDX-License-Identifier: MIT
"""Single-GPU programs, by stock TileLang."""

from __future__ import annotations

from typing import Any

from tilelang_core import compile as stock
from tilescale.backends.base import Backend, Executable
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine
from tilescale.program.model import Program
from tilescale.settings import settings


def target_for(machine: Machine) -> dict[str, str]:
    """The compilation target of a machine's processors.

    Raises:
        UnsupportedError: its description names no CUDA compute capability.
    """
    major, dot, minor = machine.identify.architecture.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise UnsupportedError(
            f"machine {machine.name!r} has no CUDA compute capability", hint="pass target= to tilescale.compile"
        )
    # From 9.0 on the matrix instructions belong to the architecture-specific feature set (CUDA C++ guide, 5.1).
    return {"kind": "cuda", "arch": f"sm_{major}{minor}{'a' if int(major) >= 9 else ''}"}


def source(program: Program, machine: Machine, target: Any, pass_configs: dict[str, Any] | None) -> str:
    """The CUDA text of a program.

    Raises:
        UnsupportedError: the program spans more than one GPU's programs.
    """
    reason = _accepts(program)
    if reason is not None:
        raise UnsupportedError(f"no CUDA text for {program.name!r}: {reason}", hint="run it with tilescale.emulate")
    return stock.cuda_source(program.func, target or target_for(machine), pass_configs)


def _available() -> bool:
    import torch

    return torch.cuda.is_available() and not settings().emulate


def _accepts(program: Program) -> str | None:
    return "it uses levels and operations beyond stock TileLang" if program.is_hierarchical else None


def _build(program: Program, machine: Machine, options: dict[str, Any]) -> Executable:
    kernel = stock.compile_kernel(program.func, **{k: v for k, v in options.items() if v is not None})
    return Executable(lambda per_unit: kernel(*per_unit[0]), gathers=False, device="cuda")


BACKEND = Backend("cuda", available=_available, accepts=_accepts, build=_build, priority=10)
