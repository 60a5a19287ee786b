# SPDX-License-Identifier: MIT
"""Control flow that depends on data: schedulers, decode loops, loops that poll, copies of a number of rows loaded from
memory.

    torchrun --nproc-per-node N tests/gpu/dynamic_check.py [names]

Ranks begin out of step, warps are delayed by different times in each iteration, and results are poisoned. Two programs
never end: both have to be errors that name the flag, and the kernel runs again afterwards. Prints PASS or FAIL for each
program and rank.
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tests.gpu import named_checks  # noqa: E402
from tilescale.errors import WaitTimeoutError  # noqa: E402

LIMIT_S = 140.0
WAIT_S = 2.0
CALLS = 10
ROWS, TILE, COLUMNS = 24, 16, 64
POISON = -77.0


@T.macro
def skew(step: Any):
    T.evaluate(T.call_extern("handle", "__nanosleep", (T.get_thread_binding() // 32 * 7 + step * 3) % 5 * 500))


def scheduler(devices: int) -> Any:
    """Blocks of all devices draw tiles of device 0's counter; each has its own number of rows, and goes to a peer."""

    @T.prim_func
    def scheduler(
        ticket: T.Tensor((1,), "int32"),
        counts: T.Tensor((ROWS,), "int32"),
        X: T.Tensor((ROWS * TILE, COLUMNS), "float32"),
        Y: T.Tensor((ROWS * TILE, COLUMNS), "float32"),
    ):
        with T.Kernel(device=devices, block=4, threads=128):
            arrived = T.alloc_flags(ROWS)
            with T.Scale("block"), T.Scale("device") as (rank, size):
                tile = T.alloc((TILE, COLUMNS), "float32", level="l1")
                row = T.alloc_var("int32", init=0)
                while row < ROWS:
                    row = T.invoke_one(T.atomic_add(ticket[0], 1, return_prev=True))
                    skew(row)
                    if row < ROWS:
                        rows = counts[row]
                        T.copy(X[row * TILE, 0], tile)
                        if rows > 0:
                            T.copy(tile, Y[row * TILE : row * TILE + rows, 0:COLUMNS], dst=(rank + 1) % size)
                        T.signal(arrived[row], dst=(rank + 1) % size)
                for r in T.serial(ROWS):
                    T.wait(arrived[r], ">=", 1)

    return scheduler


def server(devices: int, alone: bool) -> Any:
    """A block sends and receives concurrently, by polling; `alone`: one thread polls, and notifies the others."""

    @T.prim_func
    def server(
        X: T.Tensor((ROWS, COLUMNS), "float32"), Y: T.Tensor((ROWS, COLUMNS), "float32"), idle: T.Tensor((1,), "int32")
    ):
        with T.Kernel(device=devices, block=1, threads=128):
            inbox, arrived = T.alloc((ROWS, COLUMNS), "float32", level="l2"), T.alloc_flags((ROWS,))
            with T.Scale("block"), T.Scale("device") as (rank, size):
                tile, box = T.alloc((COLUMNS,), "float32"), T.alloc((1,), "int32", level="l1")
                sent, taken = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
                here = T.alloc_var("int32", init=0)
                while taken < ROWS:
                    skew(taken + sent)
                    if sent < ROWS:
                        T.copy(X[sent, 0], tile)
                        T.copy(tile, inbox[sent, 0], dst=(rank + 1) % size, signal=arrived[sent])
                        sent += 1
                    if alone:
                        if T.get_thread_binding() == 0:
                            while T.atomic_load(arrived[taken]) < 1:
                                here += 1
                            box[0] = 1
                        T.sync_threads()
                        here = box[0]
                    else:
                        here = T.atomic_load(arrived[taken])
                    if here >= 1:
                        T.copy(inbox[taken, 0], tile)
                        T.copy(tile, Y[taken, 0])
                        taken += 1
                    else:
                        T.invoke_one(T.atomic_add(idle[0], 1))

    return server


def decoder(devices: int) -> Any:
    """Sum over all ranks until a sum is large enough: the trip count is dynamic."""

    @T.prim_func
    def decoder(X: T.Tensor((COLUMNS,), "float32"), Y: T.Tensor((COLUMNS,), "float32"), n: T.Tensor((1,), "int32")):
        with T.Kernel(device=devices, block=1, threads=128):
            with T.Scale("block"), T.Scale("device"):
                tile, shared = T.alloc((COLUMNS,), "float32"), T.alloc((COLUMNS,), "float32", level="l1")
                steps = T.alloc_var("int32", init=0)
                T.copy(X, tile)
                T.copy(tile, shared)
                while shared[0] < 1000.0:
                    skew(steps)
                    T.allreduce(tile)
                    T.copy(tile, shared)
                    T.barrier()
                    steps += 1
                T.copy(tile, Y)
                n[0] = steps

    return decoder


def in_vain(devices: int, waits: bool) -> Any:
    """An endless loop: it polls, or it continues after its waits have failed."""

    @T.prim_func
    def in_vain(go: T.Tensor((1,), "int32"), Y: T.Tensor((1,), "int32")):
        with T.Kernel(device=devices, block=1, threads=128):
            arrived = T.alloc_flags(4)
            with T.Scale("block"), T.Scale("device") as (rank, size):
                step = T.alloc_var("int32", init=0)
                if go[0] == 1:
                    T.signal(arrived[3], 2, dst=(rank + 1) % size)
                if waits:
                    while Y[0] < 1:
                        T.wait(arrived[3], ">=", 2)
                        step += 1
                        if go[0] == 1:
                            Y[0] = step
                else:
                    while T.atomic_load(arrived[3]) < 2:
                        step += 1
                    Y[0] = 1

    return in_vain


def tensors(*shapes: Any) -> list[torch.Tensor]:
    return [tilescale.zeros(shape, dtype=dtype) for shape, dtype in shapes]


class Calls:
    """Calls of a program out of step."""

    def __init__(self, program: Any, held: list[torch.Tensor]):
        self.world, self.held = tilescale.init(), held
        self.kernel = tilescale.compile(program, wait_s=WAIT_S)
        self.delays = random.Random(self.world.rank)

    def __call__(self) -> list[list[torch.Tensor]]:
        """One call; the arguments of all ranks after it."""
        torch.cuda.synchronize()
        self.world.barrier()
        torch.cuda._sleep(self.delays.randrange(2_000_000))
        self.kernel(*self.held)
        self.kernel.synchronize()
        return self.world.all_gather([tensor.cpu() for tensor in self.held])


def check_scheduler() -> None:
    """Rows beyond the numbers stay as they were."""
    world = tilescale.init()
    whole = (ROWS * TILE, COLUMNS)
    ticket, counts, x, y = held = tensors(((1,), torch.int32), ((ROWS,), torch.int32), *[(whole, torch.float32)] * 2)
    calls = Calls(scheduler(world.size), held)
    for call in range(CALLS):
        generator = torch.Generator().manual_seed(call)
        numbers = torch.randint(0, TILE + 1, (ROWS,), generator=generator, dtype=torch.int32)
        ticket.zero_()
        counts.copy_(numbers)
        y.fill_(POISON)
        x.copy_(torch.rand(whole, generator=generator) + world.rank)
        ranks = calls()
        for rank, (_, _, _, got) in enumerate(ranks):
            wanted = torch.full(whole, POISON)
            for row, rows in enumerate(numbers.tolist()):
                part = slice(row * TILE, row * TILE + rows)
                wanted[part] = ranks[rank - 1][2][part]
            assert torch.equal(got, wanted), f"call {call}: {int((got != wanted).sum())} elements are wrong"


def check_server(alone: bool) -> None:
    """All data arrives, in order."""
    world = tilescale.init()
    x, y, idle = held = tensors(*[((ROWS, COLUMNS), torch.float32)] * 2, ((1,), torch.int32))
    calls = Calls(server(world.size, alone), held)
    for call in range(CALLS):
        x.copy_(torch.rand(ROWS, COLUMNS) + world.rank + call)
        y.fill_(POISON)
        idle.zero_()
        ranks = calls()
        for rank, (_, got, _) in enumerate(ranks):
            assert torch.equal(got, ranks[rank - 1][0]), f"call {call}"


def check_decoder() -> None:
    """All ranks take as many steps as their sums need."""
    world = tilescale.init()
    x, y, n = held = tensors(*[((COLUMNS,), torch.float32)] * 2, ((1,), torch.int32))
    calls = Calls(decoder(world.size), held)
    for call in range(CALLS):
        x.copy_(torch.full((COLUMNS,), float(call + 1)) * (world.rank + 1))
        y.fill_(POISON)
        wanted, steps = torch.full((COLUMNS,), float(call + 1) * world.size * (world.size + 1) / 2), 1
        while wanted[0] < 1000.0:
            wanted, steps = wanted * world.size, steps + 1
        for _, got, count in calls():
            assert torch.equal(got, wanted) and count.item() == steps, f"call {call}: {count.item()}, not {steps}"


def check_in_vain(waits: bool) -> None:
    """An error that names the flag, in time; then the kernel runs again."""
    world = tilescale.init()
    go, y = held = tensors(*[((1,), torch.int32)] * 2)
    calls = Calls(in_vain(world.size, waits), held)
    for go_on in (1, 0, 1):
        go.fill_(go_on)
        y.zero_()
        if go_on:
            assert all(got.item() >= 1 for _, got in calls())
            continue
        try:
            calls()
        except WaitTimeoutError as error:
            text = str(error)
            assert "arrived, element 3" in text, text
            assert waits or "polled" in text and "it stays 0" in text, text
        else:
            raise AssertionError("a loop that nobody ends has ended")
        calls.kernel.reset()


if __name__ == "__main__":
    named_checks.run(
        [
            ("scheduler", check_scheduler),
            ("server", lambda: check_server(False)),
            ("server_alone", lambda: check_server(True)),
            ("decoder", check_decoder),
            ("polls_in_vain", lambda: check_in_vain(False)),
            ("waits_in_vain", lambda: check_in_vain(True)),
        ],
        LIMIT_S,
    )
