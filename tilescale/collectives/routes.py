# SPDX-License-Identifier: MIT
"""Routes between many units at once, as arrays of link numbers.

The routes are those of `Machine.path`. On other networks than these two kinds they are found pair by pair:

- through switches a route is one way up and one down;
- on grids (rings, meshes, tori) a route is a walk along each dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tilescale.collectives.round_schedule import Numbers
from tilescale.hda import Endpoint, Hop, Machine, Mechanism, Network, Path
from tilescale.hda.place import UnitPlace, locate
from tilescale.hda.topology import dimensions, link_count

GRIDS = ("ring", "mesh", "torus")

Sizes = tuple[tuple[str, int | tuple[int, ...]], ...]
"""Units of launched levels, as pairs: what `Machine.path` takes as a mapping, hashable."""


@dataclass(frozen=True, eq=False)
class RouteBundle:
    """Routes of several messages.

    Attributes:
        hops: numbers of the links of all messages, one message after the other.
        begins: where the links of each message begin in `hops`; every message has at least one.
        latency: of each message, s.
        carrier: for each message, the position in `Routes.carriers` of the mechanisms on its route.
    """

    hops: Numbers
    begins: Numbers
    latency: np.ndarray
    carrier: Numbers


@dataclass(frozen=True)
class Carriers:
    """Carriers of messages on routes of one kind: the bandwidth of the slowest link, and mechanisms on it."""

    bandwidth: float
    mechanisms: tuple[Mechanism, ...]
    reaches: str


class Routes:
    """Routes between the units of a level that take part in a collective, numbered from 0."""

    def __init__(self, machine: Machine, level: str, units: Sequence[int], sizes: Mapping[str, int | Sequence[int]]):
        self.machine, self.level, self.sizes = machine, level, sizes
        self.units = np.asarray(units, np.int64)
        self.hops: list[Hop] = []
        self.carriers: list[Carriers] = []
        self._hop_numbers: dict[Hop, int] = {}
        self._pairs: dict[tuple[int, int], tuple[list[int], float, int]] = {}
        self._halves: dict[tuple[int, int], Numbers] = {}
        self._steps: dict[str, Numbers] = {}
        self.places = [locate(machine, level, int(unit), sizes) for unit in units]

    def bundle(self, source: Numbers, target: Numbers) -> RouteBundle:
        """The routes of messages from `source[i]` to `target[i]`, positions in `units`."""
        kinds = self._connecting(source, target)
        masks = np.unique(kinds)
        if len(masks) == 1:
            return self._of_kind(int(masks[0]), source, target)
        members = [np.flatnonzero(kinds == mask) for mask in masks]
        parts = [self._of_kind(int(m), source[i], target[i]) for m, i in zip(masks, members, strict=True)]
        return _in_order(parts, np.concatenate(members))

    @cached_property
    def bandwidth(self) -> np.ndarray:
        """Bytes/s of each link found until now."""
        return np.array([hop.bandwidth for hop in self.hops])

    # -- kinds of pairs: which networks connect them -------------------------------------------------------------------

    @cached_property
    def _numbers(self) -> dict[str, Numbers]:
        """Level -> number, over the whole machine, of the unit that holds each of ours."""
        return {name: np.array([place[name] for place in self.places]) for name in self.places[0]}

    def _connecting(self, source: Numbers, target: Numbers) -> Numbers:
        """For each pair the networks that connect it, as a bit mask."""
        kinds = np.zeros(len(source), np.int64)
        for bit, net in enumerate(self.machine.networks):
            if net.level not in self._numbers:
                continue
            at = self._numbers[net.level]
            linked = at[source] != at[target]
            if net.within is not None:
                linked &= self._numbers[net.within][source] == self._numbers[net.within][target]
            kinds |= linked.astype(np.int64) << bit
        return kinds

    def _of_kind(self, kind: int, source: Numbers, target: Numbers) -> RouteBundle:
        networks = [net for bit, net in enumerate(self.machine.networks) if kind >> bit & 1]
        if networks and all(net.topology == "switch" for net in networks):
            return self._through_switch(kind, source, target)
        if len(networks) == 1 and networks[0].topology in GRIDS and networks[0].level == self.level:
            return self._over_grid(networks[0], source, target)
        return self._one_by_one(source, target)

    def _path(self, source: int, target: int) -> Path:
        a, b = int(self.units[source]), int(self.units[target])
        return self.machine.path(self.level, a, b, sizes=self.sizes)

    def _carrier(self, path: Path) -> int:
        found = Carriers(path.bandwidth, path.mechanisms, path.reaches)
        if found not in self.carriers:
            self.carriers.append(found)
        return self.carriers.index(found)

    def _hop(self, hop: Hop) -> int:
        if hop not in self._hop_numbers:
            self._hop_numbers[hop] = len(self.hops)
            self.hops.append(hop)
            self.__dict__.pop("bandwidth", None)
        return self._hop_numbers[hop]

    # -- pair by pair --------------------------------------------------------------------------------------------------

    def _one_by_one(self, source: Numbers, target: Numbers) -> RouteBundle:
        found = [self._pair(int(a), int(b)) for a, b in zip(source, target, strict=True)]
        lengths = np.array([len(hops) for hops, _, _ in found])
        return RouteBundle(
            np.array([hop for hops, _, _ in found for hop in hops]),
            np.cumsum(lengths) - lengths,
            np.array([latency for _, latency, _ in found]),
            np.array([carrier for _, _, carrier in found]),
        )

    def _pair(self, a: int, b: int) -> tuple[list[int], float, int]:
        if (a, b) not in self._pairs:
            path = self._path(a, b)
            hops = path.hops or (self._shared_memory(path, self.places[a]),)
            self._pairs[a, b] = [self._hop(hop) for hop in hops], path.latency, self._carrier(path)
        return self._pairs[a, b]

    def _shared_memory(self, path: Path, place: UnitPlace) -> Hop:
        """The hop through shared memory between thread groups of one program, for all of them together."""
        program = self.machine.program_level.name
        end = Endpoint(program, place[program])
        return Hop(path.reaches, end, end, path.bandwidth, path.latency)

    # -- through a switch ----------------------------------------------------------------------------------------------

    def _through_switch(self, kind: int, source: Numbers, target: Numbers) -> RouteBundle:
        path, count = self._path(int(source[0]), int(target[0])), len(source)
        halves = np.stack([self._half(kind, side, source, target) for side in (0, 1)], axis=1)
        return RouteBundle(
            halves.ravel(), 2 * np.arange(count), np.full(count, path.latency), np.full(count, self._carrier(path))
        )

    def _half(self, kind: int, side: int, source: Numbers, target: Numbers) -> Numbers:
        """For each message the route of its source up to the switch (side 0), or of its target down from it; taken from
        one route of that kind."""
        known = self._halves.setdefault((kind, side), np.full(len(self.units), -1))
        ends = target if side else source
        new = np.flatnonzero(known[ends] < 0)
        for unit, at in zip(*np.unique(ends[new], return_index=True), strict=True):
            message = new[at]
            known[unit] = self._hop(self._path(int(source[message]), int(target[message])).hops[side])
        return known[ends]

    # -- over a grid ---------------------------------------------------------------------------------------------------

    def _over_grid(self, net: Network, source: Numbers, target: Numbers) -> RouteBundle:
        """Walk along the fastest dimension first, as `topology.route` does, with all messages at once."""
        count = self.places[0].size(net)
        dims = dimensions(net, count)
        here, goal = self._numbers[self.level][source], self._numbers[self.level][target]
        who, links = [np.arange(len(source))], [self._port(net, here, count, out=True)]
        stride = 1
        for axis in reversed(range(len(dims))):
            size = dims[axis]
            gap = goal // stride % size - here // stride % size
            if net.topology != "mesh":
                around = gap % size
                gap = np.where(around <= size - around, around, around - size)
            step = np.sign(gap)
            for walked in range(int(np.abs(gap).max(initial=0))):
                moving = np.flatnonzero(np.abs(gap) > walked)
                position = here[moving] // stride % size
                there = here[moving] + ((position + step[moving]) % size - position) * stride
                who.append(moving)
                links.append(self._neighbours(net, here[moving], there, 2 * axis + (step[moving] > 0), 2 * len(dims)))
                here = here.copy()
                here[moving] = there
            stride *= size
        who.append(np.arange(len(source)))
        links.append(self._port(net, goal, count, out=False))
        return self._as_bundle(np.concatenate(who), np.concatenate(links), source, target)

    def _as_bundle(self, who: Numbers, links: Numbers, source: Numbers, target: Numbers) -> RouteBundle:
        known = links >= 0
        who, links = who[known], links[known]
        order = np.argsort(who, kind="stable")
        lengths = np.bincount(who, minlength=len(source))
        latencies = np.array([hop.latency for hop in self.hops])[links]
        carrier = self._carrier(self._path(int(source[0]), int(target[0])))
        return RouteBundle(
            links[order],
            np.cumsum(lengths) - lengths,
            np.bincount(who, latencies, minlength=len(source)),
            np.full(len(source), carrier),
        )

    def _neighbours(self, net: Network, here: Numbers, there: Numbers, direction: Numbers, directions: int) -> Numbers:
        table = self._table(net.name, directions)
        codes = here * directions + direction
        new, first = np.unique(codes[table[codes] < 0], return_index=True)
        missing = np.flatnonzero(table[codes] < 0)[first]
        for code, i in zip(new, missing, strict=True):
            table[code] = self._hop(self.machine.path(self.level, int(here[i]), int(there[i])).hops[0])
        return table[codes]

    def _port(self, net: Network, units: Numbers, count: int, out: bool) -> Numbers:
        """The links between units and their routers, where these carry less than a router's links together; else -1."""
        if net.bandwidth >= net.link_bandwidth * link_count(net, count):
            return np.full(len(units), -1)
        table = self._table(f"{net.name} ports", 2)
        for unit in np.unique(units[table[2 * units + out] < 0]):
            ends = Endpoint(self.level, int(unit)), Endpoint(f"{net.name} router", int(unit))
            table[2 * unit + out] = self._hop(Hop(net.name, *(ends if out else ends[::-1]), net.bandwidth, 0.0))
        return table[2 * units + out]

    def _table(self, name: str, columns: int) -> Numbers:
        if name not in self._steps:
            self._steps[name] = np.full(self.machine.count(self.level) * columns, -1)
        return self._steps[name]


def _in_order(parts: Sequence[RouteBundle], order: Numbers) -> RouteBundle:
    """One bundle of several; message i of their concatenation is message order[i]."""
    back = np.argsort(order)
    hops = np.concatenate([part.hops for part in parts])
    lengths = np.concatenate([np.diff(part.begins, append=len(part.hops)) for part in parts])
    begins = (np.cumsum(lengths) - lengths)[back]
    lengths = lengths[back]
    ends = np.cumsum(lengths)
    picked = np.repeat(begins - (ends - lengths), lengths) + np.arange(len(hops))
    return RouteBundle(
        hops[picked],
        ends - lengths,
        np.concatenate([part.latency for part in parts])[back],
        np.concatenate([part.carrier for part in parts])[back],
    )
