# SPDX-License-Identifier: MIT
"""GEMMs of few rows, whose time is that of loading the weights: summed over the ranks in one launch, or local.

Weights are the left operand, as in few_rows_gemm.py, and come through a ring of bulk copies. Blocks are small, and all
of them run at once: those of a cluster share K, and sum their parts through distributed shared memory. Then each block
sums its results with those of its peers by words that carry their number: one trip over the network, without a flag.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

import tilescale.language as T
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.ops.arguments import MULTIPLE
from tilescale.ops.gemm_tiles import DEPTH, RESULT_BYTES, GemmSpec, GemmTiling, smem_room
from tilescale.ops.kernels import call_local, local_kernel
from tilescale.ops.layout import adjacent, dtype_of
from tilescale.runtime.ahead import also_needed
from tilescale.runtime.kernel import Kernel

HEIGHTS = 16, 32
"""Rows of a tile, which has all of a result."""

ROWS = HEIGHTS[-1]
"""Rows of a result, at most."""

FORMS = (64, 2), (64, 1), (128, 1)
"""Columns of a tile, which are rows of weights, and blocks of the cluster that share its K."""

BLOCKS = 2
"""Blocks that fit on an SM. Where only one fits on each, some clusters start when others are done."""


def is_able(machine: Machine, rows: int, N: int) -> bool:
    """Whether a machine has clusters and bulk copies, and all tiles of a result have an SM each."""
    has = cluster_of(machine) is not None and machine.has("tma", machine.program_level.name)
    return has and rows <= ROWS and -(-N // FORMS[-1][0]) <= machine.program_units


def cluster_of(machine: Machine) -> str | None:
    """The name of the level of clusters, if the machine has one."""
    return next((level.name for level in machine.levels if level.kind == "cluster"), None)


def few_rows_tiling(rows: int, N: int) -> tuple[GemmTiling, int]:
    """The tiles of a GEMM, and the parts of K: the smallest blocks that have an SM each.

    Two blocks of 16 rows on some SMs make all wait. Those of 32 rows hide each other's latencies.
    """
    high = next(high for high in HEIGHTS if rows <= high)
    places = current_machine().program_units * (BLOCKS if high > HEIGHTS[0] else 1)
    wide, parts = next((form for form in FORMS if -(-N // form[0]) * form[1] <= places), FORMS[-1])
    deep = 2 if wide == FORMS[0][0] else 1
    return GemmTiling(high, wide, 1.0, smem_room() // BLOCKS // (2 * DEPTH * deep * (high + wide)), deep=deep), parts


def few_rows_gemms(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Rows times the transpose of each weight, as contiguous results. None where this kernel does not make them: many
    rows, other types, weights that are not adjacent in memory, or no multiples of a tile."""
    count, widths = len(x), tuple(map(len, weights))
    whole, is_tiled = adjacent(weights), all(width % FORMS[-1][0] == 0 for width in widths)
    if whole is None or not count or not is_tiled or x.shape[1] % MULTIPLE or x.itemsize != RESULT_BYTES:
        return None
    if not is_able(current_machine(), count, len(whole)):
        return None
    how = widths, x.shape[1], dtype_of(x)
    also_needed(_local, HEIGHTS, *how)
    made, nothing = x.new_empty(count * len(whole)), whole.view(-1)[:1]
    call_local(_local((count,), *how)[0], x[None], whole, nothing, nothing.view(1, 1), nothing, made)
    ends = [0, *accumulate(count * width for width in widths)]
    return [made[begin:end].view(count, -1) for begin, end in pairwise(ends)]


def _local(counts: Sequence[int], widths: tuple[int, ...], K: int, dtype: str) -> list[Kernel]:
    """Kernels of some numbers of rows."""
    N = sum(widths)
    cuts = [few_rows_tiling(count, N) for count in counts]
    return [local_kernel(program, 0, GemmSpec(N, K, dtype, tiles, True, False), n, widths) for tiles, n in cuts]


@T.macro
def load(A, B, a, w, full, number, k, n, transposed):
    """Load a step of both operands, from column k of A on, into its stage."""
    stages, rows, depth = map(int, a.shape)
    wide = int(w.shape[1 if transposed else 2])
    stage = number % stages
    T.tma_copy(A[0, 0:rows, k : k + depth], a[stage, :, :], barrier=full[stage])
    if transposed:
        T.tma_copy(B[n : n + wide, k : k + depth], w[stage, :, :], barrier=full[stage])
    else:
        T.tma_copy(B[k : k + depth, n : n + wide], w[stage, :, :], barrier=full[stage])
    if T.shuffle_elect(2 * wide):
        T.barrier_arrive(full[stage])


@T.macro
def multiply(A, B, c, k, n, steps, of):
    """c = B[:, n:]^T A^T, of some steps from column k of A on."""
    stages, high, depth = of.tiles.stages, of.tiles.m, of.depth
    a = T.alloc((stages, high, depth), of.dtype, level="l1")
    w = T.alloc((stages, *of.b_tile), of.b_dtype, level="l1")
    full = T.alloc_barrier([1] * stages)
    T.clear(c)
    for step in T.serial(min(stages, steps)):
        load(A, B, a, w, full, step, k + step * depth, n, of.transposed)
    for step in T.serial(steps):
        T.mbarrier_wait_parity(full[step % stages], step // stages % 2)
        T.gemm(
            w[step % stages, :, :], a[step % stages, :, :], c, not of.transposed, True, policy=T.GemmWarpPolicy.FullRow
        )
        if step + stages < steps:
            load(A, B, a, w, full, step + stages, k + (step + stages) * depth, n, of.transposed)


def program(size: int, of: GemmSpec, parts: int, widths: Sequence[int] = ()) -> Any:
    """A B (+ bias, once), for up to `of.tiles.m` rows: the sum over `size` ranks.

    Without any (0) on the caller's device alone: the columns of each of several weights, `widths` of them, as one
    contiguous matrix after the other. Widths are multiples of a tile's.
    """
    N, K, rows, wide, high = of.N, of.K, T.dynamic("rows"), of.tiles.n, of.tiles.m
    steps, share = -(-K // (of.depth * parts)), wide // parts
    kind, scales = "float32" if of.scaled else of.dtype, of.scales(1)
    levels = {"device": size} if size else {}
    levels |= {str(cluster_of(current_machine())): parts} if parts > 1 else {}

    @T.prim_func
    def few_rows(
        A: T.Tensor((1, rows, K), of.dtype),
        B: T.Tensor(of.b_shape, of.b_dtype),
        bias: T.Tensor((N if of.biased else 1,), of.result),
        of_A: T.Tensor(scales[0], kind),
        of_B: T.Tensor(scales[1], kind),
        C: T.Tensor((rows, N) if size else (rows * N,), of.result),
    ):
        with T.Kernel(**levels, block=of.tiles.columns(N) * parts, threads=2 * wide) as block:
            with T.Scale("block"):
                c = T.alloc((wide, high), "float32", level="l0")
                sums = T.alloc((high, wide), "float32", level="l1")
                mine = T.alloc((high, share), "float32", level="l0")
                out = T.alloc((high, share), of.result, level="l1")
                part, n = block % parts, block // parts * wide
                first = n + part * share
                multiply(A, B, c, part * steps * of.depth, n, steps, of)
                for i, j in T.Parallel(wide, high):
                    sums[j, i] = c[i, j]
                if parts > 1:
                    T.reduce_scatter(sums, mine, dim=1)
                else:
                    T.copy(sums, mine)
                if of.scaled:
                    for j, i in T.Parallel(high, share):
                        mine[j, i] *= of_A[0, T.min(j, rows - 1)] * of_B[T.min(first + i, N - 1)]
                if of.biased:
                    for j, i in T.Parallel(high, share):
                        if first + i < N and (T.rank("device") if size else 0) == 0:
                            mine[j, i] += T.cast(bias[first + i], "float32")
                T.copy(mine, out)
                if size:
                    with T.Scale("device"):
                        T.allreduce(out)
                    for j, i in T.Parallel(high, share):
                        if j < rows and first + i < N:
                            C[j, first + i] = out[j, i]
                else:
                    begin, width = columns_of(first, widths)
                    for j, i in T.Parallel(high, share):
                        if j < rows:
                            C[begin * rows + j * width + (first - begin) + i] = out[j, i]

    return few_rows


def columns_of(first: Any, widths: Sequence[int]) -> tuple[Any, Any]:
    """The first column, and the columns, of the weight that column `first` of all is of."""
    begin, width, end = 0, widths[0], widths[0]
    for other in widths[1:]:
        begin = T.if_then_else(first >= end, end, begin)
        width = T.if_then_else(first >= end, other, width)
        end += other
    return begin, width
