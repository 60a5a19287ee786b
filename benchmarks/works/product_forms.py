# SPDX-License-Identifier: MIT
"""GEMM A B^T on one GPU in the forms that operators could use, compared with cuBLAS.

Forms are the programs of `ops.matmul_reduce_scatter` for a single device, which then only multiply and store, with a
block for each tile or with a persistent grid; the latter with a signal for each tile, as for sent tiles; and clusters
of two blocks, which load common operands once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import scaled
import torch
import trials
from trials import Case, checked, ours

import tilescale.language as T
from tilescale.ops import gemm_rs
from tilescale.ops.gemm_tiles import TILINGS, GemmSpec, GemmTiling, at_once, concurrent_stores, multiply, rescale
from tilescale.ops.persistent import iterations_of
from tilescale.passes.overlap.raster import grouped
from tilescale.tuning.race import Contender, Heat, Runner

GROUP = 8
"""Rows of tiles of a rasterization group."""

TILES = (
    (128, 256, 3), (128, 256, 4), (128, 128, 3), (128, 128, 4), (128, 128, 6), (64, 256, 4), (64, 128, 4), (64, 128, 6),
)  # fmt: skip
"""Rows, columns and stages of the loop, of tiles that `tilescale tune` could choose from."""

TILED = ("in turns", "clusters")
"""Forms that race with all of these tiles."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """M x N x K on each of two GPUs for the reduce-scatter and for the gather."""
    if gpus > 1:
        return
    wide, narrow = (2048, 1024) if quick else (8192, 3584)
    for m in (1024,) if quick else (8192, 4096):
        for n, k in (wide, narrow), (narrow, wide):
            for dtype in "float8_e4m3fn", "bfloat16":
                yield Work(m, n, k, dtype).heat()
    yield Work(*((1024, 2048, 1024) if quick else (4096, 8192, 3584)), "bfloat16").tiles_heat()


def forms(m: int, n: int, k: int, dtype: str, tiles: GemmTiling = TILINGS[0]) -> dict[str, Callable[[], Any]]:
    """Form -> the function that makes its program, with the arguments of `gemm_rs.program`."""
    own = GemmSpec(n, k, dtype, tiles, transposed=True, biased=False)
    return {
        "a block a tile": lambda: gemm_rs.program(1, own),
        "in turns": lambda: gemm_rs.program(1, concurrent_stores(own), at_once()),
        "in turns, counted": lambda: counted(m, concurrent_stores(own), at_once()),
        "clusters": lambda: by_clusters(m, own),
    }


def tiled(m: int, n: int, k: int, dtype: str) -> dict[str, Callable[[], Any]]:
    """Form and tiles -> the function that makes the program."""
    found = {}
    for rows, columns, stages in TILES:
        made = forms(m, n, k, dtype, GemmTiling(rows, columns, 1.0, stages=stages))
        found |= {f"{form}, {rows} x {columns}, {stages} stages": made[form] for form in TILED}
    return found


def place(number: Any, tiles: GemmTiling, high: Any, across: int) -> tuple[Any, Any]:
    """First row and column of a tile, of `high` by `across` in groups of rows."""
    row, column = grouped(number, tiles.group, high, across)
    return row * tiles.m, column * tiles.n


def counted(m: int, of: GemmSpec, blocks: int) -> Any:
    """Persistent grid; each tile is signalled when it is stored, as for a sender."""
    tiles, kind = of.tiles, "float32" if of.scaled else of.dtype
    across, high = of.N // tiles.n, m // tiles.m

    @T.prim_func
    def product_counted(
        A: T.Tensor((1, m, of.K), of.dtype),
        B: T.Tensor((of.N, of.K), of.b_dtype),
        bias: T.Tensor((1,), of.result),
        of_A: T.Tensor((1, m if of.scaled else 1), kind),
        of_B: T.Tensor((of.N if of.scaled else 1,), kind),
        C: T.Tensor((1, m, of.N), of.result),
        parts: T.Tensor((1, m, of.N), of.result),
        inbox: T.Tensor((1, m, of.N), of.result),
    ):
        with T.Kernel(device=1, block=blocks, threads=tiles.threads) as block:
            done = T.alloc_flags((high,))
            with T.Scale("block"):
                a = T.alloc((tiles.m, of.depth), of.dtype, level="l1")
                b = T.alloc((tiles.n, of.depth), of.b_dtype, level="l1")
                c = T.alloc((tiles.m, tiles.n), "float32", level="l0")
                out = T.alloc((tiles.m, tiles.n), of.result, level="l1")
                with T.Scale("device"):
                    for iteration in T.serial(iterations_of(block, blocks, high * across)):
                        row, column = place(block + iteration * blocks, tiles, high, across)
                        T.clear(c)
                        multiply(A, 0, row, B, column, a, b, c, of.K, tiles, True)
                        if of.scaled:
                            rescale(c, of_A, 0, row, of_B, 0, column, m, of.N)
                        T.copy(c, out)
                        T.copy(out, C[0, row, column])
                        T.signal(done[row // tiles.m])

    return product_counted


def by_clusters(m: int, of: GemmSpec) -> Any:
    """Clusters of two blocks with tiles below each other, which halve the loads of B; whole tiles only."""
    tiles, blocks, rows = of.tiles, 2, of.tiles.m
    high, kind = GROUP // blocks, "float32" if of.scaled else of.dtype

    @T.prim_func
    def product_by_clusters(
        A: T.Tensor((1, m, of.K), of.dtype),
        B: T.Tensor((of.N, of.K), of.b_dtype),
        bias: T.Tensor((1,), of.result),
        of_A: T.Tensor((1, m if of.scaled else 1), kind),
        of_B: T.Tensor((of.N if of.scaled else 1,), kind),
        C: T.Tensor((1, m, of.N), of.result),
        parts: T.Tensor((1, m, of.N), of.result),
        inbox: T.Tensor((1, m, of.N), of.result),
    ):
        grid = (blocks * high * (of.N // tiles.n), m // (GROUP * rows))
        with T.Kernel(cta_cluster=blocks, block=grid, threads=tiles.threads) as (block, group):
            with T.Scale("cta_cluster"):
                a = T.alloc((blocks * rows, of.depth), of.dtype, level="l1")
                b = T.alloc((tiles.n, of.depth), of.b_dtype, level="l1")
                c = T.alloc((blocks * rows, tiles.n), "float32", level="l0")
                out = T.alloc((blocks * rows, tiles.n), of.result, level="l1")
                place = block // blocks
                first, column = (group * high + place % high) * blocks * rows, place // high * tiles.n
                T.clear(c)
                for k in T.Pipelined(of.K // of.depth, num_stages=tiles.stages):
                    with T.Scale("block") as (rank, _):
                        T.copy(A[0, first + rank * rows, k * of.depth], T.view(a, layout=T.FullRow))
                        T.copy(B[column + rank * (tiles.n // blocks), k * of.depth], T.view(b, layout=T.FullRow))
                    T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                if of.scaled:
                    with T.Scale("block") as (rank, _):
                        rescale(T.view(c, layout=T.FullRow), of_A, 0, first + rank * rows, of_B, 0, column, m, of.N)
                T.copy(c, out)
                with T.Scale("block") as (rank, _):
                    T.copy(T.view(out, layout=T.FullRow), C[0, first + rank * rows, column])

    return product_by_clusters


class Work:
    """A GEMM M x N x K on one GPU; of float8, each row of A and of B has a scale."""

    def __init__(self, m: int, n: int, k: int, dtype: str):
        self.m, self.n, self.k, self.dtype = m, n, k, dtype
        self.kind = getattr(torch, dtype)
        self.is_scaled = dtype.startswith("float8")

    def heat(self) -> Heat:
        return self._heat("product_form", forms, "eager")

    def tiles_heat(self) -> Heat:
        """Some forms with tiles of several sizes."""
        return self._heat("product_tiles", tiled, "graph")

    def _heat(self, name: str, made: Callable[..., dict[str, Callable[[], Any]]], mode: str) -> Heat:
        shape, flops = (self.m, self.n, self.k), 2 * self.m * self.n * self.k
        own = (ours(form, make, self.own) for form, make in made(*shape, self.dtype).items())
        entries = [Contender("cublas alone", self.library), *own]
        return Heat(name, shape, self.dtype, 1, mode, entries[0].name, entries, flops)

    def draw(self, seed: int) -> Case:
        """A, B, their scales, and the GEMM's result in float32."""
        a, b = trials.randoms(seed, self.kind, (self.m, self.k), (self.n, self.k))
        if not self.is_scaled:
            want, magnitudes = trials.product(a, b)
            return Case((a, b), want, trials.product_bound(self.k, want, magnitudes))
        scales = [1 + x.abs() for x in trials.randoms(seed + 1, torch.float32, (self.m, 1), (1, self.n))]
        want, spread = scaled.reference(a, b, *scales)
        return Case((a, b, *scales), want, scaled.bound(want, spread))

    def operands(self) -> list[torch.Tensor]:
        """Buffers for the results of `draw`."""
        a, b = (trials.nothing(rows, self.k).to(self.kind) for rows in (self.m, self.n))
        if not self.is_scaled:
            return [a, b]
        return [a, b, *(trials.nothing(*shape, dtype=torch.float32) for shape in ((self.m, 1), (1, self.n)))]

    def library(self) -> Runner:
        given, c = self.operands(), trials.nothing(self.m, self.n)
        if self.is_scaled:
            return checked(self.draw, trials.into(*given), lambda: scaled.multiplied(*given))
        return checked(self.draw, trials.into(*given), lambda: torch.mm(given[0], given[1].T, out=c), [c])

    def own(self, kernel: Any) -> Runner:
        """A form. No block sends, so `parts` and `inbox` have the GEMM's result only."""
        a, b, *scales = given = self.operands()
        unused = trials.nothing(1, self.m, self.n), trials.symmetric(1, self.m, self.n)
        c, bias = trials.nothing(self.m, self.n), trials.nothing(1)
        none = trials.nothing(1, 1, dtype=self.kind)
        of_a, of_b = (scales[0].view(1, -1), scales[1].view(-1)) if scales else (none, none[0])
        call = trials.returning(c, kernel, a[None], b, bias, of_a, of_b, c[None], *unused)
        return checked(self.draw, trials.into(*given), call, [c], kernel.synchronize)
