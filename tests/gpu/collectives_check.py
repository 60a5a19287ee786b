# SPDX-License-Identifier: MIT
"""Collectives on whole tensors, on GPUs: `torchrun --nproc-per-node N tests/gpu/collectives_check.py [names]`.

Every rank makes the inputs of all ranks, and with them the result, bit by bit: sums are made in the order of ranks.
Outputs are poisoned, ranks out of step, sizes from one element to 64 MiB, and few of them divide anything.
Prints PASS or FAIL for each check and rank, and ends with exit code 1 if one fails.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tests.gpu import named_checks  # noqa: E402
from tilescale.backends.tilelang.lowering.implemented import BY_ROUNDS  # noqa: E402
from tilescale.collectives import records  # noqa: E402
from tilescale.errors import OutOfBoundsError, WaitTimeoutError  # noqa: E402
from tilescale.settings import settings  # noqa: E402

LIMIT_S = 400.0 if settings().share_gpus else 200.0
SKEW_CYCLES = 400_000
WAIT_S = 5.0
MIB = 1 << 20
LARGEST = (4 if settings().share_gpus else 64) * MIB
"""Bytes: ranks that share a GPU are time-sliced, for milliseconds each."""
BYTES = (1, 8, 100, 4096, 4100, 65536, 100_002, 512 * 1024, MIB + 6, 3 * MIB + 2, 16 * MIB, 64 * MIB)
"""Sizes of a tensor that is reduced or sent, rounded up to whole elements."""
REPEATED = 2000
"""Calls in a row, without a wait between them."""

world = tilescale.init()
RANK, SIZE = world.rank, world.size


def program(name: str, impl: str, dtype: str, op: str = "sum") -> Any:
    """A collective of tensors of any extent. It works on X, or from X to Y."""
    n = T.dynamic("n")
    whole = n * SIZE
    source = (whole,) if name in ("reduce_scatter", "all_to_all") else (n,)
    target = {"all_gather": (whole,), "all_to_all": (whole,)}.get(name, (n,))

    @T.prim_func
    def collective(X: T.Tensor(source, dtype), Y: T.Tensor(target, dtype)):
        with T.Kernel(device=SIZE):
            with T.Scale("device"):
                if name == "allreduce":
                    T.allreduce(X, op=op, impl=impl)
                elif name == "broadcast":
                    T.broadcast(X, root=SIZE - 1, impl=impl)
                elif name == "all_gather":
                    T.all_gather(X, Y, impl=impl)
                elif name == "reduce_scatter":
                    T.reduce_scatter(X, Y, op=op, impl=impl)
                else:
                    T.all_to_all(X, Y, impl=impl)

    return collective


def inputs(count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    made = []
    for rank in range(SIZE):
        generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
        x = torch.randn(count, generator=generator, device="cuda")
        made.append(x.to(dtype) if dtype.is_floating_point else (4 * x).to(dtype))
    return made


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The parts combined in the order of ranks, types of 16 bits in float32."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        functions = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}
        total = functions[op](total, part.to(wide))
    return total.to(dtype)


def wanted(name: str, given: list[torch.Tensor], op: str) -> torch.Tensor:
    """Expected result of this rank."""
    if name == "allreduce":
        return reduced(given, op)
    if name == "broadcast":
        return given[-1]
    if name == "all_gather":
        return torch.cat(given)
    parts = [x.chunk(SIZE)[RANK] for x in given]
    return torch.cat(parts) if name == "all_to_all" else reduced(parts, op)


def out_of_step(seed: int) -> None:
    """One rank comes later than the others."""
    chance = random.Random(seed)
    late, cycles = chance.randrange(SIZE), chance.randrange(SKEW_CYCLES)
    if RANK == late:
        torch.cuda._sleep(cycles)


class Checked:
    """A compiled collective, and what its results are compared with."""

    def __init__(self, name: str, impl: str, dtype: str, op: str = "sum", wait_s: float = WAIT_S):
        self.name, self.op, self.dtype = name, op, getattr(torch, dtype)
        self.kernel = tilescale.compile(program(name, impl, dtype, op), wait_s=wait_s)

    def shapes(self, count: int) -> tuple[int, int]:
        """Elements of X and of Y, for a number of elements in a part or in the reduced tensor."""
        source = count * SIZE if self.name in ("reduce_scatter", "all_to_all") else count
        return source, count * SIZE if self.name in ("all_gather", "all_to_all") else count

    def count(self, nbytes: int) -> int:
        """Elements of a part where all parts have the same size."""
        whole = -(-nbytes // self.dtype.itemsize)
        return whole if self.name in ("allreduce", "broadcast") else -(-whole // SIZE)

    def tensors(self, count: int, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """X and Y, beginning `shift` elements after a place that is well aligned."""
        return tuple(torch.empty(n + shift, dtype=self.dtype, device="cuda")[shift:] for n in self.shapes(count))

    def once(self, x: torch.Tensor, y: torch.Tensor, seed: int, run: Callable[[], Any] | None = None) -> None:
        """A call with new inputs and a poisoned output. Raises AssertionError."""
        given = inputs(x.numel(), self.dtype, seed)
        x.copy_(given[RANK])
        y.fill_(float("nan") if self.dtype.is_floating_point else 77)
        out_of_step(seed)
        (run or (lambda: self.kernel(x, y)))()
        got = x if self.name in ("allreduce", "broadcast") else y
        want = wanted(self.name, given, self.op)
        if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
            wrong = (got != want).nonzero().flatten()
            found = f"{wrong.numel()} wrong, from {wrong[:4].tolist()}"
            raise AssertionError(f"{got.numel()} elements, call {seed}: {found}")


def sizes(checked: Checked) -> None:
    """All sizes, three calls each; then with unaligned tensors."""
    for nbytes in (n for n in BYTES if n <= LARGEST):
        x, y = checked.tensors(checked.count(nbytes))
        for seed in range(3):
            checked.once(x, y, seed)
    for nbytes in (n for n in BYTES if n <= LARGEST // 8):
        checked.once(*checked.tensors(checked.count(nbytes), shift=1), 7)
    checked.kernel.synchronize()


def straight(checked: Checked) -> None:
    """Targets that peers can store into, on all ranks, on some, and on none; calls one after the other, and a graph."""
    for nbytes in (24 * MIB + 16 * SIZE, 64 * MIB)[: 1 if settings().share_gpus else 2]:
        count = checked.count(nbytes)
        source_of_call, plain = checked.tensors(count)
        symmetric = tilescale.zeros(plain.shape, dtype=checked.dtype)
        in_place = checked.name == "broadcast"
        for target_of_call in (symmetric, plain if RANK else symmetric, symmetric, plain):
            x, y = (target_of_call, plain.clone()) if in_place else (source_of_call, target_of_call)
            for seed in range(3):
                checked.once(x, y, seed)
        x, y = (symmetric, plain) if in_place else (source_of_call, symmetric)
        checked.once(x, y, 3)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        world.barrier()
        with torch.cuda.graph(graph):
            for _ in range(3):
                checked.kernel(x, y)
        for seed in range(4, 8):
            checked.once(x, y, seed, graph.replay)
    checked.kernel.synchronize()


def rows(width: int, dtype: str) -> None:
    """All-to-alls of unequal parts, with other numbers each time, also in a graph."""
    given, room = T.dynamic("given"), T.dynamic("room")

    @T.prim_func
    def exchange(
        X: T.Tensor((given, width), dtype),
        sent: T.Tensor((SIZE,), "int32"),
        Y: T.Tensor((room, width), dtype),
        received: T.Tensor((SIZE,), "int32"),
    ):
        with T.Kernel(device=SIZE):
            with T.Scale("device"):
                T.all_to_all_v(X, Y, sent, received)

    kernel, chance = tilescale.compile(exchange, wait_s=WAIT_S), random.Random(width)
    most = max(8, (LARGEST // SIZE) // (width * getattr(torch, dtype).itemsize))
    x, y = (torch.zeros(SIZE * most, width, dtype=getattr(torch, dtype), device="cuda") for _ in range(2))
    sent, received = (torch.zeros(SIZE, dtype=torch.int32, device="cuda") for _ in range(2))
    graph: torch.cuda.CUDAGraph | None = None
    for call, limit in enumerate((0, 1, 7, 300, most, most, 50, most)):
        counts = [[chance.randint(0, min(limit, most)) for _ in range(SIZE)] for _ in range(SIZE)]
        everyones = [z.view(-1, width) for z in inputs(SIZE * most * width, x.dtype, call)]
        x.copy_(everyones[RANK])
        sent.copy_(torch.tensor(counts[RANK]))
        y.fill_(77)
        out_of_step(call)
        if graph is None:
            kernel(x, sent, y, received)
        else:
            graph.replay()
        begins = [sum(counts[r][:RANK]) for r in range(SIZE)]
        want = torch.cat([everyones[r][b : b + counts[r][RANK]] for r, b in enumerate(begins)])
        assert torch.equal(y[: len(want)], want), f"call {call}: {counts}"
        assert y[len(want) :].eq(77).all(), f"call {call}: rows behind the last one have changed"
        assert received.tolist() == [counts[r][RANK] for r in range(SIZE)], f"call {call}: {received.tolist()}"
        if call == 3:
            torch.cuda.synchronize()
            world.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kernel(x, sent, y, received)
    kernel.synchronize()


def rows_without_room() -> None:
    """The last rank has no space for its rows: an error on all ranks that reports it, and all can begin again."""

    @T.prim_func
    def exchange(X: T.Tensor((4 * SIZE, 8), "int32"), sent: T.Tensor((SIZE,), "int32"), Y: T.Tensor((8, 8), "int32")):
        with T.Kernel(device=SIZE):
            with T.Scale("device"):
                T.all_to_all_v(X, Y, sent)

    kernel = tilescale.compile(exchange, wait_s=WAIT_S)
    x, y = (torch.zeros(n, 8, dtype=torch.int32, device="cuda") for n in (4 * SIZE, 8))
    few, many = torch.tensor([0] * (SIZE - 1) + [1]), torch.tensor([0] * (SIZE - 1) + [5])
    for sent in (few, many, few):
        try:
            kernel(x, sent.to(torch.int32).cuda(), y)
            kernel.synchronize()
            assert sent is few, "nobody noticed"
        except OutOfBoundsError as error:
            assert sent is many and f"gets {5 * SIZE} rows, dst has 8" in str(error), error
            kernel.reset()


def replays(checked: Checked) -> None:
    """Graphs of several calls with new inputs, of short and of long messages, between eager calls of other sizes."""
    for nbytes in (40_000, 2 * MIB):
        x, y = checked.tensors(checked.count(nbytes))
        others = checked.tensors(checked.count(3000))
        checked.once(x, y, 0)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        world.barrier()
        with torch.cuda.graph(graph):
            for _ in range(3 if checked.name != "allreduce" else 1):
                checked.kernel(x, y)
        for seed in range(6):
            checked.once(x, y, seed, graph.replay)
            checked.once(*others, seed)
    checked.kernel.synchronize()


def in_a_row(checked: Checked) -> None:
    """Thousands of calls of changing sizes without a pause, on two streams; the results of all of them count."""
    counts = [checked.count(n) for n in (6, 5000, 60_000, 1_500_000)]
    tensors = [checked.tensors(n) for n in counts]
    given = [inputs(x.numel(), checked.dtype, 5)[RANK] for x, _ in tensors]
    want = [wanted(checked.name, inputs(x.numel(), checked.dtype, 5), checked.op) for x, _ in tensors]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.current_stream()]
    torch.cuda.synchronize()
    for call in range(REPEATED // (20 if settings().share_gpus else 1)):
        which = call % len(tensors) if call % 50 == 0 else call % 3
        x, y = tensors[which]
        streams[0].wait_stream(streams[1]) if call % 2 else streams[1].wait_stream(streams[0])
        with torch.cuda.stream(streams[(call + 1) % 2]):
            x.copy_(given[which])
            if call % 97 == RANK:
                torch.cuda._sleep(SKEW_CYCLES // 4)
            checked.kernel(x, y)
            got = x if checked.name in ("allreduce", "broadcast") else y
            wrong += (got != want[which]).any()
    torch.cuda.synchronize()
    if int(wrong):
        raise AssertionError(f"{int(wrong)} of {REPEATED} calls are wrong")


def gathered_in_place(impl: str) -> None:
    """The source is the local part of the target, and parts are adjacent in rows."""
    rows = T.dynamic("rows")

    @T.prim_func
    def gather(X: T.Tensor((rows, 24), "float32"), Y: T.Tensor((rows, 24 * SIZE), "float32")):
        with T.Kernel(device=SIZE):
            with T.Scale("device"):
                T.all_gather(X, Y, dim=1, impl=impl)

    kernel = tilescale.compile(gather, wait_s=WAIT_S)
    for count in (1, 77, 5000):
        given = [x.view(count, 24) for x in inputs(count * 24, torch.float32, count)]
        y = torch.full((count, 24 * SIZE), float("nan"), device="cuda")
        kernel(given[RANK], y)
        assert torch.equal(y, torch.cat(given, 1)), f"{count} rows"
    checked = Checked("all_gather", impl, "bfloat16")
    for count in (3, 4096, 300_000):
        given = inputs(count, torch.bfloat16, count)
        y = torch.full((SIZE * count,), float("nan"), device="cuda", dtype=torch.bfloat16)
        x = y[RANK * count : (RANK + 1) * count]
        x.copy_(given[RANK])
        checked.kernel(x, y)
        assert torch.equal(y, torch.cat(given)), f"{count} elements in place"


def absent(name: str, impl: str) -> None:
    """The last rank does not arrive: the kernel reports it to the others, and all can begin again."""
    checked = Checked(name, impl, "float32", wait_s=0.5)
    for nbytes in (4000, 4 * MIB):
        x, y = checked.tensors(checked.count(nbytes))
        checked.once(x, y, 1)
        checked.kernel.synchronize()
        world.barrier()
        try:
            if RANK == SIZE - 1:
                time.sleep(3)
                raise WaitTimeoutError(f"T.{name} of level 'device': rank {RANK} did not arrive in time")
            checked.kernel(x, y)
            checked.kernel.synchronize()
        except WaitTimeoutError as error:
            assert f"T.{name} of level 'device': rank {SIZE - 1} did not arrive in time" in str(error), error
        else:
            raise AssertionError("nobody noticed")
        checked.kernel.reset()
        checked.once(x, y, 2)


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    for impl in ("one_shot", "two_shot"):
        for dtype, op in (("bfloat16", "sum"), ("float32", "sum"), ("float16", "max"), ("int32", "prod")):
            yield f"allreduce {impl} {dtype} {op}", lambda i=impl, d=dtype, o=op: sizes(Checked("allreduce", i, d, o))
        yield f"allreduce {impl} replays", lambda i=impl: replays(Checked("allreduce", i, "float32"))
        yield f"allreduce {impl} in a row", lambda i=impl: in_a_row(Checked("allreduce", i, "bfloat16"))
    for dtype in ("bfloat16", "int32"):
        yield f"reduce_scatter {dtype}", lambda d=dtype: sizes(Checked("reduce_scatter", "direct", d))
    for name in ("all_gather", "all_to_all", "broadcast"):
        for dtype in ("bfloat16", "uint8"):
            yield f"{name} {dtype}", lambda n=name, d=dtype: sizes(Checked(n, "direct", d))
    for name in ("reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        yield f"{name} replays", lambda n=name: replays(Checked(n, "direct", "float32"))
        if name != "reduce_scatter":
            yield f"{name} straight", lambda n=name: straight(Checked(n, "direct", "bfloat16"))
        yield f"{name} in a row", lambda n=name: in_a_row(Checked(n, "direct", "bfloat16"))
    for name, known in BY_ROUNDS.items():
        for impl in known:
            if records()[impl].against(SIZE) is None:
                yield f"{name} by rounds, {impl}", lambda n=name, i=impl: sizes(Checked(n, i, "int32"))
        yield f"{name} by rounds, replays", lambda n=name, i=known[-1]: replays(Checked(n, i, "int32"))
    for width, dtype in ((1, "bfloat16"), (33, "float32"), (2048, "bfloat16")):
        yield f"rows of {width} {dtype}", lambda w=width, d=dtype: rows(w, d)
    yield "rows without room", rows_without_room
    yield "all_gather, places", lambda: gathered_in_place("direct")
    for name, impl in (("allreduce", "one_shot"), ("allreduce", "two_shot"), ("broadcast", "direct")):
        yield f"{name} {impl}, a rank is absent", lambda n=name, i=impl: absent(n, i)


if __name__ == "__main__":
    named_checks.run(checks(), LIMIT_S)
