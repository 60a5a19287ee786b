# SPDX-License-Identifier: MIT
"""All-reduce, residual and RMSNorm by one kernel, against float64; then how long it takes.

    torchrun --nproc-per-node 2 tests/gpu/norm_check.py [names]

Every check has new random numbers in each call, results full of NaN before it, and ranks out of step. Sums have the
bits of float32 additions in the order of ranks. Prints PASS or FAIL for each check and rank; then, by the first rank,
the slowest rank's median times: of one kernel in one step and in two, of a sum and a norm one after the other, of the
sum alone, and of NCCL and PyTorch's norm. `time` measures these, `choices` the kernel's variants: the size of clusters,
words or lines, and whether it begins before the previous kernel has ended.
"""

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu import named_checks  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SHARED, SIZE, as_first, barrier, everyones, join, say, slowest  # noqa: E402
from tests.packed_scales import unpacked  # noqa: E402
from tilescale import ops  # noqa: E402
from tilescale.backends.cuda.running.collectives import exchanges, normalised  # noqa: E402
from tilescale.ops import whole_tensors  # noqa: E402
from tilescale.ops.group import team_of  # noqa: E402
from tilescale.ops.kernels import kernel  # noqa: E402
from tilescale.ops.layout import dtype_of  # noqa: E402
from tilescale.program.norm import GROUP, packed_words  # noqa: E402

norm = import_module("tilescale.ops.all_reduce_rms_norm")
float8 = import_module("tilescale.ops.all_reduce_rms_norm_float8")

LIMIT_S, EPS, LATE_CYCLES = 400.0, 1e-5, 2_000_000
SHAPES = [(1, 6144), (6, 6144), (16, 8192), (32, 4096), (138, 6144), (512, 6144)]
OTHERS = [(1, 8), (3, 72), (133, 1032), (7, 5120), (300, 16384), (2000, 64), (1, 12288), (40, 7168)]
TIMED = [(1, 6144), (6, 6144), (138, 6144), (512, 6144), (16, 8192)]
ROUNDS, CALLS, HOST_CALLS = 15, 40, 20
ALGORITHMS = ("one_shot", "two_shot")
POWERS = {"group_size": GROUP, "power_of_two": True}

Result = tuple[torch.Tensor, torch.Tensor]
"""The normalised rows, and what they are made of."""


class Rows(NamedTuple):
    """Inputs of a call."""

    x: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor | None

    def renew(self) -> None:
        """New numbers in the same memory."""
        self.x.copy_(torch.randn(self.x.shape, device=DEVICE))
        self.weight.copy_(as_first(torch.randn(self.weight.shape, device=DEVICE)))
        if self.residual is not None:
            self.residual.copy_(as_first(torch.randn(self.x.shape, device=DEVICE)))


def rows_of(shape: tuple[int, int], dtype: torch.dtype, has_residual: bool = True) -> Rows:
    x = torch.empty(shape, dtype=dtype, device=DEVICE)
    made = Rows(x, torch.empty_like(x[0]), torch.empty_like(x) if has_residual else None)
    made.renew()
    return made


def by_one(
    rows: Rows, result: Result, algorithm: str = "one_shot", build: Callable[..., Any] = norm.by_one_kernel
) -> Callable[[], Result]:
    """One kernel, into memory that is there."""
    dtype, has_residual = dtype_of(rows.x), rows.residual is not None
    made = kernel(build, team_of(""), rows.x.shape[1], dtype, has_residual, EPS, algorithm)
    added = rows.weight.new_empty(1, 1) if rows.residual is None else rows.residual
    return lambda: (made(rows.x, added, rows.weight, *result), result)[1]


def by_float8(rows: Rows, result: Result, scaling: str) -> Callable[[], Result]:
    """One kernel that quantizes, and writes no other norm."""
    M, N = rows.x.shape
    options = True, EPS, "one_shot", 0.0, scaling, False, False
    made = kernel(float8.by_one_kernel, team_of(""), N, dtype_of(rows.x), *options)
    q, none = torch.empty_like(rows.x, dtype=torch.float8_e4m3fn), rows.weight.new_empty(1, 1)
    scales = torch.empty(M if scaling == "row" else (M, -(-N // GROUP)), device=DEVICE)
    return lambda: (made(rows.x, rows.residual, rows.weight, none, result[1], q, scales), result)[1]


def by_two(rows: Rows, result: Result) -> Callable[[], Result]:
    """A sum, followed by a norm."""
    M, N = rows.x.shape
    dtype, has_residual = dtype_of(rows.x), rows.residual is not None
    impl = whole_tensors.algorithm("allreduce", team_of(""), rows.x.nbytes)
    made = kernel(norm.program, team_of(""), N, dtype, has_residual, EPS, impl)
    added, summed = rows.weight.new_empty(1, 1) if rows.residual is None else rows.residual, torch.empty_like(rows.x)
    return lambda: (made(rows.x, summed, added, rows.weight, *result), result)[1]


def by_sum(rows: Rows, result: Result) -> Callable[[], Result]:
    return lambda: (ops.all_reduce(rows.x, out=result[1]), result)[1]


def by_library(rows: Rows, result: Result) -> Callable[[], Result]:
    """NCCL, then PyTorch."""
    _, y = result

    def call() -> Result:
        y.copy_(rows.x)
        dist.all_reduce(y)
        if rows.residual is not None:
            y.add_(rows.residual)
        return torch.nn.functional.rms_norm(y, y.shape[1:], rows.weight, EPS), y

    return call


def check_result(rows: Rows, result: Result) -> None:
    """Raises ValueError where a result is not what its roundings leave."""
    normed, y = result
    parts, dtype = everyones(rows.x), rows.x.dtype
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    want = total.to(dtype)
    if rows.residual is not None:
        want = (want.float() + rows.residual.float()).to(dtype)
    if not torch.equal(y, want):
        raise ValueError(f"{int((y != want).sum())} of {y.numel()} sums are wrong, rows {wrong_rows(y != want)}")
    exact = parts.double().sum(0) + (0 if rows.residual is None else rows.residual.double())
    size = parts.double().abs().sum(0) + (0 if rows.residual is None else rows.residual.double().abs())
    if ((y.double() - exact).abs() > 2 * torch.finfo(dtype).eps * size + 1e-6).any():
        raise ValueError("sums are further from float64 than two roundings")
    right = y.double() * (y.double().pow(2).mean(1, keepdim=True) + EPS).rsqrt() * rows.weight.double()
    off = (normed.double() - right).abs()
    far = ~(off <= max(torch.finfo(dtype).eps, 2.0**-18) * right.abs() + 1e-6)
    if far.any():
        raise ValueError(f"{int(far.sum())} of {y.numel()} normalised are wrong, rows {wrong_rows(far)}")
    if not all(torch.equal(every, normed) for every in everyones(normed)):
        raise ValueError("ranks have other bits")


def wrong_rows(wrong: torch.Tensor) -> list[int]:
    return wrong.any(1).nonzero()[:8].view(-1).tolist()


def poison(result: Result) -> None:
    for x in result:
        x.fill_(torch.nan)


def repeated(rows: Rows, call: Callable[[], Result], before: Callable[[], None]) -> None:
    """Eager calls, then a graph, each with new numbers and ranks out of step."""
    for turn in range(4):
        once(turn, rows, call, before)
    torch.cuda.synchronize()
    graph, made = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        made += call()

    def replayed() -> Result:
        graph.replay()
        return made[0], made[1]

    for turn in range(3):
        once(turn, rows, replayed, before)


def once(turn: int, rows: Rows, call: Callable[[], Result], before: Callable[[], None]) -> None:
    rows.renew()
    before()
    if turn % SIZE == RANK:
        torch.cuda._sleep(LATE_CYCLES)
    check_result(rows, call())


def check_kernel(shape: tuple[int, int], dtype: torch.dtype, has_residual: bool) -> None:
    for algorithm in ALGORITHMS:
        rows = rows_of(shape, dtype, has_residual)
        result = torch.empty_like(rows.x), torch.empty_like(rows.x)
        repeated(rows, by_one(rows, result, algorithm), lambda result=result: poison(result))


def check_quantized(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows over the scale that is given, of each row, and of each group, each half a unit of float8 off at most."""
    rows = rows_of(shape, dtype)
    static = torch.full((1,), 0.02, device=DEVICE)
    groups = {"group_size": GROUP}
    for options in ({}, groups, {**groups, "power_of_two": True}, {**groups, "packed": True}, {"scale": static}):
        for return_normed in (True, False):
            how = {**options, "return_normed": return_normed, "eps": EPS, "weight_offset": 1.0}

            def call(how: dict[str, Any] = how) -> tuple[torch.Tensor, ...]:
                return ops.all_reduce_rms_norm_float8(*rows, **how)

            for turn in range(10):
                rows.renew()
                if turn % SIZE == RANK:
                    torch.cuda._sleep(LATE_CYCLES)
                check_float8(rows, call(), options)
            graph, made = torch.cuda.CUDAGraph(), []
            with torch.cuda.graph(graph):
                made += call()
            for _ in range(2):
                rows.renew()
                graph.replay()
                check_float8(rows, tuple(made), options)


def check_float8(rows: Rows, made: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
    """Raises ValueError where a result is not what it is to be."""
    quantized, scales, y, *normed = made
    M, N = rows.x.shape
    if options.get("packed"):
        scales, options = unpacked(scales.as_strided((packed_words(M, N),), (1,)), M, N).to(DEVICE), POWERS
    assert rows.residual is not None
    exact = y.double() * (y.double().pow(2).mean(1, keepdim=True) + EPS).rsqrt() * (rows.weight.double() + 1)
    total = everyones(rows.x)[0].float()
    for part in everyones(rows.x)[1:]:
        total = total + part.float()
    if not torch.equal(y, (total.to(y.dtype).float() + rows.residual.float()).to(y.dtype)):
        raise ValueError("sums are wrong")
    wide = GROUP if "group_size" in options else N
    if "scale" not in options:
        largest = torch.stack([group.abs().amax(1) for group in exact.split(wide, 1)], 1).clamp(min=1e-12) / 448
        bounds = [largest * (1 - 1e-5), largest * (1 + 1e-5)]
        if options.get("power_of_two"):  # the next one where the largest magnitude is nearly a power of two
            bounds = [x.log2().ceil().exp2() for x in bounds]
        off = (scales.double() < bounds[0]) | (scales.double() > bounds[1])
        if off.any():
            raise ValueError(f"{int(off.sum())} of {off.numel()} scales are wrong")
    factors = scales.double().expand(M, -1).repeat_interleave(wide, 1)[:, :N]
    bound = 2**-4 * 1.01 * exact.abs() + 2.0**-10 * factors
    bound = torch.where(exact.abs() > 448 * factors, exact.abs(), bound)  # a given scale may be too small
    if not ((quantized.double() * factors - exact).abs() <= bound).all():
        raise ValueError("quantized rows are wrong")
    if normed and not ((normed[0].double() - exact).abs() <= torch.finfo(y.dtype).eps * exact.abs() + 1e-6).all():
        raise ValueError("normalised rows are wrong")
    if not all(torch.equal(every, quantized.view(torch.uint8)) for every in everyones(quantized.view(torch.uint8))):
        raise ValueError("ranks have other bits")


def check_operator(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows = rows_of(shape, dtype)
    repeated(rows, lambda: ops.all_reduce_rms_norm(*rows, eps=EPS), lambda: None)


def check_unaligned(dtype: torch.dtype) -> None:
    """Rows that begin where no 16 bytes do."""

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.numel() + 1, dtype=dtype, device=DEVICE)[1:].view(x.shape)

    rows = Rows(*map(shifted, rows_of((4, 512), dtype)))
    result = shifted(rows.x), shifted(rows.x)
    repeated(rows, by_one(rows, result), lambda: poison(result))


def check_changing_sizes() -> None:
    """One program, whose calls have few rows, many, and few again."""
    dtype = torch.bfloat16
    for turn, count in enumerate((1, 512, 3, 138, 1, 40, 512, 2)):
        for algorithm in ALGORITHMS:
            rows = rows_of((count, 6144), dtype)
            result = torch.empty_like(rows.x), torch.empty_like(rows.x)
            once(turn, rows, by_one(rows, result, algorithm), lambda result=result: poison(result))


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    for shape in SHAPES:
        name = "x".join(map(str, shape))
        yield f"{name} bfloat16", lambda shape=shape: check_kernel(shape, torch.bfloat16, True)
        yield f"{name} operator", lambda shape=shape: check_operator(shape, torch.bfloat16)
    for number, shape in enumerate(OTHERS):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        name = f"{'x'.join(map(str, shape))} {dtype_of(torch.empty(0, dtype=dtype))}"
        yield name, lambda shape=shape, dtype=dtype, more=number % 3 > 0: check_kernel(shape, dtype, more)
    for shape in ((1, 8192), (5, 4096), (100, 8192)):
        yield f"{'x'.join(map(str, shape))} float32", lambda shape=shape: check_kernel(shape, torch.float32, True)
    for dtype in (torch.bfloat16, torch.float32):
        yield f"unaligned {dtype}", lambda dtype=dtype: check_unaligned(dtype)
    yield "changing sizes", check_changing_sizes
    for number, shape in enumerate([(1, 6144), (6, 6144), (16, 8192), (512, 6144), (5, 1032), (3, 72)]):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        yield f"{'x'.join(map(str, shape))} float8", lambda shape=shape, dtype=dtype: check_quantized(shape, dtype)
    if not SHARED:
        for shape in TIMED:
            yield f"time {'x'.join(map(str, shape))}", lambda shape=shape: time_graphs(shape)
        yield "time eager 32x6144", lambda: time_eager((32, 6144))
        yield "time host 32x6144", lambda: time_host((32, 6144))
        for shape in TIMED:
            yield f"choices {'x'.join(map(str, shape))}", lambda shape=shape: time_choices(shape)


# -- times -------------------------------------------------------------------------------------------------------------


def variants(shape: tuple[int, int]) -> dict[str, Callable[[], Result]]:
    """Its implementations, each with separate tensors."""
    ways = {name: partial(by_one, algorithm=name) for name in ALGORITHMS}
    ways.update({"float8 per row": partial(by_float8, scaling="row"), "per group": partial(by_float8, scaling="group")})
    ways.update({"two kernels": by_two, "sum alone": by_sum, "nccl": by_library})
    return {name: way(*operands(shape)) for name, way in ways.items()}


def operands(shape: tuple[int, int]) -> tuple[Rows, Result]:
    rows = rows_of(shape, torch.bfloat16)
    return rows, (torch.empty_like(rows.x), torch.empty_like(rows.x))


def choices(shape: tuple[int, int]) -> dict[str, tuple[Callable[[], Result], Callable[[], Any]]]:
    """The default kernel, and one with another choice; and the context for that, until the kernel has been called."""
    spread, start = normalised.rows_grid, normalised.launch

    def clusters(most: int) -> Callable[[], Any]:
        def limited(rows: int, nbytes: int, whole: int, room: Any, sharing: int) -> Any:
            return spread(rows, nbytes, whole, room._replace(cluster=most), sharing)

        return lambda: mock.patch.object(normalised, "rows_grid", limited)

    def form(name: str) -> Callable[[], Any]:
        return lambda: mock.patch.object(exchanges, "short", lambda *_: [exchanges.ShortForm(name, 1 << 40)])

    def in_order(*given: Any) -> Any:
        return start(*given[:5], False, *given[6:])

    found: dict[str, Callable[[], Any]] = {"chosen": nullcontext}
    found.update({f"clusters of {most}": clusters(most) for most in (2, 4, 8)})
    found.update({name: form(name) for name in ("words", "lines")})
    found["in order"] = lambda: mock.patch.object(normalised, "launch", in_order)
    # A kernel is made once for each function that builds it.
    return {
        name: (by_one(*operands(shape), build=partial(norm.by_one_kernel)), choice) for name, choice in found.items()
    }


def time_graphs(shape: tuple[int, int]) -> None:
    """Calls one after another in a CUDA graph."""
    graphs = {name: graph_of(call) for name, call in variants(shape).items()}
    report(f"{shape[0]} x {shape[1]}, graph", in_turns(graphs))


def time_choices(shape: tuple[int, int]) -> None:
    """The same of one kernel, by what it chooses."""
    graphs: dict[str, Callable[[], None]] = {}
    for name, (call, choice) in choices(shape).items():
        with choice():
            graphs[name] = graph_of(call)
    report(f"{shape[0]} x {shape[1]}, choices", in_turns(graphs))


def graph_of(call: Callable[[], Result]) -> Callable[[], None]:
    """Replay a graph of calls. It keeps their tensors: freed ones may be unmapped when the next graph is captured."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return lambda _kept=call: graph.replay()


def time_eager(shape: tuple[int, int]) -> None:
    """Calls one after another from Python; that of the operator allocates its results."""
    rows, made = rows_of(shape, torch.bfloat16), variants(shape)
    made["operator"] = lambda: ops.all_reduce_rms_norm(*rows, eps=EPS)

    def often(call: Callable[[], Result]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(CALLS):
                call()

        return run

    report(f"{shape[0]} x {shape[1]}, eager", in_turns({name: often(call) for name, call in made.items()}))


def time_host(shape: tuple[int, int]) -> None:
    """Host time of calls from Python, and its parts."""
    rows = rows_of(shape, torch.bfloat16)
    calls = {
        "operator": lambda: ops.all_reduce_rms_norm(*rows, eps=EPS),
        "sum alone": lambda: ops.all_reduce(rows.x),
        "kernel": by_one(*operands(shape)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            barrier()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            times[name].append((time.perf_counter() - begin) / HOST_CALLS * 1e6)
    report(f"{shape[0]} x {shape[1]}, host", {name: slowest(statistics.median(found)) for name, found in times.items()})
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(HOST_CALLS):
        calls["operator"]()
    profile.disable()
    barrier()
    if RANK == 0:
        pstats.Stats(profile).sort_stats("tottime").print_stats(16)


def in_turns(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median microseconds of a call, of `CALLS` a run; the variants alternate."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    together = torch.zeros(1, device=DEVICE)
    for round_ in range(ROUNDS + 2):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            barrier()
            torch.cuda._sleep(200_000)  # devices begin at once, after all ranks have launched
            dist.all_reduce(together)  # devices begin at once
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if round_ >= 2:
                times[name].append(begin.elapsed_time(end) / CALLS * 1e3)
    return {name: slowest(statistics.median(found)) for name, found in times.items()}


def report(title: str, times: dict[str, float]) -> None:
    found = ", ".join(f"{name} {us:.2f} us" for name, us in times.items())
    say(f"TIME {title}: {found} ({torch.cuda.get_device_name()})")


if __name__ == "__main__":
    join()
    named_checks.run(checks(), LIMIT_S)
