# SPDX-License-Identifier: MIT
"""`tilescale.emulate`: run a program on the CPU for a described machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import NoneType
from typing import Any

from tilelang_core import ir
from tilescale.backends.base import check as check_machine
from tilescale.backends.emulator.again import Again, Given
from tilescale.backends.emulator.arguments import Shape, bind_arguments
from tilescale.backends.emulator.assumptions import Assumptions
from tilescale.backends.emulator.checks import observers
from tilescale.backends.emulator.compiled import Compiled, Kept
from tilescale.backends.emulator.pairs import Pairs
from tilescale.backends.emulator.record.recorder import Recorder
from tilescale.backends.emulator.remedies import FOUND, advise
from tilescale.backends.emulator.report import Report
from tilescale.backends.emulator.run import Run
from tilescale.backends.progress import progress_bar
from tilescale.errors import ArgumentError, LaunchError, Location, NoDataError, UsageError, check_type
from tilescale.hda import Machine
from tilescale.hda.current import as_machine
from tilescale.hda.names import BuiltIn
from tilescale.hda.units import format_count
from tilescale.passes.faults import emulation_faults_reported, first_line
from tilescale.passes.pipeline import analyse
from tilescale.passes.upstream_rules import check_rules
from tilescale.program.arguments import count_writes
from tilescale.program.model import Program
from tilescale.settings import settings
from tilescale.timing.no_gc import no_cyclic_collection

_LONGEST_S = 5.0
"""Longest run, in seconds, that is repeated to find the missing statement."""


def emulate(
    func: ir.PrimFunc,
    args: Sequence[Any] | None = None,
    *,
    machine: Machine | BuiltIn | str | None = None,
    data: bool | None = None,
    assume: Mapping[str, Any] | None = None,
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
        data: False computes only the time: tiles and tensors have shapes and no values, and arguments may be
            tensors of any device ("meta" too), which stay as they are, or left out where the program declares all
            extents.
            None means False where all tensors are on the device "meta".
        assume: with data=False, the values of tensors on which the program's control flow depends, by name: a tensor
            or a number for all units, or a list with one for each. Writes of the program to them are ignored.
        time: whether to record what the simulation of time needs.
        machine: a machine, a built-in name or a path; the program is traced again if it was traced for another.
        progress: show a progress bar on a long run; None follows the settings.
        check: bugs to look for that a plain run does not show: "all", "none", or some of "races",
            "uninitialized", "replicas" and "outputs" (remarks of the report); None follows the settings (default:
            "all").
        schedule_seed: a number for each interleaving of the units; the same number gives the same run, and a correct
            program is correct in all of them. None follows the settings (default: round robin).

    Returns:
        A report of what every device did.

    Raises:
        ArgumentError, RankMismatchError: arguments that do not fit the program, or each other.
        LaunchError: arguments for another number of units than the launch has, or more units than the machine has.
        UsageError: the program was traced for another machine and cannot be traced again; an unknown check, options of
            other types; loops that TileLang rejects.
        DeadlockError: a wait that no unit can satisfy.
        RaceError: two unordered accesses to one element, at least one of them a write, in programs of plain TileLang
            also by two threads of a block; a wait for a phase of an mbarrier that the next phase may overtake.
        UninitializedReadError: a read of an uninitialized tile, workspace or variable.
        DivergedReplicaError: a tensor viewed with `T.Replica` differs between units when it is read as a whole, or when
            the program ends.
        OutOfBoundsError: an access outside a tile or a flag tensor.
        ShapeError: a GEMM, or a tile in registers, that such GPUs cannot distribute over the threads of its unit.
        UnsupportedError: an operation that the emulator does not run, with its line.
        NoDataError: in a run without data, a branch, an index or an extent that depends on a tensor without assumed
            values.
        InternalError: TileScale itself failed; please report it.
    """
    target = as_machine(machine)
    return emulate_program(
        analyse(func, target), target, args, data=data, assume=assume, time=time, progress=progress, check=check,
        schedule_seed=schedule_seed,
    )  # fmt: skip


def emulate_program(
    program: Program,
    target: Machine,
    args: Sequence[Any] | None = None,
    *,
    data: bool | None = None,
    assume: Mapping[str, Any] | None = None,
    time: bool = True,
    progress: bool | None = None,
    check: str | Iterable[str] | None = None,
    schedule_seed: int | None = None,
    kept: Kept | None = None,
) -> Report:
    """`emulate` for a program that is already analysed for the machine: kernels are called many times.

    `kept`: closures of earlier calls of the program on the machine.
    """
    check_type("schedule_seed", schedule_seed, "a whole number", int, NoneType)
    data = not _without_values(args) if data is None else data
    if not program.is_hierarchical:
        check_rules(program)  # others have been checked
    unsupported = check_machine(program, target)
    if args is None and data:
        raise ArgumentError("there are no arguments", hint="pass tensors, or data=False for the time alone")
    if assume is not None and data:
        raise UsageError("assume= in a run with data", hint="pass the values as arguments, or data=False")
    per_unit = _per_unit(program, args) if args is not None else _shapes_alone(program, target)
    extents, mesh = _extents(program, target, len(per_unit)), _mesh(program, target)
    watching = observers(settings().check if check is None else check) if data else ()
    seed = settings().schedule_seed if schedule_seed is None else schedule_seed
    assumptions = Assumptions(assume, program, len(per_unit)) if assume is not None else None
    begin, given = perf_counter(), Given(program, per_unit) if watching else None
    faults = emulation_faults_reported(lambda: first_line(program.func))
    kept = kept if kept is not None and data else {}  # closures without data keep state of one run
    key = tuple(extents), mesh, time, seed is None
    with faults, progress_bar(f"emulating {program.name}", progress) as advance:
        compiled = kept.pop(key, None)
        if compiled is None:
            recorder = Recorder(target, extents, mesh) if time or not data else None
            compiled = Compiled(program, target, recorder, data, seed is not None, assumptions)
        run = Run(program, target, advance, watching, seed, compiled)
        try:
            _launch(run, program, extents, mesh, per_unit, data)
        except FOUND as error:
            if given is not None and perf_counter() - begin < _LONGEST_S:
                again = Again(target, given, extents, mesh, seed, watching)
                advise(program.func, again, run, error)
            raise
    wall_s = perf_counter() - begin
    found = run.missed, run.redundant_waits, run.clipped, run.negative, run.unwritten, run.diverged
    record, kept[key] = compiled.release(), compiled
    recorded = None if record is None else lambda: record
    if recorded is None and time:
        recorded = partial(_recorded, program, target, _shapes(per_unit))
    return Report(program.name, target, tuple(run.activity), wall_s, recorded, *found, unsupported)


def _recorded(program: Program, target: Machine, per_unit: list[list[Any]]) -> Recorder:
    """The record of a program whose steps do not depend on data."""
    report = emulate_program(program, target, per_unit, data=False, progress=False)
    assert report.recorder is not None, "a run without data is recorded"
    return report.recorder()


def _shapes(per_unit: list[list[Any]]) -> list[list[Any]]:
    """Arguments of the same shapes without data."""
    return [[value.to("meta") if hasattr(value, "is_meta") else value for value in unit] for unit in per_unit]


def simulated_s(program: Program, machine: Machine, values: Sequence[Any]) -> float:
    """Simulated seconds of a call in which each unit passes arguments like these. The arguments are not changed.

    Where the time depends on values, copies are used. Raises as `emulate`.
    """
    units = units_of(program, machine)
    try:
        report = emulate(program.func, [list(values)] * units, machine=machine, data=False)
    except NoDataError:
        copies = [[v.clone() if hasattr(v, "clone") else v for v in values] for _ in range(units)]
        report = emulate(program.func, copies, machine=machine)
    return report.time_us * 1e-6


def _launch(
    run: Run,
    program: Program,
    extents: list[tuple[str, int]],
    mesh: tuple[int, ...],
    per_unit: list[list[Any]],
    data: bool,
) -> None:
    """Run all units on their arguments, which hold the results afterwards, also if the run fails."""
    written = run.written if data else frozenset()
    pairs = Pairs()
    values = bind_arguments(run.compiler, program, extents, per_unit, written, pairs)
    with no_cyclic_collection(not data):
        try:
            run.launch(extents, values, mesh)
        finally:
            pairs.put_together()
            count_writes(unit[i] for unit in per_unit for i in written)


def _without_values(args: Sequence[Any] | None) -> bool:
    given = args if isinstance(args, list | tuple) else ()
    flat = itertools.chain.from_iterable(unit if isinstance(unit, list | tuple) else (unit,) for unit in given)
    tensors = [value.is_meta for value in flat if hasattr(value, "is_meta")]
    return bool(tensors) and all(tensors)


def _shapes_alone(program: Program, machine: Machine) -> list[list[Any]]:
    """Arguments without data for each unit of the launch, as the program declares them. Raises ArgumentError: an extent
    or a scalar that the program leaves open."""
    mine = []
    for parameter in program.parameters:
        shape = ir.constants(parameter.shape)
        if parameter.buffer is None or shape is None:
            raise ArgumentError(
                f"{parameter.name!r} of {program.name} is known at launch only", hint="pass arguments for each unit"
            )
        mine.append(Shape(tuple(shape)))
    return [mine] * units_of(program, machine)


def units_of(program: Program, machine: Machine) -> int:
    """Number of tensor-owning units of a launch; all of the machine's where the program leaves it open."""
    units, coarser = 1, None
    for name, extent in _launched(program, machine):
        units *= machine.count(name, coarser) if extent is None else extent
        coarser = name
    return units


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
    """Number of units of each launched level above the program; an open level is inferred from the number of arguments.
    Raises LaunchError: the number of argument lists is not the number of units, or the machine has fewer."""
    launch = program.launches[0]
    known = _launched(program, machine)
    fixed = math.prod(n for _, n in known if n is not None)
    open_ = [name for name, n in known if n is None]
    if len(open_) > 1:
        raise LaunchError(f"levels {', '.join(open_)} are all T.ALL", hint="leave one level open", where=launch.where)
    if units < fixed or units % fixed or (not open_ and units != fixed):
        raise LaunchError(
            f"the launch has {format_count(fixed, machine.tensor_level.name)}"
            + (f" per {open_[0]}" if open_ else "")
            + f", the arguments are for {units}",
            hint=f"pass one list of tensors for each {machine.tensor_level.name}: [[A0, B0], [A1, B1], ...]",
            where=launch.where,
        )
    extents = [(name, units // fixed if n is None else n) for name, n in known]
    _check_machine(extents, machine, launch.where)
    return extents


def _launched(program: Program, machine: Machine) -> list[tuple[str, int | None]]:
    """Each launched level down to the tensor-owning one, with its number of units; None if known only at launch."""
    known = [(name, ir.constant(extent)) for name, extent in program.extents]
    if machine.program_level == machine.tensor_level:
        grid = ir.constants(program.launches[0].grid)
        known.append((machine.program_level.name, None if grid is None else math.prod(grid)))
    return known


def _mesh(program: Program, machine: Machine) -> tuple[int, ...]:
    """The grid, slowest axis first, where its programs own tensors: they map to the machine's mesh in this shape."""
    if machine.program_level != machine.tensor_level:
        return ()
    grid = [ir.constant(n) for n in program.launches[0].grid]
    return tuple(n or 1 for n in reversed(grid))


def _check_machine(extents: list[tuple[str, int]], machine: Machine, where: Location | None) -> None:
    coarser = None
    for name, extent in extents:
        there = machine.count(name, coarser)
        if extent > there:
            place = f"one {coarser}" if coarser else machine.name
            raise LaunchError(
                f"the launch has {format_count(extent, 'unit')} of level {name!r}; {place} has {there}",
                hint="launch fewer, or emulate a larger machine",
                where=where,
            )
        coarser = name
