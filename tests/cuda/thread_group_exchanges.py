# SPDX-License-Identifier: MIT
"""Single-device programs in which warpgroups or warps exchange tiles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilescale.language as T

LEVELS = {"warpgroup": 128, "warp": 32}


@dataclass(frozen=True)
class Case:
    """A program and its tensors: inputs, then outputs, all float32 unless a dtype is named."""

    make: Callable[[], Any]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    def arguments(self, seed: int) -> list[torch.Tensor]:
        """Fresh inputs, and outputs that no right result looks like."""
        generator = torch.Generator().manual_seed(seed)
        kind = getattr(torch, self.dtype)
        given = [torch.randn(shape, generator=generator).to(kind) for shape in self.inputs]
        return [*given, *(torch.full(shape, float("nan")) for shape in self.outputs)]


def passed_on(level: str, scope: str, far: str, n: int = 16) -> Any:
    """Tiles go round a ring of siblings, twice."""
    units = 256 // LEVELS[level]

    @T.prim_func
    def run(X: T.Tensor((units, n), "float32"), Y: T.Tensor((units, n), "float32")):
        with T.Kernel(1, threads=256):
            with T.Scale(level) as (rank, size):
                mine = T.alloc((n,), "float32", level=scope)
                theirs = T.alloc((n,), "float32", level=scope)
                T.copy(X[rank, 0], mine)
                for _ in T.serial(2):
                    T.barrier()
                    if far == "dst":
                        T.copy(mine, theirs, dst=(rank + 1) % size)
                    else:
                        T.copy(mine, theirs, src=(rank + 1) % size)
                    T.barrier()
                    for i in T.Parallel(n):
                        mine[i] = theirs[i] * 2
                T.copy(mine, Y[rank, 0])

    return run


def visited(n: int = 16, units: int = 8) -> Any:
    """Every warp reads every other one's shared tile: a sibling whose rank is known when it runs."""

    @T.prim_func
    def run(X: T.Tensor((units, n), "float32"), Y: T.Tensor((units, n), "float32")):
        with T.Kernel(1, threads=32 * units):
            with T.Scale("warp") as (rank, size):
                mine = T.alloc((n,), "float32", level="l1")
                seen = T.alloc((n,), "float32", level="l0")
                total = T.alloc((n,), "float32", level="l0")
                T.copy(X[rank, 0], mine)
                T.clear(total)
                T.barrier()
                for k in T.serial(size):
                    T.copy(mine, seen, src=(rank + k) % size)
                    for i in T.Parallel(n):
                        total[i] = total[i] * 0.5 + seen[i]
                T.copy(total, Y[rank, 0])

    return run


def merge(first: Any, second: Any) -> Any:
    """Two weighted means as one."""
    (x, w), (y, v) = first, second
    return (x * T.exp(w) + y * T.exp(v)) / (T.exp(w) + T.exp(v)), T.log(T.exp(w) + T.exp(v))


def few(level: str) -> int:
    """Four warps or two warpgroups: layouts of eight warps' tiles take TileLang ten seconds."""
    return min(4, 256 // LEVELS[level])


def combined(level: str, scope: str, n: int = 16) -> Any:
    """All-reduces with every operation and with a function of two tiles."""
    units = few(level)

    @T.prim_func
    def run(X: T.Tensor((units, n, n), "float32"), Y: T.Tensor((6, units, n, n), "float32")):
        with T.Kernel(1, threads=units * LEVELS[level]):
            with T.Scale(level) as (rank, _):
                tile = T.alloc((n, n), "float32", level=scope)
                weights = T.alloc((n,), "float32", level=scope)
                for which, op in enumerate(("sum", "max", "min", "prod")):
                    T.copy(X[rank, 0, 0], tile)
                    T.allreduce(tile, op=op)
                    T.copy(tile, Y[which, rank, 0, 0])
                T.copy(X[rank, 0, 0], tile)
                T.copy(X[rank, 1, 0:n], weights)
                T.allreduce(tile, weights, fn=merge)
                T.copy(tile, Y[4, rank, 0, 0])
                T.copy(weights, Y[5, rank, 0, 0:n])
                for i, j in T.Parallel(n - 1, n):
                    Y[5, rank, i + 1, j] = 0

    return run


def large_sum(rows: int = 128, columns: int = 64, units: int = 3) -> Any:
    """Accumulators of three warpgroups that do not fit in shared memory together."""

    @T.prim_func
    def run(X: T.Tensor((units, rows, columns), "float32"), Y: T.Tensor((units, rows, columns), "float32")):
        with T.Kernel(1, threads=128 * units):
            with T.Scale("warpgroup") as (wg, _):
                tile = T.alloc((rows, columns), "float32", level="l0")
                T.copy(X[wg, 0, 0], tile)
                T.allreduce(tile)
                T.copy(tile, Y[wg, 0, 0])

    return run


def shares_summed(n: int = 32) -> Any:
    """An all-reduce of shares: afterwards both hold the sum of the halves."""

    @T.prim_func
    def run(X: T.Tensor((n, n), "float32"), Y: T.Tensor((n, n), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc((n, n), "float32", level="l0")
            T.copy(X, tile)
            with T.Scale("warpgroup"):
                T.allreduce(T.view(tile, layout=T.FullCol), op="max")
            T.copy(tile, Y)

    return run


def gathered(n: int = 32) -> Any:
    """Halves of a fragment become whole on both warpgroups; the halves of the next step replace them."""

    @T.prim_func
    def run(X: T.Tensor((n, n), "float32"), Y: T.Tensor((2, 2, n, n), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc((n, n), "float32", level="l0")
            for step in T.serial(2):
                with T.Scale("warpgroup") as (wg, wgs):
                    half = T.view(tile, layout=T.FullRow)
                    whole = T.alloc((n, n), "float32", level="l0")
                    for i, j in T.Parallel(n // 2, n):
                        half[i, j] = X[wg * (n // 2) + i, j] * (step + 1)
                    T.all_gather(half)
                    for i, j in T.Parallel(n, n):
                        whole[i, j] = tile[i, j] + wg
                    T.copy(whole, Y[step, wg, 0, 0])

    return run


def exchanged(name: str, level: str, n: int = 16) -> Any:
    """A collective that has its own result: reduce-scatter, all-gather, all-to-all or broadcast."""
    units = 256 // LEVELS[level]
    into, out = {"reduce_scatter": (units * n, n), "all_gather": (n, units * n)}.get(name, (units * n, units * n))

    @T.prim_func
    def run(X: T.Tensor((units, into), "float32"), Y: T.Tensor((units, out), "float32")):
        with T.Kernel(1, threads=256):
            with T.Scale(level) as (rank, size):
                a = T.alloc((into,), "float32", level="l0")
                b = T.alloc((out,), "float32", level="l1")
                T.copy(X[rank, 0], a)
                if name == "broadcast":
                    T.broadcast(a, root=size - 1)
                    T.copy(a, b)
                else:
                    getattr(T, name)(a, b)
                T.copy(b, Y[rank, 0])

    return run


EXCHANGES: dict[str, Case] = {
    **{
        f"{level}s pass on {scope} {far}": Case(
            lambda level=level, scope=scope, far=far: passed_on(level, scope, far),
            ((256 // threads, 16),),
            ((256 // threads, 16),),
        )
        for level, threads in LEVELS.items()
        for scope in ("l0", "l1")
        for far in ("dst", "src")
    },
    "siblings visited": Case(visited, ((8, 16),), ((8, 16),)),
    **{
        f"{level}s combine {scope}": Case(
            lambda level=level, scope=scope: combined(level, scope),
            ((few(level), 16, 16),),
            ((6, few(level), 16, 16),),
        )
        for level in LEVELS
        for scope in ("l0", "l1")
    },
    "sum in turns": Case(large_sum, ((3, 128, 64),), ((3, 128, 64),)),
    "shares combined": Case(shares_summed, ((32, 32),), ((32, 32),)),
    "gathered fragment": Case(gathered, ((32, 32),), ((2, 2, 32, 32),)),
    **{
        f"{name} of {level}s": Case(
            lambda name=name, level=level: exchanged(name, level),
            ((256 // LEVELS[level], 16 if name == "all_gather" else 16 * (256 // LEVELS[level])),),
            ((256 // LEVELS[level], 16 if name == "reduce_scatter" else 16 * (256 // LEVELS[level])),),
        )
        for name in ("reduce_scatter", "all_gather", "all_to_all", "broadcast")
        for level in LEVELS
    },
}
