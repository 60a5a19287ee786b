# SPDX-License-Identifier: MIT
"""Questions about a machine that need no route: counts, capacities, residency, rates, capabilities, networks."""

from __future__ import annotations

import math

from tilescale.errors import UnsupportedError, UsageError, one
from tilescale.hda.description import Description
from tilescale.hda.model import ComputeUnit, Level, MemoryLayer, Network

REGISTER_BYTES = 4
"""Registers are counted in 32 bits, as `registers_per_thread` is everywhere."""


def count(machine: Description, level: str, within: str | None) -> int:
    """See `Machine.count`."""
    fine = machine.index(level)
    coarse = len(machine.levels) if within is None else machine.index(within)
    if within is not None and coarse < fine:
        raise UsageError(f"{one(within)} holds no {level}: {level} is the coarser level of machine {machine.name}")
    ends = {fine, coarse}
    # Clusters are made at launch; between two other levels they play no part.
    chain = [i for i in range(fine, coarse + 1) if i in ends or machine.levels[i].kind != "cluster"]
    return math.prod(_per_parent(machine, i, j) for i, j in zip(chain, chain[1:], strict=False))


def _per_parent(machine: Description, fine: int, coarse: int) -> int:
    child = machine.levels[fine]
    parent = machine.levels[coarse] if coarse < len(machine.levels) else None
    if child.kind == "thread_group":
        assert parent is not None and child.threads is not None
        return (parent.threads or _threads(machine, parent)) // child.threads
    if parent is not None and parent.kind == "cluster":
        return parent.max_size or 1
    if child.kind == "cluster":
        return (machine.program_level.count or 1) // (child.max_size or 1)
    return child.count or 1


def advice_at_the_end(machine: Description, level: str) -> str:
    """Advice for a program whose last unit of a level has no next neighbour."""
    if any(net.level == level and net.topology == "mesh" for net in machine.networks):
        return "units at an edge have no neighbour there: put the statement under a condition, if rank + 1 < size"
    return "wrap it round: (rank + 1) % size"


def _threads(machine: Description, program: Level) -> int:
    groups = [level.threads or 1 for level in machine.levels if level.kind == "thread_group"]
    return program.max_threads_per_program or groups[-1]


def capacity(layer: MemoryLayer, threads: int | None) -> int:
    """See `Machine.capacity`."""
    most = layer.capacity if layer.per_program_max is None else layer.per_program_max
    if threads is not None and layer.per_thread_max is not None:
        most = min(most, threads * layer.per_thread_max)
    return most


def residency(machine: Description, threads: int, shared_bytes: int, registers: int, fragment_bytes: int) -> int:
    """See `Machine.residency`."""
    program, fragment = machine.program_level, machine.layer_for("fragment")
    if threads > (program.max_threads_per_program or threads):
        return 0
    if registers and registers * REGISTER_BYTES > (fragment.per_thread_max or registers * REGISTER_BYTES):
        return 0
    asked: dict[str, int] = {}
    wanted = (("shared", shared_bytes), ("fragment", fragment_bytes or registers * REGISTER_BYTES * threads))
    for scope, size in wanted:
        layer = machine.layer_for(scope)
        asked[layer.name] = asked.get(layer.name, 0) + size
    limits = [program.max_programs]
    if program.max_threads is not None:
        step = _group_step(machine, fragment)
        limits.append(program.max_threads // (math.ceil(threads / step) * step))
    for name, size in asked.items():
        layer = machine.layer(name)
        if size > capacity(layer, threads):
            return 0
        taken = _allocated(machine, layer, size, threads)
        if layer.level == program.name and taken:
            limits.append(layer.capacity // taken)
    return min(limits)


def _group_step(machine: Description, layer: MemoryLayer) -> int:
    return machine.level(layer.granularity_per).threads or 1 if layer.granularity_per else 1


def _allocated(machine: Description, layer: MemoryLayer, size: int, threads: int) -> int:
    """Bytes of one instance that a request for `size` really takes."""
    parts = math.ceil(threads / _group_step(machine, layer)) if layer.granularity_per else 1
    each = math.ceil(size / parts / layer.granularity) * layer.granularity
    return parts * each + layer.reserved_per_program


def rate(machine: Description, level: str, unit: str, dtype: str, sustained: bool) -> float:
    """See `Machine.rate`."""
    kinds, factor = _compute(machine, level)
    found = next((kind for kind in kinds if kind.name == unit), None)
    if found is None:
        known = ", ".join(kind.name for kind in kinds) or "none"
        raise UnsupportedError(
            f"{one(level)} of machine {machine.name} has no {unit!r} arithmetic", hint=f"it has: {known}"
        )
    by_dtype = dict(found.rates)
    # Variants of a format without infinities or negative zero compute at the rate of the format.
    plain = dtype if dtype in by_dtype else dtype.removesuffix("uz").removesuffix("fn")
    if plain not in by_dtype:
        raise UnsupportedError(
            f"the {unit} unit of machine {machine.name} does not compute in {dtype}",
            hint=f"it computes in {', '.join(by_dtype)}",
        )
    return by_dtype[plain] * factor * (found.efficiency if sustained else 1.0)


def rates(machine: Description, level: str) -> dict[str, dict[str, float]]:
    """See `Machine.rates`."""
    kinds, factor = _compute(machine, level)
    return {kind.name: {dtype: each * factor for dtype, each in kind.rates} for kind in kinds}


def _compute(machine: Description, level: str) -> tuple[tuple[ComputeUnit, ...], float]:
    """The arithmetic of the nearest level that describes one, and how many of its units one unit of `level` is."""
    here = machine.level(level)
    if here.kind == "thread_group":
        program = machine.program_level.name
        raise UsageError(
            f"{one(level)} has no rate of its own: the threads of a program share its {program}'s arithmetic",
            hint=f"ask for the rate of {one(program)}",
        )
    described = [at for at in machine.levels if at.compute]
    if not described:
        return (), 1.0
    position = machine.index(level)
    source = min(described, key=lambda at: abs(machine.index(at.name) - position))
    if machine.index(source.name) <= position:
        return source.compute, float(count(machine, source.name, level))
    return source.compute, 1.0 / count(machine, level, source.name)


def has(machine: Description, capability: str, level: str | None) -> bool:
    """See `Machine.has`."""
    levels = machine.levels if level is None else (machine.level(level),)
    networks = [n for n in machine.networks if level in (None, n.level)]
    listed = [at.capabilities for at in levels] + [net.capabilities for net in networks]
    if level is None:
        listed.append(machine.capabilities)
    return any(capability in names for names in listed)


def network(machine: Description, level: str, within: str | None) -> Network | None:
    """See `Machine.network`."""
    machine.index(level)
    inner = 0 if within is None else machine.index(within)
    return next((net for net in _networks(machine, level) if _top(machine, net) >= inner), None)


def connects(machine: Description, level: str, within: str | None) -> bool:
    """See `Machine.connects`."""
    here = machine.index(level)
    outer = len(machine.levels) if within is None else machine.index(within)
    if here >= outer or count(machine, level, within) == 1:
        return True
    tops = [_top(machine, net) for net in _networks(machine, level)]
    # A unit also uses the networks between the units that contain it.
    return any(top >= outer or connects(machine, machine.level_names[top], within) for top in tops)


def _top(machine: Description, net: Network) -> int:
    """Position of the level whose one unit the network spans; one past the last for the whole machine."""
    return len(machine.levels) if net.within is None else machine.index(net.within)


def _networks(machine: Description, level: str) -> list[Network]:
    return [net for net in machine.networks if net.level == level]
