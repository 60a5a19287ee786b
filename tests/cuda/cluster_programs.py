# SPDX-License-Identifier: MIT
"""Programs of thread-block clusters: what tests lower and emulate, and the check on GPUs runs."""

from typing import Any

import tilescale.language as T


def ring(size: int, clusters: int = 2, n: int = 256, dtype: str = "float16", threads: int = 64) -> Any:
    """Put each program's row to the next of its cluster and get that of the previous one; parts of rows too."""
    blocks, half = size * clusters, n // 2

    @T.prim_func
    def ring_of_programs(
        X: T.Tensor((blocks, n), dtype), P: T.Tensor((blocks, n), dtype), G: T.Tensor((blocks, n), dtype)
    ):
        with T.Kernel(cta_cluster=size, block=blocks, threads=threads) as b:
            with T.Scale("block") as (rank, members):
                mine = T.alloc((n,), dtype)
                put = T.alloc((n,), dtype)
                got = T.alloc((n,), dtype, level="l0")
                T.copy(X[b, 0], mine)
                T.copy(mine[0:half], put[half:n], dst=(rank + 1) % members)
                T.copy(mine[half:n], put[0:half], dst=(rank + 1) % members)
                T.barrier()
                T.copy(mine, got, src=(rank + members - 1) % members)
                T.copy(put, P[b, 0])
                T.copy(got, G[b, 0])

    return ring_of_programs


def allreduce(size: int, dtype: str, op: str, layer: str = "l1", clusters: int = 2, m: int = 32, n: int = 48) -> Any:
    """Two all-reduces of a tile in a row."""
    blocks = size * clusters

    @T.prim_func
    def reduced(X: T.Tensor((blocks, m, n), dtype), Y: T.Tensor((blocks, m, n), dtype)):
        with T.Kernel(cta_cluster=size, block=blocks, threads=128) as b:
            with T.Scale("block"):
                tile = T.alloc((m, n), dtype, level=layer)
                T.copy(X[b, 0, 0], tile)
                T.allreduce(tile, op=op)
                T.allreduce(tile, op="max")
                T.copy(tile, Y[b, 0, 0])

    return reduced


def skewed(size: int, clusters: int = 4, rounds: int = 3) -> Any:
    """Programs that take different times synchronize, and read what the others wrote to device memory and shared
    memory."""
    blocks = size * clusters

    @T.prim_func
    def barriers(
        Delays: T.Tensor((rounds, blocks), "int32"),
        X: T.Tensor((rounds, blocks), "int32"),
        V: T.Tensor((rounds, blocks), "int32"),
        Y: T.Tensor((rounds, blocks, 2), "int32"),
    ):
        with T.Kernel(cta_cluster=size, block=blocks, threads=32) as b:
            with T.Scale("block") as (rank, members):
                mine = T.alloc((1,), "int32")
                theirs = T.alloc((1,), "int32")
                for turn in T.serial(rounds):
                    busy = T.alloc_var("int32")
                    busy = 1
                    for i in T.serial(Delays[turn, b]):
                        busy = (busy * 5 + i) % 8191
                    V[turn, b] = X[turn, b] + busy
                    mine[0] = X[turn, b] + 1
                    T.copy(mine, theirs, dst=(rank + 1) % members)
                    T.barrier()
                    Y[turn, b, 0] = V[turn, b - rank + (rank + 1) % members]
                    Y[turn, b, 1] = theirs[0]
                    T.barrier()

    return barriers


def collectives(size: int = 4, clusters: int = 2, n: int = 16, root: int = 1) -> Any:
    """The other collectives, on tiles in shared memory and in registers."""
    blocks, rows = size * clusters, 8

    @T.prim_func
    def all_of_them(
        X: T.Tensor((blocks, rows * size, n), "float32"),
        S: T.Tensor((blocks, rows, n), "float32"),
        G: T.Tensor((blocks, rows * size, n), "float32"),
        E: T.Tensor((blocks, rows * size, n), "float32"),
        B: T.Tensor((blocks, rows * size, n), "float32"),
        L: T.Tensor((blocks, rows, 2), "float32"),
    ):
        with T.Kernel(cta_cluster=size, block=blocks, threads=64) as b:
            with T.Scale("block"):
                tile = T.alloc((rows * size, n), "float32")
                held = T.alloc((rows * size, n), "float32", level="l0")
                whole = T.alloc((rows * size, n), "float32")
                part = T.alloc((rows, n), "float32", level="l0")
                top = T.alloc((rows,), "float32")
                last = T.alloc((rows,), "float32")
                T.copy(X[b, 0, 0], tile)
                T.copy(X[b, 0, 0], held)
                T.reduce_scatter(tile, part)
                T.copy(part, S[b, 0, 0])
                T.all_gather(part, whole)
                T.copy(whole, G[b, 0, 0])
                T.all_to_all(held, held)
                T.copy(held, E[b, 0, 0])
                for i in T.Parallel(rows):
                    top[i] = X[b, i, 0]
                    last[i] = X[b, i, 1]
                T.allreduce(top, last, fn=_larger)
                for i in T.Parallel(rows):
                    L[b, i, 0] = top[i]
                    L[b, i, 1] = last[i]
                T.broadcast(tile, root=root)
                T.copy(tile, B[b, 0, 0])

    return all_of_them


def _larger(a: Any, b: Any) -> Any:
    """The larger of two first values, with the second value that belongs to it."""
    return T.max(a[0], b[0]), T.if_then_else(b[0] > a[0], b[1], a[1])


def product(
    size: int = 2,
    tile: tuple[int, int, int] = (256, 128, 64),
    grid: tuple[int, int] = (2, 2),
    steps: int = 4,
    stages: int = 3,
    dtype: str = "bfloat16",
    split: str = "rows",
    operand: str = "rows",
    threads: int = 256,
) -> Any:
    """A cluster multiplies as one unit: each program loads its shares of the operands and stores its share of C.

    `split` says whether C is split by rows or columns, `operand` how programs share the load of common operands; "each"
    loads through registers, so that no bulk copy can do it.
    """
    bm, bn, bk = tile
    m, n, k = bm * grid[0], bn * grid[1], bk * steps
    by_rows, columns = split == "rows", T.FullCol if operand == "columns" else T.FullRow
    blocks = (grid[0] * size, grid[1]) if by_rows else (grid[1] * size, grid[0])

    @T.prim_func
    def by_clusters(A: T.Tensor((m, k), dtype), B: T.Tensor((k, n), dtype), C: T.Tensor((m, n), "float32")):
        with T.Kernel(cta_cluster=size, block=blocks, threads=threads) as (bx, by):
            with T.Scale("cta_cluster"):
                a = T.alloc((bm, bk), dtype, level="l1")
                w = T.alloc((bk, bn), dtype, level="l1")
                c = T.alloc((bm, bn), "float32", level="l0")
                T.clear(c)
                for step in T.Pipelined(steps, num_stages=stages):
                    with T.Scale("block") as (rank, members):
                        if by_rows:
                            T.copy(A[bx * (bm // members), step * bk], T.view(a, layout=T.FullRow))
                            if operand == "each":
                                share = T.view(w, layout=T.FullRow)
                                for i, j in T.Parallel(bk // members, bn):
                                    share[i, j] = B[step * bk + rank * (bk // members) + i, by * bn + j]
                            elif operand == "columns":
                                T.copy(B[step * bk, by * bn + rank * (bn // members)], T.view(w, layout=columns))
                            else:
                                T.copy(B[step * bk + rank * (bk // members), by * bn], T.view(w, layout=columns))
                        else:
                            T.copy(A[by * bm + rank * (bm // members), step * bk], T.view(a, layout=T.FullRow))
                            T.copy(B[step * bk, bx * (bn // members)], T.view(w, layout=T.FullCol))
                    T.gemm(a, w, c)
                with T.Scale("block") as (rank, members):
                    if by_rows:
                        T.copy(T.view(c, layout=T.FullRow), C[bx * (bm // members), by * bn])
                    else:
                        T.copy(T.view(c, layout=T.FullCol), C[by * bm, bx * (bn // members)])

    return by_clusters


def matmul(
    shape: tuple[int, int, int],
    size: int = 2,
    tile: tuple[int, int, int] = (256, 256, 64),
    stages: int = 4,
    programs: int = 0,
) -> Any:
    """A fast GEMM, bfloat16 to bfloat16: clusters load, multiply and store whole tiles.

    Results leave through shared memory. `programs`: as many take all tiles in turn.
    """
    (m, n, k), (bm, bn, bk) = shape, tile
    tm, tn = m // bm, n // bn
    launched = programs or tm * tn * size
    clusters = launched // size

    @T.prim_func
    def product_of_clusters(
        A: T.Tensor((m, k), "bfloat16"), B: T.Tensor((k, n), "bfloat16"), C: T.Tensor((m, n), "bfloat16")
    ):
        with T.Kernel(cta_cluster=size, block=launched, threads=256):
            with T.Scale("cta_cluster") as (cluster, _):
                a = T.alloc((bm, bk), "bfloat16")
                b = T.alloc((bk, bn), "bfloat16")
                c = T.alloc((bm, bn), "float32", level="l0")
                out = T.alloc((bm, bn), "bfloat16")
                for turn in T.serial((tm * tn - cluster + clusters - 1) // clusters if programs else 1):
                    i = turn * clusters + cluster
                    row, column = i % tm * bm, i // tm * bn
                    T.clear(c)
                    for step in T.Pipelined(k // bk, num_stages=stages):
                        T.copy(A[row, step * bk], a)
                        T.copy(B[step * bk, column], b)
                        T.gemm(a, b, c)
                    T.copy(c, out)
                    T.copy(out, C[row, column])

    return product_of_clusters


def persistent(size: int = 2, bm: int = 128, bn: int = 64, bk: int = 64, steps: int = 5, columns: int = 3) -> Any:
    """A loop over tiles around the loop over K, and elements of a cluster's tile read where it executes."""

    @T.prim_func
    def tiles_in_turn(
        A: T.Tensor((2 * bm, bk * steps), "bfloat16"),
        B: T.Tensor((bk * steps, bn * columns), "bfloat16"),
        C: T.Tensor((2 * bm, bn * columns), "float32"),
    ):
        with T.Kernel(cta_cluster=size, block=2 * size, threads=128) as b:
            for column in T.serial(columns):
                with T.Scale("cta_cluster") as (cluster, _):
                    a = T.alloc((bm, bk), "bfloat16")
                    w = T.alloc((bk, bn), "bfloat16")
                    c = T.alloc((bm, bn), "float32", level="l0")
                    bias = T.alloc((size,), "float32")
                    with T.Scale("block") as (rank, _):
                        bias[rank] = rank + column
                    last = bias[size - 1]
                    with T.Scale("block") as (rank, _):
                        bias[rank] = -1
                    T.clear(c)
                    for step in T.Pipelined(steps, num_stages=3):
                        T.copy(A[cluster * bm, step * bk], a)
                        T.copy(B[step * bk, column * bn], w)
                        T.gemm(a, w, c)
                    for i, j in T.Parallel(bm, bn):
                        c[i, j] = c[i, j] + last
                    with T.Scale("block") as (_, members):
                        T.copy(T.view(c, layout=T.FullRow), C[b * (bm // members), column * bn])

    return tiles_in_turn


def epilogue(size: int = 2, bm: int = 128, bn: int = 64, bk: int = 32, steps: int = 3, dtype: str = "float16") -> Any:
    """Statements at the cluster's level: load, multiply, add a bias and store tiles as wholes."""

    @T.prim_func
    def whole_tiles(
        A: T.Tensor((2 * bm, bk * steps), dtype),
        B: T.Tensor((bn, bk * steps), dtype),
        bias: T.Tensor((bn,), "float32"),
        C: T.Tensor((2 * bm, bn), "float32"),
    ):
        with T.Kernel(cta_cluster=size, block=2 * size, threads=128):
            with T.Scale("cta_cluster") as (cluster, _):
                row = cluster * bm
                a = T.alloc((bm, bk), dtype)
                w = T.alloc((bn, bk), dtype)
                c = T.alloc((bm, bn), "float32", level="l0")
                T.clear(c)
                for step in T.Pipelined(steps, num_stages=2):
                    T.copy(A[row, step * bk], a)
                    T.copy(B[0, step * bk], w)
                    T.gemm(a, w, c, transpose_B=True)
                for i, j in T.Parallel(bm, bn):
                    c[i, j] = T.max(c[i, j] + bias[j] + (row + i), 0.0)
                T.copy(c, C[row, 0])

    return whole_tiles


def conditional() -> Any:
    """A tile is stored where an argument says so."""

    @T.prim_func
    def stored_or_not(A: T.Tensor((256, 32), "float16"), C: T.Tensor((256, 32), "float16"), n: T.int32):
        with T.Kernel(cta_cluster=2, block=4, threads=128):
            with T.Scale("cta_cluster") as (cluster, _):
                a = T.alloc((128, 32), "float16")
                T.copy(A[cluster * 128, 0], a)
                if n > 0:
                    T.copy(a, C[cluster * 128, 0])

    return stored_or_not


def variables(size: int = 4, clusters: int = 2) -> Any:
    """Programs keep their own values through a region of their cluster, and share single elements of its tile."""
    blocks = size * clusters

    @T.prim_func
    def elements(X: T.Tensor((blocks,), "int32"), Y: T.Tensor((blocks, 4), "int32")):
        with T.Kernel(cta_cluster=size, block=blocks, threads=32) as b:
            own = X[b] * 3
            with T.Scale("cta_cluster") as (cluster, _):
                tile = T.alloc((size,), "int32")
                for step in T.serial(2):
                    with T.Scale("block") as (rank, _):
                        tile[rank] = own + step
                with T.Scale("block") as (rank, _):
                    Y[b, 0] = tile[rank]
                    Y[b, 1] = tile[size - 1 - rank]
                    Y[b, 2] = cluster
                    Y[b, 3] = own

    return elements


def grid_sum() -> Any:
    """A cluster of 2 x 2 in a grid of 4 x 4: ranks, and the sum of each quarter."""

    @T.prim_func
    def quarters(X: T.Tensor((4, 4), "int32"), R: T.Tensor((4, 4), "int32"), S: T.Tensor((4, 4), "int32")):
        with T.Kernel(cta_cluster=(2, 2), block=(4, 4), threads=32) as (bx, by):
            with T.Scale("block") as (rank, members):
                mine = T.alloc((1,), "int32")
                mine[0] = X[by, bx]
                T.allreduce(mine)
                R[by, bx] = rank * 10 + members + T.rank("cta_cluster") * 100
                S[by, bx] = mine[0]

    return quarters
