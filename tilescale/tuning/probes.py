# SPDX-License-Identifier: MIT
"""Probes of a calibration: groups of interleaved contenders, and the point that follows from each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilelang_core import ir
from tilescale.backends.base import Target, available
from tilescale.collectives import TENSORS, names, records
from tilescale.collectives.record import Algorithm
from tilescale.collectives.request import wanted_of
from tilescale.cost.measured import (
    IN_PARTS,
    MeasuredCollective,
    MeasuredFlag,
    MeasuredGemm,
    MeasuredLaunch,
    MeasuredTransfer,
)
from tilescale.hda import Machine, Mechanism, Network
from tilescale.passes.pipeline import analyse
from tilescale.program.effects import statements
from tilescale.program.operations import Collective as Moves
from tilescale.program.operations import operation as operation_of
from tilescale.tuning import programs
from tilescale.tuning.inputs import InputFill
from tilescale.tuning.libraries import library_collective, library_gemm
from tilescale.tuning.places import TimeSource
from tilescale.tuning.race import Contender, Runner

KIB, MIB = 1 << 10, 1 << 20
TYPE = "bfloat16"

SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB)
"""Bytes of transfers that the host starts."""

STEPS, FEW_STEPS = 32, 4
"""Tiles that each of many programs moves: on devices, and in simulation, where more give the same result."""

ALONE = 256
"""Tiles that one program moves by itself."""

ROUNDS = 100
"""Number of times that a signal passes all units."""

SHAPES = ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 4096), (8192, 3584, 8192), (1024, 8192, 8192))

OPERATIONS = ("allreduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
WHOLE = tuple(4 * KIB << n for n in range(0, 17, 2))
"""Bytes of tensors of collectives, up to 256 MiB."""

UNALIGNED = 2
"""Bytes by which parts of unaligned sizes are longer: one element."""

CONTENDED_SHAPE = (8192, 8192, 4096)
COPIED = 64 * MIB
"""Bytes copied concurrently with a GEMM: the copies take less time than the GEMM."""


@dataclass(frozen=True)
class Probe:
    """One thing to measure.

    Attributes:
        make: makes the function to call; collective.
        point: makes a point of microseconds and their spread.
    """

    name: str
    make: Callable[[], Runner]
    point: Callable[..., Any]

    @property
    def contender(self) -> Contender:
        return Contender(self.name, self.make)


@dataclass(frozen=True)
class ProbeGroup:
    """Interleaved probes.

    Attributes:
        kind: the field of `Measured` that their points go to.
        mode: as in races.
        of: the subject that several groups measure at one size each; a probe that fails once is not tried again.
    """

    kind: str
    title: str
    mode: str
    calls: int
    probes: tuple[Probe, ...]
    of: str = ""


def groups(place: TimeSource, quick: bool) -> Iterator[ProbeGroup]:
    """All groups that are measured at a place, the many sizes of collectives last; `quick` leaves out most of them."""
    network = place.machine.network(place.machine.tensor_level.name)
    for mode in ("graph", "eager"):
        made = _probe("launch", place, programs.launch, (), partial(_timed, MeasuredLaunch, mode=mode))
        yield ProbeGroup("launches", f"launches, {mode}", mode, 8, (made,))
    shapes = SHAPES[:2] if quick else SHAPES
    yield ProbeGroup("products", "products", "eager", 4, tuple(_product(place, shape) for shape in shapes))
    if place.units == 1 or network is None:
        return
    passed = partial(_flag, ROUNDS * place.units)
    yield ProbeGroup("flags", "flags", "graph", 3, (_probe("flag", place, programs.flags, (ROUNDS,), passed),))
    yield ProbeGroup("wires", "wires", "graph", 3, tuple(_wires(place, network, quick)))
    yield from () if quick else _contention(place, network)
    few = [(OPERATIONS[0], nbytes) for nbytes in WHOLE[:5:4]]
    for operation, nbytes in few if quick else tensors(place.units):
        calls = 8 if nbytes <= 4 * MIB else 2
        probes = tuple(_collectives(place, operation, nbytes))
        yield ProbeGroup("collectives", f"{operation}, {nbytes:,} B", "graph", calls, probes, of=operation)


def tensors(units: int) -> list[tuple[str, int]]:
    """Collectives and bytes of their whole tensors, those with unaligned parts last."""
    longer = [nbytes + units * UNALIGNED for nbytes in WHOLE]
    return [*itertools.product(OPERATIONS, WHOLE), *itertools.product(IN_PARTS, longer)]


def _probe(
    name: str,
    place: TimeSource,
    program: Callable[..., Any],
    given: tuple[Any, ...],
    point: Callable[..., Any],
    fill: InputFill | None = None,
) -> Probe:
    return Probe(name, lambda: place.runner(program(place.machine, place.units, *given), fill), point)


def _timed(kind: Callable[..., Any], us: float, spread: tuple[float, float], **fields: Any) -> Any:
    return kind(us=us, spread=spread, **fields)


def _flag(signals: int, us: float, spread: tuple[float, float]) -> MeasuredFlag:
    low, high = spread
    return MeasuredFlag(nbytes=0, us=us / signals, spread=(low / signals, high / signals))


# -- transfers ---------------------------------------------------------------------------------------------------------


def _wires(place: TimeSource, network: Network, quick: bool) -> Iterator[Probe]:
    places = place.machine.program_units
    for mechanism in network.mechanisms:
        if mechanism.on_request:
            continue
        if mechanism.started_by == "host":
            for nbytes in SIZES[::3] if quick else SIZES:
                yield _wire(place, mechanism, "put", nbytes, None, programs.whole_copy, (nbytes, mechanism.name))
            continue
        many = FEW_STEPS if place.simulated else STEPS
        cases = (("put", 1, ALONE), ("put", places, many), ("get", places, many))
        for operation, count, steps in cases:
            if mechanism.rate(operation) is None or (quick and count > 1):
                continue
            nbytes, together = count * steps * programs.TILE, count if count == 1 else None
            given = operation, count, steps, mechanism.name
            yield _wire(place, mechanism, operation, nbytes, together, programs.tile_copies, given)


def _wire(
    place: TimeSource,
    mechanism: Mechanism,
    operation: str,
    nbytes: int,
    count: int | None,
    program: Callable[..., Any],
    given: tuple[Any, ...],
) -> Probe:
    def point(us: float, spread: tuple[float, float]) -> MeasuredTransfer:
        slowest, fastest = (round(nbytes / t / 1e3, 2) for t in reversed(spread))
        return MeasuredTransfer(
            mechanism=mechanism.name, operation=operation, nbytes=nbytes, programs=count,
            gb_s=round(nbytes / us / 1e3, 2), spread=(slowest, fastest),
        )  # fmt: skip

    return _probe(f"{mechanism.name} {operation} {nbytes} by {count}", place, program, given, point)


# -- GEMMs and collectives ---------------------------------------------------------------------------------------------


def _product(place: TimeSource, shape: tuple[int, int, int]) -> Probe:
    """By the vendor's library, or in simulation by a plain grid of tiles."""
    if place.simulated:
        point = partial(_timed, MeasuredGemm, shape=shape, dtype=TYPE, by="tilescale")
        return _probe(str(shape), place, programs.product, (shape,), point)
    point = partial(_timed, MeasuredGemm, shape=shape, dtype=TYPE, by="cublas")
    return Probe(str(shape), lambda: library_gemm(shape), point)


def _collectives(place: TimeSource, operation: str, nbytes: int) -> Iterator[Probe]:
    """By each algorithm of whole tensors that is taken without being asked for."""
    n, fill = nbytes // 2 // place.units * place.units, InputFill(kept={})
    for name in names(operation, TENSORS) if place.simulated else chosen_from(place.machine, place.units, operation, n):
        record = records()[name]
        if record.against(place.units, TYPE) is not None:
            continue
        point = partial(
            _timed,
            MeasuredCollective,
            operation=operation,
            algorithm=name,
            units=place.units,
            nbytes=nbytes,
            dtype=TYPE,
        )
        yield Probe(name, partial(_collective, place, operation, n, record, fill), point)


def chosen_from(machine: Machine, units: int, operation: str, n: int) -> list[str]:
    """The algorithms that a program gets one of which asks for none, for n elements."""
    program = analyse(programs.collective(machine, units, operation, n, None), machine)
    calls = (stmt.value for stmt, *_ in statements(program.body) if isinstance(stmt, ir.Evaluate))
    made = next(found for call in calls if isinstance(found := operation_of(call), Moves))
    extents = {machine.tensor_level.name: units}
    target = Target(machine, tuple(extents.items()))
    able = available(made, wanted_of(made, machine, extents, in_program=False), target)
    return [name for name in able.names if name not in able.on_request]


def _collective(place: TimeSource, operation: str, n: int, record: Algorithm, fill: InputFill) -> Runner:
    if record.library and not place.simulated:
        return library_collective(operation, n)
    return place.runner(programs.collective(place.machine, place.units, operation, n, record.name), fill)


def _contention(place: TimeSource, network: Network) -> Iterator[ProbeGroup]:
    """A GEMM alone and with concurrent copies; the ratio of their times is the point of the second."""
    for mechanism in network.mechanisms:
        if mechanism.started_by == "host" and mechanism.put and not mechanism.on_request:
            alone = _probe("alone", place, programs.product, (CONTENDED_SHAPE,), _nothing)
            contended = _probe(
                mechanism.name, place, programs.product, (CONTENDED_SHAPE, COPIED, mechanism.name), _nothing
            )
            yield ProbeGroup("contention", f"GEMM with {mechanism.name}", "eager", 4, (alone, contended))


def _nothing(us: float, spread: tuple[float, float]) -> None:
    """Return no point: a time by itself is not one."""
