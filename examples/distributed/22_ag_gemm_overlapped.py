# SPDX-License-Identifier: MIT
"""All-gather + GEMM, overlapped: the copy queue moves the data, blocks only multiply.

    C = A B     A: rows over the devices     B, C: columns over the devices

A device phase starts an all-gather and does not wait for it: the device's copy queue sends the local shard to the
others, chunk by chunk, while the grid multiplies. Each chunk that arrives raises its flag, and a tile waits for the
chunk that its rows are in:

    copy queue of 1:   shard 1 to 2 ....... | shard 1 to 3 ....... | shard 1 to 0 .......
    grid of 1:         C[1] = A1 B | wait A0, C[0] = A0 B | wait A3, C[3] = A3 B | wait A2, C[2] = A2 B

The idea: an asynchronous gather. `T.all_gather(..., signal=flags, chunk=rows)` in a device phase starts it and returns;
a wait for a flag says that a chunk has arrived. The gather is in place: the local shard has the same position as on the
other devices, so nothing is copied on the device itself. `T.alloc_flags` are zero when the call begins: no clearing, no
barrier. Tiles come in the order in which the shards arrive: rank r - 1 sends to r first, rank r - 2 second.

The grid has one block for each tile, as many as there are: they wait for copy engines, not for each other, so any
subset of them may be resident.

Things to try: `rank + step` in place of `rank + devices - step`, and look at the waits with `--timeline run.svg`; a
single chunk; leave out the wait, and read which elements race.
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
    """Start the gather, then multiply each chunk after its arrival.

    Args:
        tile: rows and columns of a tile of C, and the depth of one step.
        chunk: rows that arrive together, whole tiles.
        dtype: the type of C.
    """
    TILE_M, TILE_N, TILE_K = tile
    common.whole("chunk", chunk, TILE_M)
    rows, cols = M // devices, N // devices
    tiles_m, tiles_n, chunks = -(-rows // TILE_M), -(-cols // TILE_N), -(-rows // chunk)
    group = chunk // TILE_M  # rows of tiles in a chunk

    @T.prim_func
    def ag_gemm(
        A: T.Tensor((devices, rows, K), "bfloat16"),  # on each device: the local shard, and space for the others
        B: T.Tensor((K, N), "bfloat16"),
        C: T.Tensor((devices, rows, N), dtype),
    ):
        with T.Kernel(device=devices, block=devices * tiles_m * tiles_n, threads=threads) as block:
            arrived = T.alloc_flags((devices, chunks))
            with T.Scale("device") as (rank, size):
                B_dev = T.view(B, layout=T.FullCol)
                C_dev = T.view(C, layout=T.FullCol)
                T.all_gather(A[rank, 0:rows, :], A, signal=arrived, chunk=chunk)
            with T.Scale("block"):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                out = T.alloc((TILE_M, TILE_N), dtype, level="l1")
                step = block // (tiles_m * tiles_n)
                shard = (T.rank("device") + devices - step) % devices  # in the order in which they arrive
                place = block % (tiles_m * tiles_n)
                part = place // (group * tiles_n)  # chunk after chunk, column after column of it
                height = T.min(group, tiles_m - part * group)
                m = (part * group + place % (group * tiles_n) % height) * TILE_M
                n = place % (group * tiles_n) // height * TILE_N
                T.clear(c)
                T.wait(arrived[shard, part], ">=", 1)
                for k in T.Pipelined(T.ceildiv(K, TILE_K), num_stages=stages):
                    T.copy(A[shard, m, k * TILE_K], a)
                    T.copy(B_dev[k * TILE_K, n], b)
                    T.gemm(a, b, c)
                T.copy(c, out)
                T.copy(out, C_dev[shard, m, n])

    return ag_gemm


@common.options(size=256)
def main(devices: int, size: int, seed: int) -> None:
    """Multiply (size, size) matrices, A split by rows and B by columns."""
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, devices)
    a, b = (torch.randn(size, size, generator=rng).bfloat16() for _ in range(2))
    rows = (devices, size // devices)
    a_places = [torch.full((*rows, size), torch.nan).bfloat16() for _ in range(devices)]
    for rank, (place, part) in enumerate(zip(a_places, a.chunk(devices), strict=True)):
        place[rank] = part
    b_shards = [part.contiguous() for part in b.chunk(devices, 1)]
    c_shards = [torch.full((*rows, size // devices), torch.nan) for _ in range(devices)]
    common.run(overlapped(devices, size, size, size), list(zip(a_places, b_shards, c_shards, strict=True)))
    want = (a.double() @ b.double()).reshape(*rows, size).chunk(devices, -1)
    bound = common.rounding(size, a.double().abs() @ b.double().abs()).reshape(*rows, size).chunk(devices, -1)
    common.compare("overlapped", c_shards, want, bound)


if __name__ == "__main__":
    main()
