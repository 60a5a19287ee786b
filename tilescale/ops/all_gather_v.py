# SPDX-License-Identifier: MIT
"""All-gather of unequal parts: the rows of all ranks, of which each has any number (MPI_Allgatherv).

Ranks gather how many there are, then as many rows as the rank with the most has; or as many as any may have, where the
host is not to wait for the numbers. Then the device finds where each rank's rows begin.
"""

from __future__ import annotations

from typing import Any

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.all_gather import all_gather
from tilescale.ops.all_to_all_v import not_recorded, on_device
from tilescale.ops.arguments import BYTES, as_moved, check_count, check_same, check_tensor
from tilescale.ops.group import collective, group_name
from tilescale.ops.layout import more_rows


@collective
def all_gather_v(
    a: torch.Tensor, rows: torch.Tensor | None = None, *, most: int | None = None, group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all ranks, one rank after the other. Collective.

    Args:
        a: (rows, ...); ranks may have different numbers of rows.
        rows: how many of them are gathered, a tensor of one integer on the device of `a`; None: all.
        most: rows that any rank has at most, the same on all ranks: the host does not look at the numbers, so the call
            can be in a CUDA graph, and the result has space for `most` rows of each rank.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        The rows of rank 0, of rank 1, and so on, which can be differentiated; and how many each rank has, int32.
        Devices exchange these numbers. Without `most` the host waits for them, which no CUDA graph can have. With it
        the result has ranks * most rows; those after the last received one are zeros.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=BYTES)
    if a.ndim == 0:
        raise ArgumentError("a has shape ()", hint="a has rows: reshape it")
    name = group_name(group)
    counts = all_gather(_own(a, rows), group=name)
    if most is not None:
        check_count("most", most)
        if a.shape[0] > most:
            raise ArgumentError(f"a has {a.shape[0]} rows, most is {most}", hint="raise most, on all ranks")
        return as_moved(_with_room, a, counts, most, name), counts
    not_recorded()
    return as_moved(_gathered, a, counts.tolist(), name), counts


def _own(a: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Number of this rank's rows, (1,)."""
    if rows is None:
        return on_device((a.shape[0],), a.device)
    check_tensor("rows", rows, None, (torch.int32, torch.int64))
    check_same("device", "rows", rows, "a", a)
    if rows.numel() != 1:
        raise ArgumentError(f"rows has {rows.numel()} numbers", hint="give one: how many rows of a are gathered")
    return rows.reshape(1).to(torch.int32).clamp(0, a.shape[0])


def _gathered(a: torch.Tensor, counts: list[int], group: str) -> torch.Tensor:
    highest = max(counts)
    every = all_gather(more_rows(a[:highest], highest), group=group).unflatten(0, (len(counts), highest))
    return torch.cat([part[:n] for part, n in zip(every, counts, strict=True)])


def _with_room(a: torch.Tensor, counts: torch.Tensor, most: int, group: str) -> torch.Tensor:
    every = all_gather(more_rows(a, most), group=group)
    ends, places = counts.cumsum(0), torch.arange(len(every), device=a.device)
    source = torch.searchsorted(ends, places, right=True).clamp_(max=len(counts) - 1)
    lies = source * most + places - (ends - counts)[source]
    beyond = places >= ends[-1]
    made = every.index_select(0, lies.masked_fill_(beyond, 0))
    return made.masked_fill(beyond.view(-1, *[1] * (a.ndim - 1)), 0)
