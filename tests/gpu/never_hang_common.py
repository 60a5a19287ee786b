# SPDX-License-Identifier: MIT
"""Common parts of never_hang.py: programs that hang if a signal, a copy or a rank is missing, and a rank."""

import random
import time
from collections.abc import Callable

import torch

import tilescale
import tilescale.language as T

WAIT_S = 3.0
BLOCKS, ROWS, COLUMNS = 4, 64, 128


def ring_program(blocks: int = BLOCKS, name: str = "ring"):
    """Put a tile from every block to the next rank and wait for the flag of the incoming one; `silent` does not."""

    @T.prim_func
    def ring(
        A: T.Tensor((blocks * ROWS, COLUMNS), "float32"),
        B: T.Tensor((blocks * ROWS, COLUMNS), "float32"),
        F: T.Tensor((blocks,), "int32"),
        turn: T.int32,
        silent: T.int32,
        beyond: T.int32,
    ):
        with T.Kernel(device=T.ALL, block=blocks, threads=128) as bx:
            with T.Scale("block"):
                tile = T.alloc((ROWS, COLUMNS), "float32")
                with T.Scale("device") as (d, n):
                    T.copy(A[bx * ROWS, 0], tile)
                    if d != silent:
                        T.copy(tile, B[bx * ROWS, 0], dst=(d + 1) % n, signal=F[bx])
                    T.wait(F[bx + beyond], ">=", turn)

    return ring.with_attr("global_symbol", name)


def shift_program(name: str):
    """Put a tile from every block to the next rank; synchronize all; then double the received tile."""

    @T.prim_func
    def shift(
        A: T.Tensor((BLOCKS * ROWS, COLUMNS), "float32"),
        B: T.Tensor((BLOCKS * ROWS, COLUMNS), "float32"),
        C: T.Tensor((BLOCKS * ROWS, COLUMNS), "float32"),
    ):
        with T.Kernel(device=T.ALL, block=BLOCKS, threads=128) as bx:
            with T.Scale("block"):
                tile = T.alloc((ROWS, COLUMNS), "float32")
                with T.Scale("device") as (d, n):
                    T.copy(A[bx * ROWS, 0], tile)
                    T.copy(tile, B[bx * ROWS, 0], dst=(d + 1) % n)
                    T.barrier()
                T.copy(B[bx * ROWS, 0], tile)
                for i, j in T.Parallel(ROWS, COLUMNS):
                    C[bx * ROWS + i, j] = 2 * tile[i, j]

    return shift.with_attr("global_symbol", name)


def crowd_program(blocks: int):
    """Every block waits for all blocks of the grid on the rank before."""

    @T.prim_func
    def crowd(F: T.Tensor((1,), "int32"), turn: T.int32):
        with T.Kernel(device=T.ALL, block=blocks, threads=128):
            with T.Scale("block"):
                with T.Scale("device") as (d, n):
                    T.signal(F[0], dst=(d + 1) % n)
                    T.wait(F[0], ">=", turn * blocks)

    return crowd


def queue_program(name: str, rows: int = ROWS):
    """Copies that start when a block has signalled, and a wait for the incoming ones.

    `silent` signals nothing (-2: no block does), `mute` starts nothing.
    """

    @T.prim_func
    def queued(
        A: T.Tensor((BLOCKS * rows, COLUMNS), "float32"),
        B: T.Tensor((BLOCKS * rows, COLUMNS), "float32"),
        silent: T.int32,
        mute: T.int32,
        waits: T.int32,
    ):
        with T.Kernel(device=T.ALL, block=BLOCKS, threads=128) as bx:
            done = T.alloc_flags((BLOCKS,))
            here = T.alloc_flags((BLOCKS,))
            with T.Scale("device") as (d, n):
                if d != mute:
                    for k in T.serial(BLOCKS):
                        rest = (k + 1) * rows
                        T.copy(
                            A[rest - rows : rest, 0:COLUMNS],
                            B[rest - rows, 0],
                            dst=(d + 1) % n,
                            signal=here[k],
                            after=(done[k], ">=", 1),
                        )
            with T.Scale("block"):
                if d != silent and silent != -2:
                    T.signal(done[bx])
                if waits > 0:
                    T.wait(here[bx], ">=", 1)

    return queued.with_attr("global_symbol", name)


def sum_program():
    """The sum of a tensor over all devices, by NCCL."""

    @T.prim_func
    def total(X: T.Tensor((256, 256), "float32")):
        with T.Kernel(device=T.ALL, block=1, threads=128):
            with T.Scale("device"):
                T.allreduce(X, impl="nccl")

    return total


class Rank:
    """One rank of a job: what all cases use."""

    def __init__(self) -> None:
        self.world = tilescale.init(timeout_s=30)
        self.rank, self.size = self.world.rank, self.world.size
        self.last = (self.rank - 1) % self.size
        torch.cuda.set_device(self.world.device)
        self.generator = random.Random(self.rank)
        shape = (BLOCKS * ROWS, COLUMNS)
        self.a, self.b, self.other = (tilescale.zeros(shape, torch.float32) for _ in range(3))
        self.c = torch.empty(shape, device="cuda")
        self.flags = tilescale.zeros((BLOCKS,), torch.int32)
        self.ring = tilescale.compile(ring_program(), wait_s=WAIT_S)

    def data(self, rank: int, turn: int) -> torch.Tensor:
        """Data that a rank puts in an iteration."""
        generator = torch.Generator().manual_seed(1000 * turn + rank)
        return torch.randn(self.a.shape, generator=generator).cuda()

    def skew(self) -> None:
        """Let the ranks drift apart."""
        time.sleep(0.02 * self.generator.random())

    def run_ring(self, turn: int, silent: int = -1, beyond: int = 0) -> None:
        """One iteration of the ring; compares the arrived data."""
        self.a.copy_(self.data(self.rank, turn))
        self.b.fill_(float("nan"))
        torch.cuda.synchronize()
        self.world.barrier()
        self.skew()
        self.ring(self.a, self.b, self.flags, turn, silent, beyond)
        self.ring.synchronize()
        assert torch.equal(self.b, self.data(self.last, turn)), "wrong data"

    def fresh(self, *kernels) -> None:
        """After a failure: all kernels and flags as at the beginning."""
        for kernel in kernels:
            kernel.reset()
        self.flags.zero_()
        torch.cuda.synchronize()
        self.world.barrier()


def expect(kinds: type[BaseException] | tuple, call: Callable[[], object], *texts: str, within: float) -> str:
    """The error that a call must raise within a time limit."""
    begin = time.monotonic()
    try:
        call()
    except kinds as error:
        took, text = time.monotonic() - begin, str(error)
        assert took < within, f"took {took:.1f} s: {text}"
        assert all(part in text for part in texts), f"{texts} in: {text}"
        return text
    raise AssertionError(f"no error within {time.monotonic() - begin:.1f} s")
