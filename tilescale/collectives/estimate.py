# SPDX-License-Identifier: MIT
"""Seconds of a collective on a described machine.

Rounds follow one another; the messages of a round are concurrent. A message takes the latency of its route, the
start-up of its mechanism, and its bytes over the bandwidth that the busiest link of its route leaves it: a link needs
as long as all bytes of the round that cross it (maximum load, exact where messages are alike, as in most rounds). The
units' memories, which every byte leaves and enters, may be slower still. Combining streams along with what arrives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from tilescale.collectives.links import CollectivePlan, SharedLink
from tilescale.collectives.round_schedule import Round, RoundSchedule
from tilescale.collectives.routes import Carriers, RouteBundle, Routes
from tilescale.collectives.table import algorithm as record_of
from tilescale.hda import Machine, Mechanism

SEGMENTS = (1, 4, 16, 64, 256)
"""Numbers of segments that pipelined algorithms are tried with, as long as more are faster."""


@dataclass(frozen=True)
class Estimate(CollectivePlan):
    """Cost of a collective on an otherwise idle machine.

    Attributes:
        operation: as in the language.
        rounds: how many steps follow one another.
        link_bytes: bytes over each link.
    """

    operation: str = ""
    rounds: int = 0
    link_bytes: Mapping[SharedLink, float] = field(default_factory=dict)


def estimate(
    machine: Machine,
    level: str,
    operation: str,
    algorithm: str,
    nbytes: float,
    *,
    units: Sequence[int] | None = None,
    shape: tuple[int, ...] | None = None,
    sizes: Mapping[str, int | Sequence[int]] | None = None,
    parts: Sequence[int] = (),
) -> Estimate:
    """Estimate a collective between units of a level.

    Args:
        operation: "allreduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_v", "broadcast" or "barrier".
        algorithm: one of `names(operation)`.
        nbytes: of the whole tensor: the result of an all-gather, the tensor of one unit elsewhere.
        units: numbers of those that take part, in the order of their ranks; None for all of the machine.
        shape: how they are grouped, the innermost groups last; None for how the machine's networks group them.
        sizes: of the launch, as for `Machine.path`.
        parts: of an all-to-all of unequal parts, the bytes from each unit to each, those of unit 0 first; () for equal
            ones.

    Raises:
        UsageError: no such algorithm.
        UnsupportedError: an algorithm that needs a power of two of units.
        NoPathError: nothing connects two units that exchange messages.
    """
    numbers = tuple(range(machine.count(level)) if units is None else units)
    routes = _routes(machine, level, numbers, tuple(sorted((sizes or {}).items())))
    extents = shape or _grouping(routes)
    record = record_of(operation, algorithm)
    network = machine.network(level)
    setup = network.setup(record.library) if network is not None and len(numbers) > 1 else 0.0
    fastest: Estimate | None = None
    for cut in SEGMENTS if operation in record.segmented else SEGMENTS[:1]:
        plan = record.schedule(operation, extents, cut)
        found = _evaluate(routes, record.name, plan, nbytes, parts)
        if fastest is not None and found.seconds >= fastest.seconds:
            break  # more latencies from here on
        fastest = found
    assert fastest is not None
    return replace(fastest, seconds=setup + fastest.seconds)


@lru_cache(maxsize=8)
def _routes(machine: Machine, level: str, units: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> Routes:
    return Routes(machine, level, units, dict(sizes))


def shape_of(
    machine: Machine, level: str, units: Sequence[int], sizes: Mapping[str, int | Sequence[int]]
) -> tuple[int, ...]:
    """Grouping of units by networks: the dimensions of a grid, units within one instance of the level's own network."""
    return _grouping(_routes(machine, level, tuple(units), tuple(sorted(sizes.items()))))


def _grouping(routes: Routes) -> tuple[int, ...]:
    machine, count = routes.machine, len(routes.units)
    network = machine.network(routes.level)
    if network is None:
        return (count,)
    place = routes.places[0]
    inside = sum(network.within is None or other[network.within] == place[network.within] for other in routes.places)
    if count % inside:
        return (count,)
    inner = network.dims if network.dims and math.prod(network.dims) == inside else (inside,)
    return inner if inside == count else (count // inside, *inner)


def _evaluate(routes: Routes, algorithm: str, plan: RoundSchedule, nbytes: float, parts: Sequence[int]) -> Estimate:
    """Each distinct round once: the 2(n-1) rounds of a ring send the same amounts over the same links."""
    piece, of_parts = nbytes / plan.pieces, np.asarray(parts)
    known: dict[tuple[bytes, ...], _Cost] = {}
    times: dict[tuple[bytes, ...], int] = {}
    keys: dict[tuple[int, ...], tuple[bytes, ...]] = {}
    for r in plan.rounds:
        if not len(r.source):
            continue
        key = keys.get(r.traffic) or (
            *(array.tobytes() for array in (r.source, r.target, r.count, r.combine)),
            bytes([r.by_host]),
        )
        keys[r.traffic] = key
        if parts:  # which piece it is says how large it is
            key = (*key, r.first.tobytes())
        times[key] = times.get(key, 0) + 1
        if key not in known:
            size = r.count * (of_parts[r.first] if parts else piece)
            known[key] = _cost(routes, r, size)
    busy, moved = np.zeros(len(routes.hops)), np.zeros(len(routes.hops))
    sent = np.zeros(plan.units)
    for key, cost in known.items():
        busy[: len(cost.busy)] += times[key] * cost.busy
        moved[: len(cost.moved)] += times[key] * cost.moved
        sent += times[key] * cost.sent
    links = {SharedLink.of(routes.hops[i]): i for i in np.flatnonzero(moved)}
    return Estimate(
        algorithm,
        seconds=float(sum(times[key] * cost.seconds for key, cost in known.items())),
        nbytes=round(sent.max(initial=0.0)),
        links={link: float(busy[i]) for link, i in links.items()},
        operation=plan.operation,
        rounds=len(plan.rounds),
        link_bytes={link: float(moved[i]) for link, i in links.items()},
    )


@dataclass(frozen=True, eq=False)
class _Cost:
    """A round: its seconds, for each link seconds in use and bytes, for each unit bytes sent."""

    seconds: float
    busy: np.ndarray
    moved: np.ndarray
    sent: np.ndarray


def _cost(routes: Routes, r: Round, size: np.ndarray) -> _Cost:
    """Cost of a round whose messages have `size` bytes each."""
    bundle = routes.bundle(r.source, r.target)
    startup, share = _carried(routes, bundle, r, size)
    lengths = np.diff(bundle.begins, append=len(bundle.hops))
    moved = np.bincount(bundle.hops, np.repeat(size, lengths), minlength=len(routes.hops))
    busy = np.bincount(bundle.hops, np.repeat(size / share, lengths), minlength=len(routes.hops)) / routes.bandwidth
    slowest = np.maximum.reduceat(busy[bundle.hops], bundle.begins)
    memory = _memory_seconds(routes, bundle, r, size)
    ends = np.maximum(memory[r.source], memory[r.target])
    seconds = bundle.latency + startup + np.maximum(slowest, ends)
    return _Cost(float(seconds.max()), busy, moved, np.bincount(r.source, size, minlength=len(routes.units)))


def _carried(routes: Routes, bundle: RouteBundle, r: Round, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each message the start-up, and the share of its links' bandwidth that the fastest of the initiator's
    mechanisms reaches."""
    startup, share = np.zeros(len(size)), np.ones(len(size))
    by_source = np.bincount(r.source)[r.source]
    for number in np.unique(bundle.carrier):
        carriers = routes.carriers[number]
        offers = _offers(carriers, "host" if r.by_host else "program")
        if not offers:
            continue
        mine = np.flatnonzero(bundle.carrier == number)
        # Transfers that the host starts are started one after the other; programs start all at once.
        starts = [by_source[mine] if m.started_by == "host" else np.ones(len(mine)) for m in offers]
        times = [
            m.seconds(size[mine], bandwidth=carriers.bandwidth, starts=s) for m, s in zip(offers, starts, strict=True)
        ]
        fastest = np.argmin(times, axis=0)
        waits = np.choose(fastest, [m.startup * s for m, s in zip(offers, starts, strict=True)])
        rates = np.choose(fastest, [min(m.put or 0.0, carriers.bandwidth) for m in offers])
        startup[mine] = waits * (size[mine] > 0)
        share[mine] = rates / carriers.bandwidth
    return startup, share


def _offers(carriers: Carriers, starter: str) -> list[Mechanism]:
    able = [m for m in carriers.mechanisms if m.put is not None]
    return [m for m in able if m.started_by == starter and not m.on_request] or able


def _memory_seconds(routes: Routes, bundle: RouteBundle, r: Round, size: np.ndarray) -> np.ndarray:
    """For each unit the time its memory needs to read sent data, write received data, and combine."""
    machine, count = routes.machine, len(routes.units)
    layer = machine.layer(routes.carriers[bundle.carrier[0]].reaches)
    rate = layer.sustained or layer.bandwidth
    if rate is None or machine.index(layer.level) > machine.index(routes.level):
        return np.zeros(count)
    if layer.level != routes.level:
        rate *= machine.count(layer.level, routes.level)
    # A combined element is read on both sides and written once more.
    traffic = np.bincount(r.source, size, count) + np.bincount(r.target, size * np.where(r.combine, 3, 1), count)
    return traffic / rate
