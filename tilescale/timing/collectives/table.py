# SPDX-License-Identifier: MIT
"""All algorithms by operation and name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tilescale.errors import UsageError
from tilescale.timing.collectives import direct, doubling, hierarchical, rings, trees
from tilescale.timing.collectives.schedule import Schedule

Shape = tuple[int, ...]

ALGORITHMS: dict[tuple[str, str], Callable[[Shape], Schedule]] = {
    ("allreduce", "ring"): partial(rings.one, "allreduce"),
    ("allreduce", "rings"): partial(rings.several, "allreduce"),
    ("allreduce", "halving_doubling"): doubling.allreduce,
    ("allreduce", "recursive_doubling"): doubling.exchange,
    ("allreduce", "one_shot"): direct.one_shot,
    ("allreduce", "two_shot"): direct.two_shot,
    ("allreduce", "hierarchical"): partial(hierarchical.allreduce, "hierarchical"),
    ("allreduce", "hierarchical_doubling"): partial(hierarchical.allreduce, "hierarchical_doubling"),
    ("reduce_scatter", "ring"): partial(rings.one, "reduce_scatter"),
    ("reduce_scatter", "rings"): partial(rings.several, "reduce_scatter"),
    ("reduce_scatter", "halving"): doubling.reduce_scatter,
    ("reduce_scatter", "direct"): direct.reduce_scatter,
    ("reduce_scatter", "hierarchical"): partial(hierarchical.reduce_scatter, "hierarchical"),
    ("reduce_scatter", "hierarchical_doubling"): partial(hierarchical.reduce_scatter, "hierarchical_doubling"),
    ("all_gather", "ring"): partial(rings.one, "all_gather"),
    ("all_gather", "rings"): partial(rings.several, "all_gather"),
    ("all_gather", "doubling"): doubling.all_gather,
    ("all_gather", "direct"): direct.all_gather,
    ("all_gather", "hierarchical"): partial(hierarchical.all_gather, "hierarchical"),
    ("all_gather", "hierarchical_doubling"): partial(hierarchical.all_gather, "hierarchical_doubling"),
    ("all_to_all", "direct"): direct.all_to_all,
    ("all_to_all", "pairwise"): rings.pairwise,
    ("all_to_all", "hierarchical"): hierarchical.all_to_all,
    ("broadcast", "tree"): trees.broadcast,
    ("broadcast", "direct"): direct.broadcast,
    ("broadcast", "hierarchical"): hierarchical.broadcast,
    ("barrier", "direct"): direct.barrier,
    ("barrier", "dissemination"): doubling.dissemination,
}
"""(operation, algorithm) -> its schedule for units numbered row-major in a shape, the innermost groups last."""

PIPELINED: dict[tuple[str, str], Callable[[Shape, int], Schedule]] = {
    ("allreduce", "tree"): trees.allreduce,
    ("broadcast", "ring"): rings.pipeline,
}
"""The same for algorithms that cut the tensor into a number of segments, which is their last argument."""

OTHER_NAMES = {
    ("allreduce", "nccl"): "rings",
    ("reduce_scatter", "nccl"): "rings",
    ("all_gather", "nccl"): "rings",
    ("all_to_all", "nccl"): "pairwise",
    ("broadcast", "nccl"): "ring",
}
"""Implementations of the language that are one of these algorithms; NCCL is taken to use a ring for each port."""


def names(operation: str) -> tuple[str, ...]:
    """The algorithms of an operation."""
    return tuple(name for known, name in (*ALGORITHMS, *PIPELINED) if known == operation)


def schedule(operation: str, algorithm: str, shape: int | Shape, segments: int = 1) -> Schedule:
    """The rounds of a collective.

    Args:
        operation: "allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast" (from unit 0) or "barrier".
        algorithm: one of `names(operation)`.
        shape: how many units; for units in groups the extents of all dimensions, the innermost groups last.
        segments: of pipelined algorithms.

    Raises:
        UsageError: no such algorithm; lists those there are.
        UnsupportedError: an algorithm that needs a power of two of units.
    """
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    key = operation, algorithm
    if key in PIPELINED:
        return PIPELINED[key](extents, segments)
    if key not in ALGORITHMS:
        known = ", ".join(names(operation)) or "none: no such operation"
        raise UsageError(f"no algorithm {algorithm!r} for {operation}", hint=f"there is {known}")
    return ALGORITHMS[key](extents)
