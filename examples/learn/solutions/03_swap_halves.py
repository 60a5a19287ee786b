# SPDX-License-Identifier: MIT
"""Solution: put, barrier, take, barrier. The first barrier means "complete", the second "may be overwritten".

Two boxes, used alternately, would save the second barrier: by the time a box is written again, both warpgroups have
passed the barrier of the round between.
"""

import tilescale.language as T

ROWS, HALF = 16, 32


def program(rounds: int):
    """Exchange through the box, with a barrier before and after the read."""

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
                    T.copy(mine, box[wg, 0, 0])
                    T.barrier()
                    T.copy(box[1 - wg, 0, 0], theirs)
                    T.barrier()
                    for i, j in T.Parallel(ROWS, HALF):
                        Y[r, i, wg * HALF + j] = mine[i, j] - theirs[i, j]

    return swap_halves
