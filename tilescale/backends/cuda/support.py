# SPDX-License-Identifier: MIT
"""What the CUDA back end lowers, found by trying: generated text without a GPU, or the reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilelang_core import compile as stock
from tilelang_core import ir
from tilescale.backends.cuda.lowering import exchange, peers  # noqa: F401 - they register their rules
from tilescale.backends.cuda.lowering.check import check_shared, check_text, static_shared_bytes
from tilescale.backends.cuda.lowering.clusters import collectives  # noqa: F401 - likewise
from tilescale.backends.cuda.lowering.lanes.registers import one_array_each
from tilescale.backends.cuda.lowering.lower import GridLowering, LoweredKernel
from tilescale.backends.cuda.lowering.plan import plan
from tilescale.backends.cuda.lowering.signature import Target
from tilescale.backends.cuda.target import target_for
from tilescale.errors import TileScaleError
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.program.model import Control, GridPhase, Launch, Part, Program, Sequence
from tilescale.program.operations import Copy, operation, signalled
from tilescale.settings import settings

STRIDE = 1 << 36
"""Bytes between devices in the address range that a text is generated for where there is no heap."""

DEVICES = 4
"""How many devices a text is generated for where the program leaves it open."""


def lowered_kernels(program: Program, machine: Machine, devices: int = DEVICES) -> list[LoweredKernel]:
    """The grids of a program as TileLang functions, those of its device phases included.

    Raises:
        UnsupportedError: something that has no lowering, with its line.
    """
    return [kernel for _, kernel in _lowered(program, machine, devices)[0]]


def notes(program: Program, machine: Machine, devices: int = DEVICES) -> list[str]:
    """Which implementation was chosen for each operation between units, and why, in words.

    Raises:
        UnsupportedError: something that has no lowering, with its line.
    """
    kernels, planned = _lowered(program, machine, devices)
    # What a device phase becomes has been noted when it was planned.
    grids = {id(launch.grid) for launch in program.launches}
    return list(dict.fromkeys([*planned, *(n for launch, k in kernels if id(launch.grid) in grids for n in k.notes)]))


def _lowered(
    program: Program, machine: Machine, devices: int
) -> tuple[list[tuple[Launch, LoweredKernel]], tuple[str, ...]]:
    sizes = tuple((name, ir.constant(extent) or devices) for name, extent in program.extents)
    target = Target(machine, sizes, STRIDE, nccl=not settings().share_gpus)
    body, planned = plan(program, target)
    result: list[tuple[Launch, LoweredKernel]] = []
    for launch, phase, around in _grid_phases(body, None, ()):
        lowered = GridLowering(program, launch, target, len(result), around=around).lower(phase)
        result.append((launch, lowered))
    return result, planned


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
    """The CUDA text of a program: one kernel for each grid phase, checked.

    Raises:
        UnsupportedError: something that has no lowering, with its line.
        AllocationTooLargeError: more shared memory than the machine has.
    """
    target = target or target_for(machine)
    if not program.is_hierarchical:
        return stock.cuda_source(program.func, target, pass_configs)
    texts = [checked(kernel, program, machine, target, pass_configs) for kernel in lowered_kernels(program, machine)]
    return "\n".join(texts)


def checked(
    kernel: LoweredKernel, program: Program, machine: Machine, target: Any, pass_configs: dict[str, Any] | None
) -> str:
    """The CUDA text of one kernel of a program, after the checks of `check.py`.

    Raises:
        GeneratedTextError: a text that must not run.
        AllocationTooLargeError: more shared memory than the machine has.
    """
    generated = stock.generate(kernel.func, target, pass_configs, one_array_each)
    check_text(generated.text, remote_tensors(program), kernel.ahead)
    asked = generated.dynamic_shared + static_shared_bytes(generated.text)
    check_shared(program.name, asked, machine, kernel.where)
    return generated.text


def remote_tensors(program: Program) -> frozenset[str]:
    """Names of the tensors that other devices write, flags included."""
    names = {v.data: p.name for p in program.parameters for v in p.views}
    found: set[str] = set()

    def visit(node: Any) -> None:
        made = operation(node)
        written = [*signalled(made), *([made.target] if isinstance(made, Copy) and made.to_peer else [])]
        for buffer in (ir.region_parts(region)[0] for region in written):
            found.add(names.get(buffer.data, buffer.name))

    ir.walk(program.func.body, visit)
    return frozenset(found)


def reason_against(program: Program) -> str | None:
    """Why the CUDA back end does not run a program; None if it does."""
    if not program.is_hierarchical:
        return None
    try:
        lowered_kernels(program, current_machine())
    except TileScaleError as error:
        where = f" ({error.where[0].file}:{error.where[0].line})" if error.where else ""
        return f"{error.message}{where}"
    return None
