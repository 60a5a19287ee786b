# SPDX-License-Identifier: MIT
"""The rewrite: from a program of several grids and collectives to one that launches once.

Before: grids one after the other, each with its blocks, and collectives of whole tensors between them. After: one grid
of persistent blocks. A block of the program as written is a task; counters in device memory order tasks that depend on
each other. The result is a program of the language: it is printed, checked, emulated, timed and lowered as any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine
from tilescale.passes.declined import Declined
from tilescale.passes.persistent.dependences import Need, needs_of
from tilescale.passes.persistent.phases import Grid, Phases, phases_of
from tilescale.passes.persistent.placement import Placement, placed
from tilescale.passes.persistent.ring import Ring
from tilescale.passes.persistent.task_body import TaskWriter
from tilescale.passes.persistent.tasks import Tasks
from tilescale.passes.persistent.unroll import unrolled
from tilescale.passes.rematerialize import rematerialize
from tilescale.passes.retrace import for_machine
from tilescale.passes.structure import structure
from tilescale.program.effects import ProgramNames
from tilescale.program.grids import grid_of
from tilescale.program.model import GridPhase, Launch
from tilescale.program.ops import AHEAD, FLAGS, IN_ORDER, SCALE, TASKS
from tilescale.program.tile_boxes import TileAccesses


def persistent(func: ir.PrimFunc, machine: Machine) -> tuple[ir.PrimFunc, Tasks]:
    """The program as one launch of persistent blocks, and its tasks.

    Raises:
        UnsupportedError: it cannot be fused: why, and the line.
        PhaseError, ...: as `passes.pipeline.analyse`.
    """
    func = for_machine(func, machine)
    program = rematerialize(structure(func, machine), machine)
    program = replace(program, body=unrolled(program.body))
    try:
        phases = phases_of(program, machine)
    except Declined as reason:
        raise UnsupportedError(
            f'schedule="persistent": {reason.reason}',
            hint="leave schedule= out, or write grids and collectives of whole tensors, one after the other",
            where=reason.where or program.launches[0].where,
        ) from None
    accesses = [_accesses(grid, phases.names, machine) for grid in phases.grids]
    placements = placed([found.grid.count for found in accesses], machine)
    loops = [grid.loop for grid in phases.grids]
    needs = needs_of(accesses, loops, phases.names, placements[0].blocks)
    tasks = Tasks(phases.grids, tuple(placements), tuple(needs))
    return _launched(func, phases, accesses, placements, needs, machine), tasks


def _accesses(grid: Grid, names: ProgramNames, machine: Machine) -> TileAccesses:
    """Accesses of a phase, in all iterations of the loop around it."""
    phase = grid.phase if grid.loop is None else GridPhase(grid.loop.around([grid.phase.stmt]))
    values = grid_of(phase, grid.launch, machine, {})
    assert values is not None
    return TileAccesses(phase, grid.launch, names, values)


def _launched(
    func: ir.PrimFunc, phases: Phases, accesses: Sequence[TileAccesses], placements: Sequence[Placement],
    needs: Sequence[Need], machine: Machine,
) -> ir.PrimFunc:  # fmt: skip
    block, first = ir.Var("block", "int32"), phases.grids[0].launch
    ring = Ring.of(phases, accesses, placements, block, machine)
    tasks = TaskWriter(phases.grids, needs, phases.names, machine, ring)
    threads = {axis: var for var, axis in first.thread_vars}
    stmts = [] if ring is None else ring.begin
    for loop, numbers in itertools.groupby(range(len(placements)), lambda number: phases.grids[number].loop):
        inside: list[ir.Stmt] = []
        for number in numbers:
            names = {var: threads[axis] for var, axis in phases.grids[number].launch.thread_vars}
            inside.append(ir.substitute(placements[number].loop(block, tasks.task(number)), names))
        stmts += inside if loop is None else [loop.around(inside)]
    shared = [_scale(machine.tensor_level.name, tir.sequence(phases.shared))] if phases.shared else []
    body = tir.sequence([*shared, _scale(machine.program_level.name, tir.sequence(stmts))])
    flags = [buffer for _, buffer in tasks.flags]
    buffers = {buffer.data: buffer for grid in phases.grids for buffer in grid.launch.buffers}
    nest = tir.launch_nest(
        [(block, ir.IntImm("int32", placements[0].blocks))],
        first.thread_vars,
        [*buffers.values(), *flags, *(() if ring is None else (ring.ring, ring.full))],
        _notes([grid.launch for grid in phases.grids], flags, ring),
        body,
    )
    root = ir.SBlock([], [], [], "root", nest)
    return func.with_body(ir.SBlockRealize([], ir.IntImm("bool", 1), root))


def _notes(launches: Sequence[Launch], flags: Sequence[ir.Buffer], ring: Ring | None) -> dict[str, Any]:
    """Annotations of all launches together."""
    notes: dict[str, Any] = {}
    for launch in launches:
        for key, value in launch.notes:
            joins = isinstance(value, Mapping) and key in notes
            notes[key] = {**notes[key], **value} if joins else dict(value) if isinstance(value, Mapping) else value
    notes.pop(IN_ORDER, None)
    notes[TASKS] = ir.IntImm("int32", 1)
    notes[FLAGS] = {**notes.get(FLAGS, {}), **{buffer.data: ir.IntImm("int32", 1) for buffer in flags}}
    if ring is not None:
        notes["barrier_init"] = {ring.full.data: [ir.IntImm("int32", 1)] * ring.stages}
        notes[AHEAD] = {root: ir.IntImm("int32", 1) for s in ring.streams if s is not None for root in s.roots}
    return notes


def _scale(level: str, stmt: ir.Stmt) -> ir.Stmt:
    node = ir.StringImm(level)
    return ir.AttrStmt(node, SCALE, node, stmt)
