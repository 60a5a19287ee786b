# SPDX-License-Identifier: MIT
"""All-gather: every device ends with the shards of all, once as a collective and once by hand.

    device 0: [a]      device 1: [b]              device 0: [a b]      device 1: [a b]
                                        ---->

The idea: phases. Statements inside `T.Scale("device")`, outside the grid, run once on each device and act on whole
tensors; `T.all_gather` there is a phase of its own. `T.view(whole, layout=T.FullRow)` at device level says that the
rows of a tensor are split over the devices, and each device passes its share. The machine model chooses a collective's
implementation; `impl="ring"` or `impl="copy_engine"` would choose one.

By hand it is a grid phase: each block writes its tile to its position in the result of every device. Blocks start with
different peers, `rank + 1`, `rank + 2`, ..., so that no link carries all tiles at the same time.

When it wins: as a collective, when nothing else is done with the tiles. Simulated on four H200, 256 x 256 takes 3.6 us
as a collective and 7.2 us by hand, 2048 x 2048 takes 20.4 and 23.9 us. By hand pays where a tile is used as soon as it
arrives (06).

Things to try: gather columns (`dim=1`, `T.FullCol`); let the blocks read the peers' shards instead of writing (then the
shards must be visible to peers: what does the first barrier do then, and what the second?).
"""

import common
import forms
import torch

import tilescale.language as T

TILE = 64


def collective(devices: int, rows: int, cols: int):
    """Collective: the phase `T.all_gather`."""

    @T.prim_func
    def all_gather(X: T.Tensor((rows, cols), "bfloat16"), Y: T.Tensor((rows, cols), "bfloat16")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                share = T.view(X, layout=T.FullRow)
                T.all_gather(share, Y, dim=0)

    return all_gather


def by_hand(devices: int, rows: int, cols: int):
    """By hand: each block writes its tile of the share into the Y of every device."""
    count = rows // devices

    @T.prim_func
    def push(X: T.Tensor((devices, count, cols), "bfloat16"), Y: T.Tensor((devices, count, cols), "bfloat16")):
        with T.Kernel(device=devices, block=(T.ceildiv(cols, TILE), T.ceildiv(count, TILE)), threads=128) as (bx, by):
            with T.Scale("device"):
                share = T.view(X, layout=T.FullRow)
                T.barrier()  # every Y is free
            with T.Scale("block"):
                tile = T.alloc((TILE, TILE), "bfloat16", level="l1")
                T.copy(share[0, by * TILE, bx * TILE], tile)
                with T.Scale("device") as (rank, size):
                    for step in T.serial(size):
                        T.copy(tile, Y[rank, by * TILE, bx * TILE], dst=(rank + step) % size)
            with T.Scale("device"):
                T.barrier()  # every Y is complete

    return push


@common.options(size=256)
def main(devices: int, size: int, seed: int) -> None:
    """Gather a (size, size) tensor whose rows are split over the devices."""
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, devices)
    whole = torch.randn(size, size, generator=rng).bfloat16()
    for program, shape in (collective, (size, size)), (by_hand, (devices, size // devices, size)):
        shares = whole.reshape(shape).chunk(devices)
        gathered = [torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(devices)]
        common.run(program(devices, size, size), list(zip(shares, gathered, strict=True)))
        common.compare(program.__name__, gathered, [whole.reshape(shape)] * devices)
    forms.times((collective, by_hand), devices, common.divided(2048, devices), 2048)


if __name__ == "__main__":
    main()
