# SPDX-License-Identifier: MIT
"""Gather and multiply: compute with the shards of A as they arrive, the local one first.

    C = A B     A: rows over the devices     B, C: columns over the devices     every device needs all of A

    device 1 of 4:    send A1 to all | C[1] = A1 B | wait for A2 | C[2] = A2 B | wait for A3 | C[3] = A3 B | ...

Gather first and multiply then: no device multiplies while the network works, and the network rests while all multiply.
Instead every block sends its rows of the local shard, starts on that shard immediately, and waits for another one just
before it needs it. There is a flag for each shard.

Two blocks on each device. Block b sends rows b * TILE ... of the shard, and computes columns b * TILE ... of C, all
rows of all shards.

Use:
    T.copy(a, gathered[rank, row, k], dst=peer, signal=arrived[rank])
    T.wait(arrived[shard], ">=", n)
    T.gemm(a, b, c)                           c += a b, with c in registers, cleared before

Hints:
    A shard comes in pieces: from each of its blocks as many as it sends. Count them all.
    Which shard in step s, so that the local one comes first and no two devices wait for the same one?
"""

import learn
import torch

import tilescale.language as T

BLOCKS, TILE, K, STEP = 2, 32, 64, 32
ROWS = BLOCKS * TILE


def program(devices: int):
    """Write two parts: the sends of a block, and the order in which it computes. `multiply` computes one tile of C."""
    columns = BLOCKS * TILE * devices

    @T.prim_func
    def gather_and_multiply(
        A: T.Tensor((devices, ROWS, K), "bfloat16"),
        B: T.Tensor((K, columns), "bfloat16"),
        C: T.Tensor((devices, ROWS, columns), "float32"),
    ):
        with T.Kernel(device=devices, block=BLOCKS, threads=128) as b:
            gathered = T.alloc((devices, ROWS, K), "bfloat16", level="l2")
            arrived = T.alloc((devices,), "int32", level="l2")
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullRow)  # (1, ROWS, K): the local shard
                B_dev = T.view(B, layout=T.FullCol)  # (K, BLOCKS * TILE)
                C_dev = T.view(C, layout=T.FullCol)  # (devices, ROWS, BLOCKS * TILE)
                T.clear(arrived)
                T.barrier()  # all flags are down before any device raises one
            with T.Scale("block"):
                a = T.alloc((TILE, STEP), "bfloat16", level="l1")
                w = T.alloc((STEP, TILE), "bfloat16", level="l1")
                c = T.alloc((TILE, TILE), "float32", level="l0")
                with T.Scale("device") as (rank, size):
                    for k in T.serial(K // STEP):
                        T.copy(A_dev[0, b * TILE, k * STEP], a)
                        learn.todo("send `a` to its place in `gathered` on all devices, and raise a flag")
                    for step in T.serial(size):
                        learn.todo("choose the shard of this step and wait until it is here")
                        for m in T.serial(BLOCKS):
                            T.clear(c)
                            for k in T.Pipelined(K // STEP, num_stages=2):
                                learn.todo("load `a` from `gathered`")
                                T.copy(B_dev[k * STEP, b * TILE], w)
                                T.gemm(a, w, c)
                            learn.todo("store `c` in C_dev")

    return gather_and_multiply


# -- the check: nothing to write below ---------------------------------------------------------------------------------


def case(devices, rng):
    """Check that every device ends with its columns of A B."""
    A = learn.integers(rng, devices, ROWS, K, dtype=torch.bfloat16)
    B = learn.integers(rng, K, ROWS * devices, dtype=torch.bfloat16)
    C = A.float() @ B.float()
    return learn.Case(
        args={
            "A": list(A.chunk(devices)),
            "B": [part.contiguous() for part in B.chunk(devices, 1)],
            "C": [learn.blank(devices, ROWS, ROWS) for _ in range(devices)],
        },
        want={"C": list(C.chunk(devices, -1))},
        mistakes=[
            (
                "Every row block of C is the product of the device's own shard: `gathered` has a place for each shard.",
                {"C": [C.chunk(devices, -1)[r][r].expand(devices, -1, -1) for r in range(devices)]},
            ),
        ],
    )


EARLY = (
    "a tile is loaded from `gathered` before it is there. Wait for the shard that you read, and for all of its pieces: "
    "a shard comes from all blocks of its device."
)

exercise = learn.Exercise(
    __file__,
    program,
    case,
    advice={
        "DeadlockError": f"how often is the flag of a shard raised? {BLOCKS} blocks send {K // STEP} pieces each, and "
        "each piece raises it once, on every device, also on the own one if you send it there.",
        "RaceError": EARLY,
        "UninitializedReadError": EARLY,
        "PeerOutOfRangeError": "there are devices 0 to size - 1: count modulo size.",
        "too slow": "What is the first shard that a device computes: its own, which is here, or one that is still on "
        "its way? And does it wait for one shard at a time, or for all before it begins?",
        "wrong values": "Compare three places: where a shard's rows go in `gathered`, where you load them from, and "
        "where in C their product belongs. The first index is the shard in all of them.",
    },
    demand=learn.by_hand,
    timed=2,
)

if __name__ == "__main__":
    exercise.main()
