# SPDX-License-Identifier: MIT
"""Kernels of a GEMM with a collective for all row counts: a few, since programs take the number of rows as an argument.

Rows decide between tile shapes, between persistent grids and one block a tile, and between the overlapped kernel and a
collective of whole tensors. A dry run of one row count adds the kernels of the others, so that no later count compiles.
"""

from collections import defaultdict
from typing import Any

import torch

from tilescale.comm import Team
from tilescale.ops import few_rows, strategy, whole_tensors
from tilescale.ops.kernels import Choice, ChosenKernels, kernels
from tilescale.ops.products import ROWS, TILINGS
from tilescale.runtime import ahead
from tilescale.runtime.kernel import Kernel

STEP = TILINGS[-1].m
"""Rows at whose multiples a choice of tiles may change: the height of the smallest ones."""

MANY = 2048
"""Rows of a rank's shard of a long sequence."""

ASKED = 32
"""Row counts of a kernel, evenly spread, for which the strategy is estimated."""


def prepare(
    job: strategy.CollectiveGemm,
    moved: tuple[torch.dtype, ...],
    overlapped: ChosenKernels,
    team: Team,
    *how: Any,
    parts: int = 1,
) -> None:
    """Add the kernels of all row counts to those of a dry run.

    Args:
        job: the GEMM of this call.
        moved: types of the tensors that a collective of whole tensors moves.
        overlapped: the kernels by team, rows and `how`.
        how: further arguments of the choice among `overlapped`.
        parts: how many shards these rows are.
    """
    ahead.also_needed(of_any_rows, job._replace(rows=0), moved, overlapped, team, how, parts)


def of_many_rows(
    job: strategy.CollectiveGemm,
    moved: tuple[torch.dtype, ...],
    overlapped: ChosenKernels,
    team: Team,
    how: tuple[Any, ...],
    parts: int,
) -> list[Kernel]:
    """The kernels of many rows, which depend on one estimate. Arguments as of `of_any_rows`."""
    if strategy.overlaps(job._replace(rows=MANY), team):
        return [overlapped(team, MANY * parts, *how)]
    return kernels(*(each for dtype in moved for each in whole_tensors.choices(job.collective, dtype, team)))


def of_any_rows(
    job: strategy.CollectiveGemm,
    moved: tuple[torch.dtype, ...],
    overlapped: ChosenKernels,
    team: Team,
    how: tuple[Any, ...],
    parts: int,
) -> list[Kernel]:
    """The kernels of all numbers of rows. Arguments as of `prepare`."""
    rows_of: dict[Choice, list[int]] = defaultdict(list)
    step = max(STEP // parts, 1)
    for rows in (1, max(few_rows.ROWS // parts, 1), *range(step, ROWS + 1, step)):
        rows_of[overlapped.choice(team, rows * parts, *how)].append(rows)
    needed, is_sequential = [], False
    for choice, rows in rows_of.items():
        spread = *rows[:: -(-len(rows) // ASKED)], rows[-1]
        overlaps = [strategy.overlaps(job._replace(rows=count), team) for count in spread]
        is_sequential |= not all(overlaps)
        needed += [choice] if any(overlaps) else []
    if is_sequential:
        needed += [each for dtype in moved for each in whole_tensors.choices(job.collective, dtype, team)]
    return kernels(*needed)
