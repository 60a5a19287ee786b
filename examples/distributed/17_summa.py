# SPDX-License-Identifier: MIT
"""SUMMA: a GEMM on a rectangle of devices, panel by panel.

    C = A B on P x Q devices; device (i, j) holds one block of A, of B and of C.

                    panel k of B, from the row of devices that holds it
                      |      |      |      |
                      v      v      v      v          for each panel k of K:
    panel k of A -> C00    C01    C02    C03            its column of devices sends A[:, k] along the rows,
                 -> C10    C11    C12    C13            its row of devices sends B[k, :] down the columns,
                                                        every device multiplies what it was sent

1. by_panels  as drawn, on any rectangle (van de Geijn and Watts, 1997). Two slots for a panel: while one is multiplied,
              the next comes in ("look-ahead"), and a barrier ends each step.
2. by_reads   a block reads its tiles from their owners (SRUMMA, Krishnan and Nieplocha, 2004): only two barriers.

The idea: the same algorithm, pushed (`dst=`) and pulled (`src=`). Barriers say when a slot is free, or data is there.

When it wins: simulated on 2 x 2 H200, M = N = K of 1024 takes 24.4 us by panels and 30.7 us by reads, 256 takes 15.7
and 6.8 us. by_reads has fewer barriers; by_panels sends a tile to each device once.

Things to try: `--rows 1`, where only A travels; leave out the last barrier of by_reads: what may go wrong then?
"""

import math

import click
import common
import forms
import torch

import tilescale.language as T

TILE, TILE_K = 64, 32


def by_panels(P: int, Q: int, M: int, N: int, K: int):
    """Send panels ahead, each from its owner. Their number is a multiple of P and of Q."""
    rows, cols, panels = M // P, N // Q, math.lcm(P, Q)
    width = K // panels
    common.whole("K", K, panels * TILE_K)
    tiles_m, tiles_n, tiles_k = -(-rows // TILE), -(-cols // TILE), width // TILE_K

    @T.prim_func
    def summa(
        A: T.Tensor((rows, K // Q), "bfloat16"),
        B: T.Tensor((K // P, cols), "bfloat16"),
        C: T.Tensor((rows, cols), "float32"),
    ):
        with T.Kernel(device=P * Q, block=(tiles_n, tiles_m), threads=128) as (bx, by):
            a_panels = T.alloc((2, rows, width), "bfloat16", level="l2")
            b_panels = T.alloc((2, width, cols), "bfloat16", level="l2")
            with T.Scale("device") as (rank, size):
                row, col = rank // Q, rank % Q
            for step in T.serial(panels + 1):  # send panel `step`, multiply the one before
                with T.Scale("block"):
                    a = T.alloc((TILE, TILE_K), "bfloat16", level="l1")
                    b = T.alloc((TILE_K, TILE), "bfloat16", level="l1")
                    a_out = T.alloc((TILE, TILE_K), "bfloat16", level="l1")
                    b_out = T.alloc((TILE_K, TILE), "bfloat16", level="l1")
                    c = T.alloc((TILE, TILE), "float32", level="l0")
                    with T.Scale("device"):
                        if step // (panels // Q) == col:
                            left = step % (panels // Q) * width
                            for iteration in T.serial(T.ceildiv(tiles_k - bx, tiles_n)):
                                k = (bx + iteration * tiles_n) * TILE_K
                                T.copy(A[by * TILE, left + k], a_out)
                                for j in T.serial(Q):
                                    T.copy(a_out, a_panels[step % 2, by * TILE, k], dst=row * Q + (col + j) % Q)
                        if step // (panels // P) == row:
                            top = step % (panels // P) * width
                            for iteration in T.serial(T.ceildiv(tiles_k - by, tiles_m)):
                                k = (by + iteration * tiles_m) * TILE_K
                                T.copy(B[top + k, bx * TILE], b_out)
                                for i in T.serial(P):
                                    T.copy(b_out, b_panels[step % 2, k, bx * TILE], dst=(row + i) % P * Q + col)
                    if step > 0:
                        T.clear(c)
                        if step > 1:
                            T.copy(C[by * TILE, bx * TILE], c)
                        for k in T.Pipelined(tiles_k, num_stages=2):
                            T.copy(a_panels[(step + 1) % 2, by * TILE, k * TILE_K], a)
                            T.copy(b_panels[(step + 1) % 2, k * TILE_K, bx * TILE], b)
                            T.gemm(a, b, c)
                        T.copy(c, C[by * TILE, bx * TILE])
                with T.Scale("device"):
                    T.barrier()  # panel `step` is everywhere; no device reads the previous one, nor in the next launch

    return summa


def by_reads(P: int, Q: int, M: int, N: int, K: int):
    """Read tiles of A from the row of devices and tiles of B from the column."""
    common.whole("K", K, math.lcm(P, Q) * TILE_K)
    rows, cols, steps = M // P, N // Q, K // TILE_K

    @T.prim_func
    def srumma(
        A: T.Tensor((rows, K // Q), "bfloat16"),
        B: T.Tensor((K // P, cols), "bfloat16"),
        C: T.Tensor((rows, cols), "float32"),
    ):
        with T.Kernel(device=P * Q, block=(T.ceildiv(cols, TILE), T.ceildiv(rows, TILE)), threads=128) as (bx, by):
            with T.Scale("device"):
                T.barrier()  # A and B are complete on all devices
            with T.Scale("block"):
                a = T.alloc((TILE, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE), "bfloat16", level="l1")
                c = T.alloc((TILE, TILE), "float32", level="l0")
                T.clear(c)
                with T.Scale("device") as (rank, size):
                    for step in T.Pipelined(steps, num_stages=2):
                        k = (step + rank * steps // size) % steps * TILE_K  # start at different peers
                        T.copy(A[by * TILE, k % (K // Q)], a, src=rank // Q * Q + k // (K // Q))
                        T.copy(B[k % (K // P), bx * TILE], b, src=k // (K // P) * Q + rank % Q)
                        T.gemm(a, b, c)
                T.copy(c, C[by * TILE, bx * TILE])
            with T.Scale("device"):
                T.barrier()  # no device reads this one's A and B any more

    return srumma


def blocks(matrix: torch.Tensor, P: int, Q: int) -> list[torch.Tensor]:
    """Split a matrix into P x Q blocks, in the order of the devices."""
    return [block.contiguous() for row in matrix.chunk(P) for block in row.chunk(Q, 1)]


@click.option("--rows", type=click.IntRange(min=1), help="P, the rows of devices.  [default: the squarest rectangle]")
@common.options(size=256)
def main(devices: int, size: int, seed: int, rows: int | None = None) -> None:
    """Multiply matrices of about (size, size) on a rectangle of devices."""
    P = rows or max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
    if devices % P:
        raise click.UsageError(f"{devices} devices do not make {P} equal rows: give --rows a divisor of {devices}")
    rng, Q = torch.Generator().manual_seed(seed), devices // P
    M, N, unit = common.divided(size, P), common.divided(size, Q), math.lcm(P, Q) * TILE_K
    K = -(-size // unit) * unit  # a panel is made of whole tiles
    for program in by_panels, by_reads:
        a, b = torch.randn(M, K, generator=rng).bfloat16(), torch.randn(K, N, generator=rng).bfloat16()
        results = [torch.full((M // P, N // Q), torch.nan) for _ in range(devices)]
        common.run(program(P, Q, M, N, K), list(zip(blocks(a, P, Q), blocks(b, P, Q), results, strict=True)))
        bound = common.rounding(K, a.double().abs() @ b.double().abs())
        common.compare(program.__name__, results, blocks(a.double() @ b.double(), P, Q), blocks(bound, P, Q))
    forms.times((by_panels, by_reads), P, Q, *3 * [common.divided(1024, unit)])


if __name__ == "__main__":
    main()
