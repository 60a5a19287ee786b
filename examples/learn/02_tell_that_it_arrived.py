# SPDX-License-Identifier: MIT
"""Signal the arrival: the neighbour uses your tile, and must know when it is complete.

    device r                              device r + 1
      put tile b  --------------------->    inbox[b]
      raise arrived[b]  --------------->    arrived[b]: 0 -> 1
                                            wait for arrived[b], then read inbox[b], double it, store it in Y

As before every device sends its tiles to the next one, but now four blocks do so, a tile each, and each uses the tile
that it received. A barrier would make all wait for all. A flag orders sender and receiver only: the sender raises it
after the data, and a unit that has seen the flag sees the data.

Use:
    T.copy(tile, X, dst=peer, signal=flag[i])    write into the X of a peer, then add 1 to its flag
    T.signal(flag[i], dst=peer)                  add 1 to a peer's flag, after all that this block has written
    T.wait(flag[i], ">=", n)                     continue when this device's flag is n or more

Hints:
    Two lines are enough: a put with a signal, and a wait.
    There is a flag for each block. Which one does the neighbour's block b look at?
"""

import learn

import tilescale.language as T

BLOCKS, TILE = 4, 16


def program(devices: int):
    """Write the statements between the load of the local tile and the use of the received one."""

    @T.prim_func
    def tell_that_it_arrived(
        X: T.Tensor((BLOCKS, TILE, TILE), "float32"),
        Y: T.Tensor((BLOCKS, TILE, TILE), "float32"),
    ):
        with T.Kernel(device=devices, block=BLOCKS, threads=128) as b:
            inbox = T.alloc((BLOCKS, TILE, TILE), "float32", level="l2")
            arrived = T.alloc((BLOCKS,), "int32", level="l2")
            with T.Scale("device"):
                T.clear(arrived)
                T.barrier()  # all flags are down before any device raises one
            with T.Scale("block"):
                tile = T.alloc((TILE, TILE), "float32", level="l1")
                T.copy(X[b, 0, 0], tile)
                with T.Scale("device") as (rank, size):
                    learn.todo("put the tile into the neighbour's inbox, tell that it arrived, wait for your own")
                T.copy(inbox[b, 0, 0], tile)
                for i, j in T.Parallel(TILE, TILE):
                    tile[i, j] *= 2
                T.copy(tile, Y[b, 0, 0])

    return tell_that_it_arrived


# -- the check: nothing to write below ---------------------------------------------------------------------------------


def case(devices, rng):
    """Check that device r ends with twice the tile of device r - 1."""
    sent = [learn.integers(rng, BLOCKS, TILE, TILE) for _ in range(devices)]
    return learn.Case(
        args={"X": sent, "Y": [learn.blank(BLOCKS, TILE, TILE) for _ in range(devices)]},
        want={"Y": [2 * sent[r - 1] for r in range(devices)]},
        mistakes=[
            (
                "Every Y is twice the device's own X: the tile went into the own inbox. Name the peer with dst=.",
                {"Y": [2 * x for x in sent]},
            ),
        ],
    )


def demand(report, devices):
    """Demand flags instead of a barrier."""
    if min(activity.signals for activity in report.activity) >= BLOCKS:
        return learn.by_hand(report, devices)
    return (
        "The results are right, but not every block has raised a flag of its neighbour. With a barrier all wait for "
        "all; here a block shall wait for its own tile alone."
    )


exercise = learn.Exercise(
    __file__,
    program,
    case,
    advice={
        "DeadlockError": "a wait needs a signal of the peer that fills this inbox. Compare the flag that is waited for "
        "with the one that is signalled: whose is it, which block's, and how often is it raised? It is raised once.",
        "RaceError of arrived": "flags are looked at by T.wait: a plain read may see anything, and orders nothing.",
        "RaceError": "the inbox is read although nothing says that this tile is there. The order is: data, signal; "
        "wait, data. If that is yours: does the flag that is waited for speak of this tile, or of another block's?",
        "UninitializedReadError": "the inbox was read before the tile was in it. The order is: data, signal; wait, "
        "data. And whose inbox and whose flag are meant? Without dst= it is the own one.",
        "wrong values": "Block b of device r doubles what block b of device r - 1 has put into inbox[b] of device r.",
    },
    demand=demand,
)

if __name__ == "__main__":
    exercise.main()
