# SPDX-License-Identifier: MIT
"""All-gather of unequal parts: the rows of all ranks, of which each has any number (MPI_Allgatherv).

Ranks gather how many there are, then as many rows as the rank with the most has.
"""

from __future__ import annotations

from typing import Any

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.all_gather import all_gather
from tilescale.ops.all_to_all_v import on_device
from tilescale.ops.arguments import BYTES, as_moved, check_tensor
from tilescale.ops.flat import more_rows
from tilescale.ops.group import collective, group_name
from tilescale.ops.repeated import not_recorded


@collective
def all_gather_v(a: torch.Tensor, *, group: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all ranks, one rank after the other. Collective.

    Args:
        a: (rows, ...); ranks may have different numbers of rows.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        The rows of rank 0, of rank 1, and so on, which can be differentiated; and how many each rank has, int32.
        Devices exchange these numbers, and the host waits for them, which no CUDA graph can have.

    Raises:
        ArgumentError: an argument is not supported: names it, and what is supported.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=BYTES)
    if a.ndim == 0:
        raise ArgumentError("a has shape ()", hint="a has rows: reshape it")
    name = group_name(group)
    not_recorded()
    counts = all_gather(on_device((a.shape[0],), a.device), group=name)
    return as_moved(_gathered, a, counts.tolist(), name), counts


def _gathered(a: torch.Tensor, counts: list[int], group: str) -> torch.Tensor:
    every = all_gather(more_rows(a, max(counts)), group=group).unflatten(0, (len(counts), max(counts)))
    return torch.cat([rows[:n] for rows, n in zip(every, counts, strict=True)])
