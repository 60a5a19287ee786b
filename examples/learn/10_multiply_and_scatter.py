# SPDX-License-Identifier: MIT
"""Multiply and scatter: a GEMM whose parts add up on their owners while the next parts are computed.

    C = A B     A: columns over the devices     B: rows over the devices     C: rows over the devices

    device r:   A[:, r] B[r, :]  =  a part of every element of C; the parts of row block o add up on device o

    device 0    | multiply for 1 | multiply for 2 | multiply for 0 | wait, add up the parts for 0 |
                                 '---> inbox of 1 '---> inbox of 2
    device 1    | multiply for 2 | multiply for 0 | multiply for 1 | wait, add up the parts for 1 |
                                 '---> inbox of 2 '---> inbox of 0

Multiply all first and reduce-scatter then: the network rests, and then the tensor cores do. Instead a finished tile is
sent to its owner immediately, and is in flight while the next tile is computed. Every device starts with another owner.
Block b does so with the columns b * TILE ... of C.

It is your kernel from the first line to the last: workspaces, handshake, GEMM, exchange, sum.

Use:
    T.alloc(shape, dtype, level="l2")     a workspace in device memory, which peers can reach
    T.view at device level                A_dev (devices, ROWS, STEP) and B_dev (STEP, columns) are the shares
    T.clear, T.barrier, T.copy(..., dst=, signal=), T.wait, T.gemm, T.Parallel

Hints:
    Exercise 5 sends and adds up, exercise 7 has the handshake, exercise 8 the GEMM.
    T.gemm adds into registers (level="l0"). A copy to a peer starts in shared memory (level="l1"): copy it there first.
    A grid of BLOCKS blocks fits on every device, so its blocks may wait for each other.
"""

import learn
import torch

import tilescale.language as T

BLOCKS, TILE, STEP = 2, 32, 32
ROWS, COLUMNS = TILE, BLOCKS * TILE


def program(devices: int):
    """Write the kernel."""

    @T.prim_func
    def multiply_and_scatter(
        A: T.Tensor((devices, ROWS, STEP * devices), "bfloat16"),  # columns over the devices; first index: owner
        B: T.Tensor((STEP * devices, COLUMNS), "bfloat16"),  # rows over the devices
        C: T.Tensor((ROWS, COLUMNS), "float32"),  # this rank's rows
    ):
        with T.Kernel(device=devices, block=BLOCKS, threads=128) as b:
            learn.todo("C of device o = the sum over all devices of A_dev[o] B_dev, each tile sent when it is ready")

    return multiply_and_scatter


# -- the check: nothing to write below ---------------------------------------------------------------------------------


def case(devices, rng):
    """Check that every device ends with its rows of A B."""
    A = learn.integers(rng, devices, ROWS, STEP * devices, dtype=torch.bfloat16)
    B = learn.integers(rng, STEP * devices, COLUMNS, dtype=torch.bfloat16)
    shares = list(zip(A.float().chunk(devices, -1), B.float().chunk(devices), strict=True))
    parts = [a @ b for a, b in shares]
    own = [parts[r][r] for r in range(devices)]
    return learn.Case(
        args={
            "A": [part.contiguous() for part in A.chunk(devices, -1)],
            "B": list(B.chunk(devices)),
            "C": [learn.blank(ROWS, COLUMNS) for _ in range(devices)],
        },
        want={"C": [torch.stack(parts).sum(0)[r] for r in range(devices)]},
        mistakes=[
            ("Every C is the device's own part: those of the others are missing.", {"C": own}),
            ("All C are alike: each sender multiplied A_dev[rank] and not A_dev[owner].", {"C": [sum(own)] * devices}),
        ],
    )


def demand(report, devices):
    """Demand a signal for each tile."""
    tiles = devices * BLOCKS
    fewest = min(activity.signals for activity in report.activity)
    if fewest < tiles:
        return (
            f"The results are right, but a device has signalled {fewest} times and sends {tiles} tiles: the owners "
            "wait for more than they need. Tell each owner of each tile, as soon as it is there."
        )
    return learn.by_hand(report, devices)


exercise = learn.Exercise(
    __file__,
    program,
    case,
    advice={
        "DeadlockError": "is the flag clear before the first signal of the launch (clear, then a barrier, then the "
        "blocks)? Is it raised by all `size` devices for each tile? And does every block send all its tiles before it "
        "waits?",
        "RaceError": "if it is a flag: it is cleared on one device while another may already raise it. First clear, "
        "then a barrier of all devices, then signals. If it is the inbox: it is read before all parts of this tile are "
        "there, or two senders share a place in it.",
        "UninitializedReadError": "what you allocate holds nothing at first. If it is a flag: clear it, then a barrier "
        "of all devices, then signals. If it is what T.gemm or += adds to: clear it before each tile. If it is the "
        "inbox: wait for all parts of this tile.",
        "ShapeError": "a tile of C is TILE x TILE: c = a b with a of TILE x STEP and b of STEP x TILE.",
        "too slow": "Does a tile leave for its owner as soon as it is computed, while the next one is? And which owner "
        "comes last, so that nothing has to travel after the last product?",
        "wrong values": "A part of row block o, column block b, is A_dev[o] times columns b * TILE ... of B_dev. It "
        "belongs into the inbox of device o, at the place of the sender. And c is cleared before each tile.",
    },
    demand=demand,
    timed=8,
    slack=1.02,
)

if __name__ == "__main__":
    exercise.main()
