# SPDX-License-Identifier: MIT
"""Grids: compiled once for a node, checked where they must be resident, launched with a call's arguments."""

from __future__ import annotations

from typing import Any

from tilelang_core import compile as stock
from tilelang_core import ir
from tilelang_core.formulas import formula
from tilescale.backends.cuda.running import occupancy
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import CallStep, KernelLaunch, ProgramCall, StreamWork
from tilescale.backends.tilelang import nvshmem_link
from tilescale.backends.tilelang.lowering import arguments as arg
from tilescale.backends.tilelang.lowering.check import kernels
from tilescale.backends.tilelang.lowering.program import LoweredGrid
from tilescale.backends.tilelang.text import check_of
from tilescale.program.grids import programs
from tilescale.program.waiting import first_wait, waits_across


def grid_step(context: ProgramContext, grid: LoweredGrid) -> CallStep:
    """A grid as a step. Collective: all ranks compile it, or find it compiled.

    Raises GeneratedTextError, AllocationTooLargeError: as `KernelCheck`; LaunchError: as `check_residency`.
    """
    lowered, launch = grid.kernel, grid.launch
    by_nvshmem = nvshmem_link.IMPL in lowered.libraries
    if by_nvshmem:
        context.on_all(lambda: nvshmem_link.prepare(context.heap, context.options, launch.where))
    kernel = context.compile(lowered.func, check_of(lowered, context.program, context.target.machine))
    run = stock.entry(kernel)
    if by_nvshmem:
        run = nvshmem_link.started(run, launch.where)
    for argument in lowered.arguments:
        if isinstance(argument, arg.KernelWorkspace):
            context.memory.declare(argument)
    open_extents = [formula(n) for n in launch.grid if not ir.constant(n)]

    def bind(call: ProgramCall) -> list[StreamWork]:
        if 0 in [call.known(n) for n in open_extents]:
            return []  # CUDA rejects empty grids
        return [KernelLaunch(run, [context.memory.value(a, call) for a in lowered.arguments])]

    return bind


def check_residency(context: ProgramContext, grid: LoweredGrid, kernel: Any) -> None:
    """Check that a grid fits on the device: whole, if its programs wait for one another; next to the message kernels,
    if it waits for messages of the queue. Raises LaunchError."""
    sizes, launch = dict(context.sizes), grid.launch
    where = waits_across(grid, launch, context.program, context.target.machine, sizes)
    waiting = first_wait(grid, launch) if context.spared else None
    if where is None and waiting is None:
        return
    made = stock.compiled(kernel)
    text = next(kernels(made.text))
    code = stock.device_code(made.text, kernel.target, kernel.pass_configs, kernel.compile_flags or ())
    image = occupancy.KernelImage(code, text.name, text.threads, made.dynamic_shared, launch.cluster)
    room = occupancy.resident(image, context.device.index)
    if where is not None:
        occupancy.check_resident(context.program.name, programs(launch, sizes), room, where)
    if waiting is not None:
        occupancy.check_spared(context.program.name, programs(launch, sizes), room, context.spared, waiting)
