# SPDX-License-Identifier: MIT
"""Collectives on whole tensors: the launches of each, by algorithm.

setting.py                       the program around a collective, the tensors of a call, the ranks of a level
one_shot.py two_shot.py direct.py unequal.py normalised.py float8_lines.py  by a kernel of our own, which exchanges
                                 messages with those of the peers, through:
exchanges.py workspaces.py       grids, forms and memory of messages
kernels.py                       their CUDA text, compilation and launch
rounds.py                        by any algorithm, whose rounds one kernel plays
copy_engine.py nccl.py           by the copy engine; by NCCL
hierarchical.py                  over groups that share memory: kernels inside, messages between
dense.py                         tensors with gaps, and cut along other dimensions than the first
"""

from __future__ import annotations

from collections.abc import Callable

from tilescale.backends.cuda.running.collectives import (
    copy_engine,
    direct,
    float8_lines,
    hierarchical,
    nccl,
    normalised,
    one_shot,
    rounds,
    two_shot,
    unequal,
)
from tilescale.backends.cuda.running.collectives.exchanges import HeaderCall, MessageForms
from tilescale.backends.cuda.running.collectives.kernels import HeaderKernel
from tilescale.backends.cuda.running.collectives.setting import CollectiveLauncher, PlacedCollective
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.tilelang.lowering.implemented import BY_ROUNDS, ON_TENSORS

_MODULES = {
    "one_shot": one_shot,
    "two_shot": two_shot,
    "direct": direct,
    "copy_engine": copy_engine,
    "hierarchical_direct": hierarchical,
    "nccl": nccl,
}
"""Algorithm -> the module with a launcher of each operation's name."""


def _launcher(operation: str, algorithm: str) -> CollectiveLauncher:
    if algorithm in BY_ROUNDS.get(operation, ()):
        return rounds.launcher(algorithm)
    found: CollectiveLauncher = getattr(_MODULES[algorithm], operation)
    return found


LAUNCHERS = {key: _launcher(*key) for key in ON_TENSORS}
"""(operation, algorithm) -> its launcher."""

_USES: dict[tuple[str, str], Callable[[ProgramContext, PlacedCollective], HeaderCall]] = {
    ("allreduce", "one_shot"): one_shot.use,
    ("allreduce", "two_shot"): two_shot.use,
    ("reduce_scatter", "direct"): direct.reducing,
    ("all_gather", "direct"): direct.gathering,
    ("all_to_all", "direct"): direct.exchanging,
    ("broadcast", "direct"): direct.broadcasting,
}


def kernels_of(context: ProgramContext, placed: PlacedCollective, algorithm: str) -> list[HeaderKernel]:
    """Kernels of messages that a collective compiles, as far as they are known before it is bound."""
    if (placed.made.name, algorithm) == ("all_to_all_v", "direct"):
        return unequal.kernels(context, placed)
    if placed.made.wire is not None:
        return [float8_lines.kernel(context, placed)] if placed.team(context).size > 1 else []
    if placed.made.norm is not None:
        return normalised.kernels(context, placed, steps=1 if algorithm == "one_shot" else 2)
    use = _USES.get((placed.made.name, algorithm))
    return [] if use is None else list(MessageForms(context, placed, use(context, placed)).kernels.values())
