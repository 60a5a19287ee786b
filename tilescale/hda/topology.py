# SPDX-License-Identifier: MIT
"""Links and routes inside one network whose units are linked directly: ring, mesh, torus, point-to-point, graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any

from tilescale.hda.model import Network


def dimensions(net: Network, count: int) -> tuple[int, ...]:
    """A ring is a torus of one dimension."""
    return (count,) if net.topology == "ring" else net.dims


def link_count(net: Network, count: int) -> int:
    """Links of one unit, over which its bandwidth is split where the description names no `link_bandwidth`."""
    if net.topology in ("ring", "mesh", "torus"):
        return max(1, sum(min(2, n - 1) for n in dimensions(net, count)))
    if net.topology == "graph":
        ends = [unit for link in net.links for unit in link.between]
        return max((ends.count(unit) for unit in set(ends)), default=1)
    return max(1, count - 1) if net.topology == "point-to-point" else 1


def width(net: Network, i: int, j: int) -> float:
    """Bandwidth of the link between neighbours `i` and `j` in one direction, bytes/s."""
    for link in net.links:
        if set(link.between) == {i, j} and link.bandwidth is not None:
            return link.bandwidth
    return net.link_bandwidth


def route(net: Network, count: int, a: int, b: int) -> list[int]:
    """Units on the route from `a` to `b`, both included; [] if they are not linked.

    On meshes the fastest dimension comes first (dimension-ordered routing); rings and tori take the shorter direction.
    """
    if net.topology == "point-to-point":
        return [a, b]
    if net.topology == "graph":
        return _shortest(net, a, b)
    dims, wraps = dimensions(net, count), net.topology != "mesh"
    here, there = _coordinates(a, dims), _coordinates(b, dims)
    steps = [a]
    for axis in reversed(range(len(dims))):
        for position in _walk(here[axis], there[axis], dims[axis], wraps):
            here[axis] = position
            steps.append(_number(here, dims))
    return steps


def edges(net: Network, count: int) -> Iterator[tuple[int, int]]:
    """Every directed link between neighbours, by the units' positions in the network."""
    if net.topology == "point-to-point":
        yield from ((i, j) for i, j in product(range(count), repeat=2) if i != j)
    elif net.topology == "graph":
        for link in net.links:
            yield link.between
            yield link.between[1], link.between[0]
    else:
        dims, wraps = dimensions(net, count), net.topology != "mesh"
        for unit in range(count):
            for axis, size in enumerate(dims):
                there = _coordinates(unit, dims)
                there[axis] = (there[axis] + 1) % size if wraps else there[axis] + 1
                if size > 1 and there[axis] < size:
                    neighbour = _number(there, dims)
                    yield unit, neighbour
                    yield neighbour, unit


def _walk(here: int, there: int, size: int, wraps: bool) -> Iterator[int]:
    forward = (there - here) % size
    step = (1 if forward <= size - forward else -1) if wraps else (1 if there > here else -1)
    distance = min(forward, size - forward) if wraps else abs(there - here)
    for _ in range(distance):
        here = (here + step) % size
        yield here


def _coordinates(number: int, dims: tuple[int, ...]) -> list[int]:
    found = []
    for size in reversed(dims):
        number, position = divmod(number, size)
        found.append(position)
    return found[::-1]


def _number(coordinates: list[int], dims: tuple[int, ...]) -> int:
    return sum(c * math.prod(dims[axis + 1 :]) for axis, c in enumerate(coordinates))


def _shortest(net: Network, a: int, b: int) -> list[int]:
    import networkx  # a fifth of a second to import, and few machines need it

    try:
        return list(networkx.shortest_path(_graph(net), a, b, weight="weight"))
    except (networkx.NetworkXNoPath, networkx.NodeNotFound):
        return []


@lru_cache(maxsize=16)
def _graph(net: Network) -> Any:
    import networkx

    graph = networkx.Graph()
    for link in net.links:
        # Fewest hops first, and among those the wider links.
        graph.add_edge(*link.between, weight=1 + net.bandwidth / width(net, *link.between) * 1e-6)
    return graph
