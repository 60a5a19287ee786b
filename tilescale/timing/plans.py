# SPDX-License-Identifier: MIT
"""Costs of the collectives of a launch; every different one is planned once."""

from __future__ import annotations

from collections.abc import Hashable

from tilescale.collectives.estimate import estimate
from tilescale.collectives.links import CollectivePlan
from tilescale.collectives.routes import Sizes
from tilescale.errors import NoPathError
from tilescale.hda import Machine
from tilescale.timing.rates import bandwidth


class CollectivePlans:
    """Plans for the collectives of one launch on a machine.

    Args:
        sizes: of the launch, as for `Machine.path`.
    """

    def __init__(self, machine: Machine, sizes: Sizes):
        self._machine, self._sizes = machine, dict(sizes)
        self._known: dict[Hashable, CollectivePlan] = {}

    def plan(
        self,
        name: str,
        level: str,
        rows: tuple[int, ...],
        nbytes: int,
        algorithm: str,
        on_tiles: bool,
        parts: tuple[int, ...] = (),
    ) -> CollectivePlan:
        """Plan a collective. Raises UsageError, UnsupportedError: as `estimate`.

        Args:
            level: whose units take part.
            rows: for each of them, in the order of ranks, the number of the tensor-owning unit that it is, or is in.
            nbytes: of the whole tensor.
            on_tiles: whether programs bring tiles.
            parts: as for `estimate`.
        """
        units = tuple(range(len(rows))) if len(set(rows)) < len(rows) else rows
        key = name, level, units is rows, rows if units is rows else len(rows), nbytes, algorithm, on_tiles, parts
        if key not in self._known:
            if units is rows:
                self._known[key] = self._between(name, rows, nbytes, algorithm, on_tiles, parts)
            else:
                self._known[key] = self._inside(name, level, len(rows), nbytes, algorithm)
        return self._known[key]

    def _between(
        self, name: str, rows: tuple[int, ...], nbytes: int, algorithm: str, on_tiles: bool, parts: tuple[int, ...]
    ) -> CollectivePlan:
        """Between tensor-owning units, over their links."""
        machine, owners = self._machine, self._machine.tensor_level
        found = estimate(machine, owners.name, name, algorithm, nbytes, units=rows, sizes=self._sizes, parts=parts)
        seconds = max(found.seconds, self._alone(found.nbytes)) if on_tiles else found.seconds + owners.launch
        return CollectivePlan(algorithm, seconds, found.nbytes, found.links)

    def _alone(self, nbytes: int) -> float:
        """Seconds that one program needs to send so much, however idle the links are."""
        network = self._machine.network(self._machine.tensor_level.name)
        rates = [m.per_program for m in network.mechanisms if m.per_program and not m.on_request] if network else []
        return network.latency + nbytes / max(rates) if network and rates else 0.0

    def _inside(self, name: str, level: str, count: int, nbytes: int, algorithm: str) -> CollectivePlan:
        """Between parts of one tensor-owning unit: thread groups of a program, programs of a cluster, programs of a
        grid."""
        machine = self._machine
        try:
            found = estimate(machine, level, name, algorithm, nbytes, units=range(count))
            return CollectivePlan(found.algorithm, found.seconds, found.nbytes, {})
        except NoPathError:
            # Units that no network links exchange through the memory that all of them reach: each writes, and reads
            # from all.
            memory = machine.layer_for("global")
            rate = bandwidth(memory)
            traffic = count * (count + 1) * nbytes / rate if rate else 0.0
            return CollectivePlan(memory.name, 2 * memory.latency + traffic, count * nbytes, {})
