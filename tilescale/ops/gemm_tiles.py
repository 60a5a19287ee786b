# SPDX-License-Identifier: MIT
"""Common parts of the operators' GEMM programs: tile sizes, the order of tiles, and the loop of one tile."""

import math
from dataclasses import dataclass, replace
from typing import Any

import tilescale.language as T
from tilescale.hda.current import current_machine
from tilescale.ops.arguments import BLOCK

CHUNK = 512
"""Rows that are sent together: enough for a copy engine's full rate, and soon there (1024 and 2048 were slower)."""

GROUP = 8
"""Rows of tiles that are rasterized together: the operands of a wave of blocks then fit into the L2 cache."""

GATHER_CHUNKS = 4
"""Least number of chunks of a shard for a persistent grid: fewer tiles would all run at once."""

SUM_CHUNKS, SCALED_CHUNKS = 2, 8
"""The same for sums, whose tiles have a longer epilogue, and for sums of float8, which need fewer pipeline stages only
where there are many tiles: with 4 chunks they take 3 % longer in a persistent grid, with 8 of them 5 % less."""

FEW_WAVES = 4
"""Waves of the largest tiles, up to which smaller ones are summed over the ranks in less time."""

MOST_STAGES = 6
"""Maximum number of stages of a software pipeline."""

CHUNKS = 128
"""Flags for the chunks of one shard."""

DEPTH = 64
"""Columns of a step of two-byte numbers: 128 bytes, the widest conflict-free layout of tiles in shared memory."""

STORED = 16
"""Columns that an instruction stores from registers to shared memory: tiles of other widths take four times as long."""

ADDING = 400
"""Bytes of a row of a that are multiplied in the time that a wave of tiles waits for other ranks' parts, unless DEPTH
divides its width. Two H200, 4096 x 4096 x 2048: 4 waves of 256 columns take 111 us, 5 of 208 columns 145 us, since
remote rows are complete after three waves instead of two. The kernels alone take 108 and 112 us."""

RESULT_BYTES = 2
"""Bytes of an element of a result."""

SLICE_BYTES = 4096
"""Least bytes of a row of a slice of columns: a copy engine takes longer over shorter rows."""

BARRIERS = 1024
"""Bytes of shared memory for barriers, at most."""

COPIES = 4
"""Copies of a block scale of b: together 16 bytes, the least of a bulk copy."""

SCALED = "float8"
"""Prefix of the names of types whose GEMMs are scaled."""

ROWS = CHUNK * CHUNKS
"""Rows that a shard may have."""


@dataclass(frozen=True)
class GemmTiling:
    """Tile shape of a GEMM.

    Attributes:
        m, n: a block's tile of the result.
        rate: what blocks of such tiles reach of the rate of the largest ones, which load least for each GEMM;
            measured on an H200.
        stages: steps that are loaded ahead.
        group: rows of tiles that are rasterized together, column after column; the last group has those that are left.
        deep: how many of the shortest steps are one, DEPTH columns each: narrow tiles have little to do in a step.
    """

    m: int
    n: int
    rate: float
    stages: int = 4
    group: int = GROUP
    deep: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block: a warpgroup for each 64 rows."""
        return 2 * self.m

    @property
    def group_rows(self) -> int:
        """Rows of a group of tiles, which are done at about the same time."""
        return self.group * self.m

    def columns(self, N: int) -> int:
        """Columns of tiles of a result of N columns."""
        return -(-N // self.n)

    def grid(self, rows: Any, N: int) -> tuple[int, Any]:
        """Tiles of a result along its columns, and along its rows."""
        return self.columns(N), T.ceildiv(rows, self.m)


@dataclass(frozen=True)
class GemmSpec:
    """A GEMM of an operator without its rows: a @ b, and its epilogue.

    Attributes:
        N, K: columns, and the inner dimension.
        dtype: of a. Float8 is scaled by a number for each row of a and for each column of b.
        tiles: how it is cut.
        transposed: whether b is stored as (N, K).
        biased: whether a bias is added.
        activation: its name in the epilogue; "" for none.
        gated: whether there are two matrices b, and the activation of the first GEMM gates the second one.
        other: the type of b; "" for that of a. Float8 comes in two types.
        blocks: whether float8 has block scales: one for each 128 numbers of a row of a, and for each 128 x 128 of b.
        parts: columns of each result, where b is several matrices side by side and each has a result; () for one.
    """

    N: int
    K: int
    dtype: str
    tiles: GemmTiling
    transposed: bool
    biased: bool
    activation: str = ""
    gated: bool = False
    other: str = ""
    blocks: bool = False
    parts: tuple[int, ...] = ()

    def scales(self, *shards: int) -> tuple[tuple[Any, ...], ...]:
        """Shapes of the scales of that many shards of rows of a each, and of all columns of b."""
        gemms = 1 + self.gated
        if not self.scaled:
            return *[(1, 1)] * len(shards), (1,)
        if not self.blocks:
            return *((n, T.dynamic("rows")) for n in shards), (gemms * self.N,)
        groups = -(-self.K // BLOCK)
        shapes = ((n, T.dynamic("row_blocks"), groups, BLOCK) for n in shards)
        return *shapes, (gemms * -(-self.N // BLOCK), groups, COPIES)

    @property
    def b_dtype(self) -> str:
        return self.other or self.dtype

    @property
    def scaled(self) -> bool:
        """Whether the operands are float8."""
        return self.dtype.startswith(SCALED)

    @property
    def depth(self) -> int:
        """Columns of a step."""
        return (2 * DEPTH if self.scaled else DEPTH) * self.tiles.deep

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a."""
        return self.K * (1 if self.scaled else 2)

    @property
    def step_bytes(self) -> int:
        """Bytes of the tiles of a step, of a and of each b."""
        return 2 * DEPTH * self.tiles.deep * (self.tiles.m + (1 + self.gated) * self.tiles.n)

    @property
    def chunk(self) -> int:
        """Rows of a that are sent together: as many bytes of each type."""
        return 2 * CHUNK if self.scaled else CHUNK

    @property
    def result(self) -> str:
        """The type of the result."""
        return "bfloat16" if self.scaled else self.dtype

    @property
    def b_shape(self) -> tuple[int, int]:
        """Shape of b as stored."""
        return (self.N, self.K) if self.transposed else (self.K, self.N)

    @property
    def b_tile(self) -> tuple[int, int]:
        """A step of b."""
        return (self.tiles.n, self.depth) if self.transposed else (self.depth, self.tiles.n)


CLOSE = 1.02
"""Time of tiles relative to the least, up to which the widest ones are taken: each width is a kernel."""

RATES = {256: 1.0, 240: 0.985, 224: 0.98, 208: 0.965, 192: 0.975, 176: 0.95, 160: 0.95, 128: 0.88}
"""Columns of tiles of 128 rows, and their rates: of GEMMs on two H200 and on one, interleaved with 256 columns."""

TILINGS = (*(GemmTiling(128, *it) for it in RATES.items()), GemmTiling(64, 128, 0.6), GemmTiling(64, 64, 0.45))

SUMMED_RATES = {(128, 256): 1.0, (128, 128): 0.91, (128, 64): 0.78, (64, 128): 0.6, (64, 64): 0.6}
"""The same for tiles that are summed over the ranks, by their rows and columns. Narrow ones have deep steps, and two
warpgroups hide each other's latencies."""


def at_once() -> int:
    """Blocks of such tiles that a device runs at a time."""
    return current_machine().program_units


def tiling(
    rows: int, shards: int, N: int, transposed: bool, gemms: int = 1, unit: int = 0, adds: int = 0
) -> GemmTiling:
    """The tiles with which a GEMM of `shards` times `rows` rows and N columns takes the least time in waves.

    Args:
        GEMMs: how many of one shape a block makes at once, which share its registers.
        unit: columns at whose multiples a tile has to begin another result; 0: there is one.
        adds: bytes of a row of a, where what other ranks have sent is added to tiles; 0: where it is not.
    """
    blocks, times = at_once(), {}
    for whole in (t for t in TILINGS if unit % t.n == 0):
        t = replace(whole, n=whole.n // gemms)
        if adds and t.n % DEPTH:
            t = replace(t, rate=t.rate / (1 + ADDING / adds))
        # Two narrow GEMMs are slower than the rate says: only where no tile is cut.
        narrow = transposed and t.n % STORED == 0 and (gemms == 1 or N % t.n == 0)
        if t.n % DEPTH == 0 or narrow:
            waves = math.ceil(shards * math.ceil(rows / t.m) * math.ceil(N / t.n) / blocks)
            times[t] = waves * t.m * t.n / t.rate
    return next(t for t in times if times[t] <= CLOSE * min(times.values()))


def slices(rows: int, shards: int, tiles: GemmTiling, N: int, row_bytes: int) -> int:
    """Slices of columns in which a shard of a is sent. One for a persistent grid: its rows arrive in chunks.

    Tiles that all run at once would wait for their rows as long as the last ones of a chunk take: 512 rows of each of
    two H200, N 3584, K 8192, take 126 us. With slices they begin when the first one is there: 106 us with four.
    """
    steps, rest = divmod(row_bytes, 2 * DEPTH)
    if rest or rows > CHUNK or shards * math.ceil(rows / tiles.m) * math.ceil(N / tiles.n) > at_once():
        return 1
    most = max(row_bytes // SLICE_BYTES, 1)
    return next(count for count in range(most, 0, -1) if steps % count == 0)


def is_persistent(rows: int, chunks: int) -> bool:
    """Whether the grid is persistent: for shards with enough chunks."""
    return rows >= chunks * CHUNK


def summed_tiling(rows: int, N: int, ranks: int) -> tuple[GemmTiling, int]:
    """The tiles of a GEMM that are summed over the ranks, and the number of persistent blocks, 0 for one block a tile.

    What blocks sum last, nothing hides: so tiles are large only where there are many, and where all are made at once as
    small as may be. Two H200, N 8192, K 3584: 1024 rows take 116 us with tiles of 128 x 128, 127 us with 128 x 256;
    4096 rows 445 and 418 us; 128 rows 27 us with 128 x 64. Of more than two ranks the warpgroup that adds up has no
    registers for the largest ones.
    """
    blocks = at_once()
    high = TILINGS[-1].m if rows <= TILINGS[-1].m else TILINGS[0].m
    waves = {n: -(-rows // high) * -(-N // n) / blocks for n in (256, 128, 64)}
    wide = 256 if waves[256] > FEW_WAVES and ranks == 2 else 128 if waves[64] > 1 else 64
    is_persistent = waves[wide] > 1
    deep = 2 if wide == TILINGS[-1].n else 1
    room = smem_room() - (high * wide * RESULT_BYTES if is_persistent else 0)
    stages = min(MOST_STAGES, room // (2 * DEPTH * deep * (high + wide)))
    return GemmTiling(high, wide, SUMMED_RATES[high, wide], stages, deep=deep), blocks if is_persistent else 0


def smem_room() -> int:
    """Bytes of shared memory for tiles."""
    machine = current_machine()
    return machine.capacity(machine.layer_for("shared").name) - BARRIERS


def concurrent_stores(of: GemmSpec) -> GemmSpec:
    """A GEMM whose tiles are stored concurrently with the steps of the next ones, which may leave space for fewer
    stages."""
    tiles = of.tiles
    room = smem_room() - tiles.m * tiles.n * RESULT_BYTES
    return replace(of, tiles=replace(tiles, stages=min(tiles.stages, room // of.step_bytes)))


def in_parts(tiles: GemmTiling, rows: int) -> GemmTiling:
    """The tiles, in two groups at least where a shard has several chunks: one is sent while the next is multiplied.

    1024 rows of each of two H200, N 8192, K 3584: a GEMM and its reduce-scatter take 193 us, as one group 219.
    """
    is_one = rows > CHUNK and tiles.group_rows >= rows
    return replace(tiles, group=tiles.group // 2) if is_one else tiles


def on_chip_tiles(of: GemmSpec) -> tuple[Any, Any, Any, Any]:
    """Tiles of a block: pipeline stages of a and b, sums, the stored tile."""
    tiles = of.tiles
    a = T.alloc((tiles.m, of.depth), of.dtype, level="l1")
    b = T.alloc(of.b_tile, of.b_dtype, level="l1")
    c = T.alloc((tiles.m, tiles.n), "float32", level="l0")
    out = T.alloc((tiles.m, tiles.n), of.result, level="l1")
    return a, b, c, out


def launch(size: int, *grid: Any) -> Any:
    """A grid on each of `size` devices; 0: on the caller's alone."""
    return T.Kernel(device=size, block=grid, threads=256) if size else T.Kernel(*grid, threads=256)


@T.macro
def multiply(A, shard, m, B, n, a, b, c, K, tiles, transposed):
    """c += A[shard, m:, :] B[:, n:] for one tile; B is (N, K) if transposed; a, b and c are the block's tiles."""
    depth = int(a.shape[1])
    for k in T.Pipelined(T.ceildiv(K, depth), num_stages=tiles.stages):
        T.copy(A[shard, m, k * depth], a)
        if transposed:
            T.copy(B[n, k * depth], b)
        else:
            T.copy(B[k * depth, n], b)
        T.gemm(a, b, c, transpose_B=transposed, policy=T.GemmWarpPolicy.FullRow)


@T.macro
def multiply_by_two(A, shard, m, B, Up, n, a, b, up, c, c_up, K, tiles, transposed):
    """`multiply` for two matrices of one shape: a step of A is loaded once."""
    depth = int(a.shape[1])
    for k in T.Pipelined(T.ceildiv(K, depth), num_stages=tiles.stages):
        T.copy(A[shard, m, k * depth], a)
        if transposed:
            T.copy(B[n, k * depth], b)
            T.copy(Up[n, k * depth], up)
        else:
            T.copy(B[k * depth, n], b)
            T.copy(Up[k * depth, n], up)
        T.gemm(a, b, c, transpose_B=transposed, policy=T.GemmWarpPolicy.FullRow)
        T.gemm(a, up, c_up, transpose_B=transposed, policy=T.GemmWarpPolicy.FullRow)


@T.macro
def rescale(c, of_rows, shard, m, of_columns, first, n, rows, N):
    """c *= of_rows[shard, m:], of_columns[first + n:]; beyond the last row or column it is the last one's."""
    T.assume(rows >= 1)
    for i, j in T.Parallel(c.shape[0], c.shape[1]):
        c[i, j] *= of_rows[shard, T.min(m + i, rows - 1)] * of_columns[first + T.min(n + j, N - 1)]


@T.macro
def load_scales(row_scales, column_scales, of_rows, shard, m, of_columns, n, rows, N):
    """The scales of a tile's rows and columns, into registers; beyond the last row or column it is the last one's."""
    for i in T.Parallel(row_scales.shape[0]):
        row_scales[i] = of_rows[shard, T.min(m + i, rows - 1)]
    for j in T.Parallel(column_scales.shape[0]):
        column_scales[j] = of_columns[T.min(n + j, N - 1)]


@T.macro
def scale(c, row_scales, column_scales):
    """c *= its rows' scales, its columns' scales."""
    for i, j in T.Parallel(c.shape[0], c.shape[1]):
        c[i, j] *= row_scales[i] * column_scales[j]


@T.macro
def add_bias(c, bias, n, N, first=0, once=True):
    """c += bias[first + n:], for each row; where sums follow, on the rank that is to add it `once`."""
    for i, j in T.Parallel(c.shape[0], c.shape[1]):
        if n + j < N and once:
            c[i, j] += T.cast(bias[first + n + j], "float32")


@T.macro
def gate(c, up):
    """c *= up."""
    for i, j in T.Parallel(c.shape[0], c.shape[1]):
        c[i, j] *= up[i, j]


@T.macro
def activate(c, name):
    """c = relu, silu or gelu_tanh of c."""
    for i, j in T.Parallel(c.shape[0], c.shape[1]):
        if name == "relu":
            c[i, j] = T.max(c[i, j], 0)
        elif name == "silu":
            c[i, j] = c[i, j] / (1 + T.exp(-c[i, j]))
        else:
            inner = 0.7978845608028654 * (c[i, j] + 0.044715 * c[i, j] * c[i, j] * c[i, j])  # sqrt(2 / pi)
            c[i, j] = 0.5 * c[i, j] * (1 + T.tanh(inner))


@T.macro
def swiglu(c, up):
    """c = silu(c) * up."""
    for i, j in T.Parallel(c.shape[0], c.shape[1]):
        c[i, j] *= sigmoid(c[i, j]) * up[i, j]


def sigmoid(x: Any) -> Any:
    """By the fast exponential and reciprocal of the hardware, for results of 16 bits or less: in an epilogue the exact
    ones take 4 % of the time of a GEMM of K 2048."""
    return T.fast_rcp(1 + T.__exp(-x))
