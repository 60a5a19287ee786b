# SPDX-License-Identifier: MIT
"""Reduce-scatter, launched again and again: the inbox and the flag outlive the launch.

    X of device r:   part 0   part 1   part 2             inbox of device 1        Y of device 1
                       |        |        |            from 0: its part 1
                  to device 0   1        2            from 1: its part 1   ---->   their sum
                                                      from 2: its part 1

Every device owns one part of the result: it receives that part from all devices and adds them up, as in exercise 5. But
a real program does so in every step of a training, thousands of times, and no device waits for the others between two
launches. Its owner may still read the inbox in the previous launch; the flag still has the count of that launch. So a
launch needs a handshake: no device writes into an inbox before its owner has emptied it.

The loop over the launches is there. The whole kernel is yours.

Use:
    with T.Scale("device"): T.barrier()       a device phase: no device goes on before all are here
    T.clear(flag), or counts that go on       launch n ends when the flag has counted (n + 1) * size
    T.copy, T.wait, T.Parallel                as in exercise 5

Hints:
    What must have happened on the other devices before your first copy? Wait for a signal of it.
    If you clear the flag: before or after the barrier? A signal that comes in before the clear is lost.
"""

import learn
import torch

import tilescale.language as T

LAUNCHES, TILE = 3, 16


def program(devices: int):
    """Write the kernel: handshake, send, wait, add up."""

    @T.prim_func
    def reduce_scatter(
        X: T.Tensor((LAUNCHES, devices, TILE, TILE), "float32"),
        inbox: T.Tensor((devices, TILE, TILE), "float32"),
        arrived: T.Tensor((1,), "int32"),  # zero before the first launch
        Y: T.Tensor((LAUNCHES, TILE, TILE), "float32"),
    ):
        for launch in T.serial(LAUNCHES):
            with T.Kernel(device=devices, block=1, threads=128):
                learn.todo("Y[launch] of device r = the sum of X[launch, r] of all devices, through the inboxes")

    return reduce_scatter


# -- the check: nothing to write below ---------------------------------------------------------------------------------


def case(devices, rng):
    """Check that in every launch device r gets the sum of the parts r."""
    given = [learn.integers(rng, LAUNCHES, devices, TILE, TILE) for _ in range(devices)]
    ring = range(devices)
    total = torch.stack(given).sum(0)
    return learn.Case(
        args={
            "X": given,
            "inbox": [learn.blank(devices, TILE, TILE) for _ in ring],
            "arrived": [torch.zeros(1, dtype=torch.int32) for _ in ring],
            "Y": [learn.blank(LAUNCHES, TILE, TILE) for _ in ring],
        },
        want={"Y": [total[:, r] for r in ring]},
        mistakes=[("Every Y is the device's own part: nothing was added.", {"Y": [given[r][:, r] for r in ring]})],
    )


exercise = learn.Exercise(
    __file__,
    program,
    case,
    advice={
        "DeadlockError": "if the flag is too low by less than `size`, a signal was lost: a device cleared the flag "
        "after it had come in. Clear first, then the barrier, then signals. If it is too low by whole launches, you "
        "clear it and yet wait for a count that goes on.",
        "RaceError of arrived": "a flag is cleared on one device while another may already raise it: that signal is "
        "lost. First clear, then a barrier of all devices, then signals.",
        "RaceError of inbox": "either a device that has finished a launch writes the inbox of one that has not: put a "
        "handshake at the entry, a barrier that a device reaches only when it has emptied its inbox. Or the inbox is "
        "read before all parts of this launch are in it: a flag that is never cleared counts on, to (n + 1) * size in "
        "launch n.",
        "UninitializedReadError": "a slot of the inbox is read before it is written: wait for all parts.",
        "wrong values": "Device o gets X[launch, o] of all, the sum goes to Y[launch]. Does every launch wait for its "
        "own parts? A flag that is never cleared counts on: in launch n it has to reach (n + 1) * size. And can a part "
        "of the next launch come before this one has been read? Then the entry lacks its handshake.",
    },
    demand=learn.by_hand,
)

if __name__ == "__main__":
    exercise.main()
