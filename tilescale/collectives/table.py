# SPDX-License-Identifier: MIT
"""All algorithms: the records of the files in `algorithms/`, found at the first request."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from tilescale.collectives import algorithms as family
from tilescale.collectives.record import Algorithm
from tilescale.collectives.round_schedule import SEGMENTS, RoundSchedule
from tilescale.errors import UsageError


@cache
def records() -> Mapping[str, Algorithm]:
    """Name -> record, of all files. Raises ValueError: two records have one name."""
    found: dict[str, Algorithm] = {}
    for module in pkgutil.iter_modules(family.__path__, f"{family.__name__}."):
        for record in importlib.import_module(module.name).ALGORITHMS:
            if found.setdefault(record.name, record) is not record:
                raise ValueError(f"two algorithms are called {record.name}: {module.name} has the second one")
    return MappingProxyType(found)


def names(operation: str, form: str | None = None) -> tuple[str, ...]:
    """The algorithms of an operation, of one kind or of all."""
    return tuple(name for name, record in records().items() if record.supports(operation, form))


def algorithm(operation: str, name: str) -> Algorithm:
    """The record of an algorithm that makes an operation. Raises UsageError: there is none; lists those there are."""
    if name not in names(operation):
        known = ", ".join(names(operation)) or "none: no such operation"
        raise UsageError(f"no algorithm {name!r} for {operation}", hint=f"there is {known}")
    return records()[name]


def schedule(operation: str, name: str, shape: int | tuple[int, ...], segments: int = SEGMENTS) -> RoundSchedule:
    """The rounds of a collective.

    Args:
        operation: "allreduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_v", "broadcast" (from unit 0)
            or "barrier".
        name: one of `names(operation)`.
        shape: how many units; for units in groups the extents of all dimensions, the innermost groups last.
        segments: of algorithms that cut the tensor.

    Raises:
        UsageError: no such algorithm; lists those there are.
        UnsupportedError: an algorithm that needs a power of two of units.
    """
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    return algorithm(operation, name).schedule(operation, extents, segments)
