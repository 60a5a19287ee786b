# SPDX-License-Identifier: MIT
"""All-gather on a ring: every device ends with the tiles of all, and only neighbours communicate.

    .---> device 0 ---> device 1 ---> device 2 ---> device 3 ---.
    '-----------------------------------------------------------'

    device 2    sends to device 3                  gets from device 1
    step 0      its own tile, 2 ---> inbox[0]      tile 1 ---> inbox[0]
    step 1      tile 1          ---> inbox[1]      tile 0 ---> inbox[1]
    step 2      tile 0          ---> inbox[0]      tile 3 ---> inbox[0]

In every step a device forwards the tile of the previous step, and keeps a copy. After size - 1 steps every tile has
visited every device. The inbox is double-buffered: while one slot is read, the next tile may arrive in the other.

Two flags for each block, which count upwards and never go back:
    arrived    raised by the left neighbour: the number of tiles that have arrived
    free       raised by the right neighbour: the number of tiles taken out of its inbox, whose slots are free again

Use:
    T.copy(tile, inbox[slot, b, 0, 0], dst=right, signal=arrived[b])
    T.wait(flag[b], ">=", n)
    T.signal(free[b], dst=left)

Hints:
    Before step s, s tiles were sent and there are two slots: how many must have been taken out?
    The left neighbour is (rank + size - 1) % size.
    The tile that arrives in step s set out s + 1 devices to the left.
"""

import learn
import torch

import tilescale.language as T

BLOCKS, TILE = 2, 16


def program(devices: int):
    """Write the steps."""

    @T.prim_func
    def ring_all_gather(
        X: T.Tensor((BLOCKS, TILE, TILE), "float32"),
        Y: T.Tensor((devices, BLOCKS, TILE, TILE), "float32"),
    ):
        with T.Kernel(device=devices, block=BLOCKS, threads=128) as b:
            inbox = T.alloc((2, BLOCKS, TILE, TILE), "float32", level="l2")
            arrived = T.alloc((BLOCKS,), "int32", level="l2")
            free = T.alloc((BLOCKS,), "int32", level="l2")
            with T.Scale("device"):
                T.clear(arrived)
                T.clear(free)
                T.barrier()  # all flags are down before any device raises one
            with T.Scale("block"):
                tile = T.alloc((TILE, TILE), "float32", level="l1")
                T.copy(X[b, 0, 0], tile)
                with T.Scale("device") as (rank, size):
                    T.copy(tile, Y[rank, b, 0, 0])
                    for step in T.serial(size - 1):
                        learn.todo("pass the tile on, take the next one out of the inbox, store it in Y")
            with T.Scale("device"):
                T.barrier()  # the last flags have been raised before any device clears them again

    return ring_all_gather


# -- the check: nothing to write below ---------------------------------------------------------------------------------


def case(devices, rng):
    """Check that every device ends with all tiles, in the order of the devices."""
    sent = [learn.integers(rng, BLOCKS, TILE, TILE) for _ in range(devices)]
    ring = range(devices)

    def arranged(source):
        """Y of device r when `source(r, i)` is the device whose tiles are at position i."""
        return {"Y": [torch.stack([sent[source(r, i) % devices] for i in ring]) for r in ring]}

    misplaced = "All tiles are there, in the wrong places of Y: what arrives in step s set out from rank - s - 1."
    return learn.Case(
        args={"X": sent, "Y": [learn.blank(devices, BLOCKS, TILE, TILE) for _ in ring]},
        want=arranged(lambda r, i: i),
        mistakes=[
            (misplaced, arranged(lambda r, i: r - i)),
            (misplaced, arranged(lambda r, i: 2 * r - i)),
            (misplaced, arranged(lambda r, i: r if i == r else r - 1 - i)),
        ],
    )


def demand(report, devices):
    """Demand copies from neighbour to neighbour: each block forwards size - 1 tiles, and signals each."""
    fewest = min(activity.signals for activity in report.activity)
    if fewest >= (devices - 1) * BLOCKS:
        return learn.by_hand(report, devices)
    return (
        f"The results are right, but a device has signalled {fewest} times and has {(devices - 1) * BLOCKS} tiles to "
        "pass on. Only neighbours talk on a ring: a tile goes through the inboxes, and a flag tells of it."
    )


exercise = learn.Exercise(
    __file__,
    program,
    case,
    advice={
        "DeadlockError": "walk through the steps on two devices. In step s, s tiles have arrived before and s were "
        "taken out; none may wait for a tile that its neighbour sends only after a tile of its own. A neighbour may "
        "be ahead of you: wait until a count has reached a number (>=), not for that very number.",
        "RaceError": "a slot of the inbox is read before its tile is there, or written while what it held may still "
        "be read. Wait for `arrived` before you read, and for `free` before you send into a slot for the second time; "
        "raise the left neighbour's `free` when you have taken the tile out, not before. And use the slots in turns.",
        "OutOfBoundsError": "the inbox has two slots, which are used in turns: step % 2.",
        "UninitializedReadError": "that slot of the inbox is still empty. Wait for `arrived`, and look at which of "
        "the two slots you send to and which you read.",
        "wrong values": "Which tile is in the inbox in step s? It set out s + 1 devices to the left, from "
        "(rank + size - s - 1) % size, and that is its place in Y.",
    },
    demand=demand,
)

if __name__ == "__main__":
    exercise.main()
