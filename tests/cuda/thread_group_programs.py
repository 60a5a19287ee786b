# SPDX-License-Identifier: MIT
"""Single-device programs of warpgroups and warps: small, one thing each, with the shapes of their tensors.

The tests interpret their lowered text and compile it; tests/gpu/thread_groups_check.py runs them on a GPU.
"""

from typing import Any

import tilescale.language as T
from tests.cuda.thread_group_exchanges import EXCHANGES, LEVELS, Case


def softmax(layout: Any, rows: int = 64, columns: int = 64) -> Any:
    """Statements of the whole program on a fragment that warpgroups split: every kind that can be cut."""

    @T.prim_func
    def run(
        X: T.Tensor((2, rows, columns), "float32"),
        B: T.Tensor((columns,), "float32"),
        Y: T.Tensor((rows, columns), "float32"),
        Z: T.Tensor((4, rows), "float32"),
    ):
        with T.Kernel(1, threads=256):
            scores = T.alloc((rows, columns), "float32", level="l0")
            bias = T.alloc((columns,), "float32", level="l0")
            top = T.alloc((rows,), "float32", level="l0")
            total = T.alloc((rows,), "float32", level="l0")
            staged = T.alloc((rows, columns), "float32", level="l1")
            T.fill(top, -1e30)
            T.clear(total)
            T.copy(B, bias)
            for step in T.serial(2):
                T.copy(X[step, 0, 0], scores)
                with T.Scale("warpgroup") as (wg, _):
                    part = T.view(scores, layout=layout)
                    for i, j in T.Parallel(part.shape[0], part.shape[1]):
                        part[i, j] = part[i, j] * (wg + 1)
                for i, j in T.Parallel(rows, columns):
                    scores[i, j] = scores[i, j] + bias[j]
                T.reduce_max(scores, top, dim=1, clear=False)
                for i, j in T.Parallel(rows, columns):
                    scores[i, j] = T.exp(scores[i, j] - top[i])
                T.reduce_sum(scores, total, dim=1, clear=False)
                T.copy(top, Z[step, 0])
                T.copy(total, Z[2 + step, 0])
            T.copy(scores, staged)
            for i, j in T.Parallel(rows, columns):
                Y[i, j] = staged[i, (j + 1) % columns]

    return run


def product(layout: Any, by_row: bool, transposed: bool = False, n: int = 64) -> Any:
    """A GEMM of the whole program into accumulators that warpgroups split, loaded through a pipeline."""
    shape = (n, n)

    @T.prim_func
    def run(A: T.Tensor((n, 4 * n), "float16"), B: T.Tensor((n, 4 * n), "float16"), C: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=256):
            a = T.alloc(shape, "float16", level="l1")
            b = T.alloc(shape, "float16", level="l1")
            c = T.alloc(shape, "float32", level="l0")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[0, k * n], a)
                T.copy(B[0, k * n], b)
                T.gemm(a, b, c, transpose_A=transposed, transpose_B=not transposed)
            with T.Scale("warpgroup") as (wg, _):
                mine = T.view(c, layout=layout)
                for i, j in T.Parallel(mine.shape[0], mine.shape[1]):
                    mine[i, j] = mine[i, j] + wg * (2 if by_row else 3)
            T.copy(c, C)

    return run


def cyclic(scope: str, n: int = 16) -> Any:
    """Cyclic shares of columns, written by each unit and used by the whole program."""

    @T.prim_func
    def run(X: T.Tensor((n, n), "float32"), Y: T.Tensor((n, n), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc((n, n), "float32", level=scope)
            T.copy(X, tile)
            with T.Scale("warpgroup") as (wg, _):
                part = T.view(tile, layout=T.Shard(1, block=1))
                for i, j in T.Parallel(n, n // 2):
                    part[i, j] = part[i, j] * 2 + wg
            for i, j in T.Parallel(n, n):
                tile[i, j] = tile[i, j] + j
            T.copy(tile, Y)

    return run


def roles(steps: int = 6, n: int = 64) -> Any:
    """One warpgroup loads tiles, two work on them with fragments of their own: mbarriers between, loops inside."""

    @T.prim_func
    def run(X: T.Tensor((steps, n, n), "float32"), Y: T.Tensor((2, n), "float32")):
        with T.Kernel(1, threads=384):
            tile = T.alloc_shared((n, n), "float32")
            full = T.alloc_barrier(128)
            empty = T.alloc_barrier(256)
            with T.Scale("warpgroup") as (wg, _):
                values = T.alloc((n, n), "float32", level="l0")
                sums = T.alloc((n,), "float32", level="l0")
                total = T.alloc((n,), "float32", level="l0")
                if wg == 0:
                    for k in T.serial(steps):
                        T.barrier_wait(empty, (k & 1) ^ 1)
                        T.copy(X[k, 0, 0], tile)
                        T.barrier_arrive(full)
                else:
                    T.clear(total)
                    for k in T.serial(steps):
                        T.barrier_wait(full, k & 1)
                        T.copy(tile, values)
                        T.barrier_arrive(empty)
                        T.reduce_sum(values, sums, dim=0)
                        for i in T.Parallel(n):
                            total[i] = total[i] * 0.5 + sums[i]
                    T.copy(total, Y[wg - 1, 0])

    return run


def reductions(n: int = 64) -> Any:
    """Both warpgroups reduce across their warps at the same time, many times, on tiles that differ."""

    @T.prim_func
    def run(X: T.Tensor((2, 8, n, n), "float32"), Y: T.Tensor((2, 8, n), "float32")):
        with T.Kernel(1, threads=256):
            with T.Scale("warpgroup") as (wg, _):
                tile = T.alloc((n, n), "float32", level="l0")
                sums = T.alloc((n,), "float32", level="l0")
                for k in T.serial(8):
                    T.copy(X[wg, k, 0, 0], tile)
                    T.reduce_sum(tile, sums, dim=0)
                    T.copy(sums, Y[wg, k, 0])

    return run


def nested(n: int = 32, warpgroups: int = 2) -> Any:
    """Warps inside warpgroups: views of views, barriers of the warps of one warpgroup, ranks in expressions."""

    rows = n // warpgroups

    @T.prim_func
    def run(X: T.Tensor((n, n), "float32"), Y: T.Tensor((n, n), "float32"), Z: T.Tensor((4 * warpgroups,), "float32")):
        with T.Kernel(1, threads=128 * warpgroups):
            tile = T.alloc_shared((n, n), "float32")
            T.copy(X, tile)
            with T.Scale("warpgroup") as (wg, _):
                half = T.view(tile, layout=T.FullRow)
                sums = T.alloc((4,), "float32", level="l1")
                with T.Scale("warp") as (w, ws):
                    part = T.view(half, layout=T.FullCol)
                    own = T.alloc((rows, n // 4), "float32", level="l0")
                    row = T.alloc((rows,), "float32", level="l0")
                    one = T.alloc((1,), "float32", level="l0")
                    T.copy(part, own)
                    T.reduce_sum(own, row, dim=1)
                    T.reduce_sum(row, one, dim=0)
                    T.copy(one, sums[w : w + 1])
                    T.barrier()
                    for i, j in T.Parallel(rows, n // 4):
                        own[i, j] = own[i, j] + sums[(w + 1) % ws] * (wg + 1)
                    T.copy(own, part)
                    Z[wg * 4 + w] = sums[w]
            T.copy(tile, Y)

    return run


def single_threads() -> Any:
    """Scalar code on threads, of the program and of a warpgroup."""

    @T.prim_func
    def run(X: T.Tensor((256,), "float32"), Y: T.Tensor((3, 256), "float32")):
        with T.Kernel(1, threads=256):
            slots = T.alloc_shared((256,), "float32")
            with T.Scale("thread") as (t, _):
                slots[t] = X[t] * 2
                T.barrier()
                Y[0, t] = slots[255 - t]
            T.sync_threads()
            with T.Scale("warpgroup") as (wg, _):
                if wg == 1:
                    with T.Scale("thread") as (t, size):
                        Y[1, t] = slots[t] + size
                        Y[1, t + 128] = T.rank("thread")
                        Y[2, t] = wg
                        Y[2, t + 128] = t

    return run


def copies(n: int = 32) -> Any:
    """Replicas that differ by what each unit adds, with statements of the program in between; then one sum."""

    @T.prim_func
    def run(X: T.Tensor((n, n), "float32"), Y: T.Tensor((2, n, n), "float32"), Z: T.Tensor((n, n), "float32")):
        with T.Kernel(1, threads=256):
            acc = T.alloc((n, n), "float32", level="l0")
            T.clear(acc)
            for k in T.serial(3):
                with T.Scale("warpgroup") as (wg, _):
                    mine = T.view(acc, layout=T.Replica)
                    for i, j in T.Parallel(n, n):
                        mine[i, j] = mine[i, j] + X[i, j] * (wg + k)
                    if k == 1:
                        T.copy(mine, Y[wg, 0, 0])
            with T.Scale("warpgroup"):
                T.allreduce(T.view(acc, layout=T.Replica))
            T.copy(acc, Z)

    return run


def without_views(n: int = 32) -> Any:
    """Units read a fragment of the program without a view; another one belongs to a single role."""

    @T.prim_func
    def run(X: T.Tensor((2, n, n), "float32"), B: T.Tensor((n,), "float32"), Y: T.Tensor((2, n, n), "float32")):
        with T.Kernel(1, threads=256):
            bias = T.alloc((n,), "float32", level="l0")
            role = T.alloc((n, n), "float32", level="l0")
            T.copy(B, bias)
            for i in T.Parallel(n):
                bias[i] = bias[i] * 2
            with T.Scale("warpgroup") as (wg, _):
                tile = T.alloc((n, n), "float32", level="l0")
                T.copy(X[wg, 0, 0], tile)
                for i, j in T.Parallel(n, n):
                    tile[i, j] = tile[i, j] + bias[j]
                if wg == 1:
                    T.copy(X[0, 0, 0], role)
                    for i, j in T.Parallel(n, n):
                        tile[i, j] = tile[i, j] * role[i, j]
                T.copy(tile, Y[wg, 0, 0])

    return run


ROWS, COLUMNS = 32, 64


def couriers(devices: Any = T.ALL, blocks: int = 4, level: str = "warpgroup") -> Any:
    """One unit sends tiles to the next device and raises flags, the other waits and works on what came."""
    shape = (blocks * ROWS, COLUMNS)

    @T.prim_func
    def run(
        X: T.Tensor(shape, "float32"),
        Y: T.Tensor(shape, "float32"),
        Z: T.Tensor(shape, "float32"),
        flags: T.Tensor((blocks,), "int32"),
        turn: T.int32,
    ):
        with T.Kernel(device=devices, block=blocks, threads=2 * LEVELS[level]) as bx:
            with T.Scale(level) as (role, _), T.Scale("device") as (d, n):
                tile = T.alloc((ROWS, COLUMNS), "float32", level="l1")
                if role == 0:
                    T.copy(X[bx * ROWS, 0], tile)
                    T.copy(tile, Y[bx * ROWS, 0], dst=(d + 1) % n, signal=flags[bx])
                else:
                    T.wait(flags[bx], ">=", turn)
                    T.copy(Y[bx * ROWS, 0], tile)
                    for i, j in T.Parallel(ROWS, COLUMNS):
                        tile[i, j] = tile[i, j] * 2 + d
                    T.copy(tile, Z[bx * ROWS, 0])

    return run


def namesakes(devices: Any = T.ALL, n: int = 64) -> Any:
    """Every warpgroup sums its row with that of the same warpgroup on all devices."""

    @T.prim_func
    def run(X: T.Tensor((2, n), "float32"), Y: T.Tensor((2, n), "float32")):
        with T.Kernel(device=devices, block=1, threads=256):
            with T.Scale("warpgroup") as (wg, _):
                mine = T.alloc((n,), "float32", level="l0")
                T.copy(X[wg, 0], mine)
                with T.Scale("device"):
                    T.allreduce(mine)
                T.copy(mine, Y[wg, 0])

    return run


CASES: dict[str, Case] = {
    "columns split": Case(lambda: softmax(T.FullCol), ((2, 64, 64), (64,)), ((64, 64), (4, 64))),
    "rows split": Case(lambda: softmax(T.FullRow), ((2, 64, 64), (64,)), ((64, 64), (4, 64))),
    "product by columns": Case(lambda: product(T.FullCol, False), ((64, 256),) * 2, ((64, 64),), "float16"),
    "product by rows": Case(lambda: product(T.FullRow, True), ((64, 256),) * 2, ((64, 64),), "float16"),
    "product of transposes": Case(lambda: product(T.FullRow, True, True), ((64, 256),) * 2, ((64, 64),), "float16"),
    "cyclic in registers": Case(lambda: cyclic("l0"), ((16, 16),), ((16, 16),)),
    "cyclic in memory": Case(lambda: cyclic("l1"), ((16, 16),), ((16, 16),)),
    "roles": Case(roles, ((6, 64, 64),), ((2, 64),)),
    "reductions at once": Case(reductions, ((2, 8, 64, 64),), ((2, 8, 64),)),
    "nested": Case(nested, ((32, 32),), ((32, 32), (8,))),
    "nested in one": Case(lambda: nested(warpgroups=1), ((32, 32),), ((32, 32), (4,))),
    "single threads": Case(single_threads, ((256,),), ((3, 256),)),
    "without views": Case(without_views, ((2, 32, 32), (32,)), ((2, 32, 32),)),
    "copies": Case(copies, ((32, 32),), ((2, 32, 32), (32, 32))),
    **EXCHANGES,
}
