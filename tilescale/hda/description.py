# SPDX-License-Identifier: MIT
"""A machine's description: its levels, memory layers and networks by their names, and the counts, capacities, rates and
capabilities that follow from it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property

from tilescale.errors import UnknownLayerError, UnknownLevelError, UnsupportedError, UsageError, did_you_mean, one
from tilescale.hda.model import ComputeUnit, Identify, Level, MemoryLayer, Network
from tilescale.hda.schema import spec

REGISTER_BYTES = 4
"""Registers are counted in 32 bits, as `registers_per_thread` is everywhere."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The content of a machine description, frozen. Equal and hashed by content.

    Attributes:
        levels: finest first. Their names are the description's.
        memory: layers, finest first.
        networks: what connects units of one level.
        capabilities: features of the machine as a whole.
    """

    name: str
    title: str = spec("text", "what a person calls the machine")
    description: str = spec("text", "what it is, in a sentence or two", default="")
    levels: tuple[Level, ...] = spec("named", "the levels, finest first", of=Level)
    memory: tuple[MemoryLayer, ...] = spec("named", "the memory layers, finest first", of=MemoryLayer)
    networks: tuple[Network, ...] = spec("named", "the networks, best first where several fit", of=Network, default=())
    capabilities: tuple[str, ...] = spec("names", "what the machine as a whole can do", default=())
    identify: Identify = spec("section", "how detection knows it", of=Identify, default=Identify())
    file: str = field(default="", compare=False)

    @cached_property
    def digest(self) -> str:
        """A stable hash of the content, 16 hexadecimal digits; part of cache keys."""
        parts = (self.levels, self.memory, self.networks, self.capabilities)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash((self.name, self.digest))

    # -- levels and layers -----------------------------------------------------------------------------------------

    @cached_property
    def level_names(self) -> tuple[str, ...]:
        """Names of the levels, finest first."""
        return tuple(level.name for level in self.levels)

    def level(self, name: str) -> Level:
        """The level of that name.

        Raises:
            UnknownLevelError: the machine has no such level; lists those it has.
        """
        return self.levels[self.index(name)]

    def index(self, name: str) -> int:
        """Position of a level, the finest being 0. Raises UnknownLevelError."""
        if name in self.level_names:
            return self.level_names.index(name)
        known = f"its levels are {', '.join(self.level_names)}"
        raise UnknownLevelError(
            f"machine {self.name} has no level {name!r}", hint=did_you_mean(name, self.level_names) + known
        )

    @cached_property
    def program_level(self) -> Level:
        """The level whose units run tile programs."""
        return next(level for level in self.levels if level.kind == "program")

    @cached_property
    def tensor_level(self) -> Level:
        """The level that owns the memory of scope "global": each of its units holds its own tensors."""
        return self.level(self.layer_for("global").level)

    def layer(self, name: str) -> MemoryLayer:
        """The memory layer of that name.

        Raises:
            UnknownLayerError: the machine has no such layer; lists those it has.
        """
        names = tuple(layer.name for layer in self.memory)
        if name in names:
            return self.memory[names.index(name)]
        known = ", ".join(f"{m.name} ({m.title})" if m.title else m.name for m in self.memory)
        raise UnknownLayerError(
            f"machine {self.name} has no memory layer {name!r}",
            hint=f"{did_you_mean(name, names)}its layers are {known}",
        )

    def layer_for(self, scope: str) -> MemoryLayer:
        """The layer that holds buffers of a scope: "fragment", "shared", "global" or "host".

        Raises:
            UnknownLayerError: no layer has that scope.
        """
        for layer in self.memory:
            if scope in layer.scopes:
                return layer
        raise UnknownLayerError(f"machine {self.name} has no memory layer of scope {scope!r}")

    # -- counts, capacity, rates ---------------------------------------------------------------------------------------

    def count(self, level: str, within: str | None = None) -> int:
        """Units of `level` in one unit of `within`, or in the whole machine; clusters count at their maximum size.

        Raises:
            UsageError: `within` is the finer level.
        """
        fine = self.index(level)
        coarse = len(self.levels) if within is None else self.index(within)
        if within is not None and coarse < fine:
            raise UsageError(f"{one(within)} holds no {level}: {level} is the coarser level of machine {self.name}")
        ends = {fine, coarse}
        # Clusters are made at launch; between two other levels they play no part.
        chain = [i for i in range(fine, coarse + 1) if i in ends or self.levels[i].kind != "cluster"]
        return math.prod(_per_parent(self, i, j) for i, j in zip(chain, chain[1:], strict=False))

    @property
    def program_units(self) -> int:
        """Units that execute programs in one unit that owns tensors, such as the SMs of a GPU."""
        return self.count(self.program_level.name, self.tensor_level.name)

    def capacity(self, layer: str, threads: int | None = None) -> int:
        """Bytes of a layer that one tile may take at most; less where a program of `threads` threads reaches less."""
        found = self.layer(layer)
        most = found.capacity if found.per_program_max is None else found.per_program_max
        if threads is not None and found.per_thread_max is not None:
            most = min(most, threads * found.per_thread_max)
        return most

    def residency(
        self, *, threads: int, shared_bytes: int = 0, registers_per_thread: int = 0, fragment_bytes: int = 0
    ) -> int:
        """Number of programs of a size that one physical program unit runs at once; 0 if not even one fits.

        Args:
            threads: of one program.
            shared_bytes: bytes that one program takes of the layer of scope "shared".
            registers_per_thread: 32-bit registers of one thread, or else
            fragment_bytes: bytes that one program's fragments take of the layer of scope "fragment".
        """
        program, fragment = self.program_level, self.layer_for("fragment")
        if threads > (program.max_threads_per_program or threads):
            return 0
        register_bytes = registers_per_thread * REGISTER_BYTES
        if register_bytes > (fragment.per_thread_max or register_bytes):
            return 0
        asked: dict[str, int] = {}
        wanted = (("shared", shared_bytes), ("fragment", fragment_bytes or register_bytes * threads))
        for scope, size in wanted:
            layer = self.layer_for(scope)
            asked[layer.name] = asked.get(layer.name, 0) + size
        limits = [program.max_programs]
        if program.max_threads is not None:
            step = _group_step(self, fragment)
            limits.append(program.max_threads // (math.ceil(threads / step) * step))
        for name, size in asked.items():
            layer = self.layer(name)
            if size > self.capacity(name, threads):
                return 0
            taken = _allocated(self, layer, size, threads)
            if layer.level == program.name and taken:
                limits.append(layer.capacity // taken)
        return min(limits)

    def rate(self, level: str, unit: str, dtype: str, *, sustained: bool = False) -> float:
        """Operations/s of one unit of `level`, e.g. rate("device", "tensor", "float16").

        Args:
            level: a program, cluster or unit level.
            unit: kind of arithmetic, as the description names it.
            dtype: data type, as TileLang names it.
            sustained: what well-tuned programs reach instead of the peak.

        Raises:
            UnsupportedError: the level has no such arithmetic or not for that data type; lists the available one.
            UsageError: a level of threads, which share the arithmetic of their program.
        """
        kinds, factor = _compute(self, level)
        found = next((kind for kind in kinds if kind.name == unit), None)
        if found is None:
            known = ", ".join(kind.name for kind in kinds) or "none"
            raise UnsupportedError(
                f"{one(level)} of machine {self.name} has no {unit!r} arithmetic", hint=f"it has: {known}"
            )
        by_dtype = dict(found.rates)
        # Variants of a format without infinities or negative zero compute at the rate of the format.
        plain = dtype if dtype in by_dtype else dtype.removesuffix("uz").removesuffix("fn")
        if plain not in by_dtype:
            raise UnsupportedError(
                f"the {unit} unit of machine {self.name} does not compute in {dtype}",
                hint=f"it computes in {', '.join(by_dtype)}",
            )
        return by_dtype[plain] * factor * (found.efficiency if sustained else 1.0)

    def rates(self, level: str) -> dict[str, dict[str, float]]:
        """Peak operations/s of one unit of `level`: arithmetic -> data type -> rate. Raises UsageError as `rate`."""
        kinds, factor = _compute(self, level)
        return {kind.name: {dtype: each * factor for dtype, each in kind.rates} for kind in kinds}

    def has(self, capability: str, level: str | None = None) -> bool:
        """Whether the machine, or `level` and the networks of its units, lists a capability."""
        levels = self.levels if level is None else (self.level(level),)
        networks = [n for n in self.networks if level in (None, n.level)]
        listed = [at.capabilities for at in levels] + [net.capabilities for net in networks]
        if level is None:
            listed.append(self.capabilities)
        return any(capability in names for names in listed)

    # -- networks ------------------------------------------------------------------------------------------------------

    def network(self, level: str, within: str | None = None) -> Network | None:
        """The best network between units of `level`, linking all in one unit of `within` if given; or None."""
        self.index(level)
        inner = 0 if within is None else self.index(within)
        return next((net for net in _networks(self, level) if _top(self, net) >= inner), None)

    def connects(self, level: str, within: str | None = None) -> bool:
        """Whether networks link all units of `level` within one unit of `within`, or in the whole machine."""
        here = self.index(level)
        outer = len(self.levels) if within is None else self.index(within)
        if here >= outer or self.count(level, within) == 1:
            return True
        tops = [_top(self, net) for net in _networks(self, level)]
        # A unit also uses the networks between the units that contain it.
        return any(top >= outer or self.connects(self.level_names[top], within) for top in tops)


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


def _threads(machine: Description, program: Level) -> int:
    groups = [level.threads or 1 for level in machine.levels if level.kind == "thread_group"]
    return program.max_threads_per_program or groups[-1]


def _group_step(machine: Description, layer: MemoryLayer) -> int:
    return machine.level(layer.granularity_per).threads or 1 if layer.granularity_per else 1


def _allocated(machine: Description, layer: MemoryLayer, size: int, threads: int) -> int:
    """Bytes of one instance that a request for `size` really takes."""
    parts = math.ceil(threads / _group_step(machine, layer)) if layer.granularity_per else 1
    each = math.ceil(size / parts / layer.granularity) * layer.granularity
    return parts * each + layer.reserved_per_program


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
        return source.compute, float(machine.count(source.name, level))
    return source.compute, 1.0 / machine.count(level, source.name)


def _top(machine: Description, net: Network) -> int:
    """Position of the level whose one unit the network spans; one past the last for the whole machine."""
    return len(machine.levels) if net.within is None else machine.index(net.within)


def _networks(machine: Description, level: str) -> list[Network]:
    return [net for net in machine.networks if net.level == level]
