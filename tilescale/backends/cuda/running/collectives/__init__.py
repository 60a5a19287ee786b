# SPDX-License-Identifier: MIT
"""Collectives on whole tensors: the launches of each, by algorithm."""

from __future__ import annotations

from tilescale.backends.cuda.running.collectives import by_messages, copy_engine, hierarchical, nccl, rounds
from tilescale.backends.cuda.running.collectives.setting import CollectiveLauncher
from tilescale.backends.tilelang.lowering.implemented import BY_ROUNDS, ON_TENSORS

_MODULES = {"copy_engine": copy_engine, "hierarchical_direct": hierarchical, "nccl": nccl}
"""Algorithm -> the module with a launcher of each operation's name."""


def _launcher(operation: str, algorithm: str) -> CollectiveLauncher:
    if algorithm in BY_ROUNDS.get(operation, ()):
        return rounds.launcher(algorithm)
    found: CollectiveLauncher = by_messages.launcher(operation, algorithm) or getattr(_MODULES[algorithm], operation)
    return found


LAUNCHERS = {key: _launcher(*key) for key in ON_TENSORS}
"""(operation, algorithm) -> its launcher."""
