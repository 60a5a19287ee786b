# SPDX-License-Identifier: MIT
"""The HIP back end: text of a program for AMD GPUs. There is no executable: no AMD GPU has run any text yet."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from tilelang_core import compile as stock
from tilelang_core import ir
from tilescale.backends.base import Target as AnyTarget
from tilescale.backends.hip import headers
from tilescale.backends.tilelang.lowering import implemented
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.program import LoweredProgram
from tilescale.backends.tilelang.lowering.program import lower as lower_for
from tilescale.backends.tilelang.text import DEVICES, STRIDE, check_of
from tilescale.backends.tilelang.upstream_errors import explained
from tilescale.collectives import AvailableAlgorithms, CollectiveQuery
from tilescale.errors import Location, UnsupportedError
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse
from tilescale.program.effects import phases
from tilescale.program.model import Program, location
from tilescale.program.operations import Collective
from tilescale.program.ops import SCALE

_PRELUDE, _KERNEL = "pragma_import_c", 'extern "C" __global__'


def lower(program: Program, target: AnyTarget) -> PlainText | HierarchicalText:
    """A program for a target.

    Raises:
        UnsupportedError: a construct without a lowering, with its line.
        InternalError: TileScale itself failed.
    """
    made = _target(target)
    again = lambda func: lower_for(analyse(func, target.machine), made)  # noqa: E731
    with explained(program.func, again, program.launches[0].where):
        _refuse_units_inside(program, target.machine)
        if not program.is_hierarchical:
            return PlainText(program, target.machine)
        return HierarchicalText(lower_for(program, made))


def collectives(made: Collective, wanted: CollectiveQuery, target: AnyTarget) -> AvailableAlgorithms:
    return implemented.available(made, wanted, _target(target))


def _target(target: AnyTarget) -> LoweringTarget:
    sizes = tuple((name, size or DEVICES) for name, size in target.sizes)
    return LoweringTarget(target.machine, sizes, STRIDE, headers.__name__, messages=False)


def _refuse_units_inside(program: Program, machine: Machine) -> None:
    """Reject units inside a program: a barrier of these GPUs joins all threads of a workgroup."""
    for phase, launch in phases(program.body):
        if launch is None:
            continue
        for scope in (note for note in ir.instances(phase.stmt, ir.AttrStmt) if str(note.attr_key) == SCALE):
            level = machine.level(str(scope.value.value))
            if level.kind == "thread_group" and 1 < (level.threads or 1) < launch.thread_count:
                raise UnsupportedError(
                    f"T.Scale({level.name!r}) inside a program has no HIP lowering",
                    hint="run it with tilescale.emulate",
                    where=location(scope) or launch.where,
                )


class Unrun:
    """Declines everything but text."""

    def compilations(self, options: dict[str, Any]) -> NoReturn:
        """Raises UnsupportedError."""
        raise UnsupportedError("programs for AMD GPUs are generated as text, not run")

    build = ahead = compilations


@dataclass(frozen=True)
class PlainText(Unrun):
    """A program without constructs of TileScale, lowered by stock TileLang."""

    program: Program
    machine: Machine
    notes: tuple[str, ...] = ()

    def source(self, options: dict[str, Any]) -> str:
        """The text. Raises ShapeError and UnsupportedError where stock TileLang cannot lower the program."""
        where = next((launch.where for launch in self.program.launches), None)
        return _generated(self.program.func, self.machine, options, where).text


@dataclass(frozen=True)
class HierarchicalText(Unrun):
    """A program of several devices: one TileLang function for each grid. Operations of the host have no text."""

    lowered: LoweredProgram

    @property
    def notes(self) -> tuple[str, ...]:
        """The implementation chosen for each operation between units, and the reason."""
        return self.lowered.notes

    def source(self, options: dict[str, Any]) -> str:
        """The text: one kernel for each grid, checked. Raises AllocationTooLargeError, and as `PlainText.source`."""
        program, machine = self.lowered.program, self.lowered.target.machine
        texts = []
        for grid in self.lowered.grids:
            made = _generated(grid.kernel.func, machine, options, program.launches[0].where)
            check_of(grid.kernel, program, machine)(made.text, made.dynamic_shared)
            texts.append(made.text)
        return "\n".join(texts)


def _generated(
    func: ir.PrimFunc, machine: Machine, options: dict[str, Any], where: Location | None
) -> stock.GeneratedText:
    """Stock TileLang's text, with the functions that the kernel calls: its HIP generator drops them."""
    target = options.get("target") or target_for(machine)

    def generate(func: ir.PrimFunc) -> stock.GeneratedText:
        return stock.generate(func, target, options.get("pass_configs"))

    with explained(func, generate, where):
        made = generate(func)
    notes = ir.instances(func.body, ir.AttrStmt)
    preludes = [note.value.value for note in notes if note.attr_key == _PRELUDE]
    includes, kernel, rest = made.text.partition(_KERNEL)
    return replace(made, text="".join((includes, *preludes, kernel, rest)))


_PROCESSOR = re.compile(r"gfx[0-9a-f]+")


def target_for(machine: Machine) -> dict[str, str]:
    """The target that stock TileLang compiles for. Raises UnsupportedError: the machine's description names no
    architecture of AMD."""
    processor = machine.identify.architecture
    if not _PROCESSOR.fullmatch(processor):
        raise UnsupportedError(f"machine {machine.name!r} has no architecture of AMD GPUs, such as gfx942")
    return {"kind": "hip", "mcpu": processor}
