# SPDX-License-Identifier: MIT
"""Tensor-parallel GEMM: one program from warpgroups to devices.

    C = A B    on n devices: A split by columns, B by rows, every device ends with the whole of C

    device       A[:, d]  x  B[d, :]        its share of K           partial C          all-reduce through l2 (NVLink)
    block          a      x     b           a tile of C, K step by step
    warpgroup    a[:, w]  x  b[w, :]        its half of the K step   partial c          all-reduce through l1 (shared)

The idea: the same two words at every level. `T.view(tile, layout=...)` says which part a unit holds: FullCol and
FullRow split, Replica gives each unit a copy. `T.allreduce` makes one sum of the copies of a level's units. Inside
`T.Scale("warpgroup")` that is a fragment in registers, combined through shared memory; inside `T.Scale("device")` a
tensor in device memory, combined over the network. The machine description says which memory and network that is.

Things to try: `--machine gb200-nvl72 --devices 16`; no split over warpgroups (delete
three lines); four devices that end with a quarter of C each (T.reduce_scatter, see 07).
"""

import click
import common
import torch

import tilescale
import tilescale.language as T

TILE_M, TILE_N, TILE_K, STAGES = 128, 192, 64, 5
PANEL = 10  # rows of tiles that are computed next to each other: their common operands stay in the L2 cache


def tp_gemm(devices: int, M: int, N: int, K: int):
    """Split K over the devices, and the K tile of a block over two warpgroups."""

    @T.prim_func
    def tensor_parallel_gemm(
        A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "float32")
    ):
        with T.Kernel(device=devices, block=(T.ceildiv(N, TILE_N), T.ceildiv(M, TILE_M)), threads=256) as (bx, by):
            T.use_swizzle(PANEL)
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)  # (M, K / devices) on each
                B_dev = T.view(B, layout=T.FullRow)  # (K / devices, N)
                C_dev = T.view(C, layout=T.Replica)  # (M, N), a partial sum until the all-reduce
            with T.Scale("block"):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                with T.Scale("warpgroup"):
                    T.clear(T.view(c, layout=T.Replica))
                for k in T.Pipelined(T.ceildiv(A_dev.shape[1], TILE_K), num_stages=STAGES):
                    T.copy(A_dev[by * TILE_M, k * TILE_K], a)
                    T.copy(B_dev[k * TILE_K, bx * TILE_N], b)
                    with T.Scale("warpgroup"):  # each warpgroup multiplies its half of the K tile
                        T.gemm(T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow), T.view(c, layout=T.Replica))
                with T.Scale("warpgroup"):
                    T.allreduce(T.view(c, layout=T.Replica))
                T.copy(c, C_dev[by * TILE_M, bx * TILE_N])
            with T.Scale("device"):
                T.allreduce(C_dev)

    return tensor_parallel_gemm


@common.options(size=1024, devices=8)
def main(devices: int, size: int, seed: int) -> None:
    """Multiply (size, size) matrices on all devices together."""
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, devices)
    a, b = (torch.randn(size, size, generator=rng).bfloat16() for _ in range(2))
    a_shards = [part.contiguous() for part in a.chunk(devices, 1)]
    results = [torch.full((size, size), torch.nan) for _ in range(devices)]
    program = tp_gemm(devices, size, size, size)
    if tilescale.init().rank == 0:
        click.echo(f"{size} x {size} x {size}, bfloat16, on {devices} devices\n")
        click.echo(f"{tilescale.compile(program).schedule}\n")
    common.run(program, list(zip(a_shards, b.chunk(devices), results, strict=True)))
    bound = common.rounding(size, a.double().abs() @ b.double().abs())
    common.compare("C against float64", results, [a.double() @ b.double()] * devices, [bound] * devices)


if __name__ == "__main__":
    main()
