# SPDX-License-Identifier: MIT
"""GEMM + reduce-scatter, overlapped: parts leave by copy engine while the next ones are multiplied.

    C = A B     A: columns over the devices     B: rows over the devices     C: rows over the devices

A device phase starts one copy for each chunk of rows of each other device, before any tile is computed. Each copy waits
in the device's copy queue until the tiles of its chunk are complete; a local flag counts them:

    grid of 1:         rows of 2, rows of 3, rows of 0 ........................ | own rows, + what arrived, into C
    copy queue of 1:      after the first chunk of 2: send | after the second: send | ... | after the last of 0: send

The idea: `after=(flag, ">=", n)`. The condition of a copy is given where it is started, so tiles neither send nor wait
for a send. Rows for other devices come first and local rows last: by then most parts have arrived. Parts are added in
float32 in a fixed order, so a result has the same bits every time.

A waiting block stays resident, and waits for tiles of other devices with smaller numbers. That is safe as GPUs start
blocks in the order of their numbers (docs/never-hang.md).

Things to try: local rows first, and read the deadlock on a machine with few resident blocks; `after` with a count that
is one too small, and read which elements race; larger chunks, and look at the end of `--timeline run.svg`.
"""

import common
import torch

import tilescale.language as T


def overlapped(
    devices: int,
    M: int,
    N: int,
    K: int,
    tile: tuple[int, int, int] = (64, 64, 32),
    chunk: int = 64,
    stages: int = 2,
    threads: int = 128,
    dtype: str = "float32",
):
    """Start the copies, then compute the parts that they send.

    Args:
        tile: rows and columns of a tile of C, and the depth of one step.
        chunk: rows that are sent together, whole tiles.
        dtype: the type of C and of the parts in flight; sums are float32.
    """
    TILE_M, TILE_N, TILE_K = tile
    common.whole("chunk", chunk, TILE_M)
    rows = M // devices
    tiles_m, tiles_n, chunks = -(-rows // TILE_M), -(-N // TILE_N), -(-rows // chunk)
    group = chunk // TILE_M  # rows of tiles in a chunk

    @T.prim_func
    def gemm_rs(
        A: T.Tensor((devices, rows, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((rows, N), dtype)
    ):
        with T.Kernel(device=devices, block=devices * tiles_m * tiles_n, threads=threads) as block:
            parts = T.alloc((devices, rows, N), dtype, level="l2")  # by owner
            inbox = T.alloc((devices, rows, N), dtype, level="l2")  # by source
            done, arrived = T.alloc_flags((devices, chunks)), T.alloc_flags((devices, chunks))
            with T.Scale("device") as (rank, size):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
                for step in T.serial(devices - 1):
                    for i in T.serial(chunks):
                        to = (rank + 1 + step) % size
                        first, last = i * chunk, T.min(i * chunk + chunk, rows)
                        tiles = T.ceildiv(last - first, TILE_M) * tiles_n
                        T.copy(
                            parts[to, first:last, :], inbox[rank, first:last, :],
                            dst=to, signal=arrived[rank, i], after=(done[to, i], ">=", tiles),
                        )  # fmt: skip
            with T.Scale("block"), T.Scale("device") as (rank, size):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                out = T.alloc((TILE_M, TILE_N), dtype, level="l1")
                owner = (rank + 1 + block // (tiles_m * tiles_n)) % size  # the local rows last
                place = block % (tiles_m * tiles_n)
                part = place // (group * tiles_n)  # chunk after chunk, column after column of it
                height = T.min(group, tiles_m - part * group)
                m = (part * group + place % (group * tiles_n) % height) * TILE_M
                n = place % (group * tiles_n) // height * TILE_N
                T.clear(c)
                for k in T.Pipelined(T.ceildiv(K // devices, TILE_K), num_stages=stages):
                    T.copy(A_dev[owner, m, k * TILE_K], a)
                    T.copy(B_dev[k * TILE_K, n], b)
                    T.gemm(a, b, c)
                if owner != rank:
                    T.copy(c, out)
                    T.copy(out, parts[owner, m, n])
                    T.signal(done[owner, part])
                else:
                    for step in T.serial(devices - 1):
                        source = (rank + devices - 1 - step) % size  # the rank before was the first to send
                        T.wait(arrived[source, part], ">=", 1)
                        T.copy(inbox[source, m, n], out)
                        for i, j in T.Parallel(TILE_M, TILE_N):
                            c[i, j] += T.cast(out[i, j], "float32")
                    T.copy(c, out)
                    T.copy(out, C[m, n])

    return gemm_rs


@common.options(size=256)
def main(devices: int, size: int, seed: int) -> None:
    """Multiply (size, size) matrices, the inner dimension split over the devices, rows of C left on their owners."""
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, devices)
    a, b = (torch.randn(size, size, generator=rng).bfloat16() for _ in range(2))
    a_shards = [part.contiguous() for part in a.reshape(devices, -1, size).chunk(devices, -1)]
    c_shards = [torch.full((size // devices, size), torch.nan) for _ in range(devices)]
    common.run(overlapped(devices, size, size, size), list(zip(a_shards, b.chunk(devices), c_shards, strict=True)))
    bound = common.rounding(size, a.double().abs() @ b.double().abs())
    common.compare("overlapped", c_shards, (a.double() @ b.double()).chunk(devices), bound.chunk(devices))


if __name__ == "__main__":
    main()
