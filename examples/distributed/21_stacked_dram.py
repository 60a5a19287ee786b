# SPDX-License-Identifier: MIT
"""GEMM under stacked DRAM: the weights stay in place, inputs and sums stream past them.

A vault of this machine is a slice of DRAM with two cores right under it; a mesh joins the vaults. DRAM is near and the
mesh narrow, so large tensors should not travel: B, the weights, lies in blocks over the vaults for good, and the vaults
are one large systolic array (Kung and Leiserson, 1979).

                       (zero)      (zero)
                         |           |
    A[:, 0]  -------->  B00  ---->  B01  ---->      rows of A flow to the right, from vault to vault;
                         | A B00     |              sums of products flow down:
    A[:, 1]  -------->  B10  ---->  B11  ---->      what comes from above + A B, here
                         |           |
                       C[:, 0]     C[:, 1]          complete below the last row

Tile after tile of rows is processed like this, and all vaults are busy once the first has passed. Nothing wraps round,
so with `--devices 64`, rows of eight as on the chip, every copy is one hop of the mesh.

The idea: each memory layer keeps data of a matching lifetime. l2, the vault's DRAM: its blocks of A, B and C, into
which the neighbours write. l1, a core's scratchpad: the core's columns of B, loaded once for all rows of A. l0, its
registers: the sum in flight from the vault above to the vault below. A neighbour writes straight into A and C, each
element once, so arrival flags are enough and no credits are needed.

Things to try: more rows of A (`--size`) and what part of the time the array fills and drains; the blocks of B in the
other order; four chips that split K, and an all-reduce of C inside T.Scale("chip").
"""

import math

import common
import torch

import tilescale.language as T

TILE = 16


def weights_stay(P: int, Q: int, M: int, N: int, K: int):
    """Multiply on P x Q vaults: A enters at the first vault of each row, C leaves at the last of each column."""
    inner, cols = K // P, N // Q
    tiles_m, tiles_n = -(-M // TILE), -(-cols // TILE)

    @T.prim_func
    def systolic(
        A: T.Tensor((M, inner), "bfloat16"), B: T.Tensor((inner, cols), "bfloat16"), C: T.Tensor((M, cols), "float32")
    ):
        with T.Kernel(vault=P * Q, core=tiles_n) as n:
            rows_here = T.alloc((tiles_m,), "int32", level="l2")
            sums_here = T.alloc((tiles_m, tiles_n), "int32", level="l2")
            with T.Scale("vault"):
                T.clear(rows_here)
                T.clear(sums_here)
                T.barrier()  # no device reads the A and C of the previous launch, all flags are cleared
            with T.Scale("core"):
                a = T.alloc((TILE, inner), "bfloat16", level="l1")
                b = T.alloc((inner, TILE), "bfloat16", level="l1")
                c = T.alloc((TILE, TILE), "float32", level="l0")
                T.copy(B[0, n * TILE], b)
                with T.Scale("vault") as (rank, size):
                    row, col = rank // Q, rank % Q
                    for m in T.serial(tiles_m):
                        if col > 0:
                            T.wait(rows_here[m], ">=", 1)
                        T.copy(A[m * TILE, 0], a)
                        if n == 0 and col + 1 < Q:  # one core passes them on for all
                            T.copy(a, A[m * TILE, 0], dst=rank + 1, signal=rows_here[m])
                        T.clear(c)
                        if row > 0:
                            T.wait(sums_here[m, n], ">=", 1)
                            T.copy(C[m * TILE, n * TILE], c)
                        T.gemm(a, b, c)
                        if row + 1 < P:
                            T.copy(c, C[m * TILE, n * TILE], dst=rank + Q, signal=sums_here[m, n])
                        else:
                            T.copy(c, C[m * TILE, n * TILE])

    return systolic


@common.options(size=256, devices=64, machine="stacked-3d")
def main(devices: int, size: int, seed: int) -> None:
    """Multiply (size, size) matrices on the squarest rectangle of vaults."""
    P = max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
    Q = devices // P
    rng = torch.Generator().manual_seed(seed)
    M, N, K = size, common.divided(size, Q), common.divided(size, P)
    a, b = torch.randn(M, K, generator=rng).bfloat16(), torch.randn(K, N, generator=rng).bfloat16()
    args, wanted, bound = [], [], []
    for row, (left, below) in enumerate(zip(a.chunk(P, 1), b.chunk(P), strict=True)):
        for col, weights in enumerate(below.chunk(Q, 1)):
            entering = left if col == 0 else torch.full(left.shape, torch.nan)
            args.append([entering.bfloat16().contiguous(), weights.contiguous(), torch.zeros(M, N // Q)])
            # The last row ends with the result, the others with the sums from above, the first with its zeros.
            k, columns = K if row + 1 == P else row * (K // P), slice(col * (N // Q), (col + 1) * (N // Q))
            wanted.append(a[:, :k].double() @ b[:k, columns].double())
            bound.append(common.rounding(K, a[:, :k].double().abs() @ b[:k, columns].double().abs()))
    common.run(weights_stay(P, Q, M, N, K), args)
    common.compare(f"systolic, {P} x {Q}", [c for _, _, c in args], wanted, bound)


if __name__ == "__main__":
    main()
