# SPDX-License-Identifier: MIT
"""Which of stock TileLang's operations the emulator runs, read off its tables."""

from __future__ import annotations

import sys

from tilelang_core.catalogue import cuda_operations
from tilescale.backends.emulator import run  # noqa: F401 - fills the tables
from tilescale.backends.emulator.interpret.registry import IGNORED, OPERATIONS, VALUES, VECTORS
from tilescale.backends.emulator.numerics import INTRINSICS, intrinsics
from tilescale.program.ops import ALL_OPS

ORDERINGS = "Hints and orderings, which one unit at a time and copies that complete at once have no use for."


def runs() -> dict[str, list[str]]:
    """What a family of operations is about, as its file says -> the names of those that run."""
    found: dict[str, set[str]] = {}
    for table in (OPERATIONS, VALUES, VECTORS):
        for name, rule in table.items():
            found.setdefault(_about(rule.__module__), set()).add(name)
    found[_about(intrinsics.__name__)] = set(INTRINSICS)
    found[ORDERINGS] = IGNORED
    return {about: sorted(names - ALL_OPS) for about, names in sorted(found.items()) if names - ALL_OPS}


def remaining() -> list[str]:
    """Operations of CUDA programs that the emulator refuses, by name and line."""
    known = IGNORED | OPERATIONS.keys() | VALUES.keys() | VECTORS.keys() | INTRINSICS.keys()
    return sorted(set(cuda_operations()) - known)


def _about(module: str) -> str:
    return " ".join((sys.modules[module].__doc__ or "").split("\n\n")[0].split())
