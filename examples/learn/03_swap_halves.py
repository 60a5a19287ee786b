# SPDX-License-Identifier: MIT
"""Swap halves: two warpgroups of a block exchange their results through shared memory.

    columns of X[r]      0 ........ 31     32 ....... 63
                         warpgroup 0       warpgroup 1
    mine                 x * x             x * x               in registers: the other one cannot see it
    box (shared)         box[0]   <--->    box[1]
    theirs               from box[1]       from box[0]
    Y[r]                 mine - theirs     mine - theirs

A scale finer than the block lets parts of the block execute independently: inside `T.Scale("warpgroup")` each of the
two runs the statements, at its own pace. Shared data is in shared memory, and a barrier orders the warpgroups, just as
flags and barriers order devices.

They do so for every row block r, with the same box.

Use:
    T.copy(mine, box[wg, 0, 0])      registers to shared memory
    T.barrier()                      at the level of the innermost scale: here, the two warpgroups

Hints:
    The half of the other one is there when it has arrived at a barrier.
    In the next round you write your box again. Has the other one read it by then?
"""

import learn

import tilescale.language as T

ROWS, HALF = 16, 32


def program(rounds: int):
    """Write the exchange."""

    @T.prim_func
    def swap_halves(X: T.Tensor((rounds, ROWS, 2 * HALF), "float32"), Y: T.Tensor((rounds, ROWS, 2 * HALF), "float32")):
        with T.Kernel(1, threads=256):
            box = T.alloc((2, ROWS, HALF), "float32", level="l1")
            with T.Scale("warpgroup") as (wg, wgs):
                mine = T.alloc((ROWS, HALF), "float32", level="l0")
                theirs = T.alloc((ROWS, HALF), "float32", level="l0")
                for r in T.serial(rounds):
                    for i, j in T.Parallel(ROWS, HALF):
                        mine[i, j] = X[r, i, wg * HALF + j] * X[r, i, wg * HALF + j]
                    learn.todo("swap: my half goes through the box to the other warpgroup, its half comes to `theirs`")
                    for i, j in T.Parallel(ROWS, HALF):
                        Y[r, i, wg * HALF + j] = mine[i, j] - theirs[i, j]

    return swap_halves


# -- the check: nothing to write below ---------------------------------------------------------------------------------


def case(rounds, rng):
    """Check that each half is its squares less the squares of the other half."""
    x = learn.integers(rng, rounds, ROWS, 2 * HALF)
    squares = x * x
    return learn.Case(
        args={"X": [x], "Y": [learn.blank(rounds, ROWS, 2 * HALF)]},
        want={"Y": [squares - squares.roll(HALF, -1)]},
        mistakes=[("Y is zero: `theirs` is `mine`. Read the box of the other warpgroup, 1 - wg.", {"Y": [0 * x]})],
    )


exercise = learn.Exercise(
    __file__,
    program,
    case,
    advice={
        "RaceError": "the two warpgroups run at their own pace. Between a write of a box and a read of it by the other "
        "one stands a barrier, and so does one between that read and the write of the next round.",
        "UninitializedReadError": "the other warpgroup had not yet written its box. Between a write of a box and a "
        "read of it by the other one stands a barrier.",
        "DeadlockError": "both warpgroups have to arrive at the same barriers, equally often.",
        "wrong values": "The two warpgroups run at their own pace. Which statement makes sure that the other one has "
        "written its box when you read it, and which that it has read yours when you write it again?",
        "too slow": "Does `theirs` come through the box? To read the other half of X and square it once more takes "
        "longer than to be handed it by the warpgroup that has it.",
        "CollectiveNotReachedError": "both warpgroups have to arrive at the same barriers: no barrier inside `if wg`.",
    },
    timed=5,
    sizes={"h200-sxm-8": (2, 5, 1), "gb200-nvl72": (3,)},
    unit="rounds",
)

if __name__ == "__main__":
    exercise.main()
