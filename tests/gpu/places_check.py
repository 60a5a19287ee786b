# SPDX-License-Identifier: MIT
"""Operators with tensors at new addresses in each call: `torchrun --nproc-per-node 2 tests/gpu/places_check.py`.

Results are right, with and without gradients, no CUDA graph is instantiated after the first calls, and a call that
fails during the capture of a graph leaves the operators unchanged.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.ops_support import compare, main, poison, random, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, barrier, everyones, total  # noqa: E402
from tilescale import from_tensor, ops  # noqa: E402
from tilescale.backends.cuda.running import repeated  # noqa: E402
from tilescale.backends.cuda.running.graphs import LaunchGraph  # noqa: E402
from tilescale.ops.layer_gemms import column_parallel, row_parallel  # noqa: E402
from tilescale.settings import settings  # noqa: E402

WARM, CALLS = 10, 6
MOST_GROWN = 2
LATE_CYCLES = 1_000_000

Case = tuple[str, Callable[..., torch.Tensor], Callable[[], list[torch.Tensor]], Callable[..., torch.Tensor]]

made: list[object] = []
"""Every graph that a program has made for itself."""


def cases() -> Iterator[Case]:
    """A name, an operator, new inputs for it, and what is right."""
    yield "all_gather, 64 KiB", ops.all_gather, lambda: [random(32, 1024)], lambda x: everyones(x).flatten(0, 1)
    yield "all_gather, 8 MiB", ops.all_gather, lambda: [random(4096, 1024)], lambda x: everyones(x).flatten(0, 1)
    yield "all_reduce, 64 KiB", ops.all_reduce, lambda: [random(32, 1024)], total
    yield "reduce_scatter, 4 MiB", ops.reduce_scatter, lambda: [random(2048, 1024)], mine
    for rows, N, K in ((64, 768, 512), (600, 768, 512), (1536, 768, 512), (512, 2048, 8192)):
        yield (  # the last one's rows are sent in slices of columns
            f"all_gather_matmul, {rows} rows",
            lambda a, w: ops.all_gather_matmul(a, w.t()),
            lambda rows=rows, N=N, K=K: [random(rows, K), random(N, K)],
            lambda a, w: everyones(a).flatten(0, 1).float() @ w.float().t(),
        )
    for rows in (64, 600, 1536):
        yield (
            f"matmul_reduce_scatter, {rows} rows",
            lambda a, w: ops.matmul_reduce_scatter(a, w.t()),
            lambda rows=rows: [random(SIZE * rows, 512), random(768, 512)],
            lambda a, w: mine(a.float() @ w.float().t()),
        )
    yield (  # with plain kernels, which round
        "all_gather_matmul, float8",
        lambda a, w: ops.all_gather_matmul(a, w.t(), float8=ops.Float8()),
        lambda: [random(600, 512), random(768, 512)],
        lambda a, w: everyones(rounded(a)).flatten(0, 1) @ rounded(w).t(),
    )
    yield (
        "matmul_reduce_scatter, float8",
        lambda a, w: ops.matmul_reduce_scatter(a, w.t(), float8=ops.Float8()),
        lambda: [random(SIZE * 600, 512), random(768, 512)],
        lambda a, w: mine(rounded(a) @ rounded(w).t()),
    )
    yield (
        "matmul_all_reduce",
        lambda a, w: ops.matmul_all_reduce(a, w.t()),
        lambda: [random(600, 512), random(768, 512)],
        lambda a, w: total(a.float() @ w.float().t()),
    )


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Float8 numbers, times the scale of their row: the least power of two with which all are in the type's range."""
    kind = torch.float8_e4m3fn
    scale = (x.float().abs().amax(1, keepdim=True) / torch.finfo(kind).max).log2().ceil().exp2()
    return (x.float() / scale).to(kind).float() * scale


def mine(x: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum."""
    return total(x).chunk(SIZE)[RANK]


def check_places(_: slice) -> None:
    """New inputs in each call, which are kept, so that none takes the place of another; ranks out of step."""
    for name, call, draw, right in cases():
        for differentiates in (False, True):
            kept, before = [], 0
            for number in range(WARM + CALLS):
                given = [x.requires_grad_(differentiates) for x in draw()]
                want = right(*(x.detach() for x in given))
                poison()
                if number % SIZE == RANK:
                    torch.cuda._sleep(LATE_CYCLES)
                before = len(made) if number == WARM else before
                got = call(*given)
                compare(name, got.detach(), want)
                if differentiates:
                    check_gradients(name, call, given, got)
                kept.append((given, got))
            if len(made) != before:
                raise ValueError(f"{name}: {len(made) - before} graphs were made after {WARM} calls")
            how = ", with gradients" if differentiates else ""
            say(f"PASS {name}{how}: {host_us(call, draw, differentiates):.1f} us of the host")


def check_gradients(name: str, call: Callable[..., torch.Tensor], given: list[torch.Tensor], got: torch.Tensor) -> None:
    """Results of copies, at other addresses, are the same."""
    grad = random(*got.shape)
    copies = [x.detach().clone().requires_grad_() for x in given]
    for one, other in zip(
        torch.autograd.grad(got, given, grad), torch.autograd.grad(call(*copies), copies, grad), strict=True
    ):
        compare(f"{name}, gradient", one, other)


def host_us(call: Callable[..., torch.Tensor], draw: Callable[[], list[torch.Tensor]], differentiates: bool) -> float:
    """Host time of a call, with new addresses each time."""
    given = [[x.requires_grad_(differentiates) for x in draw()] for _ in range(20)]
    barrier()
    begin = time.perf_counter()
    kept = [call(*each) for each in given]
    took = time.perf_counter() - begin
    barrier()
    return took / len(kept) * 1e6


def check_recorded(_: slice) -> None:
    """Calls that repeat are recorded, and right: elsewhere, in symmetric memory, in a workspace that has grown."""
    for name, call, draw, right in cases():
        calls, kept = len(recordings), []
        for _ in range(WARM):
            call(*draw())
        for number in range(WARM + CALLS):
            given = [from_tensor(x) if number % 4 == 3 else x for x in draw()]
            if number == WARM and len(grown) < MOST_GROWN:
                grown.append(name)
                ops.workspace(8192, 8192 + 512 * len(grown))
            if number % SIZE == RANK:
                torch.cuda._sleep(LATE_CYCLES)
            kept.append(call(*given))
            compare(name, kept[-1], right(*given))
        made = sum(recordings[calls:])
        if not made and not settings().share_gpus:  # copies within a GPU are other ones
            raise ValueError(f"{name}: none of {len(recordings) - calls} calls that were tried is recorded")
        say(f"PASS {name}, recorded: {made} of {len(recordings) - calls} that were tried")


grown: list[str] = []
recordings: list[bool] = []
"""For each attempt to record a call, whether it succeeded."""


def check_layers(_: slice) -> None:
    """Gradients of layers with one form but weights at different addresses, in many steps, as of one matrix."""
    torch.manual_seed(1)
    joined = torch.randn(2 * 768, 512, device=DEVICE, dtype=torch.bfloat16) / 16
    apart = [torch.randn(768, 512, device=DEVICE, dtype=torch.bfloat16) / 16 for _ in range(2)]
    pairs = [list(joined.split(768)), apart]
    down = torch.randn(512, 768, device=DEVICE, dtype=torch.bfloat16) / 16
    for rows in (64, 1536):
        for number in range(2 * WARM):
            weights = [w.detach().requires_grad_() for w in pairs[number % 2]]
            x, last = random(1, rows, 512).requires_grad_(), down.detach().requires_grad_()
            gate, up = column_parallel(x, weights, [], "", "", number % 3 == 0)[:2]
            hidden = torch.nn.functional.silu(gate) * up
            y = row_parallel(hidden, last, None, "", True, "")
            grad = random(1, rows, 512)
            got = torch.autograd.grad(y, [x, *weights, last], grad)
            whole = everyones(x.detach()[0]).flatten(0, 1).float().requires_grad_()
            wide = [w.detach().float().requires_grad_() for w in (*weights, last)]
            made = (torch.nn.functional.silu(whole @ wide[0].t()) * (whole @ wide[1].t())) @ wide[2].t()
            grads = everyones(grad[0]).flatten(0, 1).float()
            want = torch.autograd.grad(made, [whole, *wide], grads)
            mine_of = total(want[0]).chunk(SIZE)[RANK]
            for what, one, other in zip(("x", "gate", "up", "down"), got, (mine_of[None], *want[1:]), strict=True):
                size = 2 * (other.abs() + other.abs().mean())
                compare(f"layers of {rows} rows, step {number}, gradient of {what}", one, other, size)
        say(f"PASS gradients of layers, {rows} rows")


def check_captures(_: slice) -> None:
    """An error in a capture ends that alone: the next calls, eager and captured, are right."""
    for name, call, draw, right in cases():
        given = draw()
        want = right(*given)
        compare(name, call(*given), want)
        barrier()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                call(*given)
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        compare(name, call(*given), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call(*given)
        graph.replay()
        compare(name, got, want)
        say(f"PASS {name} after a capture that failed")


def check_threads(_: slice) -> None:
    """Calls from one thread after the other."""
    x, found = random(32, 1024), []
    for _ in range(3):
        thread = threading.Thread(target=lambda: found.append(in_thread(x)))
        thread.start()
        thread.join()
    for got in found:
        compare("all_reduce in a thread", got, total(x))
    say(f"PASS calls from {len(found)} threads")


def check_compiled(_: slice) -> None:
    """Layers in graphs of PyTorch's compiler, with its CUDA graphs and without, give what eager ones give."""
    torch.manual_seed(0)
    up, gate, down = (torch.nn.Linear(*shape, bias=False) for shape in ((512, 1024), (512, 1024), (1024, 512)))
    for layer in (up, gate, down):
        layer.to(DEVICE, torch.bfloat16)
    columns = [ops.ColumnParallelLinear.shard(layer) for layer in (up, gate)]
    rows = ops.RowParallelLinear.shard(down)
    ops.gather_once(*columns)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + rows(torch.nn.functional.silu(columns[0](x)) * columns[1](x))

    for mode in ("default", "reduce-overhead"):
        compiled = torch.compile(block, fullgraph=True, mode=mode)
        for number in range(5):
            x = random(1, 256, 512)
            found = []
            for call in (block, compiled):
                given = x.clone().requires_grad_()
                y = call(given)
                y.float().pow(2).sum().backward()
                found.append((y.detach().clone(), given.grad.clone(), down.weight.grad.clone()))
                down.weight.grad = None
            if number % SIZE == RANK:
                torch.cuda._sleep(LATE_CYCLES)
            for one, other in zip(*found, strict=True):
                compare(f"compiled, {mode}", other, one)
        barrier()
        say(f"PASS layers compiled, mode {mode}")


def in_thread(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.set_device(DEVICE)
    made = ops.all_reduce(x)
    torch.cuda.synchronize()
    return made


def counted(build: Callable[..., None]) -> Callable[..., None]:
    """A constructor that adds what it makes to `made`."""

    def call(own: object, *given: object) -> None:
        build(own, *given)
        made.append(own)

    return call


if __name__ == "__main__":
    LaunchGraph.__init__ = counted(LaunchGraph.__init__)  # type: ignore[method-assign]
    record = repeated.recorded

    def noted(*given: object) -> object:
        made_of, found = record(*given)  # type: ignore[arg-type]
        recordings.append(found is not None)
        return made_of, found

    repeated.recorded = noted  # type: ignore[assignment]
    checks = {"places": check_places, "recorded": check_recorded, "layers": check_layers, "captures": check_captures}
    main(checks | {"threads": check_threads, "compiled": check_compiled})
