# SPDX-License-Identifier: MIT
"""A program's schedule in words: which phases run in which order on what, and by which implementations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilelang_core import ir, tl
from tilescale.hda import Machine
from tilescale.passes.overlap.schedule import Schedule
from tilescale.passes.persistent.tasks import Tasks
from tilescale.program.asynchronous import is_asynchronous, owns_a_queue
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Parameter, Part, Program
from tilescale.program.operations import Copy, operation, signalled
from tilescale.program.ops import ALL_OPS, RANK, VIEW

_TILE_OP = tl.TILE_OPERATIONS


def describe(
    program: Program, machine: Machine, chosen: Sequence[str] = (), made: Schedule | Tasks | None = None
) -> str:
    """Describe the devices' arguments, then each launch and phase in the order in which every device runs them.

    Args:
        chosen: which implementations a back end chooses, and why.
        made: the schedule of its collectives, or its tasks.
    """
    lines = [
        f"{program.name} on {machine.name}, phase by phase",
        f"  each {machine.tensor_level.name} passes {', '.join(map(_parameter, program.parameters))}",
        *_ScheduleText(program, machine).part(program.body, "  "),
    ]
    if isinstance(made, Schedule) and made.moves:
        lines += ["  collectives", *(f"    {move}" for move in made.moves)]
    if isinstance(made, Tasks):
        lines += ["  tasks", *(f"    {line}" for line in made.lines)]
    if chosen:
        lines += ["  implementations on GPUs", *(f"    {note}" for note in chosen)]
    return "\n".join(lines)


def _parameter(parameter: Parameter) -> str:
    shape = ", ".join(str(ir.constant(n) or n) for n in parameter.shape)
    return parameter.name if parameter.buffer is None else f"{parameter.name} ({shape}) {parameter.buffer.dtype}"


class _ScheduleText:
    def __init__(self, program: Program, machine: Machine):
        self.machine = machine
        self.names = {view.data: p.name for p in program.parameters for view in p.views}
        self.phase = 0

    def part(self, part: Part, indent: str) -> Iterator[str]:
        if isinstance(part, Launch):
            yield f"{indent}{self._launch(part)}"
            yield from self.part(part.body, indent + "  ")
        elif isinstance(part, DevicePhase | GridPhase):
            yield from self._phase(part, indent)
        elif isinstance(part, Control):
            yield f"{indent}{_control(part.stmt)}"
            for inner in part.parts:
                yield from self.part(inner, indent + "  ")
        else:
            for inner in part.parts:
                yield from self.part(inner, indent)

    def _launch(self, launch: Launch) -> str:
        units = [f"{extent} x {name}" for name, extent in launch.extents]
        cluster = [f"clusters of {launch.cluster_size}"] if launch.cluster_size > 1 else []
        grid = f"grid {' x '.join(map(str, launch.grid))} of {self.machine.program_level.name}s"
        return f"launch {', '.join([*units, grid, *cluster, f'{launch.thread_count} threads'])}"

    def _phase(self, part: DevicePhase | GridPhase, indent: str) -> Iterator[str]:
        operations = list(dict.fromkeys(self._operations(part)))
        if not operations and isinstance(part, DevicePhase):  # views and names only: nothing to run
            return
        self.phase += 1
        level = self.machine.tensor_level if isinstance(part, DevicePhase) else self.machine.program_level
        yield f"{indent}{self.phase}. each {level.name}: {', '.join(operations) or 'element-wise statements'}"

    def _operations(self, part: DevicePhase | GridPhase) -> list[str]:
        found: list[str] = []
        starts = isinstance(part, DevicePhase) and owns_a_queue(self.machine.tensor_level, self.machine)

        def visit(node: ir.Node) -> None:
            name = ir.op_name(node) or ""
            if name.startswith(_TILE_OP):
                found.append(name.removeprefix(_TILE_OP))
            elif name in ALL_OPS - {VIEW.name, RANK.name}:
                found.append(self._ours(node, starts and is_asynchronous(node)))

        ir.walk(part.stmt, visit)
        return found

    def _ours(self, call: ir.Call, starts: bool) -> str:
        ours, name = operation(call), call.op.name.rpartition(".")[2]
        tiles = [argument for argument in call.args if ir.op_name(argument) == tl.REGION][: 2 if starts else None]
        level, impl = ir.attribute(call, "level"), ir.attribute(call, "impl")
        between = f" between {level}s" if level else ""
        text = f"{name}({', '.join(map(self._name, tiles))}){between}{f' by {impl}' if impl else ''}"
        return f"start {text} asynchronously{self._flags(ours)}" if starts else text

    def _flags(self, ours: Any) -> str:
        """The flags that a started copy waits for and signals."""
        after = ours.after if isinstance(ours, Copy) else None
        waits = f" after {self._name(after.flag)} {after.compare} {after.value}" if after is not None else ""
        return f"{waits}, signals {self._name(signalled(ours)[0])}"

    def _name(self, region: ir.Call) -> str:
        buffer = ir.region_parts(region)[0]
        return self.names.get(buffer.data, buffer.name.removesuffix("_view"))


def _control(stmt: ir.Stmt) -> str:
    if isinstance(stmt, ir.For):
        return f"for {stmt.loop_var.name} in {stmt.min}..{stmt.min + stmt.extent - 1}:"
    return f"{'while' if isinstance(stmt, ir.While) else 'if'} {stmt.condition}:"
