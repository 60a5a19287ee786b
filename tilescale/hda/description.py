# SPDX-License-Identifier: MIT
"""Levels, memory layers and networks of a description, found by their names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from tilescale.errors import UnknownLayerError, UnknownLevelError, did_you_mean
from tilescale.hda.model import Identify, Level, MemoryLayer, Network
from tilescale.hda.schema import spec


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
