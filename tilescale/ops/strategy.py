# SPDX-License-Identifier: MIT
"""Strategy of a GEMM, or of an all-to-all, by the machine model: overlapped with its communication, or sequential.

Sequential: PyTorch multiplies all rows at once, and the collective takes its measured time, or else the estimate of its
rounds (`tilescale/collectives/select.py`). Overlapped: tiles follow the rows as they arrive, or leave, in chunks that a
copy queue moves, by the formulas of `schedule="overlap"`. Its costs are partial waves of tiles where a shard has few of
them, the exposed transfer of the first or the last chunk, and the start-up of queue and grids. An all-reduce is made
tile by tile, by the blocks of the GEMM: its last sums are exposed. Few rows have smaller blocks, one for each part of
K: see few_rows.py. `benchmarks/results/ways.json` has GEMMs that went both ways on two H200.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from tilescale.collectives.record import TENSORS
from tilescale.collectives.select import CollectiveQuery, everything, measured_times, seconds
from tilescale.comm import Team
from tilescale.cost.calibrated import in_force
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.ops.few_rows import is_able
from tilescale.ops.gemm_tiles import (
    CHUNK,
    GATHER_CHUNKS,
    RESULT_BYTES,
    TILINGS,
    GemmTiling,
    in_parts,
    is_persistent,
    slices,
    summed_tiling,
    tiling,
)
from tilescale.ops.layout import CHUNK_BYTES, dtype_name
from tilescale.ops.whole_tensors import is_split
from tilescale.passes.overlap.estimate import RowTransport, gathered, reduced, sliced, tiles_summed
from tilescale.passes.overlap.tile_cost import TileWork, bandwidth_of, rate_of

KEPT = 4096
"""Decisions that are kept, those used last."""

EXACT = 512
"""Most rows of all ranks for which a decision is that of the exact number. An estimate takes the host 0.6 ms: more rows
share one if they fill as many of the smallest tiles."""

EQUAL = 1.01
"""Estimate of an overlapped GEMM, relative to that of the sequential one, up to which it is chosen: power limits the
rate of long GEMMs, and waves that are not full leave some. Two H200, 2618 x 5120 x 8704: 385 us, sequentially 409."""

GATING, ACTIVATING = 2.5, 2.0
"""Further reads or writes of the result by PyTorch's kernels of a gated activation, and of another one."""

SCALE_BYTES, PARTIAL_BYTES = 4, 4
"""Size of a row's scale, which is gathered as well, and of an element of a split of K."""


class TorchGemms(NamedTuple):
    """The GEMM kernels that PyTorch calls.

    Attributes:
        tiles: rows and columns of a block's tile, and its rate relative to the peak.
        splits: most splits of K, where tiles do not fill a wave. A library with splits also balances half of a last
            wave that is not full.
        time: of tiles that are not bound by their loads, relative to ours.
        reading: bandwidth of a GEMM that does nothing but read weights, relative to copies.
        whole: whether blocks load whole tiles, also for few rows.
    """

    tiles: tuple[tuple[int, int, float], ...]
    splits: int
    time: float
    reading: float
    whole: bool = False


SIDES = 64, 128, 192, 256

CUBLAS = TorchGemms(
    tuple((m, n, 1.0) for m in SIDES for n in SIDES if m * n <= 128 * 256),  # float32 sums in a block's registers
    splits=4,
    time=1.04,
    reading=0.92,
)
"""For two-byte types. Small tiles are bound by their loads: 64 bytes a clock for each SM."""

ROWWISE = TorchGemms(((64, 128, 0.55), (128, 128, 1.0)), splits=1, time=1.06, reading=0.85, whole=True)
"""For float8 with a scale for each row: up to 128 rows times 3840 x 7680 take 22 us on an H200, the time of one tile
over all of K; up to 118 rows times 20480 x 7168 take 49 us, 3.0 TB/s, with the zeros of its tiles. The time is that of
least error for sequential GEMMs of `benchmarks/results/any_shape.json`. Overlap does not compensate for the library's
rate if little is moved for many operations: 10526 rows times 20480 x 7168 on two H200 take 2557 us sequentially, 2722
us overlapped."""

READING = 0.92
"""Bandwidth of our tiles that read weights, relative to copies."""

SCALED_RATE = 0.85
"""Highest rate of our tiles of float8, relative to the peak, as power allows: the least error of overlapped GEMMs of
`benchmarks/results/any_shape.json`."""

FASTER = 0.2
"""Time that a tile saves by running alone, relative to one of a full wave: the least mean error of the overlapped GEMMs
of all draws of `benchmarks/held_out.py`."""

IDLE = 0.5
"""Share of the time in which bulk loads write zeros that the memory has nothing to read. With an all-reduce of two
H200 1, 8 and 32 rows times 5120 x 16384 take 84, 77 and 66 us; 10 and 40 rows of float8 times 8192 x 14784 50 and 42
us."""

LATENCIES = 6
"""Memory latencies of a GEMM that nothing hides: descriptors, its first step, its last stores."""


class CollectiveGemm(NamedTuple):
    """A GEMM with a collective.

    Attributes:
        collective: "all_gather" before the GEMM, "reduce_scatter" or "allreduce" after it.
        rows: of a rank's shard: of a, of the result, or of the part that it sums.
        columns: of each weight.
        K: the inner dimension, of this rank.
        dtype: of a.
        gated: whether there are two weights, whose tiles a block makes at once.
        ending: number of PyTorch's further reads or writes of the result, for an epilogue that is fused otherwise.
    """

    collective: str
    rows: int
    columns: tuple[int, ...]
    K: int
    dtype: torch.dtype
    gated: bool = False
    ending: float = 0.0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that is sent."""
        return self.K * self.dtype.itemsize if self.collective == "all_gather" else sum(self.columns) * RESULT_BYTES


def overlaps(job: CollectiveGemm, team: Team) -> bool:
    """Whether a GEMM overlaps with its communication: never in float32 or between nodes, always where there is none."""
    if job.dtype is torch.float32:
        return False
    return team.size == 1 or _overlaps(current_machine(), _decided(job, team.size), team.size)


def _decided(job: CollectiveGemm, ranks: int) -> CollectiveGemm:
    """The GEMM whose decision is that of a job."""
    step = step_of(ranks)
    return job if job.rows * ranks <= EXACT else job._replace(rows=math.ceil(job.rows / step) * step)


def step_of(parts: int) -> int:
    """Rows of one of several parts at whose multiples a choice of tiles may change."""
    return max(TILINGS[-1].m // parts, 1)  # the smallest ones


@lru_cache(KEPT)
def _overlaps(machine: Machine, job: CollectiveGemm, ranks: int) -> bool:
    if is_split(machine, ranks):
        return False
    known = in_force(machine)
    return min(overlapped(known, job, ranks), one_launch(known, job, ranks)) < EQUAL * in_order(known, job, ranks)


def takes_one_launch(job: CollectiveGemm, team: Team) -> bool:
    """Whether an overlapped GEMM and all-reduce is that of few rows, in one launch."""
    return _takes_one_launch(current_machine(), job, team.size)


@lru_cache(KEPT)
def _takes_one_launch(machine: Machine, job: CollectiveGemm, ranks: int) -> bool:
    known = in_force(machine)
    alone = one_launch(known, job, ranks)
    return alone < math.inf and alone < overlapped(known, job, ranks)


def in_order(machine: Machine, job: CollectiveGemm, ranks: int) -> float:
    """Seconds of the GEMM of all rows and of the fastest collective of whole tensors, one after the other."""
    rows, N = job.rows * ranks, sum(job.columns)
    collective = _collective(machine, job.collective, ranks, rows * job.row_bytes)
    if job.collective == "all_gather" and job.dtype.itemsize == 1:
        collective += _collective(machine, job.collective, ranks, rows * SCALE_BYTES)
    ending = job.ending * rows * N * RESULT_BYTES / bandwidth_of(machine)
    gemms = (machine.tensor_level.launch + _by_library(machine, job, rows, columns) for columns in job.columns)
    return sum(gemms) + collective + ending


def _by_library(machine: Machine, job: CollectiveGemm, rows: int, N: int) -> float:
    """Seconds of PyTorch's GEMM with a weight of N columns: its fastest tiles, at least the time to read weights."""
    library = ROWWISE if job.dtype.itemsize == 1 else CUBLAS
    places, waits = machine.program_units, _waits(machine)
    cache = machine.layer_for("global").cache_bandwidth or bandwidth_of(machine)
    rate = rate_of(machine, dtype_name(job.dtype)) / places / library.time
    moved = (rows + N) * job.K * job.dtype.itemsize + rows * N * RESULT_BYTES
    reading = _reading(machine, moved, library.reading)

    def seconds(m: int, n: int, relative: float, splits: int) -> float:
        tiles = math.ceil(rows / m) * math.ceil(N / n)
        if splits > 1 and tiles >= places:
            return math.inf
        waves = splits * tiles / places
        balanced = max(waves, 1.0) if library.splits > 1 else math.ceil(waves)
        waves = (math.ceil(waves) + balanced) / 2
        adding_up = (splits > 1) * (waits + 2 * splits * rows * N * PARTIAL_BYTES / cache)
        depth = job.K / splits
        multiplied, row_bytes = 2 * m * n * depth / (rate * relative), depth * job.dtype.itemsize
        tile, idle = _tile(machine, multiplied, (m, n), rows if library.whole else m, row_bytes, tiles <= places)
        return max(waves * tile + waits + adding_up, reading + waves * idle)

    return min(seconds(*tile, splits) for tile in library.tiles for splits in range(1, library.splits + 1))


def overlapped(machine: Machine, job: CollectiveGemm, ranks: int) -> float:
    """Seconds of the GEMM and of concurrent chunks or tiles; infinite where nothing moves them."""
    if job.collective == "allreduce":
        return _through_tiles(machine, job, ranks)
    travel = _travel(machine, ranks, job.rows, job.row_bytes)
    if travel is None:
        return math.inf
    begins = travel.beginning
    chunk, gathers = min(CHUNK, job.rows), job.collective == "all_gather"
    gemms = 1 + job.gated
    # Weights that are not gated have a grid each, of which the widest says how they are cut.
    adds = 0 if gathers else job.K * job.dtype.itemsize
    tiles = tiling(job.rows, ranks, max(job.columns), True, gemms, adds=adds)
    work = _work(machine, job, tiles, job.rows, ranks, gemms)
    if not gathers or not is_persistent(job.rows, GATHER_CHUNKS):  # such blocks load the next tile ahead
        work = replace(work, tile=work.tile + _waits(machine))
    if gathers:
        parts = slices(job.rows, ranks, tiles, max(job.columns), job.row_bytes)
        # The fork is the start of the first transfer; scales are another one.
        first = (job.dtype.itemsize == 1) * travel.queue.startup
        if parts == 1:
            return begins + gathered(travel, chunk, work, begin=first, kept=False)
        return begins + sliced(travel, parts, work, first)
    group = min(in_parts(tiles, job.rows).group_rows, job.rows)
    return begins + reduced(travel, group, work, everywhere=False, behind=False)


def _through_tiles(machine: Machine, job: CollectiveGemm, ranks: int) -> float:
    """Seconds until the tiles of all rows are made and summed."""
    rows, N = job.rows * ranks, sum(job.columns)
    tiles, blocks = summed_tiling(rows, N, ranks)
    level, nbytes = machine.tensor_level.name, rows * N * RESULT_BYTES
    wanted = CollectiveQuery("allreduce", TENSORS, level, tuple(range(ranks)), (), nbytes, "bfloat16")
    work = _work(machine, job, tiles, rows)
    if not blocks:  # persistent ones load the next tile ahead
        work = replace(work, tile=work.tile + _waits(machine))
    return tiles_summed(machine, wanted, work, tiles.m * tiles.n * RESULT_BYTES)


def one_launch(machine: Machine, job: CollectiveGemm, ranks: int) -> float:
    """Seconds of a GEMM and all-reduce of few rows in one launch; infinite where there is none. All blocks load from
    the beginning, at the rate of copies. Nothing hides the latencies of their sums."""
    rows, N = job.rows * ranks, sum(job.columns)
    if job.collective != "allreduce" or not is_able(machine, rows, N):
        return math.inf
    level, nbytes = machine.tensor_level, rows * N * RESULT_BYTES
    wanted = CollectiveQuery("allreduce", TENSORS, level.name, tuple(range(ranks)), (), nbytes, "bfloat16")
    reading = _reading(machine, N * job.K * job.dtype.itemsize, 1.0)
    return level.launch + reading + _waits(machine) + seconds(machine, wanted, "one_shot")


def exchanges_as_a_whole(nbytes: int, transposed: int, team: Team) -> bool:
    """Whether an all-to-all is sent as a whole between `transposed` transpositions of its tensor, as always between
    nodes; else a queue moves chunks, and blocks copy these into the result as they arrive."""
    return _exchanges_as_a_whole(current_machine(), nbytes, transposed, team.size)


@lru_cache(KEPT)
def _exchanges_as_a_whole(machine: Machine, nbytes: int, transposed: int, ranks: int) -> bool:
    if is_split(machine, ranks):
        return True
    known, part = in_force(machine), max(nbytes // ranks, 1)
    chunk = min(CHUNK_BYTES, part)
    travel = _travel(known, ranks, part, 1)
    if travel is None:
        return True
    transposing = known.tensor_level.launch + travel.local * nbytes
    whole = _collective(known, "all_to_all", ranks, nbytes) + transposed * transposing
    sent = (ranks - 1) * part / chunk * travel.sending(chunk)
    own = travel.keeping(part)
    return whole <= travel.beginning + travel.queue.startup + max(sent, own) + travel.keeping(chunk)


def _collective(machine: Machine, operation: str, ranks: int, nbytes: int) -> float:
    """Seconds of the fastest algorithm that is measured, or else of the fastest by their rounds."""
    wanted = CollectiveQuery(operation, TENSORS, machine.tensor_level.name, tuple(range(ranks)), (), nbytes, "bfloat16")
    able = everything(machine, wanted)
    names = [name for name in able.names if name not in able.on_request]
    known = [time for name in names for _, time in measured_times(machine, wanted, [name])]
    rounds = [machine.tensor_level.launch + seconds(machine, wanted, name) for name in names if not known]
    return min(known or rounds, default=math.inf)


def _travel(machine: Machine, parts: int, rows: int, row_bytes: int) -> RowTransport | None:
    """Transfer of parts of `rows` rows by a queue; None where there is none."""
    return RowTransport.over(machine.network(machine.tensor_level.name), machine, parts, rows, row_bytes)


def _work(
    machine: Machine, job: CollectiveGemm, tiles: GemmTiling, rows: int, shards: int = 1, gemms: int = 1
) -> TileWork:
    """The tiles of `shards` shards of rows; each has a tile of several GEMMs. A shard reads all weights once."""
    places, N = machine.program_units, sum(job.columns)
    count = shards * math.ceil(rows / tiles.m) * math.ceil(N / gemms / tiles.n)
    relative = min(tiles.rate, SCALED_RATE) if job.dtype.itemsize == 1 else tiles.rate
    rate = rate_of(machine, dtype_name(job.dtype)) / places * relative
    multiplied = 2 * tiles.m * tiles.n * gemms * job.K / rate
    row_bytes = job.K * job.dtype.itemsize
    tile, idle = _tile(machine, multiplied, (tiles.m, gemms * tiles.n), rows, row_bytes, count <= places)
    read = _reading(machine, N * row_bytes, READING, shards) + max(count / places, 1.0) * idle
    return TileWork(count, tile, places, read / count, faster=FASTER)


def _tile(
    machine: Machine, multiplied: float, tile: tuple[int, int], rows: int, row_bytes: float, concurrent: bool
) -> tuple[float, float]:
    """Seconds of a tile that is multiplied in `multiplied`, and loaded meanwhile; and those of them in which it reads
    no memory. The last tiles of `rows` rows are filled with zeros; of concurrent tiles these count, else the mean."""
    memory = machine.layer_for("global")
    if memory.per_program is None or memory.fill is None:
        return multiplied, 0.0
    zeros = -rows % tile[0]
    loaded, filled = row_bytes / memory.per_program, zeros * row_bytes / memory.fill
    whole = max(multiplied, sum(tile) * loaded)
    cut = max(multiplied, (sum(tile) - zeros) * loaded + filled)
    share = 1.0 if concurrent else 1 / math.ceil(rows / tile[0])
    return whole + (cut - whole) * share, IDLE * filled * share


def _reading(machine: Machine, nbytes: int, share: float, times: int = 1) -> float:
    """Seconds of a GEMM that does nothing but read its operands, some `times`, at a share of the memory's bandwidth.

    Calls that follow one another find in the cache what it keeps of them. Each half of it has what its programs read:
    operands up to half of its capacity stay, those of all of it do not.
    """
    memory = machine.layer_for("global")
    kept = memory.cache_capacity / 2
    missed = min(max(nbytes / kept - 1, 0.0), 1.0) if kept else 1.0
    a_byte = missed / (share * bandwidth_of(machine)) + (1 - missed) / (memory.cache_bandwidth or bandwidth_of(machine))
    return _waits(machine) + times * nbytes * a_byte


def _waits(machine: Machine) -> float:
    """Seconds of the memory latencies that a tile of a GEMM does not hide."""
    return LATENCIES * machine.layer_for("global").latency
