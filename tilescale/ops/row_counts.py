# SPDX-License-Identifier: MIT
"""Kernels of a GEMM with a collective for all row counts: a few, since programs take the number of rows as an argument.

Rows decide between tile shapes, between persistent grids and one block a tile, and between the overlapped kernel and a
collective of whole tensors. A dry run of one row count adds the kernels of the others, so that no later count compiles.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import torch

from tilescale.comm import Team
from tilescale.ops import few_rows, strategy, whole_tensors
from tilescale.ops.gemm_tiles import ROWS
from tilescale.ops.kernels import Choice, ChosenKernels, kernels
from tilescale.runtime import ahead
from tilescale.runtime.kernel import Kernel

MANY = 2048
"""Rows of a rank's shard of a long sequence."""


class GemmKernels(NamedTuple):
    """The kernels of a GEMM with a collective.

    Attributes:
        job: the GEMM, of no rows.
        moved: types of the tensors that a collective of whole tensors moves.
        overlapped: the kernels by team, rows and `how`.
        team: the ranks of the collective.
        how: further arguments of the choice among `overlapped`.
        parts: how many shards the rows of a call are.
    """

    job: strategy.CollectiveGemm
    moved: tuple[torch.dtype, ...]
    overlapped: ChosenKernels
    team: Team
    how: tuple[Any, ...]
    parts: int

    def of_many_rows(self) -> list[Kernel]:
        """Those of a long sequence, which depend on one estimate."""
        if self._overlaps(MANY):
            return [self.overlapped(self.team, MANY * self.parts, *self.how)]
        return kernels(*self._in_order())

    def of_any_rows(self) -> list[Kernel]:
        """Those of all numbers of rows."""
        rows_of: dict[Choice, list[int]] = defaultdict(list)
        step = strategy.step_of(self.parts)
        # Estimates of few rows depend on whether the last row of tiles is full, or nearly empty.
        few = {max(few_rows.ROWS // self.parts, 1), *range(1, strategy.EXACT, step)}
        for rows in sorted({*few, *range(step, ROWS + 1, step)}):
            rows_of[self.overlapped.choice(self.team, rows * self.parts, *self.how)].append(rows)
        # Most kernels overlap with their most rows: one estimate. Those of no row have all of theirs estimated.
        needed = [choice for choice, rows in rows_of.items() if any(map(self._overlaps, reversed(rows)))]
        every = (rows for each in rows_of.values() for rows in each)
        return kernels(*needed, *(() if all(map(self._overlaps, every)) else self._in_order()))

    def _overlaps(self, rows: int) -> bool:
        return strategy.overlaps(self.job._replace(rows=rows), self.team)

    def _in_order(self) -> list[Choice]:
        return [each for kind in self.moved for each in whole_tensors.choices(self.job.collective, kind, self.team)]


def prepare(
    job: strategy.CollectiveGemm,
    moved: tuple[torch.dtype, ...],
    overlapped: ChosenKernels,
    team: Team,
    *how: Any,
    parts: int = 1,
) -> None:
    """Add the kernels of all row counts to those of a dry run. Arguments as of `GemmKernels`; `job` is of any rows."""
    made = GemmKernels(job._replace(rows=0), moved, overlapped, team, how, parts)
    ahead.also_needed(GemmKernels.of_any_rows, made)
