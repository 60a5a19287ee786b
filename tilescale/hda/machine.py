# SPDX-License-Identifier: MIT
"""A machine: its levels, memory layers and networks, and every question that the rest of TileScale asks of it."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING

from tilescale.errors import UnknownLayerError, UnknownLevelError
from tilescale.hda import query
from tilescale.hda.model import Identify, Level, MemoryLayer, Network
from tilescale.hda.names import BuiltIn
from tilescale.hda.schema import spec

if TYPE_CHECKING:
    from tilescale.hda.route import Path

__all__ = ["Machine"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A hierarchical machine, read from a description and frozen. Equal and hashed by content.

    Attributes:
        levels: finest first. Their names are the description's.
        memory: layers, finest first.
        networks: what connects units of one level.
        capabilities: what the machine as a whole can do.
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

    # -- loading --------------------------------------------------------------------------------------------------

    @staticmethod
    def load(name_or_path: BuiltIn | str | PathLike[str]) -> Machine:
        """The machine of that name, or of a description file.

        Raises:
            UnknownMachineError: neither a built-in name nor a file; lists the built-in ones.
            MachineFileError: a description that does not follow the schema.
        """
        from tilescale.hda.load import load

        return load(name_or_path)

    @staticmethod
    def detect() -> Machine:
        """The machine this process runs on: its GPUs if there are any that a description knows, else its CPUs."""
        from tilescale.hda.detect import detect

        return detect()

    @staticmethod
    def names() -> tuple[str, ...]:
        """The built-in machines, sorted."""
        from tilescale.hda.load import names

        return names()

    @cached_property
    def digest(self) -> str:
        """A stable hash of the content, 16 hexadecimal digits; part of cache keys."""
        parts = (self.levels, self.memory, self.networks, self.capabilities)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash((self.name, self.digest))

    def __repr__(self) -> str:
        return f"Machine({self.name!r})"

    def _repr_html_(self) -> str:
        """A notebook's view of it."""
        from tilescale.hda.draw.svg import picture

        return picture(self)

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
            f"machine {self.name} has no level {name!r}", hint=_suggest(name, self.level_names) + known
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
            f"machine {self.name} has no memory layer {name!r}", hint=f"{_suggest(name, names)}its layers are {known}"
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

    # -- counts, capacity, rates (query.py) ----------------------------------------------------------------------------

    def count(self, level: str, within: str | None = None) -> int:
        """Units of `level` in one unit of `within`, or in the whole machine; clusters count at their maximum size."""
        return query.count(self, level, within)

    def capacity(self, layer: str, threads: int | None = None) -> int:
        """Bytes of a layer that one tile may take at most; less where a program of so many `threads` reaches less."""
        return query.capacity(self.layer(layer), threads)

    def residency(
        self, *, threads: int, shared_bytes: int = 0, registers_per_thread: int = 0, fragment_bytes: int = 0
    ) -> int:
        """How many programs of that size one physical program unit runs at once; 0 if not even one fits.

        Args:
            threads: of one program.
            shared_bytes: what one program takes of the layer of scope "shared".
            registers_per_thread: 32-bit registers of one thread, or else
            fragment_bytes: what one program's fragments take of the layer of scope "fragment".
        """
        return query.residency(self, threads, shared_bytes, registers_per_thread, fragment_bytes)

    def rate(self, level: str, unit: str, dtype: str, *, sustained: bool = False) -> float:
        """Operations/s of one unit of `level`, e.g. rate("device", "tensor", "float16").

        Args:
            level: a program, cluster or unit level.
            unit: kind of arithmetic, as the description names it.
            dtype: data type, as TileLang names it.
            sustained: what well-tuned programs reach instead of the peak.

        Raises:
            UnsupportedError: the level has no such arithmetic or not for that data type; lists what it has.
        """
        return query.rate(self, level, unit, dtype, sustained)

    def rates(self, level: str) -> dict[str, dict[str, float]]:
        """Peak operations/s of one unit of `level`: kind of arithmetic -> data type -> rate."""
        return query.rates(self, level)

    def has(self, capability: str, level: str | None = None) -> bool:
        """Whether the machine, or `level` and the networks of its units, lists a capability."""
        return query.has(self, capability, level)

    # -- networks (route.py) --------------------------------------------------------------------------------------

    def network(self, level: str, within: str | None = None) -> Network | None:
        """The best network between units of `level`, linking all in one unit of `within` if given; or None."""
        return query.network(self, level, within)

    def connects(self, level: str, within: str | None = None) -> bool:
        """Whether networks link all units of `level` that lie in one unit of `within`, or in the whole machine."""
        return query.connects(self, level, within)

    def path(self, level: str, a: int, b: int, *, sizes: Mapping[str, int | Sequence[int]] | None = None) -> Path:
        """The best route between units `a` and `b` of `level`.

        Args:
            level: whose units they are.
            a, b: unit numbers over the whole machine, row-major, the coarsest level slowest.
            sizes: what a launch uses where that is not all: units of a level in one unit of the next coarser level
                that is launched. A tuple for the program level lays the programs out on a mesh, slowest first.

        Raises:
            NoPathError: nothing connects them.
            PeerOutOfRangeError: there is no such unit.
        """
        from tilescale.hda.route import path

        return path(self, level, a, b, sizes or {})


def _suggest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}? " if close else ""
