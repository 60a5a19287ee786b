# SPDX-License-Identifier: MIT
"""Guards of real jobs on memory of the CPU: the device is a thread, its kernels are written in Python.

They imitate headers/sync.cuh, on the same words, so all code above the device is that of GPUs.
"""

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

import tilescale  # noqa: E402
from tilescale.backends.cuda.running import timeouts  # noqa: E402
from tilescale.backends.cuda.running.wait_guard import WaitGuard  # noqa: E402
from tilescale.backends.tilelang.lowering.arguments import WaitSite  # noqa: E402
from tilescale.comm import default_heap  # noqa: E402
from tilescale.errors import Location, RankFailedError, RankMismatchError, WaitTimeoutError  # noqa: E402

LIMIT_S = 1.0
FLAG, ENTRY, EXIT = range(3)
STOP, STATE, COMPLETE = 0, 0, 2
TIMEOUT, ABSENT, DIFFERENT = 0, 2, 3

stream: queue.Queue[Callable[[], None]] = queue.Queue()
records: dict[int, timeouts.WaitRecords] = {}


def device() -> None:
    """Run kernels in order."""
    while True:
        stream.get()()
        stream.task_done()


def pretend() -> None:
    """Let this process have a GPU."""
    threading.Thread(target=device, daemon=True).start()
    zeros, full = torch.zeros, torch.full
    torch.zeros = lambda *shape, pin_memory=False, **given: zeros(*shape, **given)
    torch.full = lambda *shape, pin_memory=False, **given: full(*shape, **given)
    timeouts.past_waits = lambda device: None
    torch.cuda.stream = lambda which: contextlib.nullcontext()
    torch.cuda.synchronize = lambda device=None: stream.join()


def fail(head: torch.Tensor, kind: int, site: int, index: int, expected: int, seen: int) -> None:
    heap, words = default_heap(), records[head.data_ptr()]._words
    row = timeouts.HEAD + timeouts.ROW * heap.team.rank
    for peer in range(heap.team.size):
        there = heap.peers(words)[heap.addresses.slot(peer)]
        there[row + 1 : row + 7] = torch.tensor([kind, site, 0, index, expected, seen])
        there[row + STATE] = COMPLETE
        there[STOP] = heap.team.rank + 1
    notify_host(head)


def notify_host(head: torch.Tensor) -> None:
    if head[STOP] != 0:
        records[head.data_ptr()]._stopped[0] = int(head[STOP])


def await_(ready: Callable[[], bool], limit_ns: int, head: torch.Tensor) -> str:
    end = time.monotonic() + limit_ns / 1e9
    while not ready():
        if head[STOP] != 0:
            return "stopped"
        if time.monotonic() > end:
            return "late"
        time.sleep(0.002)
    return "ready"


def barrier_kernel(slot, rank, purpose, limit_ns, site, words, epochs, head) -> None:
    def run() -> None:
        if head[STOP] == 0:
            epochs[0] += 1
            count, own = int(epochs[0]), words[slot]
            words[:, rank] = count << 32 | purpose & 0xFFFF_FFFF
            for peer in range(default_heap().team.size):
                outcome = await_(lambda p=peer: int(own[p]) >> 32 >= count, limit_ns, head)
                seen = int(own[peer])
                if outcome == "late":
                    fail(head, ABSENT, site, peer, count, seen >> 32)
                elif outcome == "ready" and seen >> 32 == count and (seen ^ purpose) & 0xFFFF_FFFF:
                    fail(head, DIFFERENT, site, peer, purpose & 0xFFFF_FFFF, seen & 0xFFFF_FFFF)
                if outcome != "ready":
                    break
        notify_host(head)

    stream.put(run)


class Program:
    """A program of one wait, between its barriers."""

    def __init__(self, name: str, limit_s: float = LIMIT_S):
        place = Location(__file__, 1)
        sites = [
            WaitSite("T.wait(F >=)", place, "F", ">="),
            WaitSite("the barrier at its entry", place),
            WaitSite("the barrier at its exit", place),
        ]
        world, heap = tilescale.init(), default_heap()
        self.guard = WaitGuard(name, world, heap, int(limit_s * 1e9), sites, lambda func: barrier_kernel, heap.team)
        head = self.guard.records.device
        records[head.data_ptr()] = self.guard.records
        self.cleared = 0

    def __call__(self, arrives: bool = True, tensors: int = 0) -> None:
        """A call; `arrives`: whether the flag does that this rank waits for."""
        self.guard.check()
        head = self.guard.records.device
        self.guard.barrier(ENTRY, tensors, patience=1)()

        def wait() -> None:
            if await_(lambda: arrives, self.guard.limit_ns, head) == "late":
                fail(head, TIMEOUT, FLAG, 5, 2, 1)
            notify_host(head)

        stream.put(wait)
        self.guard.barrier(EXIT)()

    def fails(self, kind: type[Exception], *texts: str, within: float = 5 * LIMIT_S) -> None:
        """The error that waiting for the device must raise, and the next call too."""
        begin = time.monotonic()
        try:
            self.guard.synchronize()
        except kind as error:
            assert time.monotonic() - begin < within
            assert all(text in str(error) for text in texts), error
        else:
            raise AssertionError(f"no {kind.__name__}")
        try:
            self()
        except kind:
            return
        raise AssertionError("the next call raised nothing")

    def works(self) -> None:
        """After a reset on all ranks; ends when all have seen it, since the next failure elsewhere shows here too."""
        self.guard.reset(lambda: setattr(self, "cleared", self.cleared + 1))
        for _ in range(3):
            self()
            self.guard.synchronize()
        tilescale.init().barrier()


def survive(rank: int) -> None:
    """Failures after which a job continues."""
    program = Program("gemm")
    program.works()
    program(arrives=rank != 0)
    told = () if rank == 0 else (f"so rank {rank} stopped too",)
    waited = f"gemm on rank 0, block (0): waited {LIMIT_S:g} s for F, element 5, >= 2; it is 1"
    program.fails(WaitTimeoutError, waited, *told)
    program.works()
    program(tensors=rank == 1)
    program.fails(RankMismatchError, "different tensors")
    program.works()
    others = Program("first"), Program("second")
    mine = others[rank % 2]
    mine()
    mine.fails(RankMismatchError, "different orders")
    for other in others:
        other.works()
    if rank == 1:
        time.sleep(3 * LIMIT_S)
    program()
    program.fails(WaitTimeoutError, "the barrier at its entry: rank 1 did not arrive in time")
    program.works()
    assert program.cleared == 4
    print("survived", flush=True)


def lose(rank: int, victim: int) -> None:
    """A rank is killed while all wait."""
    program = Program("gemm", limit_s=20)
    program.works()
    program(arrives=False)
    if rank == victim:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    program.fails(RankFailedError, f"rank {victim}", "disappeared", within=5)
    print("noticed", flush=True)


if __name__ == "__main__":
    pretend()
    number = tilescale.init(timeout_s=20).rank
    survive(number) if len(sys.argv) == 1 else lose(number, int(sys.argv[1]))
