# SPDX-License-Identifier: MIT
"""Send a tile to your neighbour.

    device 0      device 1      device 2
     A  -----.     A  -----.     A  -----> (to device 0)
     B <---   `--> B        `--> B

Every device has a tile A. Send it to the next device, which receives it in its B; the last device sends to the first.
One program runs on all devices. Each device asks for its rank, and a copy names its destination.

Use:
    with T.Scale("device") as (rank, size):    which device this is, of how many
    T.copy(tile, X, dst=peer)                  write `tile` into the X of device `peer`

Hints:
    One line is enough.
    `tile` is in the block's own memory. B is a name for the B of every device: dst= says which one is meant.
    There may be 1, 2, 3, 4, 8 or 16 devices. Which device follows the last?
"""

import learn

import tilescale.language as T

TILE = 32


def program(devices: int):
    """Write the line below."""

    @T.prim_func
    def neighbour_shift(A: T.Tensor((TILE, TILE), "float32"), B: T.Tensor((TILE, TILE), "float32")):
        with T.Kernel(device=devices, block=1, threads=128):
            with T.Scale("block"):
                tile = T.alloc((TILE, TILE), "float32", level="l1")
                T.copy(A, tile)
                with T.Scale("device") as (rank, size):
                    learn.todo("send the tile into the B of the next device")
            with T.Scale("device"):
                T.barrier()  # no device ends before all tiles have arrived

    return neighbour_shift


# -- the check: nothing to write below ---------------------------------------------------------------------------------


def case(devices, rng):
    """Check that device r received the tile of device r - 1."""
    sent = [learn.integers(rng, TILE, TILE) for _ in range(devices)]
    return learn.Case(
        args={"A": sent, "B": [learn.blank(TILE, TILE) for _ in range(devices)]},
        want={"B": [sent[r - 1] for r in range(devices)]},
        mistakes=[
            ("Every B is the device's own A: the copy stayed at home. Name the peer with dst=.", {"B": sent}),
            (
                "Every B is the A of the next device: the tiles went the other way round.",
                {"B": [sent[(r + 1) % devices] for r in range(devices)]},
            ),
        ],
    )


exercise = learn.Exercise(
    __file__,
    program,
    case,
    advice={
        "NoPathError": "peers reach each other's device memory, where A and B are, not a block's own tile. The tile is "
        "the near side of the copy, B the far one.",
        "PeerOutOfRangeError": "the ring is open. After the last device comes device 0: count modulo size.",
        "RaceError": "two devices send to the same B. Each sends to one other device, the next one, however many there "
        "are: (rank + 1) % size.",
        "wrong values": "The tile that comes into the B of device r is the A of device r - 1.",
    },
)

if __name__ == "__main__":
    exercise.main()
