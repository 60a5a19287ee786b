# SPDX-License-Identifier: MIT
"""Roles: one warpgroup of a block loads tiles from the devices that have them, two others multiply.

    C = A B     A, C: rows over the devices     B: rows too, so that tile k of B lies on device k // (tiles / devices)

    warpgroup 0    load tile 0 | load tile 1 | wait until 0 is empty | load tile 2 | ...
                       full[0]       full[1]       empty[0]
    warpgroup 1    wait | upper half of c += a b | wait | ...
    warpgroup 2    wait | lower half of c += a b | wait | ...

The idea: units of one block that run different programs. The rank of a warpgroup selects its program, `if wg == 0`.
They synchronize by barriers in shared memory, a pair for each stage of the ring: `full` counts the arrivals of the
loader's 128 threads, `empty` those of the 256 that multiply. A barrier starts over after each round; a wait names the
parity of the round that must have ended, so the n-th use of a stage waits for parity n % 2, and the loader's first
waits, for stages that were never used, name the round before the first.

The multiplying warpgroups never wait for a network: while they work on one stage, the loader is fetching the others.

Things to try: more stages, and fewer; the loader waits with the same parity as the others (a deadlock: which waits form
the cycle?); a second loading warpgroup, for B alone.
"""

import common
import torch

import tilescale.language as T

TILE_M, TILE_N, TILE_K, STAGES = 128, 128, 64, 3


def loader_and_workers(devices: int, M: int, N: int, K: int):
    """Warpgroup 0 is the producer; warpgroups 1 and 2 are consumers of half of the rows each. K is a multiple of
    devices * TILE_K.
    """
    common.whole("K", K, devices * TILE_K)
    rows, keys = M // devices, K // devices
    half, steps = TILE_M // 2, K // TILE_K

    @T.prim_func
    def roles(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(device=devices, block=(T.ceildiv(N, TILE_N), T.ceildiv(rows, TILE_M)), threads=384) as (bx, by):
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullRow)
                B_dev = T.view(B, layout=T.FullRow)
                C_dev = T.view(C, layout=T.FullRow)
            with T.Scale("block"):
                row, col = by * TILE_M, bx * TILE_N
                a = T.alloc((STAGES, TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((STAGES, TILE_K, TILE_N), "bfloat16", level="l1")
                full = T.alloc_barrier([128] * STAGES)
                empty = T.alloc_barrier([256] * STAGES)
                with T.Scale("warpgroup") as (wg, _):
                    c = T.alloc((half, TILE_N), "float32", level="l0")
                    if wg == 0:
                        for k in T.serial(steps):
                            stage = k % STAGES
                            T.barrier_wait(empty[stage], (k // STAGES + 1) % 2)
                            T.copy(A_dev[row : row + TILE_M, k * TILE_K : (k + 1) * TILE_K], a[stage, :, :])
                            owner, key = k * TILE_K // keys, k * TILE_K % keys
                            with T.Scale("device"):
                                T.copy(B_dev[key : key + TILE_K, col : col + TILE_N], b[stage, :, :], src=owner)
                            T.barrier_arrive(full[stage])
                    else:
                        T.clear(c)
                        for k in T.serial(steps):
                            stage = k % STAGES
                            T.barrier_wait(full[stage], k // STAGES % 2)
                            T.gemm(a[stage, (wg - 1) * half : wg * half, :], b[stage, :, :], c)
                            T.barrier_arrive(empty[stage])
                        T.copy(c, C_dev[row + (wg - 1) * half, col])

    return roles


@common.options(size=512)
def main(devices: int, size: int, seed: int) -> None:
    """Multiply matrices of about (size, size), a whole number of tiles of K on every device."""
    rng = torch.Generator().manual_seed(seed)
    size = -(-size // (devices * TILE_K)) * devices * TILE_K
    a, b = (torch.randn(size, size, generator=rng).bfloat16() for _ in range(2))
    results = [torch.full((size // devices, size), torch.nan) for _ in range(devices)]
    args = list(zip(a.chunk(devices), b.chunk(devices), results, strict=True))
    common.run(loader_and_workers(devices, size, size, size), args)
    bound = common.rounding(size, a.double().abs() @ b.double().abs()).chunk(devices)
    common.compare("roles", results, (a.double() @ b.double()).chunk(devices), bound)


if __name__ == "__main__":
    main()
