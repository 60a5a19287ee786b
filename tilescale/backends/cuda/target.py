# SPDX-License-Identifier: MIT
"""The compilation target of a machine's GPUs."""

from __future__ import annotations

import torch

from tilescale.errors import UnsupportedError
from tilescale.hda import Machine


def has_gpu() -> bool:
    """Whether there is a GPU. In a process forked after the first use of CUDA, where the driver finds none: whether the
    parent has one."""
    return torch.cuda._is_in_bad_fork() or torch.cuda.is_available()


def target_for(machine: Machine) -> dict[str, str]:
    """The target that stock TileLang compiles for. Raises UnsupportedError: the machine's description names no CUDA
    compute capability."""
    major, dot, minor = machine.identify.architecture.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise UnsupportedError(
            f"machine {machine.name!r} has no CUDA compute capability", hint="pass target= to tilescale.compile"
        )
    # From 9.0 on the matrix instructions belong to the architecture-specific feature set (CUDA C++ guide, 5.1).
    return {"kind": "cuda", "arch": f"sm_{major}{minor}{'a' if int(major) >= 9 else ''}"}


def target_or_auto(machine: Machine) -> dict[str, str] | str:
    """The machine's target, or that of the local GPU where the description names no compute capability."""
    return target_for(machine) if machine.identify.architecture else "auto"


def check_gpu(machine: Machine, device: torch.device) -> None:
    """Raise UnsupportedError for a local GPU that cannot run the machine's code."""
    check_processor(machine, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


def check_processor(machine: Machine, processor: tuple[int, int], name: str) -> None:
    """Raise UnsupportedError for a GPU, given by compute capability and name, that cannot run the machine's code.

    Code for a compute capability runs on later minor versions; code with architecture-specific features runs on that
    one alone (CUDA C++ guide, 5.1).
    """
    major, _, minor = machine.identify.architecture.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return
    wanted = int(major), int(minor)
    fits = wanted == processor if wanted[0] >= 9 else wanted[0] == processor[0] and wanted[1] <= processor[1]
    if not fits:
        raise UnsupportedError(
            f"the program is made for machine {machine.name!r}, compute capability {machine.identify.architecture}; "
            f"this GPU, {name}, has {processor[0]}.{processor[1]}",
            hint="name its machine in TILESCALE_MACHINE or by tilescale.use_machine(...): `tilescale machine list`, or "
            "`tilescale machine detect` for one that no built-in machine describes",
        )
