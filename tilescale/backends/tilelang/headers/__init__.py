# SPDX-License-Identifier: MIT
"""Device functions that generated kernels carry as text, for all instruction sets with the functions that they call.

sync.cuh: signals, bounded waits, barriers; producer.cuh: waits of producers; siblings.cuh: barriers of one level of
several; rendezvous.cuh: barriers of all ranks at begin and end of a call; combine.cuh: the combination of two elements;
cluster.cuh: shared memory of a cluster; units.cuh: barriers of units inside a program; atomics.cuh: additions between
GPUs; broadcast.cuh: broadcasts of a thread's value; polling.cuh: polling loops; nvshmem.cuh: copies, signals and
barriers by NVSHMEM. words.cuh, messages.cuh, sums.cuh, short_messages.cuh, norm_messages.cuh, float8_messages.cuh,
long_messages.cuh, moved_messages.cuh, row_messages.cuh, rounds.cuh: collectives on whole tensors. cluster_sum.cuh: sums
over a cluster. tile_messages.cuh: sums of small tiles of programs.

The package of an instruction set has memory.cuh (accesses, fences and the clock) and adders.cuh (atomic additions).
"""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def header(name: str, package: str = __package__) -> str:
    """The text of a file in a package, or in this one if that has no file of the name."""
    own = resources.files(package).joinpath(name)
    return (own if own.is_file() else resources.files(__package__).joinpath(name)).read_text()
