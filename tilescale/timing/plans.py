# SPDX-License-Identifier: MIT
"""Collectives of a launch: by which algorithm, and what each of them takes; every different one is planned once."""

from __future__ import annotations

from collections.abc import Hashable

from tilescale.cost.choose import collective
from tilescale.errors import NoPathError
from tilescale.hda import Machine
from tilescale.timing.collectives import estimate
from tilescale.timing.links import CollectivePlan
from tilescale.timing.rates import Sizes, bandwidth

OF_TENSORS = {
    "allreduce": ("one_shot", "two_shot", "ring", "tree", "nccl"),
    "reduce_scatter": ("direct", "ring", "nccl"),
    "all_gather": ("direct", "ring", "nccl"),
    "all_to_all": ("direct", "nccl"),
    "broadcast": ("direct", "tree", "nccl"),
    "barrier": ("direct",),
}
"""Operation -> algorithms that come into question for whole tensors."""

OF_TILES = {
    "allreduce": ("one_shot", "two_shot"),
    "reduce_scatter": ("direct",),
    "all_gather": ("direct",),
    "all_to_all": ("direct",),
    "broadcast": ("direct",),
    "barrier": ("direct",),
}
"""The same where programs bring tiles."""


class Plans:
    """Plans for the collectives of one launch on a machine.

    Args:
        sizes: of the launch, as for `Machine.path`.
    """

    def __init__(self, machine: Machine, sizes: Sizes):
        self._machine, self._sizes = machine, dict(sizes)
        self._known: dict[Hashable, CollectivePlan] = {}

    def plan(
        self, name: str, level: str, rows: tuple[int, ...], nbytes: int, impl: str | None, on_tiles: bool
    ) -> CollectivePlan:
        """What a collective takes.

        Args:
            level: whose units take part.
            rows: for each of them, in the order of ranks, the number of the tensor-owning unit it is or lies in.
            nbytes: of the whole tensor.
            impl: the algorithm, None for the fastest.
            on_tiles: whether programs bring tiles.

        Raises:
            UsageError, UnsupportedError: as `estimate`.
        """
        units = tuple(range(len(rows))) if len(set(rows)) < len(rows) else rows
        key = name, level, units is rows, rows if units is rows else len(rows), nbytes, impl, on_tiles
        if key not in self._known:
            if units is rows:
                self._known[key] = self._between(name, rows, nbytes, impl, on_tiles)
            else:
                self._known[key] = self._inside(name, level, len(rows), nbytes, impl)
        return self._known[key]

    def _between(
        self, name: str, rows: tuple[int, ...], nbytes: int, impl: str | None, on_tiles: bool
    ) -> CollectivePlan:
        """Between tensor-owning units, over their links."""
        machine, owners = self._machine, self._machine.tensor_level
        able = (impl,) if impl else self._able(name, rows, nbytes, on_tiles)
        plans = [estimate(machine, owners.name, name, each, nbytes, units=rows, sizes=self._sizes) for each in able]
        best = min(plans, key=lambda plan: plan.seconds)
        if on_tiles:
            seconds = max(best.seconds, self._alone(best.nbytes))
        else:
            seconds = best.seconds + owners.launch
        return CollectivePlan(best.algorithm, seconds, best.nbytes, best.links)

    def _able(self, name: str, rows: tuple[int, ...], nbytes: int, on_tiles: bool) -> tuple[str, ...]:
        """What comes into question: inside one network the choice of the cost model, across several all."""
        able = (OF_TILES if on_tiles else OF_TENSORS)[name]
        level = self._machine.tensor_level.name
        network = self._machine.network(level)
        if len(able) == 1 or network is None:
            return able
        span = self._machine.count(level, network.within)
        if min(rows) // span != max(rows) // span:
            return able
        return (collective(network, name, len(rows), nbytes, able).name,)

    def _alone(self, nbytes: int) -> float:
        """Seconds that one program needs to send so much, however idle the links are."""
        network = self._machine.network(self._machine.tensor_level.name)
        rates = [m.per_program for m in network.mechanisms if m.per_program and not m.on_request] if network else []
        return network.latency + nbytes / max(rates) if network and rates else 0.0

    def _inside(self, name: str, level: str, count: int, nbytes: int, impl: str | None) -> CollectivePlan:
        """Between parts of one tensor-owning unit: lanes of a program, programs of a cluster, programs of a grid."""
        machine = self._machine
        try:
            found = estimate(machine, level, name, impl or OF_TILES[name][0], nbytes, units=range(count))
            return CollectivePlan(found.algorithm, found.seconds, found.nbytes, {})
        except NoPathError:
            # Units that no network links meet in the memory that all of them reach: each writes, and reads from all.
            memory = machine.layer_for("global")
            rate = bandwidth(memory)
            traffic = count * (count + 1) * nbytes / rate if rate else 0.0
            return CollectivePlan(memory.name, 2 * memory.latency + traffic, count * nbytes, {})
