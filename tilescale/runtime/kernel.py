# SPDX-License-Identifier: MIT
"""A program bound to a machine: call it with tensors, look at its source."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from tilelang_core import ir
from tilescale import backends
from tilescale.backends import cuda
from tilescale.backends.emulator.emulate import for_machine
from tilescale.comm import World, init
from tilescale.errors import ArgumentError, LaunchError, RankMismatchError
from tilescale.hda import Machine
from tilescale.passes.structure import structure
from tilescale.program.model import Program
from tilescale.runtime.outputs import allocate_outputs, output_positions

if TYPE_CHECKING:
    import torch


class Kernel:
    """A compiled program.

    Call it with this rank's tensors: every rank of the job calls it with its own (SPMD), a view's shards where the
    program lays a tensor over devices. On a computer without GPUs the call is a collective: the arguments gather at
    one rank, the machine is emulated there, the results return.

    Attributes:
        machine: the machine that it is compiled for.
        report: what the last emulated call did, on the rank that emulated; None elsewhere.
    """

    def __init__(self, func: ir.PrimFunc, machine: Machine, options: dict[str, Any]):
        self.machine = machine
        self.options = options
        self.report: Any = None
        self._func = for_machine(func, machine)

    @property
    def ir(self) -> ir.PrimFunc:
        """The traced TIR."""
        return self._func

    @cached_property
    def program(self) -> Program:
        """The program's structure: parameters, launches, phases."""
        return structure(self._func, self.machine)

    @property
    def source(self) -> str:
        """The CUDA text.

        Raises:
            UnsupportedError: the program uses levels that have no CUDA lowering, or the machine has no CUDA target.
        """
        return cuda.source(self.program, self.machine, self.options.get("target"), self.options.get("pass_configs"))

    def get_kernel_source(self) -> str:
        """`source`, under TileLang's name."""
        return self.source

    @cached_property
    def _executable(self) -> backends.Executable:
        return backends.choose(self.program).build(self.program, self.machine, self.options)

    def __call__(self, *args: Any) -> Any:
        """Run on this rank's arguments, in place; returns what `out_idx` or `T.empty` declare as outputs.

        Raises:
            ArgumentError: arguments that do not fit the program.
            LaunchError: the job has another number of ranks than the program's devices.
            RankMismatchError: ranks call different programs.
            DeadlockError, OutOfBoundsError, ...: as `tilescale.emulate`, on every rank.
        """
        executable = self._executable
        if not executable.gathers:
            return executable.run([list(args)])
        positions = output_positions(self.program, self.options.get("out_idx"))
        given = [_local(a, executable.device) for a in args]
        values = allocate_outputs(self.program, positions, given)
        self._emulate(executable, values)
        if not positions:
            return None
        outputs = [values[i] for i in positions]
        return outputs[0] if len(outputs) == 1 else outputs

    def _emulate(self, executable: backends.Executable, values: list[Any]) -> None:
        world = init()
        if world.size == 1:
            self._check_units(world)
            self.report = executable.run([values])
            return
        signature = (self.program.name, ir.fingerprint(self._func), self.machine.digest)

        def at_root(payloads: list[Any]) -> list[Any]:
            _check_signatures([s for s, _ in payloads])
            per_unit = [v for _, v in payloads]
            self.report = executable.run(per_unit)
            return per_unit

        results = world.run_at_root((signature, values), at_root)
        _store(values, results)

    def _check_units(self, world: World) -> None:
        units = 1
        for _, extent in self.program.extents:
            units *= ir.constant(extent) or 1
        if units != 1:
            raise LaunchError(
                f"{self.program.name!r} launches {units} units that own tensors, the job has {world.size} rank",
                hint=f"start it with `tilescale run -n {units} ...`, or emulate all of them in one process with "
                "tilescale.emulate(func, one list of tensors per unit)",
                where=self.program.launches[0].where,
            )


def _local(value: Any, device: str) -> Any:
    import torch

    if hasattr(value, "to_local"):  # A DTensor: the program sees this rank's shard.
        value = value.to_local()
    if isinstance(value, torch.Tensor) and value.device.type != device:
        raise ArgumentError(
            f"a tensor is on {value.device}, this program runs on {device}", hint=f"pass tensors on {device}"
        )
    return value


def _check_signatures(signatures: list[tuple[str, str, str]]) -> None:
    for rank, signature in enumerate(signatures):
        if signature != signatures[0]:
            raise RankMismatchError(
                f"rank 0 runs {signatures[0][0]!r}, rank {rank} runs {signature[0]!r}, and they are not the same program",
                hint="all ranks call the same program, traced with the same shapes, in the same order",
            )


def _store(values: list[Any], results: list[Any]) -> None:
    import torch

    for mine, result in zip(values, results, strict=True):
        if isinstance(mine, torch.Tensor) and mine is not result:
            mine.copy_(result)
