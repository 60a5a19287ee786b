# SPDX-License-Identifier: MIT
"""Cases of never_hang.py with copy queues: waits of a stream have no bound of their own."""

from collections.abc import Callable

import torch

import tilescale
from tests.gpu.never_hang_common import BLOCKS, COLUMNS, WAIT_S, Rank, expect, queue_program
from tilescale.errors import WaitTimeoutError


def queue_that_waits(own: Rank) -> None:
    """The flag that the queue waits for is never signalled, and no kernel waits."""
    queue = tilescale.compile(queue_program("queue_waits"), wait_s=WAIT_S)
    for turn in range(3):
        run_queue(own, queue, turn)
    for silent in (-2, 1):
        queue(own.a, own.b, silent, -1, 0)
        told = "T.copy(", "never_hang_common.py"
        text = expect(WaitTimeoutError, queue.synchronize, *told, within=4 * WAIT_S)
        assert "copy queue: waited" in text and "for done, element" in text and ">= 1; it is 0" in text, text
        if own.rank == 0:
            print(text, flush=True)
        expect(WaitTimeoutError, lambda: queue(own.a, own.b, -1, -1, 1), within=0.5)
        own.fresh(queue)
        run_queue(own, queue, 7)
    queue(own.a, own.b, -2, -1, 0)
    torch.cuda.synchronize()  # not a call of this project: it returns nevertheless
    expect(WaitTimeoutError, queue.synchronize, "T.copy(", within=0.5)
    own.fresh(queue)
    run_queue(own, queue, 8)


def run_queue(own: Rank, queue, turn: int) -> None:
    """A call that must succeed."""
    own.a.copy_(own.data(own.rank, turn))
    own.b.fill_(float("nan"))
    torch.cuda.synchronize()
    own.world.barrier()
    own.skew()
    queue(own.a, own.b, -1, -1, 1)
    queue.synchronize()
    assert torch.equal(own.b, own.data(own.last, turn)), "wrong data"


def copy_that_never_started(own: Rank) -> None:
    queue = tilescale.compile(queue_program("queue_mute"), wait_s=WAIT_S)
    run_queue(own, queue, 1)

    def wrong() -> None:
        queue(own.a, own.b, -1, 1, 1)
        queue.synchronize()

    expect(WaitTimeoutError, wrong, "for here, element", within=3 * WAIT_S)
    own.fresh(queue)
    run_queue(own, queue, 2)


def queue_that_waits_in_a_graph(own: Rank) -> None:
    queue = tilescale.compile(queue_program("queue_graph"), wait_s=WAIT_S)
    run_queue(own, queue, 1)
    good, bad = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(good):
        queue(own.a, own.b, -1, -1, 1)
    with torch.cuda.graph(bad):
        queue(own.a, own.b, -2, -1, 0)
    for turn in range(20):
        own.a.copy_(own.data(own.rank, turn))
        own.skew()
        good.replay()
    queue.synchronize()
    assert torch.equal(own.b, own.data(own.last, 19)), "wrong data"
    for _ in range(3):
        bad.replay()
    expect(WaitTimeoutError, queue.synchronize, "T.copy(", within=4 * WAIT_S)
    own.fresh(queue)
    good.replay()
    queue.synchronize()
    own.fresh(queue)


CASES = [queue_that_waits, copy_that_never_started, queue_that_waits_in_a_graph]


def with_copies(own: Rank) -> Callable[[], object]:
    """And: copies in flight from and to it."""
    rows = 1 << 17
    queue = tilescale.compile(queue_program("queue_kill", rows), wait_s=25)
    a, b = (tilescale.zeros((BLOCKS * rows, COLUMNS), torch.float32) for _ in range(2))
    queue(a, b, -1, -1, 1)
    queue.synchronize()

    def calls() -> None:
        while True:
            for _ in range(8):
                queue(a, b, -1, -1, 1)
            queue.synchronize()

    return calls
