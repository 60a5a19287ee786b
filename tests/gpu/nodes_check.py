# SPDX-License-Identifier: MIT
"""Two nodes on the GPUs of one host, ONE PROCESS that starts their ranks: `python tests/gpu/nodes_check.py [PART ...]`.

NCCL takes each node for a host of its own and goes by sockets; no memory is shared between them. On two GPUs these are
two nodes of a rank each, and two of two, whose ranks of one number share a GPU. Each call has fresh inputs, poisoned
outputs and ranks that come at different times, and is compared with sums in float64; then a CUDA graph is replayed.
First all kernels are compiled, side by side; then each part is a job of its own, which ends within `LIMIT_S`, and some
of them run at a time: most of what they take is the host's. Prints PASS or FAIL for each check and rank, writes what
was found to `nodes_check.json` in the folder `--out` (benchmarks/results), and ends with exit code 1 if one fails.
"""

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from limits import bounded  # noqa: E402
from nodes_programs import Case, cases, queued_gather  # noqa: E402
from outcomes import RESULTS, Outcome, keep, kept, write  # noqa: E402

import tilescale  # noqa: E402
from tilelang_core import compile as stock  # noqa: E402
from tilescale.backends.base import Target  # noqa: E402
from tilescale.backends.cuda import support  # noqa: E402
from tilescale.backends.cuda.running.collectives import hierarchical  # noqa: E402
from tilescale.backends.cuda.running.collectives.kernels import HeaderKernel, combining, moving  # noqa: E402
from tilescale.backends.tilelang.text import REWRITES, check_of  # noqa: E402
from tilescale.comm.heap import default  # noqa: E402
from tilescale.errors import TileScaleError  # noqa: E402
from tilescale.ops import chunks  # noqa: E402

LIMIT_S = 110.0
CHECK_S = 60.0
"""Seconds that a part, and each of its checks, may take."""
DEATH_S = 30.0
"""Seconds within which surviving ranks must be notified."""
LAST_S = 3.0
"""Seconds by which rank 0 ends after the others."""
AT_A_TIME = 3
"""Parts that run at a time."""
CALLS, REPLAYS = 3, 2
NODES = 2
CHUNK = 1 << 20
"""Bytes of a message between nodes: of a large tensor several, in the forms of short and of long messages inside."""

PARTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "pairs": (1, ("",)),
    "messages": (2, ("put", "get", "three")),
    "queues": (2, ("queued",)),
    "sums": (2, ("allreduce", "reduce_scatter")),
    "moves": (2, ("all_gather", "all_to_all", "broadcast")),
    "operators": (2, ("operator",)),
    "death": (1, ("queued",)),
}
"""Name -> ranks of a node, and how the names of the checks begin that it makes, or whose programs it takes."""

MACHINE = """
extends: h200-sxm-8x4
title: two nodes
levels:
  node:
    count: {nodes}
  device:
    count: {local}
"""

PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "TILESCALE_WAIT_S": "20", "OMP_NUM_THREADS": "2",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "PYTHONPATH": PATHS, "PYTHONUNBUFFERED": "1",
}  # fmt: skip


# -- operators ---------------------------------------------------------------------------------------------------------

ROW, K, N = 264, 520, 264


def operators() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Operators over all ranks, of each rank's input and a local weight."""
    return {
        "all_reduce": lambda a, b: tilescale.ops.all_reduce(a),
        "all_gather": lambda a, b: tilescale.ops.all_gather(a),
        "reduce_scatter": lambda a, b: tilescale.ops.reduce_scatter(a),
        "all_to_all": lambda a, b: tilescale.ops.all_to_all(a, 0, 0),
        "all_gather_matmul": lambda a, b: tilescale.ops.all_gather_matmul(a, b),
        "matmul_reduce_scatter": lambda a, b: tilescale.ops.matmul_reduce_scatter(a, b),
        "matmul_all_reduce": lambda a, b: tilescale.ops.matmul_all_reduce(a, b),
    }


def expected(name: str, rank: int, a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    """Expected result of an operator on a rank, in float64."""
    ranks = len(a)
    wanted = {
        "all_reduce": lambda: torch.stack(a).sum(0),
        "all_gather": lambda: torch.cat(a),
        "reduce_scatter": lambda: torch.stack(a).sum(0).chunk(ranks)[rank],
        "all_to_all": lambda: torch.cat([x.chunk(ranks)[rank] for x in a]),
        "all_gather_matmul": lambda: torch.cat(a) @ b[rank],
        "matmul_reduce_scatter": lambda: sum(x @ y for x, y in zip(a, b, strict=True)).chunk(ranks)[rank],
        "matmul_all_reduce": lambda: sum(x @ y for x, y in zip(a, b, strict=True)),
    }
    return wanted[name]()


def check_operator(name: str, rows: int) -> None:
    """Several calls with new inputs."""
    world = tilescale.init()
    for seed in range(CALLS):
        generator = torch.Generator().manual_seed(seed)
        a, b = (
            [torch.randn(shape, generator=generator).bfloat16() for _ in range(world.size)]
            for shape in ((rows, K), (K, N))
        )
        mine = a[world.rank].cuda(), b[world.rank].cuda()
        world.barrier()
        time.sleep(random.random() * 0.02)
        got = operators()[name](*mine).double().cpu()
        wanted = expected(name, world.rank, [x.double() for x in a], [x.double() for x in b])
        error = (got - wanted).abs().max().item()
        assert error <= 4e-2 * wanted.abs().max().item(), f"call {seed}: {error}"


# -- running -----------------------------------------------------------------------------------------------------------


def inputs(case: Case, seed: int, ranks: int) -> list[list[torch.Tensor]]:
    """Arguments of all ranks: a random tensor, a poisoned one, flags of zero."""
    _, (source, target), name, _ = case
    dtype, everybody = getattr(torch, name), []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        given = torch.randint(-99, 99, source, generator=generator) if name == "int32" else None
        given = torch.randn(source, generator=generator) if given is None else given
        poison = torch.full(target, -77 if name == "int32" else torch.nan)
        everybody.append([given.to(dtype), poison.to(dtype), torch.zeros(4, dtype=torch.int32)])
    return everybody


def check(case: Case) -> None:
    """Several calls with new inputs, then a graph of one call replayed with new inputs."""
    world = tilescale.init()
    func, _, name, wanted = case
    kernel = tilescale.compile(func, schedule="sequential")
    mine = [tilescale.from_tensor(x.to("cuda")) for x in inputs(case, 0, world.size)[world.rank]]

    def once(seed: int, run: Callable[[], Any]) -> None:
        everybody = inputs(case, seed, world.size)
        for tensor, value in zip(mine, everybody[world.rank], strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize()
        time.sleep(random.random() * 0.02)
        run()
        kernel.synchronize()
        for position, expected in wanted(everybody)[world.rank].items():
            got = mine[position].cpu().double()
            tolerance = 0.0 if name == "int32" or position == 2 else {"float32": 1e-5, "bfloat16": 4e-2}[name]
            error = (got - expected.double()).abs().max().item()
            bound = tolerance * max(1.0, expected.abs().max().item())
            assert error <= bound, f"call {seed}, argument {position}: {error}"  # nor is it NaN

    calls = CALLS if mine[0].numel() < 1 << 20 else 2
    for seed in range(calls):
        once(seed, lambda: kernel(*mine))
    graph = torch.cuda.CUDAGraph()
    world.barrier()
    with torch.cuda.graph(graph):
        kernel(*mine)
    for seed in range(calls, calls + (REPLAYS if calls == CALLS else 1)):
        once(seed, graph.replay)


def check_death(world: tilescale.World, found: Path) -> int:
    """The last rank dies while the other waits for its copies; that one must be notified in bounded time. Returns 0 if
    so.
    """
    func, shapes, dtype, _ = queued_gather(NODES, world.local_size)
    kernel = tilescale.compile(func, schedule="sequential")
    mine = [tilescale.zeros(shape, getattr(torch, dtype)) for shape in shapes] + [tilescale.zeros(4, torch.int32)]
    kernel(*mine)
    kernel.synchronize()
    world.barrier()
    if world.rank == world.size - 1:
        os._exit(0)
    begin, verdict = time.perf_counter(), "FAIL nothing was raised"
    with bounded(f"death on rank {world.rank}", DEATH_S):
        try:
            kernel(*mine)
            kernel.synchronize()
        except TileScaleError as error:
            verdict = f"PASS {type(error).__name__}: {str(error).splitlines()[0]}"
    seconds = time.perf_counter() - begin
    print(f"rank {world.rank}, death: {verdict} ({seconds:.1f} s)", flush=True)
    keep(Outcome.of("death", "the other node dies", NODES, [verdict], seconds), found)
    return int(not verdict.startswith("PASS"))


def checks(local: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """All checks of a layout by name."""
    for name, make in cases(NODES, local):
        yield name, lambda make=make: check(make())
    for name in operators():
        for rows in (ROW, 16 * ROW):
            yield f"operator {name} of {rows} rows", lambda name=name, rows=rows: check_operator(name, rows)


def as_rank(part: str, found: Path) -> None:
    """The checks of a part, on this rank; rank 0 keeps what is found."""
    default._spans = lambda device, nodes: False  # fabric handles of one host would join its two nodes
    hierarchical.chunk_bytes = lambda target: CHUNK
    chunks.message_bytes, chunks.WHOLE_BYTES = lambda path: CHUNK // 8, 0
    world = tilescale.init(timeout_s=60)
    torch.cuda.set_device(world.device)
    with bounded(f"{part} on rank {world.rank}", LIMIT_S):
        failed = check_death(world, found) if part == "death" else run_checks(part, world, found)
        if world.rank == 0 and part != "death":
            time.sleep(LAST_S)  # it has the job's store, from which the others may still be reading
        os._exit(failed)


def run_checks(part: str, world: tilescale.World, found: Path) -> int:
    """The checks of a part, until one fails; 0 if none does."""
    for name, run in checks(world.local_size):
        if not name.startswith(PARTS[part][1]):
            continue
        begin, where = time.perf_counter(), f"rank {world.rank} of {NODES} x {world.local_size}, {name}"
        with bounded(where, CHECK_S):
            try:
                run()
                verdict = "PASS"
            except Exception:  # noqa: BLE001 - reported, and the next check runs
                verdict = f"FAIL {traceback.format_exc(limit=-4)}"
            seconds = time.perf_counter() - begin
            print(f"{where}: {verdict} ({seconds:.1f} s)", flush=True)
            outcome = Outcome.of(part, name, NODES, world.all_gather(verdict), seconds)
            if world.rank == 0:
                keep(outcome, found)
            if outcome.failures:
                return 1  # the state that a rank has left in NCCL would fail the others
    return 0


# -- processes ---------------------------------------------------------------------------------------------------------


def machine(local: int, folder: Path) -> Path:
    """Write the description of two nodes of a number of GPUs to a file."""
    path = folder / f"two-nodes-of-{local}.yaml"
    path.write_text(MACHINE.format(nodes=NODES, local=local), encoding="utf-8")
    return path


def compile_share(parts: Sequence[str], number: int, count: int, folder: Path) -> None:
    """One of `count` shares of all that parts compile, into the compiler's cache, where ranks find it."""
    todo: list[Callable[[], object]] = []

    def grids(make: Callable[[], Case], described: Path) -> None:
        with tilescale.use_machine(str(described)):
            kernel = tilescale.compile(make()[0])
        target = Target.of(kernel.program, kernel.machine, None)
        for grid in support.lower(kernel.program, target).kernels:
            check = check_of(grid, kernel.program, kernel.machine)
            stock.KernelCompilation(grid.func, REWRITES, check).run()

    for local in (1, 2):
        described = machine(local, folder)
        begins = tuple(begin for part in parts if PARTS[part][0] == local for begin in PARTS[part][1])
        mine = [make for name, make in cases(NODES, local) if name.startswith(begins)]
        todo += [lambda make=make, at=described: grids(make, at) for make in mine]
    sums = [combining("float32", "sum"), combining("bfloat16", "sum"), combining("int32", "max")]
    moves = {moving(dtype) for dtype in ("float32", "bfloat16", "uint8")}
    made = [("reduce", element, ("false",)) for element in sums]
    made += [("move", element, (flag,)) for element in sorted(moves) for flag in ("true", "false")]
    made += [("broadcast", element, ()) for element in sorted(moves)]
    for function, element, flags in made:
        for form in ("words", "slots"):
            text = HeaderKernel(function, form, element, 2, flags).text
            todo.append(lambda text=text: stock.device_code(text, "auto"))
    for make in todo[number::count]:
        make()


def compile_all(parts: Sequence[str], folder: Path) -> None:
    """All shares, a process for each."""
    begin, count = time.perf_counter(), min(16, max(1, (os.cpu_count() or 2) // 2))
    command = [sys.executable, __file__, *parts, "--compile", str(count), str(folder)]
    environment = {**os.environ, **ENVIRONMENT, "TILESCALE_EMULATE": "0"}
    shares = [subprocess.Popen([*command, str(number)], env=environment, cwd=ROOT) for number in range(count)]
    codes = [share.wait() for share in shares]
    print(f"INFO compiled by {count} processes in {time.perf_counter() - begin:.0f} s, exit codes {codes}", flush=True)


def job(part: str, folder: Path) -> list[Outcome]:
    """A part: two nodes of a number of ranks. Results of its checks, and its error, if any."""
    local, begin = PARTS[part][0], time.perf_counter()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    gpus, ranks, lines = torch.cuda.device_count(), [], folder / f"{part}.jsonl"
    for rank in range(NODES * local):
        node, number = divmod(rank, local)
        own = {
            "RANK": rank, "WORLD_SIZE": NODES * local, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": node, "MASTER_PORT": port, "NCCL_HOSTID": f"node{node}",
            "TILESCALE_MACHINE": machine(local, folder),
        }  # fmt: skip
        if local == 1:
            own["CUDA_VISIBLE_DEVICES"] = node % gpus
        environment = {**os.environ, **ENVIRONMENT, **{key: str(value) for key, value in own.items()}}
        command = [sys.executable, __file__, part, "--rank", str(lines)]
        ranks.append(subprocess.Popen(command, env=environment, cwd=ROOT))
    codes = [process.wait() for process in ranks]
    seconds = time.perf_counter() - begin
    print(f"INFO part {part!r}: {seconds:.0f} s, exit codes {codes}", flush=True)
    outcomes = kept(lines)
    if any(codes) and not any(outcome.failures for outcome in outcomes):
        verdicts = [f"exit code {code}" if code else "PASS" for code in codes]
        outcomes.append(Outcome.of(part, "to the end", NODES, verdicts, seconds))
    return outcomes


def main() -> int:
    """The parts that are named, or all, `AT_A_TIME`; as a rank of one of them, its checks."""
    options = argparse.ArgumentParser()
    options.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    options.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    given = options.parse_args()
    parts = given.parts or [*PARTS]
    if given.compile is not None:
        count, folder, number = given.compile
        compile_share(parts, int(number), int(count), Path(folder))
        return 0
    if given.rank is not None:
        as_rank(parts[0], given.rank)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_A_TIME) as pool:
        compile_all(parts, Path(folder))
        outcomes = [one for found in pool.map(lambda part: job(part, Path(folder)), parts) for one in found]
    write(outcomes, given.out / "nodes_check.json")
    failed = [f"{one.part}: {one.check}" for one in outcomes if one.failures]
    print(f"FAIL: {', '.join(failed)}" if failed else f"PASS ALL: {len(outcomes)} checks", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
