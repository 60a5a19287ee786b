# SPDX-License-Identifier: MIT
"""Graphs that a recorded call launches one after the other, as one graph with a copy of each.

A launch takes the host 2.5 us, a node of the same launch 0.5 us; a device begins it 1 us earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilelang_core.lru import LruCache
from tilescale.backends.cuda.running.graph_nodes import nodes_of
from tilescale.backends.cuda.running.graphs import joined
from tilescale.backends.cuda.running.native import PLACES, ReplayGraph, ReplaySource, ReplayStep
from tilescale.backends.cuda.running.replay import GraphReplay
from tilescale.errors import DeviceError

KEPT = 512
"""Joined graphs that are kept for further records, those used last. Records keep theirs."""


class PartLaunch(NamedTuple):
    """The launch of a graph, with the source of each of its arguments."""

    replay: GraphReplay
    sources: Sequence[ReplaySource]


def joined_steps(steps: Sequence[PartLaunch | ReplayStep]) -> list[ReplayStep]:
    """The same steps, with launches that follow one another as one, where the driver can, and as long as one can have
    all their arguments."""
    made: list[ReplayStep] = []
    parts: list[PartLaunch] = []
    for step in steps:
        if isinstance(step, ReplayStep):
            made, parts = [*made, *_joined_step(parts), step], []
            continue
        if sum(len(part.sources) for part in [*parts, step]) > PLACES:
            made, parts = [*made, *_joined_step(parts)], []
        parts.append(step)
    return [*made, *_joined_step(parts)]


def _joined_step(parts: Sequence[PartLaunch]) -> list[ReplayStep]:
    whole = _joined([part.replay for part in parts]) if len(parts) > 1 else None
    if whole is None:
        return [ReplayStep(part.replay.graph, part.sources) for part in parts]
    return [ReplayStep(whole, [source for part in parts for source in part.sources])]


_wholes: LruCache[tuple[tuple[GraphReplay, bytes], ...], ReplayGraph] = LruCache(KEPT)


def _joined(replays: Sequence[GraphReplay]) -> ReplayGraph | None:
    """The graph of these graphs in order; None if one is forgotten, or the driver refuses it."""
    if any(replay.graph.refused for replay in replays):
        return None
    known = tuple((replay, replay.graph.known) for replay in replays)
    whole = _wholes.get(known)
    if whole is None or whole.refused:
        try:
            whole = _wholes[known] = _new(replays)
        except DeviceError:  # such as a node that no copy can have
            return None
    return whole


def _new(replays: Sequence[GraphReplay]) -> ReplayGraph:
    graph, copies = joined([replay.handle for replay in replays])
    given = [number for replay in replays for number in replay.given]
    copied = list(map(nodes_of, copies))
    whole = ReplayGraph(graph.executable, given, b"".join(replay.graph.kinds for replay in replays), (graph, copied))
    nodes, known, pairs, first = [], [], [], 0
    for replay, own in zip(replays, copied, strict=True):
        nodes += replay.moving(own, first)
        known += [first + i for i, is_known in enumerate(replay.graph.known) if is_known]
        pairs += [(first + one, first + other) for one, other in replay.graph.pairs]
        first += len(replay.given)
        replay.graph.is_part_of(whole)
    whole.learn(nodes, known, pairs)
    return whole
