# SPDX-License-Identifier: MIT
"""Put with signal: tiles travel round a ring, and each device waits only for the tile that it needs.

    device r-1                     device r                        device r+1
      put tile, raise arrived[b]  -->  inbox[b]
                                       wait arrived[b], take the tile
      wait free[b]  <----------------- raise free[b]
                                       put tile, raise arrived[b] -->  inbox[b]

The idea: a barrier synchronizes all devices, a flag only two. `T.copy(..., dst=, signal=flag)` writes the data and then
raises the receiver's flag; a unit that has waited for the flag sees the data. A second flag goes the other way, the
credit: the receiver has read its inbox, and the sender may write it again.

Every tile visits every device, and each device adds up what it sees, so all end with the sum over the devices.

Flags count upwards and never go back, so that a round cannot be mistaken for the previous one. They are cleared once,
at the start; the barrier after that keeps a fast neighbour from raising a flag that has not been cleared yet. The
barrier at the end is for the last credits, for which no block waits: they must not arrive during the next launch.

Things to try: leave out the credit (the sums may stay right by luck: the emulator interleaves the devices); wait for
`step + 2` and read the deadlock report; make the inbox double-buffered, so that two tiles are in flight.
"""

import common
import torch

import tilescale.language as T

TILE = 32


def ring_sum(devices: int, rows: int, cols: int):
    """Sum over all devices: each block passes its tile on around the ring."""
    blocks = -(-rows // TILE)

    @T.prim_func
    def put_with_signal(X: T.Tensor((rows, cols), "float32"), Y: T.Tensor((rows, cols), "float32")):
        with T.Kernel(device=devices, block=blocks, threads=128) as b:
            inbox = T.alloc((rows, cols), "float32", level="l2")
            arrived = T.alloc((blocks,), "int32", level="l2")
            free = T.alloc((blocks,), "int32", level="l2")
            with T.Scale("device"):
                T.clear(arrived)
                T.clear(free)
                T.barrier()
            with T.Scale("block"):
                tile = T.alloc((TILE, cols), "float32", level="l1")
                total = T.alloc((TILE, cols), "float32", level="l0")
                T.copy(X[b * TILE, 0], tile)
                T.copy(tile, total)
                with T.Scale("device") as (rank, size):
                    right = (rank + 1) % size
                    left = (rank + size - 1) % size
                    for step in T.serial(size - 1):
                        T.wait(free[b], ">=", step)
                        T.copy(tile, inbox[b * TILE, 0], dst=right, signal=arrived[b])
                        T.wait(arrived[b], ">=", step + 1)
                        T.copy(inbox[b * TILE, 0], tile)
                        T.signal(free[b], dst=left)
                        for i, j in T.Parallel(TILE, cols):
                            total[i, j] += tile[i, j]
                T.copy(total, Y[b * TILE, 0])
            with T.Scale("device"):
                T.barrier()

    return put_with_signal


@common.options(size=128)
def main(devices: int, size: int, seed: int) -> None:
    """Add up (size, size) tensors of all devices on a ring."""
    rng = torch.Generator().manual_seed(seed)
    given = [torch.randn(size, size, generator=rng) for _ in range(devices)]
    sums = [torch.full((size, size), torch.nan) for _ in range(devices)]
    common.run(ring_sum(devices, size, size), list(zip(given, sums, strict=True)))
    stacked = torch.stack(given).double()
    bound = common.rounding(devices, stacked.abs().sum(0))
    common.compare("ring", sums, [stacked.sum(0)] * devices, [bound] * devices)


if __name__ == "__main__":
    main()
