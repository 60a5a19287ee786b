# SPDX-License-Identifier: MIT
"""Routes between two units of a machine: which links a transfer takes, how fast, by which mechanisms.

A unit uses the networks of its own level and those of the units that contain it: a device of one node reaches a device
of another through the network between nodes. One network is enough in most machines; where none is, routes over several
are searched as a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from tilescale.errors import NoPathError, UnsupportedError
from tilescale.hda import topology
from tilescale.hda.description import Description
from tilescale.hda.model import Mechanism, Network
from tilescale.hda.place import UnitPlace, locate

TYPICAL_BYTES = 1 << 20
"""Routes are compared by the time of a transfer of this size: a tile, not a word and not a tensor."""

SEARCH_LIMIT = 4096
"""Units up to which routes over several networks are searched."""


class Endpoint(NamedTuple):
    """A unit, by level and number over the whole machine, or a switch, by its network and the number of its place."""

    level: str
    number: int

    def __str__(self) -> str:
        return f"{self.level} {self.number}"


@dataclass(frozen=True)
class Hop:
    """One directed link of a route. Transfers whose routes share a hop share its bandwidth."""

    network: str
    source: Endpoint
    target: Endpoint
    bandwidth: float
    latency: float

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} ({self.network})"


@dataclass(frozen=True)
class Path:
    """A route from unit `a` to unit `b` of a level.

    Attributes:
        hops: the links in order; none between a unit and itself, or between thread groups of one program.
        bandwidth: of the slowest hop, bytes/s.
        latency: of all hops, s.
        mechanisms: those that every hop offers, best first, with their rates on this path.
        reaches: the memory layer at the far side that transfers read and write.
    """

    level: str
    a: int
    b: int
    hops: tuple[Hop, ...]
    bandwidth: float
    latency: float
    mechanisms: tuple[Mechanism, ...]
    reaches: str

    @property
    def networks(self) -> tuple[str, ...]:
        """Names of the networks along the route, each once, in order."""
        return tuple(dict.fromkeys(hop.network for hop in self.hops))

    def time(self, nbytes: float, mechanism: str | None = None, operation: str = "put") -> float:
        """Seconds for a transfer that has the path to itself.

        Args:
            nbytes: how much.
            mechanism: by which; None for the fastest, or for the links alone where the path has no mechanisms.
            operation: "put", "get" or "reduce".

        Raises:
            UnsupportedError: no such mechanism on this path, or it does not offer the operation.
        """
        if mechanism is None and not self.mechanisms:
            return self.latency + nbytes / self.bandwidth
        offers = [m for m in self.mechanisms if mechanism in (None, m.name) and m.rate(operation) is not None]
        if not offers:
            wanted = f"{operation} by {mechanism}" if mechanism else operation
            known = ", ".join(m.name for m in self.mechanisms)
            raise UnsupportedError(
                f"no {wanted} from {self.level} {self.a} to {self.level} {self.b}", hint=f"its mechanisms are {known}"
            )
        return self.latency + min(m.seconds(nbytes, operation, bandwidth=self.bandwidth) for m in offers)


def path(machine: Description, level: str, a: int, b: int, sizes: Mapping[str, int | Sequence[int]]) -> Path:
    """See `Machine.path`."""
    at_a, at_b = locate(machine, level, a, sizes), locate(machine, level, b, sizes)
    if a == b:
        return Path(level, a, b, (), float("inf"), 0.0, (), "")
    if machine.level(level).kind == "thread_group":
        return _between_thread_groups(machine, level, a, b, at_a, at_b)
    found = [_through(net, at_a, at_b) for net in machine.networks]
    routes = [hops for hops in found if hops] or [_search(machine, level, at_a, at_b)]
    hops = min(routes, key=_typical_time)
    if not hops:
        raise _no_path(machine, level, a, b, at_a, at_b)
    return _as_path(machine, level, a, b, hops)


def _as_path(machine: Description, level: str, a: int, b: int, hops: tuple[Hop, ...]) -> Path:
    narrowest = {hop.network: min(h.bandwidth for h in hops if h.network == hop.network) for hop in hops}
    nets = [net for name in narrowest for net in machine.networks if net.name == name]
    offered = [tuple(_scaled(m, narrowest[net.name] / net.bandwidth) for m in net.mechanisms) for net in nets]
    return Path(
        level, a, b, hops,
        bandwidth=min(narrowest.values()),
        latency=sum(hop.latency for hop in hops),
        mechanisms=_common(offered),
        reaches=nets[-1].reaches,
    )  # fmt: skip


def _scaled(mechanism: Mechanism, share: float) -> Mechanism:
    """The mechanism on one link that has only a share of its unit's bandwidth."""
    return mechanism.map(lambda operation, rate: rate * share)


def _common(offered: Sequence[tuple[Mechanism, ...]]) -> tuple[Mechanism, ...]:
    """Mechanisms that all networks along the route offer, each as slow as its slowest part."""
    found = offered[0]
    for others in offered[1:]:
        by_name = {m.name: m for m in others}
        found = tuple(_slower(m, by_name[m.name]) for m in found if m.name in by_name)
    return found


def _slower(one: Mechanism, other: Mechanism) -> Mechanism:
    def least(operation: str, rate: float) -> float | None:
        there = other.rate(operation)
        return None if there is None else min(rate, there)

    return replace(one.map(least), startup=one.startup + other.startup)


def _typical_time(hops: tuple[Hop, ...]) -> float:
    if not hops:
        return float("inf")
    return sum(hop.latency for hop in hops) + TYPICAL_BYTES / min(hop.bandwidth for hop in hops)


def _between_thread_groups(machine: Description, level: str, a: int, b: int, at_a: UnitPlace, at_b: UnitPlace) -> Path:
    program = machine.program_level.name
    if at_a[program] != at_b[program]:
        raise NoPathError(
            f"{level} {a} and {level} {b} of machine {machine.name} belong to different programs",
            hint=f"exchange between their units of level {program!r}",
        )
    layer = machine.layer_for("shared")
    return Path(level, a, b, (), layer.bandwidth or float("inf"), layer.latency, (), layer.name)


def _through(net: Network, at_a: UnitPlace, at_b: UnitPlace) -> tuple[Hop, ...]:
    """The route over one network, or () where it does not connect the two."""
    if net.level not in at_a or at_a[net.level] == at_b[net.level]:
        return ()
    if net.within is not None and at_a[net.within] != at_b[net.within]:
        return ()
    scope = 0 if net.within is None else at_a[net.within]
    if net.topology == "switch":
        # With separate ports each finer unit is an endpoint, else the whole unit is.
        has_port = net.ports is not None and net.ports in at_a
        end, width = (net.ports or "", net.link_bandwidth) if has_port else (net.level, net.bandwidth)
        switch, half = Endpoint(f"{net.name} switch", scope), net.latency / 2
        return (
            Hop(net.name, Endpoint(end, at_a[end]), switch, width, half),
            Hop(net.name, switch, Endpoint(end, at_b[end]), width, half),
        )
    count, local_a, local_b = at_a.size(net), at_a.local(net), at_b.local(net)
    base = at_a[net.level] - local_a
    steps = topology.route(net, count, local_a, local_b)
    return tuple(
        Hop(net.name, Endpoint(net.level, base + i), Endpoint(net.level, base + j), width, net.latency)
        for (i, j), width in ((pair, topology.width(net, *pair)) for pair in pairwise(steps))
    )


def _search(machine: Description, level: str, at_a: UnitPlace, at_b: UnitPlace) -> tuple[Hop, ...]:
    """The shortest route over several networks, or () if there is none."""
    apart = [name for name in at_a if at_a[name] != at_b[name]]
    physical = [n for n in machine.networks if n.level in apart and machine.level(n.level).kind == "unit"]
    if not physical or any(machine.count(n.level) > SEARCH_LIMIT for n in physical):
        return ()
    import networkx  # a fifth of a second to import, and few machines need it

    graph = networkx.DiGraph()
    for hop in (hop for net in physical for hop in _all_hops(machine, net)):
        weight = _typical_time((hop,))
        if weight < graph.get_edge_data(hop.source, hop.target, {"weight": float("inf")})["weight"]:
            graph.add_edge(hop.source, hop.target, weight=weight, hop=hop)
    # Units are inside coarser ones: going out and coming in are free, and only where the two are in different ones.
    for fine, coarse in pairwise(apart):
        graph.add_edge(Endpoint(fine, at_a[fine]), Endpoint(coarse, at_a[coarse]), weight=0.0)
        graph.add_edge(Endpoint(coarse, at_b[coarse]), Endpoint(fine, at_b[fine]), weight=0.0)
    try:
        ends = Endpoint(level, at_a[level]), Endpoint(level, at_b[level])
        nodes = networkx.shortest_path(graph, *ends, weight="weight")
    except (networkx.NetworkXNoPath, networkx.NodeNotFound):
        return ()
    return tuple(graph.edges[pair]["hop"] for pair in pairwise(nodes) if "hop" in graph.edges[pair])


def _all_hops(machine: Description, net: Network) -> Iterator[Hop]:
    count = machine.count(net.level, net.within)
    for scope in range(1 if net.within is None else machine.count(net.within)):
        units = [Endpoint(net.level, scope * count + i) for i in range(count)]
        if net.topology == "switch":
            switch = Endpoint(f"{net.name} switch", scope)
            for unit in units:
                yield Hop(net.name, unit, switch, net.bandwidth, net.latency / 2)
                yield Hop(net.name, switch, unit, net.bandwidth, net.latency / 2)
            continue
        for i, j in topology.edges(net, count):
            yield Hop(net.name, units[i], units[j], topology.width(net, i, j), net.latency)


def _no_path(machine: Description, level: str, a: int, b: int, at_a: UnitPlace, at_b: UnitPlace) -> NoPathError:
    hints = []
    for net in machine.networks:
        if net.level in at_a and net.within is not None and at_a[net.within] != at_b[net.within]:
            ends = f"{net.within} {at_a[net.within]} and {at_b[net.within]}"
            hints.append(f"{net.name} connects {net.level}s within one {net.within}, and these are in {ends}")
    layer = machine.layer_for("global")
    if layer.level in at_a and at_a[layer.level] == at_b[layer.level] and layer.level != level:
        hints.append(f"both can use {layer.name} ({layer.title}) of their {layer.level}")
    return NoPathError(
        f"no network of machine {machine.name} connects {level} {a} and {level} {b}",
        hint="; ".join(hints) or f"the description lists no network of level {level!r} or coarser that links them",
    )


def advice_at_the_end(machine: Description, level: str) -> str:
    """Advice for a program whose last unit of a level has no next neighbour."""
    if any(net.level == level and net.topology == "mesh" for net in machine.networks):
        return "units at an edge have no neighbour there: put the statement under a condition, if rank + 1 < size"
    return "wrap it round: (rank + 1) % size"
