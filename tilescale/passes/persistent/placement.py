# SPDX-License-Identifier: MIT
"""Placement of tasks on persistent blocks: round robin, one phase after the other.

A block executes its tasks in the order of phases, and tasks wait for those of earlier phases only. So where all blocks
are resident, the first unfinished task in this order never waits: the launch cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.hda import Machine


@dataclass(frozen=True)
class Task:
    """The statements of tasks of a phase.

    Attributes:
        number: variable for a task's number.
        first: what a block does once before its tasks: waits and loads that all of them have alike.
        body: what it does in each.
        last: what it does once behind them, where every block has several.
    """

    number: ir.Var
    first: list[ir.Stmt]
    body: ir.Stmt
    last: list[ir.Stmt]


@dataclass(frozen=True)
class Placement:
    """Tasks of a phase on blocks.

    Attributes:
        blocks: of the launch.
        first: the block of its first task; the next tasks are on the next blocks.
        count: tasks of the phase.
    """

    blocks: int
    first: int
    count: int

    def loop(self, block: ir.Var, task: Task) -> ir.Stmt:
        """A block executes its tasks of the phase."""
        if self.count <= self.blocks:
            body = tir.sequence([*task.first, task.body])
            run = body if self.is_even else ir.IfThenElse(task.number < self.count, body, None)
            return tir.sequence([ir.Bind(task.number, self.task(block, 0)), run])
        iteration = ir.Var("iteration", "int32")
        run = tir.sequence([ir.Bind(task.number, self.task(block, iteration)), task.body])
        loop = ir.For(iteration, 0, self.iterations(block), ir.ForKind.SERIAL, run)
        return tir.sequence([*task.first, loop, *task.last])

    def task(self, block: ir.Var, iteration: Any) -> Any:
        """The task that a block executes in an iteration of its loop."""
        mine: Any = (block + (self.blocks - self.first)) % self.blocks if self.first else block
        return mine + iteration * self.blocks

    def iterations(self, block: ir.Var) -> Any:
        """Tasks of a block."""
        if self.is_even:
            return ir.IntImm("int32", self.count // self.blocks)
        return ir.simplify((self.count - self.task(block, 0) + (self.blocks - 1)) // self.blocks, {})

    def executed(self) -> np.ndarray:
        """Tasks of each block."""
        mine = (np.arange(self.blocks) - self.first) % self.blocks
        return (self.count - mine + self.blocks - 1) // self.blocks

    @property
    def is_even(self) -> bool:
        """Whether each block executes as many tasks."""
        return self.count % self.blocks == 0


def placed(counts: Sequence[int], machine: Machine) -> list[Placement]:
    """Tasks of each phase, on as many blocks as a device executes at once."""
    blocks, begin, found = min(machine.program_units, max(counts)), 0, []
    for count in counts:
        found.append(Placement(blocks, begin % blocks, count))
        begin += count
    return found
