# SPDX-License-Identifier: MIT
"""Demands of operations: seconds of a machine's arithmetic, memories and links, from its description."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from copy import copy
from functools import lru_cache

from tilescale.collectives.links import SharedLink
from tilescale.collectives.routes import Sizes
from tilescale.errors import TileScaleError
from tilescale.hda import Machine, MemoryLayer
from tilescale.hda.route import Path

WIDER = {"float64": (), "float32": ("float64",), "tfloat32": ("float32",), "int32": ("float32",), "int64": ("int32",)}
"""Wider types in which a data type is computed if no unit has it. All others are computed in float32."""


class Rates:
    """A machine's numbers in the form in which steps need them."""

    def __init__(self, machine: Machine):
        self.machine = machine
        level = machine.program_level
        self.units = machine.rates(level.name)
        self.places = 1 if level == machine.tensor_level else machine.count(level.name, machine.tensor_level.name)
        self.layers = {scope: _layer(machine, scope) for scope in ("fragment", "shared", "global")}

    @property
    def kinds(self) -> dict[str, str]:
        """Resource name -> what kind of resource it is."""
        layers = [name for layer in self.machine.memory for name in (layer.name, cache_name(layer))]
        return {**dict.fromkeys(self.units, "compute"), **dict.fromkeys(layers, "memory")}

    def arithmetic(self, operations: Mapping[tuple[str, str], float]) -> dict[Hashable, float]:
        """Demands of one program for operations by unit and data type: `{("vector", "float32"): 4096}`."""
        demands: dict[Hashable, float] = {}
        for (unit, dtype), count in operations.items():
            name, rate = self._unit(unit, dtype)
            demands[name] = demands.get(name, 0.0) + count / rate
        return demands

    def product(self, operations: float, dtype: str) -> dict[Hashable, float]:
        """Demands of one program for a GEMM, on the unit that is fastest at it."""
        name, rate = self._fastest(dtype)
        return {name: operations / rate}

    @lru_cache(maxsize=256)  # noqa: B019 - one object a run
    def _unit(self, unit: str, dtype: str) -> tuple[str, float]:
        """The unit and type of a computation: the unit itself, else the vector unit, in this or a wider type."""
        for name in (unit, "vector"):
            for kind in _fallbacks(dtype):
                if kind in self.units.get(name, ()):
                    return name, self._sustained(name, kind)
        return self._fastest(dtype)

    @lru_cache(maxsize=256)  # noqa: B019 - one object a run
    def _fastest(self, dtype: str) -> tuple[str, float]:
        plain = dtype.removesuffix("uz").removesuffix("fn")
        # The precision of tfloat32 is what such machines multiply float32 in.
        for kind in (plain, *(("tfloat32",) if plain == "float32" else ()), *_fallbacks(plain)[1:]):
            able = [(self._sustained(unit, kind), unit) for unit, rates in self.units.items() if kind in rates]
            if able and (kind != "float32" or not self._has("tfloat32")):
                rate, unit = max(able)
                return unit, rate
        rate, unit = max((rate, unit) for unit, rates in self.units.items() for rate in rates.values())
        return unit, rate

    def _has(self, dtype: str) -> bool:
        return any(dtype in rates for rates in self.units.values())

    def _sustained(self, unit: str, dtype: str) -> float:
        return self.machine.rate(self.machine.program_level.name, unit, dtype, sustained=True)

    # -- memory --------------------------------------------------------------------------------------------------------

    def on_chip(self, scope: str, nbytes: float) -> dict[Hashable, float]:
        """Demand for moving bytes in or out of a layer that each program unit has for itself; {} if that is free."""
        layer = self.layers[scope]
        rate = bandwidth(layer)
        return {layer.name: nbytes / rate} if rate and nbytes else {}

    def latency(self, scope: str) -> float:
        """Seconds from a load to its value."""
        return self.layers[scope].latency

    # -- networks ------------------------------------------------------------------------------------------------------

    @lru_cache(maxsize=4096)  # noqa: B019
    def path(self, a: int, b: int, sizes: Sizes) -> Path:
        """The route between two units that own tensors."""
        return self.machine.path(self.machine.tensor_level.name, a, b, sizes=dict(sizes))

    def over(self, path: Path, nbytes: float, share: float) -> dict[Hashable, float]:
        """Demands on the links of a route for bytes that are moved at a share of its bandwidth."""
        return {SharedLink.of(hop): nbytes / (hop.bandwidth * share) for hop in path.hops}


def _layer(machine: Machine, scope: str) -> MemoryLayer:
    try:
        return machine.layer_for(scope)
    except TileScaleError:
        return machine.layer_for("global")


def _fallbacks(dtype: str) -> tuple[str, ...]:
    plain = dtype.removesuffix("uz").removesuffix("fn")
    return plain, *WIDER.get(plain, ("float32",))


def bandwidth(layer: MemoryLayer) -> float | None:
    """Bandwidth that well-tuned programs reach, bytes/s."""
    return layer.sustained or layer.bandwidth


def cache_name(layer: MemoryLayer) -> str:
    """Resource name of the cache in front of a layer."""
    return f"{layer.name} cache"


class TileCache:
    """Tiles in the cache in front of a tensor-owning unit's memory: those touched last, as far as they fit.

    Programs that run at the same time read the same tile at about the same time, in any order of recording; so a
    touched tile stays while `together` more of them start. `history`: the same for caches with the same past.
    """

    def __init__(self, capacity: int, together: int):
        self.capacity, self.together = capacity, together
        self._tiles: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()
        self._bytes = 0
        self._programs = 0
        self.history = 0

    def starts(self, count: int) -> None:
        """Start `count` more programs."""
        self._programs += count
        self.history = hash((self.history, count, self.together))

    def copy(self) -> TileCache:
        """Another cache with the same tiles."""
        other = copy(self)
        other._tiles = self._tiles.copy()
        return other

    def holds(self, tile: Hashable, nbytes: int) -> bool:
        """Whether the cache had a tile, which it has from now on."""
        self.history = hash((self.history, tile, nbytes))
        known = self._tiles.pop(tile, None)
        self._tiles[tile] = (nbytes, self._programs)
        self._bytes += nbytes - (known[0] if known else 0)
        while self._bytes > self.capacity:
            oldest, (size, program) = next(iter(self._tiles.items()))
            if program > self._programs - self.together:
                break
            del self._tiles[oldest]
            self._bytes -= size
        return known is not None
