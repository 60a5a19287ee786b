# SPDX-License-Identifier: MIT
"""Neighbour shift: every device sends its tensor to the next one.

    device 0      device 1      device 2      device 3
     A  -----.     A  -----.     A  -----.     A  -----> (to device 0)
     B <---   `--> B        `--> B        `--> B

The idea: one program for all devices, and a rank. A tile program runs on every device of the launch; inside
`T.Scale("device")` it asks which device it is and names another one: `T.copy(tile, B[...], dst=peer)` writes into the B
of device `peer`. That is all there is to remote memory.

Two barriers make it correct:
- before: the neighbour may still be busy with the previous use of its B; no device writes before all have arrived here;
- after: the copies into my B are my neighbour's; when the program has ended, they must be there.

Things to try: shift by two; read from the left neighbour with `src=` instead; leave --devices out and start it with
`tilescale run -n 4 01_neighbour_shift.py`, or with torchrun or mpirun.
"""

import common
import torch

import tilescale.language as T

TILE = 64


def shift(devices: int, rows: int, cols: int):
    """A and B are each device's own tensors: no view distributes them."""

    @T.prim_func
    def neighbour_shift(A: T.Tensor((rows, cols), "float32"), B: T.Tensor((rows, cols), "float32")):
        with T.Kernel(device=devices, block=(T.ceildiv(cols, TILE), T.ceildiv(rows, TILE)), threads=128) as (bx, by):
            with T.Scale("device"):
                T.barrier()  # every B is free
            with T.Scale("block"):
                tile = T.alloc((TILE, TILE), "float32", level="l1")
                T.copy(A[by * TILE, bx * TILE], tile)
                with T.Scale("device") as (rank, size):
                    T.copy(tile, B[by * TILE, bx * TILE], dst=(rank + 1) % size)
            with T.Scale("device"):
                T.barrier()  # every B is complete

    return neighbour_shift


@common.options(size=256)
def main(devices: int, size: int, seed: int) -> None:
    """Shift a (size, size) tensor to the next device."""
    rng = torch.Generator().manual_seed(seed)
    sent = [torch.randn(size, size, generator=rng) for _ in range(devices)]
    received = [torch.full((size, size), torch.nan) for _ in range(devices)]
    common.run(shift(devices, size, size), list(zip(sent, received, strict=True)))
    common.compare("neighbour shift", received, [sent[rank - 1] for rank in range(devices)])


if __name__ == "__main__":
    main()
