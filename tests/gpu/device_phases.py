# SPDX-License-Identifier: MIT
"""Device phases on GPUs against the emulator: `torchrun --nproc-per-node N tests/gpu/device_phases.py [names]`.

Every rank makes the inputs of all ranks, emulates the whole machine for itself, runs its own part on its GPU, and
compares. Each program runs several times with new inputs and ranks out of step, then as a CUDA graph.
Prints PASS or FAIL for each check and rank, and ends with exit code 1 if one fails.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tests.gpu import named_checks, queue_programs  # noqa: E402
from tilescale.settings import settings  # noqa: E402

LIMIT_S = 500.0 if settings().share_gpus else 240.0
ROWS, COLUMNS = 96, 64
CALLS, REPLAYS = 3, 6


def two_tensors(phase: Callable[..., Any], source: tuple[int, ...], target: tuple[int, ...], dtype: str) -> Any:
    """A program of one device phase, `phase(X, Y, flags, rank, size)`."""
    devices = tilescale.init().size

    @T.prim_func
    def two(X: T.Tensor(source, dtype), Y: T.Tensor(target, dtype), flags: T.Tensor((4,), "int32")):
        with T.Kernel(device=devices):
            with T.Scale("device") as (rank, size):
                phase(X, Y, flags, rank, size)

    return two


def put(impl: str | None) -> Any:
    """A whole tensor to the next device, with a signal; then the flag goes back as a credit."""

    @T.macro
    def phase(X, Y, flags, rank, size):
        T.copy(X, Y, dst=(rank + 1) % size, signal=flags[0], value=3, impl=impl)
        T.wait(flags[0], "==", 3)
        T.signal(flags[1], dst=(rank + size - 1) % size)
        T.wait(flags[1], ">=", 1)

    return two_tensors(phase, (ROWS, COLUMNS), (ROWS, COLUMNS), "float32")


def get(impl: str | None) -> Any:
    """A slice of a tensor from the next device."""

    @T.macro
    def phase(X, Y, flags, rank, size):
        T.clear(Y)
        T.barrier()
        T.copy(X[8:40, :], Y[16:48, :], src=(rank + 1) % size, impl=impl)
        T.barrier()

    return two_tensors(phase, (ROWS, COLUMNS), (ROWS, COLUMNS), "bfloat16")


def collective(name: str, impl: str, dim: int, dtype: str = "float32", op: str = "sum") -> Any:
    """One collective on whole tensors, twice: the second one must not overtake the first."""
    n = tilescale.init().size
    whole, part = [ROWS, COLUMNS], [ROWS, COLUMNS]
    whole[dim] *= n
    shapes = {"all_gather": (part, whole), "reduce_scatter": (whole, part), "all_to_all": (whole, whole)}
    source, target = shapes.get(name, (part, part))

    @T.macro
    def phase(X, Y, flags, rank, size):
        for _ in T.serial(2):
            if name == "allreduce":
                T.allreduce(X, op=op, impl=impl)
            elif name == "broadcast":
                T.broadcast(X, root=size - 1, impl=impl)
            elif name == "all_gather":
                T.all_gather(X, Y, dim=dim, impl=impl)
            elif name == "reduce_scatter":
                T.reduce_scatter(X, Y, op=op, dim=dim, impl=impl)
            else:
                T.all_to_all(X, Y, dim=dim, impl=impl)

    return two_tensors(phase, tuple(source), tuple(target), dtype)


def merge(a: Any, b: Any) -> Any:
    """Two partial results with the logarithms of their weights."""
    top = T.max(a[1], b[1])
    left, right = T.exp(a[1] - top), T.exp(b[1] - top)
    return (a[0] * left + b[0] * right) / (left + right), top + T.log(left + right)


def merged(impl: str, rows: int = ROWS) -> Any:
    """An all-reduce of two tensors with a combination of the user's."""
    devices = tilescale.init().size

    @T.prim_func
    def two(X: T.Tensor((rows, COLUMNS), "float32"), L: T.Tensor((rows,), "float32"), flags: T.Tensor((4,), "int32")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                for _ in T.serial(2):
                    T.allreduce(X, L, fn=merge, impl=impl)

    return two


def mixed() -> Any:
    """Loops, scalars, elements, flags and collectives; then a grid that uses a value of the device phase."""
    devices = tilescale.init().size

    @T.prim_func
    def steps(X: T.Tensor((ROWS, COLUMNS), "float32"), top: T.Tensor((1,), "float32"), flags: T.Tensor((4,), "int32")):
        with T.Kernel(device=devices, block=6, threads=64) as bx:
            with T.Scale("device") as (rank, size):
                right = (rank + 1) % size
                for step in T.serial(3):
                    T.signal(flags[0], dst=right)
                    T.wait(flags[0], ">=", step + 1)
                    top[0] = 0
                    for i in T.serial(ROWS):
                        top[0] = T.max(top[0], T.abs(X[i, step]))
                    T.allreduce(top, op="max")
                    for i, j in T.Parallel(ROWS, COLUMNS):
                        X[i, j] = X[i, j] / top[0] + rank
                if rank == 0:
                    T.signal(flags[1], 7, op="set", dst=size - 1)
                T.barrier()
            with T.Scale("block"):
                tile = T.alloc((16, COLUMNS), "float32", level="l1")
                T.copy(X[bx * 16, 0], tile)
                with T.Scale("device"):
                    T.barrier()
                    T.copy(tile, X[bx * 16, 0], dst=right)
                    T.barrier()

    return steps


def tiles(side: str, impl: str | None, dtype: str) -> Any:
    """Tiles to or from the next device by a mechanism."""
    devices = tilescale.init().size

    @T.prim_func
    def moved(X: T.Tensor((ROWS, COLUMNS), dtype), Y: T.Tensor((ROWS, COLUMNS), dtype), flags: T.Tensor((4,), "int32")):
        with T.Kernel(device=devices, block=3, threads=128) as bx:
            tile = T.alloc((32, COLUMNS), dtype, level="l1")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.barrier()
                if side == "dst":
                    T.copy(X[bx * 32, 0], tile)
                    T.copy(tile, Y[bx * 32, 0], dst=(rank + 1) % size, signal=flags[bx], impl=impl)
                    T.wait(flags[bx], ">=", 1)
                else:
                    T.copy(X[bx * 32, 0], tile, src=(rank + 1) % size, impl=impl)
                    T.copy(tile, Y[bx * 32, 0])
                T.barrier()

    return moved


def until_small() -> Any:
    """A loop whose number of rounds the devices find out: all halve until the largest element is small enough."""
    devices = tilescale.init().size

    @T.prim_func
    def halved(X: T.Tensor((ROWS, COLUMNS), "float32"), rounds: T.Tensor((1,), "int32")):
        with T.Kernel(device=devices, block=6, threads=64) as bx:
            with T.Scale("device"):
                top = T.alloc((1,), "float32", level="l2")
                rounds[0] = 0
                top[0] = 1e9
                while top[0] > 0.5:
                    with T.Scale("block"):
                        for i, j in T.Parallel(16, COLUMNS):
                            X[bx * 16 + i, j] = X[bx * 16 + i, j] / 2
                    top[0] = 0
                    for i, j in T.grid(ROWS, COLUMNS):
                        top[0] = T.max(top[0], T.abs(X[i, j]))
                    T.allreduce(top, op="max")
                    rounds[0] += 1

    return halved


def refuses_capture() -> None:
    """A graph would not repeat reads of the host in the middle of a call."""
    world = tilescale.init()
    func = until_small()
    kernel = tilescale.compile(func, schedule="sequential")
    mine = [x.cuda() for x in inputs(func, 0)[world.rank]]
    kernel(*mine)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kernel(*mine)
    except tilescale.errors.UnsupportedError as error:
        assert "decides on values in device memory" in str(error), error
    else:
        raise AssertionError("the capture was not refused")
    kernel(*mine)
    torch.cuda.synchronize()


def levels() -> Any:
    """Collectives over one level of two; on one server, as if it were two. Needs an even number of ranks."""
    size = tilescale.init().size

    @T.prim_func
    def two(X: T.Tensor((ROWS, COLUMNS), "float32"), L: T.Tensor((ROWS,), "float32"), flags: T.Tensor((4,), "int32")):
        with T.Kernel(node=2, device=size // 2):
            with T.Scale("device"):
                T.allreduce(X)
                T.allreduce(X, L, fn=merge)
            with T.Scale("node"):
                T.allreduce(X, op="max")
                T.broadcast(L, root=1)

    return two


# -- running -----------------------------------------------------------------------------------------------------------


def random_like(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Numbers of a type; integers are small, so that their products do not overflow differently."""
    if not dtype.is_floating_point:
        return torch.randint(-3, 4, tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def inputs(func: Any, seed: int) -> list[list[torch.Tensor]]:
    """Arguments of all ranks: random tensors, flags of zero."""
    kernel = tilescale.compile(func, schedule="sequential")
    ranks = []
    for rank in range(tilescale.init().size):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        values = []
        for parameter in kernel.program.parameters:
            shape = [int(n) for n in parameter.buffer.shape]
            dtype = getattr(torch, str(parameter.buffer.dtype))
            is_flag = parameter.name == "flags"
            values.append(torch.zeros(shape, dtype=dtype) if is_flag else random_like(shape, dtype, generator))
        ranks.append(values)
    return ranks


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal but for rounding in another order."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}.get(got.dtype, 0.0)
    torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def check(
    func: Any, machine: str | None = None, graph: bool = True, wanted: Callable[[list[Any]], Any] | None = None
) -> None:
    """Several calls with new inputs, then a graph of one call replayed with new inputs.

    `wanted` makes of all ranks' arguments what they are afterwards; left out, the emulator does.
    """
    world = tilescale.init()
    with tilescale.use_machine(machine or tilescale.current_machine()):
        kernel = tilescale.compile(func, schedule="sequential")
        mine = [tilescale.from_tensor(x.to("cuda")) for x in inputs(func, 0)[world.rank]]

        def once(seed: int, run: Callable[[], Any]) -> None:
            everyone = inputs(func, seed)
            for tensor, value in zip(mine, everyone[world.rank], strict=True):
                tensor.copy_(value)
            torch.cuda.synchronize()
            world.barrier()
            time.sleep(random.random() * 0.01)
            run()
            torch.cuda.synchronize()
            (wanted or partial(tilescale.emulate, func))(everyone)
            for number, (tensor, value) in enumerate(zip(mine, everyone[world.rank], strict=True)):
                same(tensor, value, f"call {seed}, argument {number}")

        for seed in range(CALLS):
            once(seed, lambda: kernel(*mine))
        if graph:
            captured = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            world.barrier()
            with torch.cuda.graph(captured):
                kernel(*mine)
            for seed in range(CALLS, CALLS + REPLAYS):
                once(seed, captured.replay)


def checks() -> dict[str, Callable[[], None]]:
    size = tilescale.init().size
    found: dict[str, Callable[[], None]] = {}
    for impl in ("lsu", "copy_engine"):
        found[f"put whole {impl}"] = lambda impl=impl: check(put(impl))
        found[f"get slice {impl}"] = lambda impl=impl: check(get(impl))
    for impl in ("nccl", "one_shot"):
        for dtype, op in (("float32", "sum"), ("bfloat16", "max"), ("int32", "prod")):
            name = f"allreduce {impl} {dtype} {op}"
            found[name] = lambda i=impl, d=dtype, o=op: check(collective("allreduce", i, 0, d, o))
        found[f"allreduce fn {impl}"] = lambda impl=impl: check(merged(impl))
    found["allreduce fn one_shot, many programs"] = lambda: check(merged("one_shot", 1024))
    for name, impls in {
        "all_gather": ("nccl", "copy_engine", "direct"),
        "all_to_all": ("nccl", "copy_engine", "direct"),
        "reduce_scatter": ("nccl", "direct"),
        "broadcast": ("nccl", "direct"),
    }.items():
        for impl in impls:
            for dim in (0, 1) if name != "broadcast" else (0,):
                found[f"{name} {impl} dim {dim}"] = lambda n=name, i=impl, d=dim: check(collective(n, i, d))
    found["mixed"] = lambda: check(mixed())
    found["until small"] = lambda: check(until_small(), graph=False)
    found["until small, captured"] = refuses_capture
    for side in ("dst", "src"):
        for impl, dtype in (("tma", "float32"), ("tma", "bfloat16"), ("lsu", "bfloat16")):
            found[f"tiles {side} {impl} {dtype}"] = lambda s=side, i=impl, d=dtype: check(tiles(s, i, d))
    for name, (func, wanted) in queue_programs.checks().items():
        found[f"async {name}"] = lambda func=func, wanted=wanted: check(func, wanted=wanted)
    if settings().share_gpus:
        return {name: run for name, run in found.items() if "nccl" not in name}
    if size % 2 == 0:
        found["levels"] = lambda: check(_traced_for("h200-sxm-8x4", levels), "h200-sxm-8x4")
    return found


def _traced_for(machine: str, make: Callable[[], Any]) -> Any:
    with tilescale.use_machine(machine):
        return make()


if __name__ == "__main__":
    named_checks.run(checks().items(), LIMIT_S)
