# SPDX-License-Identifier: MIT
"""All-reduce a tile: every device ends with the sum of all tiles, to the last bit the same.

    tile of device 0 ---> inbox[0] of every device
    tile of device 1 ---> inbox[1] of every device        then, on every device:  Y = inbox[0] + inbox[1] + inbox[2] ...
    tile of device 2 ---> inbox[2] of every device

`T.allreduce(tile)` does it in one statement. Here you build it: every device sends to all, a flag counts what has
arrived, and then every device adds up. Sums of floating-point numbers depend on their order, so all devices add in the
order of the ranks: inbox[0] first. Devices that go on with results that differ in the last bit drift apart.

Use:
    for r in T.serial(size): ...            a loop over the devices
    T.copy(tile, inbox[rank, b, 0, 0], dst=peer, signal=arrived[b])
    T.wait(arrived[b], ">=", n)
    T.clear(total); for i, j in T.Parallel(TILE, TILE): total[i, j] += ...

Hints:
    The local tile is sent too, to the local inbox: then all are treated the same.
    Start with the peer rank, then rank + 1, ...: so that not all devices send to device 0 at the same time.
"""

import learn
import torch

import tilescale.language as T

BLOCKS, TILE = 2, 16


def program(devices: int):
    """Write the two loops and the statements between them."""

    @T.prim_func
    def all_reduce(X: T.Tensor((BLOCKS, TILE, TILE), "float32"), Y: T.Tensor((BLOCKS, TILE, TILE), "float32")):
        with T.Kernel(device=devices, block=BLOCKS, threads=128) as b:
            inbox = T.alloc((devices, BLOCKS, TILE, TILE), "float32", level="l2")
            arrived = T.alloc((BLOCKS,), "int32", level="l2")
            with T.Scale("device"):
                T.clear(arrived)
                T.barrier()  # all flags are down before any device raises one
            with T.Scale("block"):
                tile = T.alloc((TILE, TILE), "float32", level="l1")
                total = T.alloc((TILE, TILE), "float32", level="l0")
                T.copy(X[b, 0, 0], tile)
                with T.Scale("device") as (rank, size):
                    learn.todo("send the tile to all devices, wait for theirs, add them up in `total`")
                T.copy(total, Y[b, 0, 0])

    return all_reduce


# -- the check: nothing to write below ---------------------------------------------------------------------------------


def case(devices, rng):
    """Check for the sum in the order of the ranks, rounded to float32 after each addition."""
    given = [learn.reals(rng, BLOCKS, TILE, TILE) for _ in range(devices)]
    ring = range(devices)

    def summed(order):
        """Return the sums when device r adds the tiles of the devices in `order(r)`."""
        return {"Y": [sum((given[i % devices] for i in order(r)), torch.zeros(())) for r in ring]}

    rounded = "The sums are right but for their rounding: add in the same order on all devices, that of the ranks."
    return learn.Case(
        args={"X": given, "Y": [learn.blank(BLOCKS, TILE, TILE) for _ in ring]},
        want=summed(lambda r: ring),
        mistakes=[
            (rounded, summed(lambda r: range(r, r + devices))),
            (rounded, summed(lambda r: range(r + 1, r + 1 + devices))),
            (rounded, summed(lambda r: range(r + devices, r, -1))),
            (rounded, summed(lambda r: [r, *(i for i in ring if i != r)])),
            ("The device's own tile is missing in its sum.", summed(lambda r: [i for i in ring if i != r])),
            ("Every Y is the device's own X: nothing was added.", {"Y": given}),
        ],
    )


exercise = learn.Exercise(
    __file__,
    program,
    case,
    advice={
        "DeadlockError": "count: who raises this flag, and how often? A block is sent `size` tiles if it sends itself "
        "one too, else size - 1. Send before you wait: if all wait first, none ever sends.",
        "RaceError": "the inbox is read before all tiles are in it: wait until the flag has counted every sender. If "
        "two devices write the same slot: a sender's slot is its own rank.",
        "UninitializedReadError of total": "`total[i, j] += ...` adds to what is there: clear it first.",
        "UninitializedReadError": "a slot of the inbox is read before it is written: wait until the flag has "
        "counted every sender.",
        "OutOfBoundsError": "the inbox has one slot for each device, 0 to size - 1.",
        "wrong values": "Which tiles are missing in the sum, or are in it twice? The tile of each goes into the inbox "
        "of each, in the slot of its sender.",
        "PeerOutOfRangeError": "there are devices 0 to size - 1: count modulo size.",
    },
    demand=learn.by_hand,
)

if __name__ == "__main__":
    exercise.main()
