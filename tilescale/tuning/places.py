# SPDX-License-Identifier: MIT
"""Sources of times: this job's GPUs, or without any the emulator's simulation; and timers of calls on GPUs."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tilelang_core import ir
from tilescale import backends
from tilescale.comm import World, init
from tilescale.cost.calibrated import in_force
from tilescale.errors import UnsupportedError, UsageError
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse
from tilescale.runtime.compile import compile as compile_program
from tilescale.runtime.kernel import Kernel
from tilescale.runtime.outputs import KernelOutputs, output_positions, place_arguments
from tilescale.settings import settings
from tilescale.timing.no_gc import no_cyclic_collection
from tilescale.tuning.checks import ResultCheck
from tilescale.tuning.inputs import InputFill, tensors_for
from tilescale.tuning.race import Runner, Timer

WAIT_S = 3.0
"""Longest wait of a kernel for its peers: one that hangs is out soon."""


class SimulatedTimer:
    """The timer of simulated calls: a call returns its own time."""

    def barrier(self) -> None:
        """Nothing is under way."""

    def prepare(self, call: Callable[[], Any]) -> Callable[[int], float]:
        return lambda calls: call()


@dataclass(frozen=True)
class TimeSource:
    """The hardware or simulation that times programs.

    Attributes:
        machine: the machine that programs are compiled for.
        team: the ranks that measure together.
        simulated: whether times are the emulator's.
        units: that own tensors and take part: ranks, or units of a machine that is simulated.
    """

    machine: Machine
    team: World
    simulated: bool
    units: int

    @property
    def name(self) -> str:
        """Name of the hardware: the GPU's, or the machine's with a word that marks it as simulated."""
        if self.simulated:
            return f"{self.machine.name} (simulated)"
        return str(torch.cuda.get_device_name(self.team.device))

    def timer(self, mode: str) -> Timer:
        """A timer for calls made in a "graph", "eager", or on the "host"."""
        if self.simulated:
            return SimulatedTimer()
        return TIMERS[mode]()

    def runner(
        self, program: ir.PrimFunc | Kernel, fill: InputFill | None = None, check: ResultCheck | None = None
    ) -> Runner:
        """A function that calls a program, or its kernel, on generated inputs; collective. On GPUs the results are
        compared first. Raises UnsupportedError: nothing but the emulator runs it."""
        if self.simulated:
            func = program.prim_func if isinstance(program, Kernel) else program
            us = simulated_us(func, self.machine)
            return Runner(lambda: us)
        kernel = program
        if not isinstance(program, Kernel):
            kernel = compile_program(program, machine=self.machine, schedule="sequential", wait_s=WAIT_S)
        if kernel.device == "cpu":  # this builds it, before any rank waits for a peer
            raise UnsupportedError(f"{kernel} is emulated here: its time would be that of the emulation")
        given = tensors_for(kernel, fill or InputFill())

        def checked(seed: int) -> None:
            kernel(*given)
            kernel.synchronize()
            if check is not None:
                check.run(kernel, given)

        return Runner(lambda: kernel(*given), checked)


def here(machine: Machine, units: int | None = None) -> TimeSource:
    """This job's GPUs if it has some, else the machine in simulation; collective.

    Args:
        units: how many units that own tensors take part in a simulation; None for all of the machine.

    Raises:
        UsageError: more units than the machine has.
        LaunchError, UsageError: as `tilescale.init` and `World.device`.
    """
    world, most = init(), machine.count(machine.tensor_level.name)
    if units is not None and units > most:
        raise UsageError(f"{units} units: {machine.name} has {most}", hint="name a larger machine: --machine")
    if settings().emulate or not torch.cuda.is_available():
        return TimeSource(machine, world, True, units or most)
    torch.cuda.set_device(world.device)
    if world.size > 1 and not settings().share_gpus:
        backends.device_services().group(world)  # which connects through the job's store, under any launcher
    return TimeSource(machine, world, False, world.size)


def simulated_us(func: ir.PrimFunc, machine: Machine, shapes: Sequence[Any] | None = None) -> float:
    """Simulated microseconds of a program on a machine, with the numbers that were measured here if there are some.
    Raises ArgumentError, NoDataError, UnsupportedError, ...: as `tilescale.emulate` without data. `shapes`: arguments
    of a unit, tensors of any device, where the program leaves extents open."""
    args = None if shapes is None else _arguments(func, machine, shapes)
    return backends.simulated_us(func, args, machine=in_force(machine))


def _arguments(func: ir.PrimFunc, machine: Machine, given: Sequence[Any]) -> list[list[Any]]:
    """The arguments of each unit of the launch, with the outputs that a call would allocate."""
    program = analyse(func, machine)
    outputs = KernelOutputs(program, output_positions(program, None), "meta")
    mine = outputs.allocate(place_arguments(program, outputs.positions, given))
    return [mine] * math.prod(ir.constant(extent) or machine.count(name) for name, extent in program.extents)


GRAPH_CALLS = 10
"""Calls that a graph holds."""


class EagerTimer:
    """Device time of calls that follow one another on the current stream."""

    def barrier(self) -> None:
        """All ranks' devices are idle, and the ranks start together."""
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
            torch.cuda.synchronize()

    def prepare(self, call: Callable[[], Any]) -> Callable[[int], float]:
        return lambda calls: _between_events(call, calls)


class GraphTimer(EagerTimer):
    """Device time of a call inside a CUDA graph of several."""

    def prepare(self, call: Callable[[], Any]) -> Callable[[int], float]:
        """As `race.Timer`; captures."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        with no_cyclic_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(GRAPH_CALLS):  # a graph that the collector destroyed meanwhile would end the capture
                call()
        torch.cuda.synchronize()

        def group(calls: int, works_on: object = call) -> float:  # the graph holds addresses: their tensors must live
            return _between_events(graph.replay, calls) / GRAPH_CALLS

        return group


class HostTimer(EagerTimer):
    """Time until a call returns on the host, the device far from being the limit."""

    def prepare(self, call: Callable[[], Any]) -> Callable[[int], float]:

        def group(calls: int) -> float:
            call()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            us = (time.perf_counter() - begin) * 1e6 / calls
            torch.cuda.synchronize()
            return us

        return group


TIMERS = {"eager": EagerTimer, "graph": GraphTimer, "host": HostTimer}
"""Mode of a race -> its timer."""


def _between_events(call: Callable[[], Any], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls
