# SPDX-License-Identifier: MIT
"""Coordinates of a unit: from its number in a launch to the units that hold it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilescale.errors import PeerOutOfRangeError, UsageError
from tilescale.hda.description import Description
from tilescale.hda.model import Level, Network
from tilescale.hda.units import format_count

Sizes = Mapping[str, int | Sequence[int]]


@dataclass(frozen=True)
class UnitPlace:
    """A unit and all units that hold it.

    Attributes:
        numbers: level -> number over the whole machine, its own level and all coarser ones. Programs that are run in
            turn on their units are numbered as launched, everything else as built.
        spans: level -> how many of its units the next coarser unit holds.
        clusters: cluster level -> programs in one cluster.
    """

    machine: Description
    numbers: Mapping[str, int]
    spans: Mapping[str, int]
    clusters: Mapping[str, int]

    def __getitem__(self, level: str) -> int:
        return self.numbers[level]

    def __contains__(self, level: object) -> bool:
        return level in self.numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def size(self, net: Network) -> int:
        """Number of units that one instance of the network connects."""
        if net.within is not None and net.within in self.clusters:
            return self.clusters[net.within]
        return self.machine.count(net.level, net.within)

    def local(self, net: Network) -> int:
        """Position of the unit of the network's level among those it connects."""
        number = self.numbers[net.level]
        if net.within is not None and net.within in self.clusters:
            return number % self.spans[net.level] % self.clusters[net.within]
        return number % self.size(net)


def locate(machine: Description, level: str, number: int, sizes: Sizes) -> UnitPlace:
    """The place of unit `number` of `level` in a launch of `sizes`; see `Machine.path` for both.

    Raises:
        PeerOutOfRangeError: the launch has no such unit.
        UsageError: the launch asks for more units than are built.
    """
    for name in sizes:
        machine.index(name)
    here = machine.level(level)
    if here.kind == "thread_group":
        groups = _extent(here, sizes) or machine.count(level, machine.program_level.name)
        return _inside(locate(machine, machine.program_level.name, number // groups, sizes), level, number)
    clusters = {at.name: _cluster_size(at, sizes) for at in machine.levels if at.kind == "cluster"}
    if here.kind == "cluster":
        program = machine.program_level
        launched = _extent(program, sizes) or program.count or 1
        per_unit = math.ceil(launched / clusters[level])
        outer, inner = divmod(number, per_unit)
        first = locate(machine, program.name, outer * launched + inner * clusters[level], sizes)
        return UnitPlace(machine, {k: v for k, v in first.numbers.items() if k != program.name}, first.spans, clusters)
    return _locate_unit(machine, here, number, sizes, clusters)


def _inside(place: UnitPlace, level: str, number: int) -> UnitPlace:
    return UnitPlace(place.machine, {level: number, **place.numbers}, place.spans, place.clusters)


def _locate_unit(
    machine: Description, here: Level, number: int, sizes: Sizes, clusters: Mapping[str, int]
) -> UnitPlace:
    chain = [at for at in machine.levels[machine.index(here.name) :] if at.kind != "cluster"]
    rest, digits = number, {}
    for at in chain:
        extent = _extent(at, sizes) or at.count or 1
        rest, digits[at.name] = divmod(rest, extent)
    if rest or number < 0:
        total = math.prod(_extent(at, sizes) or at.count or 1 for at in chain)
        raise PeerOutOfRangeError(f"there is no {here.name} {number}: there are {total}, numbered from 0")
    numbers: dict[str, int] = {}
    spans: dict[str, int] = {}
    outer = 0
    for at in reversed(chain):
        spans[at.name], digit = _built(machine, at, digits[at.name], sizes)
        for name, size in clusters.items() if at.kind == "program" else ():
            numbers[name] = outer * math.ceil(spans[at.name] / size) + digit // size
        outer = outer * spans[at.name] + digit
        numbers[at.name] = outer
    ordered = {name: numbers[name] for name in machine.level_names if name in numbers}
    return UnitPlace(machine, ordered, spans, clusters)


def _built(machine: Description, at: Level, digit: int, sizes: Sizes) -> tuple[int, int]:
    """Number of units of `at` in the next coarser unit, and the index of a launch's unit `digit` among them."""
    extent, count = _extent(at, sizes) or at.count or 1, at.count or 1
    if at.kind == "program" and at.virtual:
        return extent, digit
    if extent > count:
        asked = format_count(extent, "unit")
        raise UsageError(f"the launch asks for {asked} of level {at.name!r}, machine {machine.name} has {count}")
    return count, _on_mesh(machine, at, digit, sizes)


def _on_mesh(machine: Description, at: Level, digit: int, sizes: Sizes) -> int:
    """A launch shape with as many dimensions as the mesh takes its first corner; else units fill it in order."""
    shape = sizes.get(at.name)
    dims = next((n.dims for n in machine.networks if n.level == at.name and n.dims), ())
    if shape is None or isinstance(shape, int) or len(shape) != len(dims):
        return digit
    if any(n > d for n, d in zip(shape, dims, strict=True)):
        raise UsageError(f"a launch of {tuple(shape)} does not fit the {dims} units of machine {machine.name}")
    position, stride = 0, 1
    for n, d in zip(reversed(shape), reversed(dims), strict=True):
        digit, coordinate = divmod(digit, n)
        position += coordinate * stride
        stride *= d
    return position


def _extent(at: Level, sizes: Sizes) -> int | None:
    size = sizes.get(at.name)
    return size if size is None or isinstance(size, int) else math.prod(size)


def _cluster_size(at: Level, sizes: Sizes) -> int:
    # A launch that does not name clusters has none; a question without a launch means the largest there can be.
    return _extent(at, sizes) or (1 if sizes else at.max_size or 1)
