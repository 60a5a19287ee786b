# SPDX-License-Identifier: MIT
"""What the CUDA back end lowers, found by trying: generated text without a GPU, or the reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilelang_core import compile as stock
from tilelang_core import ir
from tilescale.backends.cuda import exchange, peers  # noqa: F401 - they register their rules
from tilescale.backends.cuda.lower import GridLowering, LoweredKernel
from tilescale.backends.cuda.signature import Target
from tilescale.backends.cuda.target import target_for
from tilescale.errors import TileScaleError, UnsupportedError
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Program, Sequence

STRIDE = 1 << 36
"""Bytes between devices in the address range that a text is generated for where there is no heap."""

DEVICES = 4
"""How many devices a text is generated for where the program leaves it open."""


def lowered_kernels(program: Program, machine: Machine, devices: int = DEVICES) -> list[LoweredKernel]:
    """The grid phases of a program as TileLang functions.

    Raises:
        UnsupportedError: something that has no lowering, with its line.
    """
    sizes = tuple((name, ir.constant(extent) or devices) for name, extent in program.extents)
    target = Target(machine, sizes, STRIDE)
    result: list[LoweredKernel] = []
    for launch, phase, around in _grid_phases(program.body, None, ()):
        result.append(GridLowering(program, launch, target, len(result), around=around).lower(phase))
    return result


def _grid_phases(
    part: Part, launch: Launch | None, around: tuple[ir.Var, ...]
) -> Iterator[tuple[Launch, GridPhase, tuple[ir.Var, ...]]]:
    if isinstance(part, Launch):
        yield from _grid_phases(part.body, part, around)
    elif isinstance(part, Sequence):
        for inner in part.parts:
            yield from _grid_phases(inner, launch, around)
    elif isinstance(part, Control):
        own = (part.stmt.loop_var,) if isinstance(part.stmt, ir.For) else ()
        for inner in part.parts:
            yield from _grid_phases(inner, launch, around + own)
    elif isinstance(part, GridPhase):
        yield launch, part, around


def source(program: Program, machine: Machine, target: Any, pass_configs: dict[str, Any] | None) -> str:
    """The CUDA text of a program: one kernel for each grid phase.

    Raises:
        UnsupportedError: something that has no lowering, with its line.
    """
    target = target or target_for(machine)
    if not program.is_hierarchical:
        return stock.cuda_source(program.func, target, pass_configs)
    texts = [stock.cuda_source(k.func, target, pass_configs) for k in lowered_kernels(program, machine)]
    return "\n".join(texts)


def reason_against(program: Program) -> str | None:
    """Why the CUDA back end does not run a program; None if it does."""
    if not program.is_hierarchical:
        return None
    try:
        lowered_kernels(program, current_machine())
        for phase in _device_phases(program.body):
            _check_device_phase(phase)
    except TileScaleError as error:
        where = f" ({error.where[0].file}:{error.where[0].line})" if error.where else ""
        return f"{error.message}{where}"
    return None


def _device_phases(part: Part) -> Iterator[DevicePhase]:
    if isinstance(part, DevicePhase):
        yield part
    elif isinstance(part, Launch):
        yield from _device_phases(part.body)
    elif isinstance(part, Sequence | Control):
        for inner in part.parts:
            yield from _device_phases(inner)


def _check_device_phase(phase: DevicePhase) -> None:
    from tilescale.backends.cuda.phases import runs

    calls: list[ir.Call] = []
    ir.walk(phase.stmt, lambda n: calls.append(n.value) if isinstance(n, ir.Evaluate) else None)
    for call in calls:
        reason = runs(call)
        if reason is not None:
            raise UnsupportedError(reason)
