# SPDX-License-Identifier: MIT
"""Ranks of a job: joining it (`init`), continuing without failed ranks (`shrink`), its description (`World`), groups of
ranks and their collectives (`Team`).

Memory that all ranks reach: `empty`, `zeros` and `from_tensor`, of a `SymmetricHeap`.
"""

from tilescale.comm.heap import AddressMap, SymmetricHeap, Usage, default_heap, empty, from_tensor, heap_of, zeros
from tilescale.comm.team import Team
from tilescale.comm.world import World, current_world, init, shrink

__all__ = [
    "AddressMap",
    "SymmetricHeap",
    "Team",
    "Usage",
    "World",
    "current_world",
    "default_heap",
    "empty",
    "from_tensor",
    "heap_of",
    "init",
    "shrink",
    "zeros",
]
