# SPDX-License-Identifier: MIT
"""Provoke every known hang of a job, on GPUs, and expect an error on all ranks in bounded time.

    python tests/gpu/never_hang.py [parts of names]     (a rank for each GPU; under torchrun, as many as it starts)

ONE PROCESS that starts the ranks itself, because launchers kill the others as soon as one is gone. Prints PASS or FAIL
for each case.
"""

import os
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
from tests.cuda import gated_programs  # noqa: E402
from tests.gpu.never_hang_common import (  # noqa: E402
    BLOCKS,
    COLUMNS,
    ROWS,
    WAIT_S,
    Rank,
    crowd_program,
    expect,
    ring_program,
    shift_program,
    sum_program,
)
from tests.gpu.never_hang_queue import CASES, with_copies  # noqa: E402
from tilescale.errors import (  # noqa: E402
    LaunchError,
    OutOfBoundsError,
    RankFailedError,
    RankMismatchError,
    TileScaleError,
    WaitTimeoutError,
)

JOB_S = {"survive": 120.0, "kill-1": 30.0, "kill-0": 30.0, "kill-copies-1": 40.0}
PROCESSORS = 132


# -- cases -------------------------------------------------------------------------------------------------------------


def good_run(own: Rank) -> None:
    for turn in range(1, 6):
        own.run_ring(turn)
    own.fresh(own.ring)


def missing_signal(own: Rank) -> None:
    text = expect(WaitTimeoutError, lambda: own.run_ring(1, silent=1), "ring", within=3 * WAIT_S)
    for part in ("for F, element", ">= 1; it is 0", "block (", f"rank {2 % own.size}", "never_hang_common.py"):
        assert part in text, f"{part} in: {text}"
    if own.rank == 0:
        print(text, flush=True)
    expect(WaitTimeoutError, lambda: own.ring(own.a, own.b, own.flags, 1, -1, 0), within=0.5)


def missing_tile(own: Rank) -> None:
    """The producer of a GEMM waits for a tile that is never sent."""
    func = gated_programs.arriving(sends=False).with_attr("global_symbol", "product")
    product = tilescale.compile(func, wait_s=WAIT_S)
    x, b = gated_programs.operands(0, own.rank)
    c = torch.empty((len(x), gated_programs.COLUMNS), device="cuda")
    y, sent = (tilescale.empty(x.shape, dtype=x.dtype) for _ in range(2))
    flags = tilescale.zeros((1, 6), dtype=torch.int32)

    def call(steps: int = 6) -> None:
        product(sent, y, b.cuda(), c, flags, steps, 1)
        product.synchronize()

    call(0)  # compiles it, which may take longer than the wait
    text = expect(WaitTimeoutError, call, "product", within=3 * WAIT_S)
    for part in ("for flags, element 0", ">= 1; it is 0", "block (1)", "gated_programs.py"):
        assert part in text, f"{part} in: {text}"
    own.fresh(product)


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
    missing_tile,
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
    *CASES,
]


def chosen(names: list[str]) -> list[Callable[[Rank], None]]:
    """The cases after which a job goes on whose names contain one of these; all for none."""
    return [case for case in SURVIVED if any(name in case.__name__ for name in names or [""])]


def survive(names: list[str]) -> None:
    own = Rank()
    for case in chosen(names):
        begin = time.monotonic()
        case(own)
        print(f"done {case.__name__} rank {own.rank} ({time.monotonic() - begin:.1f} s)", flush=True)


def in_a_kernel(own: Rank) -> Callable[[], object]:
    """State of ranks when one is killed: a kernel that waits forever."""
    own.ring = tilescale.compile(ring_program(name="ring_kill"), wait_s=25)
    own.run_ring(1)

    def calls() -> None:
        own.ring(own.a, own.b, own.flags, 1000, -1, 0)
        own.ring.synchronize()

    return calls


def kill(victim: int, prepare: Callable[[Rank], Callable[[], object]]) -> None:
    """A rank is killed while all are busy; then the others wait for it in vain."""
    own = Rank()
    calls = prepare(own)
    own.world.barrier()
    begin = time.monotonic()
    if own.rank == victim:
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    text = expect(RankFailedError, calls, f"rank {victim}", "disappeared", within=10)
    if own.rank == (victim + 1) % own.size:
        print(text, flush=True)
    print(f"done killed rank {own.rank} ({time.monotonic() - begin:.1f} s)", flush=True)


# -- jobs --------------------------------------------------------------------------------------------------------------


def child(job: str, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    try:
        survive(names) if job == "survive" else kill(int(job[-1]), with_copies if "copies" in job else in_a_kernel)
    except (TileScaleError, AssertionError, RuntimeError):
        print(f"rank {os.environ['RANK']}: {traceback.format_exc()}", flush=True)
        raise SystemExit(1) from None


def start(job: str, names: list[str], size: int) -> tuple[list[str], list[int | None], float]:
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
            command = [sys.executable, "-u", __file__, "--job", job, *names]
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    codes: list[int | None] = []
    for process in ranks:
        try:
            codes.append(process.wait(max(0.1, begin + JOB_S[job] - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(None)
    return [log.read_text() for log in outputs], codes, time.monotonic() - begin


def main(names: list[str]) -> int:
    """Run the jobs and cases whose names contain one of these, or all; how many cases failed."""
    size, failed = int(os.environ.get("WORLD_SIZE", torch.cuda.device_count())), 0
    for job in JOB_S:
        victims = {int(job[-1])} if job.startswith("kill") else set()
        cases = {case.__name__: size for case in chosen(names)} if not victims else {"killed": size - 1}
        if not cases or victims and names and not any(name in job for name in names):
            continue
        outputs, codes, took = start(job, names, size)
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
    if sys.argv[1:2] == ["--job"]:
        child(sys.argv[2], sys.argv[3:])
    elif os.environ.get("RANK", "0") == "0":
        raise SystemExit(main(sys.argv[1:]) != 0)
