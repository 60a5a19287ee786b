# SPDX-License-Identifier: MIT
"""Collectives on whole tensors: the launches of each, by algorithm.

setting.py                       the program around a collective, the tensors of a call, the ranks of a level
by_messages.py                   by a kernel of our own, which exchanges messages with those of the peers, with:
unequal.py normalised.py float8_lines.py  parts of unequal sizes, norms of sums, and floats sent as float8, through:
exchanges.py workspaces.py       grids, forms and memory of messages
kernels.py                       their CUDA text, compilation and launch
rounds.py                        by any algorithm, whose rounds one kernel plays
copy_engine.py nccl.py           by the copy engine; by NCCL
hierarchical.py                  over groups that share memory: kernels inside, messages between
dense.py                         tensors with gaps, and cut along other dimensions than the first
"""

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
