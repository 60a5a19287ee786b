# SPDX-License-Identifier: MIT
"""Split a grid whose programs branch by their index, each branch with a pipelined loop: a grid for each branch.

Why: a kernel has one producer, for one pipelined loop, and the registers of the branch that needs most. Programs of one
grid have no order, so the two kernels may run concurrently, and the second one uses SMs that the first leaves idle: a
GEMM of 4096 x 3072 x 4096 whose tiles load from one of two tensors fills 2.9 waves of 132 programs instead of 1.5 and
1.5. Before: a grid phase. After: two phases, each with a launch of fewer programs; or the same phase, if its programs
wait for one another, synchronize, or use their index as ranks.

Worth: ag_gemm of `benchmarks/results/operators.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.statements import flat, is_pipelined, is_scalar
from tilescale.hda import Machine
from tilescale.program.effects import names_of
from tilescale.program.grids import GridValues, UnknownValue
from tilescale.program.model import GridPhase, Launch, Program
from tilescale.program.operations import Rank, operation

NOTE = "branches of a grid by the numbers of its programs: a grid each, at once"

_MOST = 1 << 20
"""Maximum programs of an axis: more would take too long to check one by one."""


@dataclass(frozen=True)
class _Branch:
    """A condition that holds for the first programs of an axis, or for the last ones.

    Attributes:
        first: number of the first programs.
        arms: the statements of these, and of the others.
    """

    stmt: ir.IfThenElse
    axis: int
    first: int
    arms: tuple[ir.Stmt, ir.Stmt]


def apart(phase: GridPhase, launch: Launch, program: Program, machine: Machine) -> list[tuple[GridPhase, Launch]]:
    """The grids of a grid's branches, the first programs' first; the grid itself if it does not consist of two
    branches."""
    branch = _branch(phase.stmt, launch)
    if branch is None or launch.cluster_size > 1 or _orders(phase, program) or _names_program(phase, machine):
        return [(phase, launch)]
    count = ir.integer(launch.grid[branch.axis])
    ranges = (0, branch.first), (branch.first, count)
    return [_grid(phase, launch, branch, arm, *numbers) for arm, numbers in zip(branch.arms, ranges, strict=True)]


def _grid(
    phase: GridPhase, launch: Launch, branch: _Branch, arm: ir.Stmt, begin: int, end: int
) -> tuple[GridPhase, Launch]:
    """The grid of one arm: the programs from `begin` to `end`."""
    var = launch.programs[branch.axis]
    stmt = tir.rewrite(phase.stmt, enter=lambda node: arm if branch.stmt.same_as(node) else None)
    extents = [ir.IntImm("int32", end - begin) if i == branch.axis else n for i, n in enumerate(launch.grid)]
    return GridPhase(ir.substitute(stmt, {var: var + begin}) if begin else stmt), replace(launch, grid=tuple(extents))


def _branch(stmt: ir.Stmt, launch: Launch) -> _Branch | None:
    """The branch that is the whole phase except scalars."""
    rest = [s for s in flat(stmt) if not is_scalar(s)]
    if len(rest) != 1 or not isinstance(rest[0], ir.IfThenElse) or rest[0].else_case is None:
        return None
    made = rest[0]
    arms = made.then_case, made.else_case
    asked = [axis for axis, var in enumerate(launch.programs) if var in set(ir.variables(made.condition))]
    if len(asked) != 1 or not all(ir.contains(arm, is_pipelined) for arm in arms):
        return None
    count = ir.constant(launch.grid[asked[0]])
    if count is None or count > _MOST:
        return None
    try:
        met = GridValues(count, {launch.programs[asked[0]]: np.arange(count)}).value(made.condition, {})
    except UnknownValue:
        return None
    changes = np.flatnonzero(np.diff(np.broadcast_to(met, count).astype(int)))
    if len(changes) != 1:
        return None
    first = int(changes[0]) + 1
    return _Branch(made, asked[0], first, arms if met[0] else arms[::-1])


def _orders(phase: GridPhase, program: Program) -> bool:
    """Whether a program of the grid may wait for another one: for its signal, or a copy that waits for the signal."""
    effects = names_of(program).all_effects(phase.stmt)
    return bool(effects.acquires and effects.releases or effects.synchronizes) or effects.opaque


def _names_program(phase: GridPhase, machine: Machine) -> bool:
    """Whether a program uses its rank in the grid."""
    binds = [stmt for stmt in ir.statements(phase.stmt) if isinstance(stmt, ir.Bind)]
    made = [(stmt.var, operation(stmt.value)) for stmt in binds]
    ranks = {var for var, rank in made if isinstance(rank, Rank) and machine.level(rank.level).kind == "program"}
    return ir.contains(phase.stmt, lambda node: isinstance(node, ir.Var) and node in ranks)
