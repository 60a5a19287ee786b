# SPDX-License-Identifier: MIT
"""Provokes every way in which a job could hang, on GPUs, and expects an error on all ranks in bounded time.

    python tests/gpu/never_hang.py            (a rank for each GPU; under torchrun, as many as it starts)

ONE PROCESS that starts the ranks itself, because launchers kill the others as soon as one is gone. Prints PASS or FAIL
for each case.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tilescale.errors import (  # noqa: E402
    LaunchError,
    OutOfBoundsError,
    RankFailedError,
    RankMismatchError,
    TileScaleError,
    WaitTimeoutError,
)

WAIT_S = 3.0
JOB_S = {"survive": 80.0, "kill-1": 30.0, "kill-0": 30.0}
BLOCKS, ROWS, COLUMNS = 4, 64, 128
PROCESSORS = 132


def ring_program(blocks: int = BLOCKS, name: str = "ring"):
    """Every block puts a tile to the next rank and waits for the flag of the one that it gets; `silent` does not."""

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
    """Every block puts a tile to the next rank; all meet; then it doubles what it got."""

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
        """What a rank puts in a turn."""
        generator = torch.Generator().manual_seed(1000 * turn + rank)
        return torch.randn(self.a.shape, generator=generator).cuda()

    def skew(self) -> None:
        """Let the ranks drift apart."""
        time.sleep(0.02 * self.generator.random())

    def run_ring(self, turn: int, silent: int = -1, beyond: int = 0) -> None:
        """One turn of the ring; compares what arrived."""
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
    """The error that a call must raise in so many seconds."""
    begin = time.monotonic()
    try:
        call()
    except kinds as error:
        took, text = time.monotonic() - begin, str(error)
        assert took < within, f"took {took:.1f} s: {text}"
        assert all(part in text for part in texts), f"{texts} in: {text}"
        return text
    raise AssertionError(f"no error within {time.monotonic() - begin:.1f} s")


# -- cases -------------------------------------------------------------------------------------------------------------


def good_run(own: Rank) -> None:
    for turn in range(1, 6):
        own.run_ring(turn)
    own.fresh(own.ring)


def missing_signal(own: Rank) -> None:
    text = expect(WaitTimeoutError, lambda: own.run_ring(1, silent=1), "ring", within=3 * WAIT_S)
    for part in ("for F, element", ">= 1; it is 0", "block (", f"rank {2 % own.size}", "never_hang.py"):
        assert part in text, f"{part} in: {text}"
    if own.rank == 0:
        print(text, flush=True)
    expect(WaitTimeoutError, lambda: own.ring(own.a, own.b, own.flags, 1, -1, 0), within=0.5)


def soft_reset(own: Rank) -> None:
    own.fresh(own.ring)
    for turn in range(1, 21):
        own.run_ring(turn)
    own.fresh(own.ring)


def flag_out_of_bounds(own: Rank) -> None:
    expect(OutOfBoundsError, lambda: own.run_ring(1, beyond=BLOCKS), "T.wait(F >=)", within=2 * WAIT_S)
    own.fresh(own.ring)


def different_tensors(own: Rank) -> None:
    shift = tilescale.compile(shift_program("shift_tensors"), wait_s=WAIT_S)
    shift(own.a, own.b, own.c)
    shift.synchronize()

    def wrong() -> None:
        shift(own.a, own.other if own.rank == 1 else own.b, own.c)
        shift.synchronize()

    expect(RankMismatchError, wrong, "different tensors", within=2 * WAIT_S)
    own.fresh(shift)


def different_order(own: Rank) -> None:
    first, second = (tilescale.compile(shift_program(f"shift_{name}"), wait_s=WAIT_S) for name in ("x", "y"))
    for kernel in (first, second):
        kernel(own.a, own.b, own.c)
        kernel.synchronize()
    mine = (first, second) if own.rank == 0 else (second, first)

    def wrong() -> None:
        mine[0](own.a, own.b, own.c)
        mine[0].synchronize()

    text = expect((RankMismatchError, WaitTimeoutError), wrong, within=3 * WAIT_S)
    print(f"rank {own.rank}: {text.splitlines()[0]}", flush=True)
    own.fresh(first, second)
    for kernel in (first, second):
        kernel(own.a, own.b, own.c)
        kernel.synchronize()


def different_shapes(own: Rank) -> None:
    mine = tilescale.compile(ring_program(BLOCKS + (own.rank == 1), "ring_shapes"), wait_s=WAIT_S)
    rows = (BLOCKS + (own.rank == 1)) * ROWS
    x = torch.zeros((rows, COLUMNS), device="cuda")
    flags = torch.zeros(BLOCKS + (own.rank == 1), dtype=torch.int32, device="cuda")
    expect(RankMismatchError, lambda: mine(x, x.clone(), flags, 1, -1, 0), "ring_shapes", "shapes", within=5)


def different_programs(own: Rank) -> None:
    mine = tilescale.compile(shift_program("left" if own.rank == 0 else "right"), wait_s=WAIT_S)
    expect(RankMismatchError, lambda: mine(own.a, own.b, own.c), "'left'", "'right'", within=5)


def oversubscribed_grid(own: Rank) -> None:
    crowded = tilescale.compile(crowd_program(64 * PROCESSORS), wait_s=WAIT_S)
    text = expect(LaunchError, lambda: crowded(own.flags[:1], 1), f"{64 * PROCESSORS}", within=60)
    if own.rank == 0:
        print(text, flush=True)
    fitting = tilescale.compile(crowd_program(PROCESSORS), wait_s=WAIT_S)
    for turn in (1, 2):
        fitting(own.flags[:1], turn)
    fitting.synchronize()
    own.fresh(fitting)


def failing_compiler(own: Rank) -> None:
    broken = tilescale.compile(shift_program("broken"), compile_flags=["--no-such-option"])
    expect(Exception, lambda: broken(own.a, own.b, own.c), within=60)


def graph_replays(own: Rank) -> None:
    shift = tilescale.compile(shift_program("shift_graph"), wait_s=WAIT_S)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        shift(own.a, own.b, own.c)
        shift.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            shift(own.a, own.b, own.c)
        for turn in range(100):
            own.a.copy_(own.data(own.rank, turn))
            own.c.fill_(float("nan"))
            own.skew()
            for _ in range(10):
                graph.replay()
            shift.synchronize()
            assert torch.equal(own.c, 2 * own.data(own.last, turn)), f"replay {turn}"


def two_streams(own: Rank) -> None:
    kernels = [tilescale.compile(shift_program(f"shift_{i}"), wait_s=WAIT_S) for i in range(2)]
    streams = [torch.cuda.Stream() for _ in kernels]
    buffers = [[tilescale.zeros(own.a.shape, torch.float32) for _ in range(2)] for _ in kernels]
    outputs = [torch.empty_like(own.c) for _ in kernels]
    for turn in range(30):
        torch.cuda.synchronize()
        for which in range(4):
            i = which % 2
            with torch.cuda.stream(streams[i]):
                buffers[i][0].copy_(own.data(own.rank, 2 * turn + i))
                outputs[i].fill_(float("nan"))
                own.skew()
                kernels[i](*buffers[i], outputs[i])
        for i, kernel in enumerate(kernels):
            kernel.synchronize()
            assert torch.equal(outputs[i], 2 * own.data(own.last, 2 * turn + i)), f"turn {turn}, stream {i}"


def nccl_in_order(own: Rank) -> None:
    total = tilescale.compile(sum_program(), wait_s=WAIT_S)
    x = torch.ones((256, 256), device="cuda")
    for _ in range(3):
        total(x)
    total.synchronize()
    assert (x == own.size**3).all()


SURVIVED = [
    good_run,
    missing_signal,
    soft_reset,
    flag_out_of_bounds,
    different_tensors,
    different_order,
    different_shapes,
    different_programs,
    oversubscribed_grid,
    failing_compiler,
    graph_replays,
    two_streams,
    nccl_in_order,
]


def survive() -> None:
    """All cases after which a job goes on."""
    own = Rank()
    for case in SURVIVED:
        begin = time.monotonic()
        case(own)
        print(f"done {case.__name__} rank {own.rank} ({time.monotonic() - begin:.1f} s)", flush=True)


def kill(victim: int) -> None:
    """A rank is killed while all are in a kernel; then the others wait for it in vain."""
    own = Rank()
    own.ring = tilescale.compile(ring_program(name="ring_kill"), wait_s=25)
    own.run_ring(1)
    begin = time.monotonic()
    if own.rank == victim:
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    # Nobody reaches this turn: every rank is in its kernel when the victim dies.
    own.ring(own.a, own.b, own.flags, 1000, -1, 0)
    text = expect(RankFailedError, own.ring.synchronize, f"rank {victim}", "disappeared", within=10)
    if own.rank == (victim + 1) % own.size:
        print(text, flush=True)
    print(f"done killed rank {own.rank} ({time.monotonic() - begin:.1f} s)", flush=True)


# -- jobs --------------------------------------------------------------------------------------------------------------


def child(job: str) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    try:
        survive() if job == "survive" else kill(int(job[-1]))
    except (TileScaleError, AssertionError, RuntimeError):
        print(f"rank {os.environ['RANK']}: {traceback.format_exc()}", flush=True)
        raise SystemExit(1) from None


def start(job: str, size: int) -> tuple[list[str], list[int | None], float]:
    """Run a job; the ranks' outputs, the ranks' exit codes (None: had to be killed) and its seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begin, outputs, ranks = time.monotonic(), [], []
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    for rank in range(size):
        env = dict(inherited, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        outputs.append(Path(f"/tmp/never_hang_{os.getpid()}_{rank}.log"))
        with outputs[-1].open("w") as log:
            command = [sys.executable, "-u", __file__, job]
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    codes: list[int | None] = []
    for process in ranks:
        try:
            codes.append(process.wait(max(0.1, begin + JOB_S[job] - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(None)
    return [log.read_text() for log in outputs], codes, time.monotonic() - begin


def main() -> int:
    """Run all jobs; how many cases failed."""
    size, failed = int(os.environ.get("WORLD_SIZE", torch.cuda.device_count())), 0
    for job in JOB_S:
        outputs, codes, took = start(job, size)
        victims = {int(job[-1])} if job.startswith("kill") else set()
        cases = {case.__name__: size for case in SURVIVED} if not victims else {"killed": size - 1}
        for case, wanted in cases.items():
            passed = sum(f"done {case} rank" in output for output in outputs) == wanted
            failed += not passed
            print(f"{'PASS' if passed else 'FAIL'} {job}: {case}, {size} ranks", flush=True)
        ended = all(code == 0 for rank, code in enumerate(codes) if rank not in victims) and None not in codes
        failed += not ended
        print(f"{'PASS' if ended else 'FAIL'} {job}: every rank ended by itself, {codes} ({took:.1f} s)", flush=True)
        for rank, output in enumerate(outputs):
            lines = output.splitlines()[-30 if not ended else -12 :]
            print("\n".join(f"    [{rank}] {line}" for line in lines), flush=True)
    return failed


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1])
    elif os.environ.get("RANK", "0") == "0":
        raise SystemExit(main() != 0)
