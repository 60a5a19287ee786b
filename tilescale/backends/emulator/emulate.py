# SPDX-License-Identifier: MIT
"""`tilescale.emulate`: run a program on the CPU for a described machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any

from tilelang_core import ir
from tilescale.backends.emulator.arguments import Shape, bind_arguments
from tilescale.backends.emulator.checks import observers
from tilescale.backends.emulator.progress import progress_bar
from tilescale.backends.emulator.record.recorder import Recorder
from tilescale.backends.emulator.run import Activity, Run
from tilescale.errors import ArgumentError, LaunchError, Location, UsageError
from tilescale.hda import Machine
from tilescale.hda.current import as_machine
from tilescale.passes.pipeline import analyse
from tilescale.passes.rules import check_rules
from tilescale.passes.written import written_parameters
from tilescale.program.arguments import count_writes
from tilescale.program.model import Program
from tilescale.settings import settings
from tilescale.timing.collector import no_cyclic_collection
from tilescale.timing.draw import plot, summary, trace
from tilescale.timing.timeline import Timeline

MOST_LINES = 16
"""Units that have a line each in a report."""


@dataclass(frozen=True)
class Report:
    """What an emulation did.

    Attributes:
        machine: what was emulated.
        activity: for each unit that owns tensors, in the order of the arguments, what it did.
        wall_s: seconds that the emulation took on this computer; says nothing of the machine.
        recorder: the record of which `timeline` is the simulation; None if the run was not timed.
        missed: tile operations of which no element lay inside of its tensor, so that loads gave zero and stores
            nothing: the tensor's name and the line -> how many.
    """

    machine: Machine
    activity: tuple[Activity, ...]
    wall_s: float
    recorder: Recorder | None = field(default=None, repr=False, compare=False)
    missed: Mapping[tuple[str, Location | None], int] = field(default_factory=dict)

    @cached_property
    def timeline(self) -> Timeline:
        """When everything happened on the machine; simulated when first asked for.

        Raises:
            UsageError: the run was not timed.
        """
        if self.recorder is None:
            raise UsageError("this run was not timed", hint="leave out time=False")
        return self.recorder.timeline()

    @property
    def time_us(self) -> float:
        """Simulated duration in microseconds. Raises as `timeline`."""
        return self.timeline.end_s * 1e6

    @property
    def utilization(self) -> dict[str, float]:
        """Resource -> share of the time that it worked, over all units that have one. Raises as `timeline`."""
        return self.timeline.utilization

    def trace(self, path: str | PathLike[str]) -> None:
        """Write the timeline for Perfetto (https://ui.perfetto.dev), compressed where the path ends in ".gz".

        Units that own tensors are processes, their engines threads, and arrows lead from what was waited for. Raises as
        `timeline`, and a UsageError where no file can be made.
        """
        trace(self.timeline, path)

    def plot(self, path: str | PathLike[str], *, engines: bool = False) -> None:
        """Draw the timeline: a row for each unit that owns tensors, time in microseconds.

        Args:
            path: a .png, .svg or .pdf file.
            engines: a row for each engine of a unit instead, or for each family of engines where there are many.

        Raises:
            UsageError: the run was not timed, another ending, or no file can be made there.
            DependencyError: matplotlib is missing.
        """
        plot(self.timeline, path, engines=engines)

    def __str__(self) -> str:
        parts = [self._activity()] + ([summary(self.timeline)] if self.recorder is not None else [])
        return "\n".join(parts + [_missed(*key, count) for key, count in self.missed.items()])

    def _activity(self) -> str:
        level = self.machine.tensor_level.name
        heads = ("programs", "messages", "sent", "received", "signals", "combined")
        rows = [f"{level:>8}" + "".join(f" {head:>10}" for head in heads) + "  collectives"]
        # Of many units those that did the same share a line with their neighbours.
        many = len(self.activity) > MOST_LINES
        numbered = enumerate(self.activity)
        for _, group in itertools.groupby(numbered, key=lambda item: _line(item[1]) if many else item[0]):
            (first, activity), *others = group
            label = f"{first}-{others[-1][0]}" if others else str(first)
            rows.append(f"{label:>8}{_line(activity)}")
        return "\n".join(rows)


def _missed(name: str, where: Location | None, count: int) -> str:
    place = f"  {Path(where.file).name}:{where.line}" if where else ""
    return f"nothing read or written: wholly outside of {name} x{count}{place}"


def _line(a: Activity) -> str:
    counts = (a.programs, a.messages, a.sent, a.received, a.signals, a.contributed)
    names = ", ".join(f"{name} x{count}" for name, count in a.collectives.items()) or "-"
    return "".join(f" {count:>10}" for count in counts) + f"  {names}"


def emulate(
    func: ir.PrimFunc,
    args: Sequence[Any] | None = None,
    *,
    machine: Machine | str | None = None,
    data: bool = True,
    time: bool = True,
    progress: bool | None = None,
    check: str | Iterable[str] | None = None,
    schedule_seed: int | None = None,
) -> Report:
    """Run a traced program on CPU tensors for all units of a machine.

    Args:
        func: a `@T.prim_func`.
        args: one list of tensors (and scalars) per device, changed in place; for a single-device program the list
            itself may be given. Under a device-level `T.view` each device passes its shard.
        data: False computes nothing but the time: tiles and tensors have shapes and no values, and arguments may be
            tensors of any device ("meta" too), which stay as they are, or left out where the program says all extents.
        time: whether to write down what the simulation of the time needs.
        machine: a machine, a built-in name or a path; the program is traced again if it was traced for another.
        progress: show a progress bar on a long run; None follows the settings.
        check: mistakes to look for that a run by itself does not show: "all", "none", or some of "races",
            "uninitialized" and "replicas"; None follows the settings ("all" where they say nothing).
        schedule_seed: a number for each interleaving of the units; the same number gives the same run, and a right
            program is right in all of them. None follows the settings (units take turns where they say nothing).

    Returns:
        What every device did.

    Raises:
        ArgumentError, RankMismatchError: arguments that do not fit the program, or each other.
        LaunchError: arguments for another number of units than the launch has, or more units than the machine has.
        UsageError: the program was traced for another machine and cannot be traced again; an unknown check; loops that
            TileLang refuses.
        DeadlockError: a wait that nobody can satisfy.
        RaceError: two accesses to one place, one of them a write, that nothing orders; a wait for a phase of an
            mbarrier that the next phase may overtake.
        UninitializedReadError: a read of a tile, workspace or variable that nobody has written.
        DivergedReplicaError: what is viewed with `T.Replica` is read as a whole, or the program ends, while the units
            hold different values.
        OutOfBoundsError: an access outside a tile or a flag tensor.
        UnsupportedError: an operation that the emulator does not run, with its line.
        NoDataError: in a run without data, a branch, an index or an extent that depends on a tensor.
    """
    target = as_machine(machine)
    program = analyse(func, target)
    if not program.is_hierarchical:
        check_rules(program)  # others have been checked
    if args is None and data:
        raise ArgumentError("there are no arguments", hint="pass tensors, or data=False for the time alone")
    per_unit = _per_unit(program, args) if args is not None else _shapes_alone(program, target)
    extents = _extents(program, target, len(per_unit))
    begin = perf_counter()
    with progress_bar(program.name, progress) as advance:
        mesh = _mesh(program, target)
        recorder = Recorder(target, extents, mesh) if time or not data else None
        watching = observers(settings().check if check is None else check) if data else ()
        seed = settings().schedule_seed if schedule_seed is None else schedule_seed
        run = Run(program, target, advance, watching, seed, recorder, data)
        written = written_parameters(program) if data else frozenset()
        values = bind_arguments(run.compiler, program, extents, per_unit, written)
        with no_cyclic_collection(not data):
            try:
                run.launch(extents, values, mesh)
            finally:
                count_writes(unit[i] for unit in per_unit for i in written)
    return Report(target, tuple(run.activity), perf_counter() - begin, recorder, run.missed)


def _shapes_alone(program: Program, machine: Machine) -> list[list[Any]]:
    """For each unit of the launch arguments without data, as the program declares them.

    Raises:
        ArgumentError: an extent or a scalar that the program leaves open.
    """
    units, coarser = 1, None
    for name, extent in _launched(program, machine):
        units *= machine.count(name, coarser) if extent is None else extent
        coarser = name
    mine = []
    for parameter in program.parameters:
        shape = [ir.constant(n) for n in parameter.shape]
        if parameter.buffer is None or None in shape:
            raise ArgumentError(
                f"{parameter.name!r} of {program.name} is known at launch only", hint="pass arguments for each unit"
            )
        mine.append(Shape(tuple(shape)))
    return [mine] * units


def _per_unit(program: Program, args: Sequence[Any]) -> list[list[Any]]:
    if not program.parameters and not args:
        return [[]]
    if not isinstance(args, list | tuple):
        raise ArgumentError(
            f"the arguments of {program.name} are given as one {type(args).__name__}",
            hint="pass a list of them for each unit, in one list",
        )
    return [list(a) for a in args] if all(isinstance(a, list | tuple) for a in args) else [list(args)]


def _extents(program: Program, machine: Machine, units: int) -> list[tuple[str, int]]:
    """Units of each launched level above the program; what is left open takes what the arguments leave.

    Raises:
        LaunchError: the number of argument lists is not the number of units, or the machine has fewer.
    """
    launch = program.launches[0]
    known = _launched(program, machine)
    fixed = math.prod(n for _, n in known if n is not None)
    open_ = [name for name, n in known if n is None]
    if len(open_) > 1:
        raise LaunchError(f"levels {', '.join(open_)} are all T.ALL", hint="leave one level open", where=launch.where)
    if units < fixed or units % fixed or (not open_ and units != fixed):
        raise LaunchError(
            f"the launch has {fixed} units that own tensors"
            + (f" per {open_[0]}" if open_ else "")
            + f", the arguments are for {units}",
            hint="pass one list of tensors for each unit",
            where=launch.where,
        )
    extents = [(name, units // fixed if n is None else n) for name, n in known]
    _check_machine(extents, machine, launch.where)
    return extents


def _launched(program: Program, machine: Machine) -> list[tuple[str, int | None]]:
    """Each launched level down to the one that owns tensors, and how many units; None if that is known at launch."""
    known = [(name, ir.constant(extent)) for name, extent in program.extents]
    if machine.program_level == machine.tensor_level:
        grid = [ir.constant(n) for n in program.launches[0].grid]
        known.append((machine.program_level.name, math.prod(grid) if None not in grid else None))
    return known


def _mesh(program: Program, machine: Machine) -> tuple[int, ...]:
    """The grid, slowest axis first, where its programs own tensors: they lie on the machine's mesh like that."""
    if machine.program_level != machine.tensor_level:
        return ()
    grid = [ir.constant(n) for n in program.launches[0].grid]
    return tuple(n or 1 for n in reversed(grid))


def _check_machine(extents: list[tuple[str, int]], machine: Machine, where: Any) -> None:
    coarser = None
    for name, extent in extents:
        there = machine.count(name, coarser)
        if extent > there:
            place = f"one {coarser}" if coarser else machine.name
            raise LaunchError(
                f"the launch has {extent} units of level {name!r}; {place} has {there}",
                hint="launch fewer, or emulate a larger machine",
                where=where,
            )
        coarser = name
