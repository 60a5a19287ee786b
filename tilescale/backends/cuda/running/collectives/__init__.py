# SPDX-License-Identifier: MIT
"""Collectives on whole tensors: what a device puts on its stream for each, by algorithm.

setting.py                       the program around a collective, the tensors of a call, the ranks of a level
one_shot.py two_shot.py direct.py unequal.py  by a kernel of our own, which exchanges messages with those of the peers,
                                 through:
exchanges.py workspaces.py       grids, forms and memory of messages
kernels.py                       their CUDA text, compilation and launch
rounds.py                        by any algorithm, whose rounds one kernel plays
copy_engine.py copied_sums.py    by the copy engine
nccl.py nvshmem.py               by NCCL; by NVSHMEM
hierarchical.py                  over groups that share memory: kernels inside, messages between
dense.py                         tensors with gaps, and cut along other dimensions than the first
"""

from __future__ import annotations

from collections.abc import Callable

from tilescale.backends.cuda.lowering.implemented import BY_ROUNDS
from tilescale.backends.cuda.running.collectives import (
    copied_sums,
    copy_engine,
    direct,
    hierarchical,
    nccl,
    nvshmem,
    one_shot,
    rounds,
    two_shot,
    unequal,
)
from tilescale.backends.cuda.running.collectives.exchanges import Forms, Use
from tilescale.backends.cuda.running.collectives.kernels import Kernel
from tilescale.backends.cuda.running.collectives.setting import Launcher, Stand
from tilescale.backends.cuda.running.owner import Owner

LAUNCHERS: dict[tuple[str, str], Launcher] = {
    ("allreduce", "one_shot"): one_shot.allreduce,
    ("allreduce", "two_shot"): two_shot.allreduce,
    ("allreduce", "copy_engine"): copied_sums.allreduce,
    ("allreduce", "hierarchical_direct"): hierarchical.allreduce,
    ("allreduce", "nccl"): nccl.allreduce,
    ("allreduce", "nvshmem"): nvshmem.allreduce,
    ("reduce_scatter", "direct"): direct.reduce_scatter,
    ("reduce_scatter", "copy_engine"): copied_sums.reduce_scatter,
    ("reduce_scatter", "hierarchical_direct"): hierarchical.reduce_scatter,
    ("reduce_scatter", "nccl"): nccl.reduce_scatter,
    ("reduce_scatter", "nvshmem"): nvshmem.reduce_scatter,
    ("all_gather", "direct"): direct.all_gather,
    ("all_gather", "copy_engine"): copy_engine.all_gather,
    ("all_gather", "hierarchical_direct"): hierarchical.all_gather,
    ("all_gather", "nccl"): nccl.all_gather,
    ("all_gather", "nvshmem"): nvshmem.all_gather,
    ("all_to_all", "direct"): direct.all_to_all,
    ("all_to_all", "copy_engine"): copy_engine.all_to_all,
    ("all_to_all", "hierarchical_direct"): hierarchical.all_to_all,
    ("all_to_all", "nccl"): nccl.all_to_all,
    ("all_to_all", "nvshmem"): nvshmem.all_to_all,
    ("all_to_all_v", "direct"): unequal.all_to_all_v,
    ("all_to_all_v", "nccl"): nccl.all_to_all_v,
    ("broadcast", "direct"): direct.broadcast,
    ("broadcast", "copy_engine"): copy_engine.broadcast,
    ("broadcast", "hierarchical_direct"): hierarchical.broadcast,
    ("broadcast", "nccl"): nccl.broadcast,
    ("broadcast", "nvshmem"): nvshmem.broadcast,
    **{(operation, name): rounds.launcher(name) for operation, names in BY_ROUNDS.items() for name in names},
}
"""(operation, algorithm) -> what makes it."""

_USES: dict[tuple[str, str], Callable[[Owner, Stand], Use]] = {
    ("allreduce", "one_shot"): one_shot.use,
    ("allreduce", "two_shot"): two_shot.use,
    ("reduce_scatter", "direct"): direct.reducing,
    ("all_gather", "direct"): direct.gathering,
    ("all_to_all", "direct"): direct.exchanging,
    ("broadcast", "direct"): direct.broadcasting,
}


def kernels_of(own: Owner, stand: Stand, algorithm: str) -> list[Kernel]:
    """Kernels of messages that a collective compiles, as far as they are known before it is made."""
    if (stand.made.name, algorithm) == ("all_to_all_v", "direct"):
        return unequal.kernels(own, stand)
    use = _USES.get((stand.made.name, algorithm))
    return [] if use is None else list(Forms(own, stand, use(own, stand)).kernels.values())
