# SPDX-License-Identifier: MIT
"""Which way a product goes, by the machine model: beside its communication, or one after the other.

One after the other PyTorch multiplies all rows at once, and the collective takes what was measured of it, or else what
its rounds take (`tilescale/collectives/select.py`). Beside one another tiles go through the rows as they come, or go,
in chunks that a copy queue moves, by the formulas of `schedule="overlap"`. That costs waves of tiles that are not full
where a shard has few of them, the way of the first chunk or of the last one, and that queue and grid begin together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from tilescale.collectives.record import TENSORS
from tilescale.collectives.select import Wanted, everything, measured_times, seconds
from tilescale.comm import Team
from tilescale.cost.calibrated import in_force
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.ops.flat import dtype_of
from tilescale.ops.products import CHUNK, Tiling, in_parts, tiling
from tilescale.ops.small import spans_nodes
from tilescale.passes.overlap.estimate import WORTH, Travel, reduced
from tilescale.passes.overlap.work import Work, bandwidth_of, places_of, rate_of

KEPT = 4096
"""Decisions that are kept, those used last."""

RESULT_BYTES = 2
"""Of an element of a result."""

BEGINS = {"all_gather": 1, "reduce_scatter": 1, "allreduce": 3}
"""How often grid and queue wait for one another beyond what the formulas count: at the beginning, and at the end of an
all-reduce, whose chunks are sent on and copied."""


@dataclass(frozen=True)
class Job:
    """A product with a collective.

    Attributes:
        collective: "all_gather" in front of the product, "reduce_scatter" or "allreduce" behind it.
        rows: of a rank's shard: of a, of the result, or of what it sums for all.
        N, K: columns of all weights together, and the inner dimension, of this rank.
        dtype: of a, as programs name it.
        row_bytes: of a row that travels.
        tiles: of the overlapped product.
        products: whose tiles a block makes at once.
        ending: how often PyTorch reads or writes what it multiplied, to apply what is fused otherwise.
    """

    collective: str
    rows: int
    N: int
    K: int
    dtype: str
    row_bytes: int
    tiles: Tiling
    products: int = 1
    ending: float = 0.0


def overlaps(job: Job, team: Team) -> bool:
    """Whether a product goes beside its communication: never between nodes, always where there is none."""
    return team.size == 1 or (not spans_nodes(team) and _pays(current_machine(), job, team.size))


def of_sum(collective: str, a: torch.Tensor, b: torch.Tensor, team: Team) -> Job:
    """The job of a product whose parts are summed over the ranks."""
    (M, K), N = a.shape, b.shape[1]
    rows = -(-M // team.size)
    tiles = in_parts(tiling(rows, team.size, N, True), rows)
    return Job(collective, rows, N, K, dtype_of(a), N * RESULT_BYTES, tiles)


@lru_cache(KEPT)
def _pays(machine: Machine, job: Job, ranks: int) -> bool:
    known = in_force(machine)
    return beside(known, job, ranks) < (1 - WORTH) * in_order(known, job, ranks)


def in_order(machine: Machine, job: Job, ranks: int) -> float:
    """Seconds of the product of all rows and of the fastest collective of whole tensors, one after the other."""
    rows, level = job.rows * ranks, machine.tensor_level.name
    wanted = Wanted(job.collective, TENSORS, level, tuple(range(ranks)), (), rows * job.row_bytes, "bfloat16")
    able = everything(machine, wanted)
    names = [name for name in able.names if name not in able.on_request]
    known = [time for name in names for _, time in measured_times(machine, wanted, [name])]
    collective = min(known or [seconds(machine, wanted, name) for name in names])
    ending = job.ending * rows * job.N * RESULT_BYTES / bandwidth_of(machine)
    return _work(machine, job, tiling(rows, 1, job.N, True), rows).seconds + collective + ending


def beside(machine: Machine, job: Job, ranks: int) -> float:
    """Seconds of the product and the chunks that a queue moves meanwhile."""
    network = machine.network(machine.tensor_level.name)
    assert network is not None
    queue = next(m for m in network.mechanisms if m.started_by == "host" and m.put and not m.on_request)
    travel = Travel(network, queue, ranks, job.rows, job.row_bytes, 2 / bandwidth_of(machine))
    chunk = min(CHUNK, job.rows)
    begins = BEGINS[job.collective] * (queue.startup + network.latency)
    if job.collective != "all_gather":
        everywhere = job.collective == "allreduce"
        work = _work(machine, job, job.tiles, job.rows, ranks, job.products)
        made = reduced(travel, chunk, work, everywhere=everywhere, behind=False)
        return begins + made + (travel.keeping((ranks - 1) * job.rows) if everywhere else 0.0)
    own, others = (_work(machine, job, job.tiles, job.rows, shards, job.products) for shards in (1, ranks - 1))
    arrived = np.cumsum([travel.sending(chunk)] * -(-job.rows // chunk) * (ranks - 1))
    return begins + own.seconds + float(others.done(np.maximum(arrived - own.seconds, 0.0))[-1])


def _work(machine: Machine, job: Job, tiles: Tiling, rows: int, shards: int = 1, products: int = 1) -> Work:
    """The tiles of so many shards of rows; each has a tile of several products."""
    places, columns = places_of(machine), job.N // products
    operations = 2 * tiles.m * tiles.n * products * job.K
    each = operations * places / rate_of(machine, job.dtype) / tiles.rate
    return Work(shards * math.ceil(rows / tiles.m) * math.ceil(columns / tiles.n), each, places)
