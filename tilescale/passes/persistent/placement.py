# SPDX-License-Identifier: MIT
"""Placement of tasks on persistent blocks: round robin, one phase after the other.

A block executes its tasks in the order of phases, and tasks wait for those of earlier phases only. So where all blocks
are resident, the first unfinished task in this order never waits: the launch cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.hda import Machine


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

    def loop(self, block: ir.Var, task: ir.Var, body: ir.Stmt) -> ir.Stmt:
        """A block executes its tasks of the phase: `body` for each value of `task`."""
        mine: Any = (block + (self.blocks - self.first)) % self.blocks if self.first else block
        if self.count <= self.blocks:
            run = ir.IfThenElse(task < self.count, body, None) if self._is_partial else body
            return tir.sequence([ir.Bind(task, mine), run])
        turn = ir.Var("turn", "int32")
        count: Any = ir.IntImm("int32", self.count // self.blocks)
        if self._is_partial:
            count = ir.simplify((self.count - mine + (self.blocks - 1)) // self.blocks, {})
        run = tir.sequence([ir.Bind(task, mine + turn * self.blocks), body])
        return ir.For(turn, 0, count, ir.ForKind.SERIAL, run)

    @property
    def _is_partial(self) -> bool:
        """Whether some blocks execute fewer tasks than others."""
        return self.count % self.blocks != 0


def resident_blocks(machine: Machine) -> int:
    """Blocks that a device executes at once: one for each SM."""
    return machine.count(machine.program_level.name, machine.tensor_level.name)


def placed(counts: Sequence[int], machine: Machine) -> list[Placement]:
    """Tasks of each phase, on as many blocks as a device executes at once."""
    blocks, begin, found = min(resident_blocks(machine), max(counts)), 0, []
    for count in counts:
        found.append(Placement(blocks, begin % blocks, count))
        begin += count
    return found
