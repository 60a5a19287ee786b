# SPDX-License-Identifier: MIT
"""Cannon's algorithm: a GEMM on a square of devices that communicate with their neighbours only.

    C = A B on side x side devices; each holds one block of A, of B and of C.

    skew the blocks once           then, side times: multiply, pass A on to the left and B upwards

    A00 A01 A02   row i moves                  B00 B11 B22
    A11 A12 A10   i to the left     <-- A      B10 B21 B02    B  column j moved
    A22 A20 A21                                B20 B01 B12    ^  j upwards

After the skew device (i, j) has blocks A[i, k] and B[k, j] of the same k, and each step brings the next k to both. No
device ever holds more than two blocks of A and B, on any number of devices (L. E. Cannon, 1969).

The idea: the launch numbers the devices in a line, and the program arranges them as it likes: `row = rank // side`,
`col = rank % side`, and neighbours in four directions. Only neighbours wait for each other:

    arrived     the right neighbour's A, and the lower one's B, have come in: the next step may read them
    free        the left neighbour no longer reads its A, nor the upper one its B: the next step may send it the next

Each block has two slots: one is multiplied while the other receives the next block; sending and multiplying are one
grid phase and overlap. Each neighbour has its flag, because one of them may be a step ahead of the other.

Things to try: a barrier in place of the four flags; one slot instead of two, and where the program then has to wait;
skew the arguments on the host and leave out the first phase.
"""

import click
import common
import torch

import tilescale.language as T

TILE = 64
TILE_K = 32


def cannon(side: int, M: int, N: int, K: int):
    """Multiply with blocks (M / side, K / side) of A, (K / side, N / side) of B and (M / side, N / side) of C on every
    device.
    """
    rows, cols, inner = M // side, N // side, K // side
    tiles_m, tiles_n, tiles_k = -(-rows // TILE), -(-cols // TILE), -(-inner // TILE_K)

    @T.prim_func
    def cannon_gemm(
        A: T.Tensor((rows, inner), "bfloat16"),
        B: T.Tensor((inner, cols), "bfloat16"),
        C: T.Tensor((rows, cols), "float32"),
    ):
        with T.Kernel(device=side * side, block=(tiles_n, tiles_m), threads=128) as (bx, by):
            a_blocks = T.alloc((2, rows, inner), "bfloat16", level="l2")
            b_blocks = T.alloc((2, inner, cols), "bfloat16", level="l2")
            arrived = T.alloc((2,), "int32", level="l2")  # tiles of A, of B
            free = T.alloc((2,), "int32", level="l2")  # steps that the left neighbour, the upper one has ended
            with T.Scale("device") as (rank, size):
                row, col = rank // side, rank % side
                left = row * side + (col + side - 1) % side
                right = row * side + (col + 1) % side
                above = (row + side - 1) % side * side + col
                below = (row + 1) % side * side + col
                T.clear(arrived)
                T.clear(free)
                T.barrier()  # no device reads the blocks of the previous launch, every flag is cleared
                T.copy(A, a_blocks[0, 0:rows, 0:inner], dst=row * side + (col + side - row) % side)
                T.copy(B, b_blocks[0, 0:inner, 0:cols], dst=(row + side - col) % side * side + col)
                T.barrier()  # every block is on the device that multiplies it in the first step
            for step in T.serial(side):
                with T.Scale("block"):
                    a = T.alloc((TILE, TILE_K), "bfloat16", level="l1")
                    b = T.alloc((TILE_K, TILE), "bfloat16", level="l1")
                    a_out = T.alloc((TILE, TILE_K), "bfloat16", level="l1")
                    b_out = T.alloc((TILE_K, TILE), "bfloat16", level="l1")
                    c = T.alloc((TILE, TILE), "float32", level="l0")
                    here = step % 2
                    with T.Scale("device"):
                        if step + 1 < side:
                            for iteration in T.serial(T.ceildiv(tiles_k - bx, tiles_n)):
                                k = bx + iteration * tiles_n
                                T.copy(a_blocks[here, by * TILE, k * TILE_K], a_out)
                                T.copy(a_out, a_blocks[1 - here, by * TILE, k * TILE_K], dst=left, signal=arrived[0])
                            for iteration in T.serial(T.ceildiv(tiles_k - by, tiles_m)):
                                k = by + iteration * tiles_m
                                T.copy(b_blocks[here, k * TILE_K, bx * TILE], b_out)
                                T.copy(b_out, b_blocks[1 - here, k * TILE_K, bx * TILE], dst=above, signal=arrived[1])
                    T.clear(c)
                    if step > 0:
                        T.copy(C[by * TILE, bx * TILE], c)
                    for k in T.Pipelined(tiles_k, num_stages=2):
                        T.copy(a_blocks[here, by * TILE, k * TILE_K], a)
                        T.copy(b_blocks[here, k * TILE_K, bx * TILE], b)
                        T.gemm(a, b, c)
                    T.copy(c, C[by * TILE, bx * TILE])
                with T.Scale("device"):
                    if step + 1 < side:
                        T.signal(free[0], dst=right)
                        T.signal(free[1], dst=below)
                        T.wait(arrived[0], ">=", (step + 1) * tiles_m * tiles_k)
                        T.wait(arrived[1], ">=", (step + 1) * tiles_k * tiles_n)
                        T.wait(free[0], ">=", step + 1)
                        T.wait(free[1], ">=", step + 1)

    return cannon_gemm


def blocks(matrix: torch.Tensor, side: int) -> list[torch.Tensor]:
    """Split a matrix into side x side blocks, in the order of the devices."""
    return [block.contiguous() for row in matrix.chunk(side) for block in row.chunk(side, 1)]


@common.options(size=256)
def main(devices: int, size: int, seed: int) -> None:
    """Multiply (size, size) matrices on a square of devices."""
    side = round(devices**0.5)
    if side * side != devices:
        raise click.UsageError(
            f"Cannon's algorithm takes a square number of devices, not {devices}: --devices={side**2}, or 17_summa.py"
        )
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, side)
    a, b = (torch.randn(size, size, generator=rng).bfloat16() for _ in range(2))
    results = [torch.full((size // side, size // side), torch.nan) for _ in range(devices)]
    common.run(cannon(side, size, size, size), list(zip(blocks(a, side), blocks(b, side), results, strict=True)))
    bound = common.rounding(size, a.double().abs() @ b.double().abs())
    common.compare("cannon", results, blocks(a.double() @ b.double(), side), blocks(bound, side))


if __name__ == "__main__":
    main()
