# SPDX-License-Identifier: MIT
"""A program as the CUDA back end has it: lowered once; text on any computer, an executable where there are GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tilelang_core import compile as stock
from tilescale.backends.base import Executable
from tilescale.backends.base import Target as AnyTarget
from tilescale.backends.cuda.lowering import implemented
from tilescale.backends.cuda.lowering.check import check_shared, check_text, static_shared_bytes
from tilescale.backends.cuda.lowering.groups.registers import one_array_each
from tilescale.backends.cuda.lowering.kernel import LoweredKernel
from tilescale.backends.cuda.lowering.phase import Target
from tilescale.backends.cuda.lowering.program import LoweredProgram
from tilescale.backends.cuda.lowering.program import lower as lower_for
from tilescale.backends.cuda.target import target_for
from tilescale.collectives import Available, Wanted
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine
from tilescale.passes.written import written_by_peers
from tilescale.program.model import Program
from tilescale.program.operations import Collective
from tilescale.settings import settings

STRIDE = 1 << 36
"""Bytes between devices in the address range that a text is generated for where there is no heap."""

DEVICES = 4
"""How many devices a text is generated for where the program leaves it open and there is no job."""


def lower(program: Program, target: AnyTarget) -> PlainLowered | DeviceLowered:
    """A program for a target.

    Raises:
        UnsupportedError: something that has no lowering, with its line.
    """
    if not program.is_hierarchical:
        return PlainLowered(program, target.machine)
    return DeviceLowered(lower_for(program, _target(target)))


def serves(machine: Machine) -> bool:
    """Whether there is text for a machine."""
    try:
        return bool(target_for(machine))
    except UnsupportedError:
        return False


def collectives(made: Collective, wanted: Wanted, target: AnyTarget) -> Available:
    """The algorithms for a collective."""
    return implemented.available(made, wanted, _target(target))


def _target(target: AnyTarget) -> Target:
    sizes = tuple((name, size or DEVICES) for name, size in target.sizes)
    return Target(target.machine, sizes, STRIDE, nccl=not settings().share_gpus)


@dataclass(frozen=True)
class PlainLowered:
    """A program without our constructs: stock TileLang's."""

    program: Program
    machine: Machine
    notes: tuple[str, ...] = ()

    def source(self, options: dict[str, Any]) -> str:
        """The text. Raises UnsupportedError for a machine that names no CUDA target."""
        target = options.get("target") or target_for(self.machine)
        return stock.cuda_source(self.program.func, target, options.get("pass_configs"))

    def build(self, options: dict[str, Any]) -> Executable:
        """TileLang's own kernel, which checks arguments and allocates outputs."""
        given = {k: v for k, v in options.items() if v is not None and k != "wait_s"}
        kernel = stock.compile_kernel(self.program.func, **given)
        return Executable(
            lambda per_unit: kernel(*per_unit[0]),
            gathers=False,
            device="cuda",
            direct=kernel.torch_function,
            synchronize=_synchronize,
        )


@dataclass(frozen=True)
class DeviceLowered:
    """A program of devices: one TileLang function for each grid, and operations of the host."""

    lowered: LoweredProgram

    @property
    def notes(self) -> tuple[str, ...]:
        """Which implementation was chosen for each operation between units, and why."""
        return self.lowered.notes

    @cached_property
    def kernels(self) -> list[LoweredKernel]:
        """The grids of the program as TileLang functions, those of its device phases included."""
        return [grid.kernel for grid in self.lowered.grids]

    def source(self, options: dict[str, Any]) -> str:
        """The text: one kernel for each grid, checked.

        Raises:
            UnsupportedError: the machine names no CUDA target.
            AllocationTooLargeError: more shared memory than the machine has.
        """
        program, machine = self.lowered.program, self.lowered.target.machine
        target, configs = options.get("target") or target_for(machine), options.get("pass_configs")
        return "\n".join(checked(kernel, program, machine, target, configs) for kernel in self.kernels)

    def build(self, options: dict[str, Any]) -> Executable:
        """Its kernels compiled, for the devices of this job. Collective. Raises as `DeviceProgram`."""
        from tilescale.backends.cuda.running.execute import DeviceProgram

        own = DeviceProgram(self.lowered, options)
        return Executable(
            lambda per_unit: own(per_unit[0]),
            gathers=False,
            device="cuda",
            again=own.again,
            synchronize=own.synchronize,
            reset=own.reset,
        )


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def checked(
    kernel: LoweredKernel, program: Program, machine: Machine, target: Any, pass_configs: dict[str, Any] | None
) -> str:
    """The CUDA text of one kernel of a program, after the checks of `check.py`.

    Raises:
        GeneratedTextError: a text that must not run.
        AllocationTooLargeError: more shared memory than the machine has.
    """
    generated = stock.generate(kernel.func, target, pass_configs, one_array_each)
    check_text(generated.text, written_by_peers(program), kernel.ahead)
    asked = generated.dynamic_shared + static_shared_bytes(generated.text)
    check_shared(program.name, asked, machine, kernel.where)
    return generated.text
