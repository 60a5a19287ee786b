# SPDX-License-Identifier: MIT
"""GEMM on a wafer: Cannon's algorithm on a mesh of cores, where no shift goes further than two hops.

A core has 48 KiB of its own memory and wires to four neighbours; there is nothing else. It holds one block of A, B and
C, multiplies, passes A along its row and B along its column, and multiplies the blocks that arrive.

Cannon's shifts go round (16), but a mesh has no wires from its last column to its first: one block of each row would
cross the whole of it in every step, and with many cores all would wait for that one. So the ring is folded, even
positions outbound and odd ones inbound, as in MeshGEMM (WaferLLM; He and others, 2025):

    position       0     1     2     3     4     5
    out            o-----------o-----------o-----.
    back           '-----o-----------o-----------o

Neighbours of the ring are two positions apart, at both ends one; a step takes the same time on any number of cores.

The idea: the program chooses which cores are neighbours. Blocks are assigned to the cores by their position on the
ring, not on the mesh; all that changes in Cannon's algorithm are the four neighbours.

The memory of a core is the layer l0 of this machine, for tensors and for tiles; the flags are a tensor of it, too.

Things to try: the plain ring (`(position + by // 2 + side) % side`) and its `report.time_us`, with small blocks on many
cores; bfloat16; blocks that no longer fit into a core, and what the error says.
"""

import click
import common
import torch

import tilescale.language as T


def place_on_ring(position: int, side: int) -> int:
    """Position on the folded ring of a core of a line of `side` cores."""
    return side - (position + 1) // 2 if position % 2 else position // 2


def stepped(position, by: int, side: int):
    """Position that follows on the folded ring (by=2) or precedes (by=-2): even ones go up, odd ones down."""
    there = position + by * (1 - 2 * (position % 2))
    there = T.max(there, -1 - there)  # turned back at position 0,
    return T.min(there, 2 * side - 1 - there) % side  # and at the other end


def mesh_gemm(side: int, M: int, N: int, K: int):
    """Pass each core's block of A to the previous core of its row's ring, and B to the previous one of its column's."""
    rows, cols, inner = M // side, N // side, K // side

    @T.prim_func
    def folded_cannon(
        A: T.Tensor((rows, inner), "float16"),
        B: T.Tensor((inner, cols), "float16"),
        C: T.Tensor((rows, cols), "float32"),
        arrived: T.Tensor((2,), "int32"),
        free: T.Tensor((2,), "int32"),
    ):
        with T.Kernel(core=(side, side)) as (x, y):
            with T.Scale("core"):
                a = T.alloc((2, rows, inner), "float16", level="l0")
                b = T.alloc((2, inner, cols), "float16", level="l0")
                c = T.alloc((rows, cols), "float32", level="l0")
                a_to = y * side + stepped(x, -2, side)
                a_from = y * side + stepped(x, 2, side)
                b_to = stepped(y, -2, side) * side + x
                b_from = stepped(y, 2, side) * side + x
                T.clear(arrived)
                T.clear(free)
                T.clear(c)
                T.copy(A, a[0, 0:rows, 0:inner])
                T.copy(B, b[0, 0:inner, 0:cols])
                T.barrier()  # all flags are cleared, and no device computes with blocks of the previous launch
                for step in T.serial(side):
                    here = step % 2
                    if step + 1 < side:  # both blocks travel while they are multiplied
                        T.wait(free[0], ">=", step)
                        T.copy(a[here, 0:rows, 0:inner], a[1 - here, 0:rows, 0:inner], dst=a_to, signal=arrived[0])
                        T.wait(free[1], ">=", step)
                        T.copy(b[here, 0:inner, 0:cols], b[1 - here, 0:inner, 0:cols], dst=b_to, signal=arrived[1])
                    T.gemm(a[here, 0:rows, 0:inner], b[here, 0:inner, 0:cols], c)
                    if step + 1 < side:
                        T.signal(free[0], dst=a_from)
                        T.signal(free[1], dst=b_from)
                        T.wait(arrived[0], ">=", step + 1)
                        T.wait(arrived[1], ">=", step + 1)
                T.copy(c, C)
                T.barrier()  # every device knows of the last free slots

    return folded_cannon


def blocks(matrix: torch.Tensor, side: int, skew: str = "") -> list[torch.Tensor]:
    """Blocks of all cores; A skewed by rows or B by columns, so that the first blocks of a core have the same k."""
    grid = [row.chunk(side, 1) for row in matrix.chunk(side)]
    found = []
    for core in range(side * side):
        i, j = (place_on_ring(position, side) for position in divmod(core, side))
        k = (i + j) % side
        found.append(grid[k if skew == "columns" else i][k if skew == "rows" else j].contiguous())
    return found


@common.options(size=96, devices=16, machine="wafer-mesh")
def main(devices: int, size: int, seed: int) -> None:
    """Multiply (size, size) matrices on a square of cores."""
    side = round(devices**0.5)
    if side * side != devices:
        raise click.UsageError(f"{devices} cores are no square: give --devices {side * side}")
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, side)
    a, b = (torch.randn(size, size, generator=rng).half() for _ in range(2))
    results = [torch.full((size // side, size // side), torch.nan) for _ in range(devices)]
    flags = [[torch.zeros(2, dtype=torch.int32) for _ in range(2)] for _ in range(devices)]
    given = zip(blocks(a, side, "rows"), blocks(b, side, "columns"), results, *zip(*flags, strict=True), strict=True)
    common.run(mesh_gemm(side, size, size, size), list(given))
    bound = common.rounding(size, a.double().abs() @ b.double().abs())
    common.compare("folded_cannon", results, blocks(a.double() @ b.double(), side), blocks(bound, side))


if __name__ == "__main__":
    main()
