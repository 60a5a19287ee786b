# SPDX-License-Identifier: MIT
"""Launches and phases as closures: a device runs its phases in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.execute.grid import Grid, Plan
from tilescale.backends.emulator.execute.lockstep import LockstepGrids
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.lockstep import Lockstep
from tilescale.backends.emulator.interpret.statements import thread_index
from tilescale.backends.emulator.interpret.symbols import PRIVATE
from tilescale.errors import ArgumentError, LaunchError
from tilescale.passes.mod_analysis import written_parameters
from tilescale.program.footprint import held
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Sequence


def compile_part(compiler: Compiler, part: Part) -> Closure:
    """The closure of a part of a program, run on a device's frame."""
    if isinstance(part, Sequence):
        return _in_order([compile_part(compiler, p) for p in part.parts])
    if isinstance(part, DevicePhase):
        with compiler.executing_as(compiler.machine.tensor_level):
            return compiler.stmt(part.stmt)
    if isinstance(part, Control):
        return _control(compiler, part)
    if isinstance(part, GridPhase):
        return _grid_phase(compiler, part)
    return _launch(compiler, part)


def _in_order(parts: list[Closure]) -> Closure:
    def run(frame: Frame) -> None:
        for part in parts:
            part(frame)

    return run


def _control(compiler: Compiler, part: Control) -> Closure:
    stmt = part.stmt
    if isinstance(stmt, ir.For):
        compiler.loop_variables.discard(stmt.loop_var)
    bodies = [compile_part(compiler, p) for p in part.parts]
    if isinstance(stmt, ir.IfThenElse):
        condition = compiler.expr(stmt.condition)

        def branch(frame: Frame) -> None:
            taken = uniform(condition(frame), frame, "a condition around phases")
            if taken or len(bodies) > 1:
                bodies[0 if taken else 1](frame)

        return branch
    if isinstance(stmt, ir.While):
        condition = compiler.expr(stmt.condition)

        def loop_while(frame: Frame) -> None:
            while uniform(condition(frame), frame, "a condition around phases"):
                bodies[0](frame)

        return loop_while
    slot, begin, extent = compiler.slot(stmt.loop_var), compiler.expr(stmt.min), compiler.expr(stmt.extent)

    def loop(frame: Frame) -> None:
        first = uniform(begin(frame), frame, "where a loop begins")
        for i in range(first, first + uniform(extent(frame), frame, "a loop's extent")):
            frame.slots[slot] = i
            bodies[0](frame)

    return loop


def _launch(compiler: Compiler, launch: Launch) -> Closure:
    compiler.launch = launch
    compiler.begin_function(launch)
    body = compile_part(compiler, launch.body)
    owned = compiler.device_buffers(launch)

    def run(frame: Frame) -> None:
        compiler.allocate(owned, frame.unit, frame)
        body(frame)

    return run


def _grid_phase(compiler: Compiler, phase: GridPhase) -> Closure:
    launch = compiler.launch
    extents = [compiler.expr(n) for n in launch.grid]
    slots = [compiler.slot(v) for v in launch.programs]
    compiler.loop_variables -= set(launch.programs)
    threads = {compiler.slot(var): thread_index(launch, axis) for var, axis in launch.thread_vars}
    compiler.begin_function(launch)
    body = compiler.stmt(phase.stmt)
    plan = _plan(compiler, phase, launch, slots, threads)
    if compiler.instrumentation is not None:
        plan.together = compiler.instrumentation.representatives(compiler, launch, phase.stmt)
    elif compiler.lockstep is not None:
        plan.together = _lockstep_grids(compiler, compiler.lockstep, slots)

    def run(frame: Frame) -> None:
        shape = tuple(uniform(n(frame), frame, "the grid's extent") for n in extents)
        if 0 in shape and not compiler.program.is_hierarchical:
            raise _no_blocks(compiler.program.name, shape, launch)
        Grid(plan, shape, frame).run(body)

    return run


def _lockstep_grids(compiler: Compiler, made: Lockstep, slots: list[int]) -> LockstepGrids:
    """Runner of the grids of a program that runs in lockstep."""
    compiler.in_lockstep = True
    body = compiler.stmt(made.stmt)
    compiler.in_lockstep = False
    written = written_parameters(compiler.program)
    tensors = [
        (compiler.slot(parameter.buffer.data), number in written)
        for number, parameter in enumerate(compiler.program.parameters)
        if parameter.buffer is not None
    ]

    def allocate(frame: Frame) -> None:
        for buffer in made.buffers:
            frame.slots[compiler.slot(buffer.data)] = compiler.instance(buffer, frame)

    first, count = compiler.slot(made.first), compiler.slot(made.programs)
    return LockstepGrids(body, made.axis, made.most, first, count, slots, tensors, allocate)


def _no_blocks(name: str, shape: tuple[int, ...], launch: Launch) -> ArgumentError:
    """The error of a plain launch without blocks, which CUDA rejects; in other programs, devices may have none."""
    return ArgumentError(
        f"{name} launches a grid of no blocks: {shape}",
        hint="CUDA launches at least one block: make no call where there is nothing to do",
        where=launch.where,
    )


def _plan(compiler: Compiler, phase: GridPhase, launch: Launch, slots: list[int], threads: Mapping[int, Any]) -> Plan:
    machine = compiler.machine
    cluster = next((level for level in machine.levels if level.kind == "cluster"), None)
    cluster = cluster if launch.cluster_size > 1 else None
    own = compiler.owned_by(machine.program_level.name)
    shared = compiler.owned_by(cluster.name) if cluster is not None else []
    private = [b for b in launch.buffers if b.scope() in PRIVATE]
    return Plan(
        launch,
        machine.program_level,
        machine.tensor_level,
        cluster,
        _resident(compiler, phase, launch),
        slots,
        threads,
        allocate=lambda unit, frame: compiler.allocate(own, unit, frame),
        allocate_shared=lambda unit, frame: compiler.allocate(shared, unit, frame),
        private=lambda frame: compiler.private(private, frame),
        in_order=launch.in_order or _meets_others(compiler, phase),
    )


def _resident(compiler: Compiler, phase: GridPhase, launch: Launch) -> int:
    """Programs that a tensor-owning unit holds at once. Raises LaunchError if not even one fits."""
    machine = compiler.machine
    count = held(phase, launch, compiler.surroundings, machine)
    if count == 0:
        program = machine.program_level
        raise LaunchError(
            f"a program of {launch.thread_count} threads does not fit one {program.title or program.name} of "
            f"{machine.name!r}",
            hint="use fewer threads",
            where=launch.where,
        )
    return count


def _meets_others(compiler: Compiler, phase: GridPhase) -> bool:
    """Whether programs synchronize with those of the same index on other devices by the language's own operations,
    which guarantee progress for any grid size. The guarantee requires that programs start in order."""
    machine = compiler.machine
    owner = machine.index(machine.tensor_level.name)
    return any(machine.index(s.level) >= owner for s in compiler.surroundings.all_effects(phase.stmt).synchronizes)
