# SPDX-License-Identifier: MIT
"""The compilation target of a machine's processors."""

from __future__ import annotations

from tilescale.errors import UnsupportedError
from tilescale.hda import Machine


def target_for(machine: Machine) -> dict[str, str]:
    """The target that stock TileLang compiles for.

    Raises:
        UnsupportedError: the machine's description names no CUDA compute capability.
    """
    major, dot, minor = machine.identify.architecture.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise UnsupportedError(
            f"machine {machine.name!r} has no CUDA compute capability", hint="pass target= to tilescale.compile"
        )
    # From 9.0 on the matrix instructions belong to the architecture-specific feature set (CUDA C++ guide, 5.1).
    return {"kind": "cuda", "arch": f"sm_{major}{minor}{'a' if int(major) >= 9 else ''}"}


def target_or_auto(machine: Machine) -> dict[str, str] | str:
    """The same, or that of the GPU at hand where the description names no compute capability."""
    return target_for(machine) if machine.identify.architecture else "auto"
