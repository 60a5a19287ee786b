# SPDX-License-Identifier: MIT
"""The CUDA back end: a program is lowered once; text on any computer, an executable where there are GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from tilelang_core import compile as stock
from tilelang_core import ir
from tilelang_core.lru import LruCache
from tilescale.backends.base import Compilation, Executable
from tilescale.backends.base import Target as AnyTarget
from tilescale.backends.cuda import headers, lowered_cache
from tilescale.backends.cuda.lowered_cache import cached, found
from tilescale.backends.cuda.running.execute import DeviceProgram
from tilescale.backends.cuda.target import target_for
from tilescale.backends.tilelang.limits import check_threads, may_be_uneven
from tilescale.backends.tilelang.lowering import implemented
from tilescale.backends.tilelang.lowering.kernel import LoweredKernel
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.program import LoweredProgram
from tilescale.backends.tilelang.lowering.program import lower as lower_for
from tilescale.backends.tilelang.nvshmem_link import IMPL
from tilescale.backends.tilelang.text import DEVICES, STRIDE, check_tiles, checked
from tilescale.backends.tilelang.upstream_errors import explained
from tilescale.collectives import AvailableAlgorithms, CollectiveQuery
from tilescale.errors import ShapeError, TileScaleError
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse
from tilescale.program.model import Program
from tilescale.program.operations import Collective
from tilescale.settings import settings


def lower(program: Program, target: AnyTarget) -> PlainLowered | DeviceLowered:
    """A program for a target.

    Raises:
        UnsupportedError: a construct without a lowering, with its line.
        ShapeError: the tiles of a unit cannot be distributed over its threads.
        InternalError: TileScale itself failed.
    """
    made = _target(target)
    again = lambda func: lower_for(analyse(func, target.machine), made)  # noqa: E731
    with explained(program.func, again, program.launches[0].where):
        check_threads(program, target.machine)
        if not program.is_hierarchical:
            return PlainLowered(program, target.machine)
        return DeviceLowered(cached(program, made))


def find(builder: str, machine: Machine, units: int | None) -> DeviceLowered | None:
    """A program by its builder's name, for a machine and a number of units, that was lowered before."""
    made = found(builder, _target(AnyTarget(machine, (("unit", units),)))) if builder and units else None
    return DeviceLowered(made) if made is not None else None


_even: LruCache[Hashable, TileScaleError | None] = LruCache(256)
"""The error of a program without a lowering, by function and machine, where the program was lowered: its tiles can be
distributed over threads as far as is known."""


def done_file(work: str, machine: Machine) -> Path | None:
    """The file that says that all kernels of some work for a machine are in the caches; None without caches."""
    return lowered_cache.done_file(work, _target(AnyTarget(machine, ())))


def check(program: Program, machine: Machine) -> TileScaleError | None:
    """Raise the errors of a program that every lowering for a machine has. Only TileLang can infer layouts of tiles in
    registers, so in doubt the program is lowered. Raises ShapeError: the tiles of a unit cannot be distributed over its
    threads.

    Returns:
        The error of a lowering that fails for another reason. Such a program can still be emulated.
    """
    check_threads(program, machine)
    key = program.func, machine.digest
    if key not in _even:
        if not may_be_uneven(program, machine):
            return None
        _even[key] = _unsupported(program, machine)
    return _even[key]


def _unsupported(program: Program, machine: Machine) -> TileScaleError | None:
    try:
        lower(program, AnyTarget.of(program, machine)).check_tiles()
    except ShapeError:
        raise
    except TileScaleError as error:
        error.__cause__ = error.__context__ = None  # their frames keep the lowering alive
        return error.with_traceback(None)
    return None


def collectives(made: Collective, wanted: CollectiveQuery, target: AnyTarget) -> AvailableAlgorithms:
    return implemented.available(made, wanted, _target(target))


def _target(target: AnyTarget) -> LoweringTarget:
    sizes = tuple((name, size or DEVICES) for name, size in target.sizes)
    own = settings()
    by_nccl, by_nvshmem = not own.share_gpus, own.heap == IMPL
    return LoweringTarget(target.machine, sizes, STRIDE, headers.__name__, by_nccl, by_nvshmem)


@dataclass(frozen=True)
class PlainLowered:
    """A program without constructs of TileScale, lowered by stock TileLang."""

    program: Program
    machine: Machine
    notes: tuple[str, ...] = ()

    def source(self, options: dict[str, Any]) -> str:
        """The text.

        Raises:
            UnsupportedError: the machine names no CUDA target.
            ShapeError, UnsupportedError: stock TileLang cannot lower it.
        """
        with self._explained(options):
            return self._text(self.program.func, options)

    def check_tiles(self) -> None:
        """Raise the errors of tiles that threads cannot share, as `source` does."""
        where = next((launch.where for launch in self.program.launches), None)
        check_tiles(self.program.func, target_for(self.machine), where)

    def _text(self, func: ir.PrimFunc, options: dict[str, Any]) -> str:
        target = options.get("target") or target_for(self.machine)
        return stock.cuda_source(func, target, options.get("pass_configs"))

    def _explained(self, options: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        where = next((launch.where for launch in self.program.launches), None)
        return explained(self.program.func, lambda func: self._text(func, options), where)

    def compilations(self, options: dict[str, Any]) -> list[stock.KernelCompilation]:
        given = {k: v for k, v in options.items() if v is not None and k not in ("wait_s", "timeline")}
        return [stock.KernelCompilation(self.program.func, options=given)]

    ahead = compilations

    def build(self, options: dict[str, Any]) -> Executable:
        """TileLang's own kernel, which checks arguments and allocates outputs.

        Raises:
            UntrustedCacheError: other users may write into its cache.
            ShapeError, UnsupportedError: stock TileLang cannot compile it.
        """
        from tilescale.backends.cuda.running.toolchain import check_cache

        check_cache()
        (compilation,) = self.compilations(options)
        with self._explained(options):
            kernel = compilation.run()
        return Executable(
            lambda per_unit: kernel(*per_unit[0]),
            gathers=False,
            device="cuda",
            direct=kernel.torch_function,
            stock=kernel,
            synchronize=_synchronize,
        )


@dataclass(frozen=True)
class DeviceLowered:
    """A multi-device program: one TileLang function for each grid, and host operations."""

    lowered: LoweredProgram
    _unbuilt: list[DeviceProgram] = field(default_factory=list, repr=False, compare=False)

    @property
    def program(self) -> Program:
        return self.lowered.program

    @property
    def notes(self) -> tuple[str, ...]:
        """The implementation chosen for each operation between units, and the reason."""
        return self.lowered.notes

    @cached_property
    def kernels(self) -> list[LoweredKernel]:
        """The grids of the program as TileLang functions, including those of its device phases."""
        return [grid.kernel for grid in self.lowered.grids]

    def source(self, options: dict[str, Any]) -> str:
        """The text: one kernel for each grid, checked. Raises as `texts`."""
        return "\n".join(self.texts(options))

    def texts(self, options: dict[str, Any]) -> list[str]:
        """The text of each kernel, as it is compiled.

        Raises:
            UnsupportedError: the machine names no CUDA target.
            AllocationTooLargeError: more shared memory than the machine has.
        """
        program, machine = self.lowered.program, self.lowered.target.machine
        target, configs = options.get("target") or target_for(machine), options.get("pass_configs")
        return [checked(kernel, program, machine, target, configs) for kernel in self.kernels]

    def check_tiles(self) -> None:
        """Raise the errors of tiles that threads cannot share, as `source` does."""
        program, target = self.lowered.program, target_for(self.lowered.target.machine)
        for kernel in self.kernels:
            check_tiles(kernel.func, target, program.launches[0].where)

    def compilations(self, options: dict[str, Any]) -> list[Compilation]:
        """Its kernels, lowered for the devices of this job. Collective. Raises as `build`."""
        return self._begun(options).compilations()

    def ahead(self, options: dict[str, Any]) -> list[Compilation]:
        """The kernels of its grids, which the devices of this job have in common."""
        from tilescale.backends.cuda.running.ahead import compiler_options, of_grids
        from tilescale.backends.cuda.running.toolchain import check_cache

        check_cache()
        return of_grids(self.lowered, compiler_options(options))

    def _begun(self, options: dict[str, Any]) -> DeviceProgram:
        """The program on this rank's device before `build`: the same object until then."""
        from tilescale.backends.cuda.running.execute import DeviceProgram
        from tilescale.backends.cuda.running.toolchain import check_cache

        if not self._unbuilt:
            check_cache()
            self._unbuilt.append(DeviceProgram(self.lowered, options))
        return self._unbuilt[0]

    def build(self, options: dict[str, Any]) -> Executable:
        """Its kernels compiled, for the devices of this job. Collective.

        Raises UntrustedCacheError, and as `DeviceProgram`.
        """
        from tilescale.backends.cuda.running.moments import timeline

        own = self._begun(options).build()
        self._unbuilt.clear()
        return Executable(
            lambda per_unit: own(per_unit[0]),
            gathers=False,
            device=str(own.device),
            again=own.again,
            synchronize=own.synchronize,
            reset=own.reset,
            timeline=partial(timeline, own),
        )


def _synchronize() -> None:
    torch.cuda.synchronize()
