# SPDX-License-Identifier: MIT
"""What a collective and the grid beside it take, in order and overlapped: a few numbers of the machine, no simulation.

The grid takes as long as its arithmetic, or as reading and writing each of its tensors once (the roofline model,
Williams, Waterman and Patterson, 2009). A chunk takes a latency and the time of what moves it (`Mechanism.seconds`);
its start-up is over while others go before it, so only that of the first counts. Overlapped, the grid goes on through
the chunks in the order in which they come, or go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilescale.collectives.record import TENSORS
from tilescale.collectives.select import Wanted, everything, members, numbering, seconds
from tilescale.cost.calibrated import in_force
from tilescale.cost.operations import network_of, region_bytes
from tilescale.hda import Machine, Mechanism, Network
from tilescale.passes.overlap.legality import Site
from tilescale.passes.overlap.schedule import QUEUE, Declined
from tilescale.passes.overlap.uses import Uses
from tilescale.program.grids import Unknown
from tilescale.program.model import GridPhase, Launch, bytes_of

MOST_CHUNKS = 32
"""Chunks of a part, at most."""

CLOSE = 0.01
"""Estimates that differ by less than this share say nothing: fewer chunks are taken."""


@dataclass(frozen=True)
class Travel:
    """What moves the rows of a collective while programs run.

    Attributes:
        queue: the mechanism, over `network`.
        parts, height: parts of so many rows.
        row_bytes: bytes of a row.
        local: seconds that a byte takes within a unit's own memory.
    """

    network: Network
    queue: Mechanism
    parts: int
    height: int
    row_bytes: int
    local: float

    @classmethod
    def of(cls, site: Site, uses: Uses, parts: int, height: int, carrier: str = QUEUE) -> Travel:
        """How a collective's rows travel on the machine.

        Raises:
            Declined: nothing moves data while programs run, or programs move none.
        """
        network, starter = (
            network_of(site.made.call, in_force(uses.machine), uses.sizes),
            "host" if carrier == QUEUE else "program",
        )
        offers = network.mechanisms if network is not None else ()
        able = [m for m in offers if m.started_by == starter and m.put and not m.on_request]
        if network is None or not able:
            name = network.name if network is not None else uses.machine.name
            raise Declined(f"no mechanism of {name} moves data {'while' if carrier == QUEUE else 'where'} programs run")
        whole = region_bytes(site.made.whole[0]) or 0
        return cls(network, able[0], parts, height, whole // (parts * height), 2 / _bandwidth(uses.machine))

    def sending(self, rows: int) -> float:
        """Seconds for some rows to another unit; the queue has begun before."""
        return self.network.latency + self.queue.seconds(rows * self.row_bytes, starts=0)

    def keeping(self, rows: int) -> float:
        """Seconds for some rows to another place of the unit's own memory."""
        return self.network.latency + rows * self.row_bytes * self.local

    def chunks(self, step: int) -> Iterator[int]:
        """Numbers of rows that may travel together: whole steps, at last the whole part."""
        rows = max(step, -(-self.height // MOST_CHUNKS // step) * step)
        while rows < self.height:
            yield rows
            rows *= 2
        yield self.height


def gathered(travel: Travel, chunk: int, grid: float) -> float:
    """Seconds until a grid is done that goes through the parts as an all-gather brings them."""
    each = -(-travel.height // chunk)
    share = grid / (travel.parts * each)
    here, now = travel.queue.startup, 0.0
    for number in range(travel.parts * each):
        here += travel.keeping(chunk) if number < each else travel.sending(chunk)
        now = max(now, here) + share
    return now


def exchanged(travel: Travel, chunk: int, made: float, read: float) -> float:
    """Seconds until a grid is done that goes through the parts as an all-to-all brings them, behind one that makes the
    parts of others first, which leave as they are made; either may take no time."""
    each = -(-travel.height // chunk)
    others, share = (travel.parts - 1) * each, made / (travel.parts * each)
    gone = [travel.queue.startup]
    for number in range(others):
        gone.append(max(gone[-1], (number + 1) * share) + travel.sending(chunk))
    now = made + travel.keeping(travel.height) + read / travel.parts
    for arrived in gone[1:]:
        now = max(now, arrived) + read / (travel.parts * each)
    return now


def reduced(travel: Travel, chunk: int, grid: float, *, everywhere: bool) -> float:
    """Seconds until a grid is done that makes the rows of others first, which leave as they are made, and then adds up
    its own chunk by chunk as they come; and until everybody has the sums."""
    each = -(-travel.height // chunk)
    others = (travel.parts - 1) * each
    share = grid / (travel.parts * each)
    gone = [travel.queue.startup]
    for number in range(others):
        gone.append(max(gone[-1], (number + 1) * share) + travel.sending(chunk))
    now, sent = others * share, gone[-1]
    for number in range(each):
        now = max(now, gone[1 + number + others - each]) + share  # the last to send here is the unit after
        sent = max(sent, now) + (travel.parts - 1) * travel.sending(chunk)
    return max(now, sent) if everywhere else now


def best_chunk(travel: Travel, step: int, grid: float, seconds: Any) -> int:
    """The rows of a chunk for which `seconds(travel, chunk, grid)` is least."""
    times = {chunk: seconds(travel, chunk, grid) for chunk in travel.chunks(step)}
    least = min(times.values())
    return max(chunk for chunk, time in times.items() if time <= least * (1 + CLOSE))


def in_order(site: Site, uses: Uses, grid: float) -> float:
    """Seconds of the collective, by the fastest algorithm that the machine has, and then the grid."""
    machine, sizes, made = uses.machine, dict(uses.sizes), site.made
    units, numbered = members(sizes, made.level), numbering(machine, sizes)
    dtype = str(ir.region_parts(made.source)[0].dtype)
    wanted = Wanted(made.name, TENSORS, made.level, units, numbered, region_bytes(made.whole[0]), dtype)
    found = everything(machine, wanted)
    able = [name for name in found.names if name not in found.on_request]
    return min(seconds(machine, wanted, name) for name in able) + grid


# -- the grid ----------------------------------------------------------------------------------------------------------


def grid_seconds(phase: GridPhase, launch: Launch, uses: Uses) -> float:
    """Seconds of a grid by itself."""
    machine, touched = uses.machine, {a.root for a in uses.names.all_effects(phase.stmt).accesses}
    homes = [uses.names.homes[root] for root in touched if root in uses.names.homes]
    nbytes = sum(bytes_of(b.shape, b.dtype) or 0 for b in homes if b.scope() == "global")
    arithmetic = sum(count / _rate(machine, dtype) for dtype, count in _products(phase, launch, uses))
    return max(arithmetic, nbytes / _bandwidth(machine))


def _products(phase: GridPhase, launch: Launch, uses: Uses) -> Iterator[tuple[str, float]]:
    """Type of the operands and operations of each matrix product of a grid, over all programs."""
    grid = uses.grid(launch, dict.fromkeys(uses.sizes, 0))

    def visit(stmt: ir.Stmt, times: Any) -> Iterator[tuple[str, float]]:
        if isinstance(stmt, ir.For):
            try:
                times = times * np.maximum(grid.value(stmt.extent, {}), 0)
            except Unknown:
                pass  # once, then: less is better than too much where overlap is to pay
        if isinstance(stmt, ir.Evaluate) and str(ir.op_name(stmt.value)).startswith(tl.GEMM):
            a, _, c = (ir.region_parts(stmt.value.args[i]) for i in range(3))
            m, n = (ir.constant(e) or 1 for e in c[2][-2:])
            elements = [ir.constant(e) or 1 for e in a[2]]
            yield str(a[0].dtype), float(2 * n * np.prod(elements) * np.sum(times)) if m else 0.0
        for inner in ir.children(stmt):
            yield from visit(inner, times)

    yield from visit(phase.stmt, np.ones(grid.count))


def _rate(machine: Machine, dtype: str) -> float:
    """Operations a second of a unit that owns tensors, by its fastest arithmetic; as float32 for unknown types."""
    level = machine.tensor_level.name
    rates = machine.rates(level)
    kinds = [kind for kind in (dtype, "tfloat32", "float32") if any(kind in known for known in rates.values())]
    able = [u for u, known in rates.items() if kinds and kinds[0] in known]
    return max((machine.rate(level, unit, kinds[0], sustained=True) for unit in able), default=float("inf"))


def _bandwidth(machine: Machine) -> float:
    layer = machine.layer_for("global")
    return layer.sustained or layer.bandwidth or float("inf")
