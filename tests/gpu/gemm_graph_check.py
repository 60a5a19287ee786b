# SPDX-License-Identifier: MIT
"""PyTorch's GEMMs in recorded calls: `torchrun --nproc-per-node 2 tests/gpu/gemm_graph_check.py`.

Random shapes, types and layouts, new tensors in every call: results have the bits of PyTorch's, on two streams as well.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.ops_support import main, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK  # noqa: E402
from tilelang_core.lru import LruCache  # noqa: E402
from tilescale.backends.cuda.running import kernel_graph, recording  # noqa: E402
from tilescale.backends.cuda.running.repeated import TRIED, RecordedCalls  # noqa: E402

CALLS, SHAPES = TRIED[0] + 4, 24

Draw = Callable[[], list[torch.Tensor]]

graphs: list[bool] = []
"""For each recorded GEMM, whether it is a graph."""


def matrix(rows: int, columns: int, dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    shape = (columns, rows) if transposed else (rows, columns)
    made = torch.randn(*shape, device=DEVICE).to(dtype)
    return made.t() if transposed else made


def check(name: str, call: Callable[..., torch.Tensor], draw: Draw) -> None:
    """Calls of one form, with the bits of PyTorch's; raises ValueError for others, or if no graph was made."""
    repeated, before = RecordedCalls(call), len(graphs)
    for number in range(CALLS):
        given = draw()
        want = call(*given)
        stream = torch.cuda.Stream() if number % 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.empty_like(want).fill_(float("nan"))  # where the result may come to lie
        with torch.cuda.stream(stream):
            got = repeated(*given)
        torch.cuda.synchronize()
        if not torch.equal(got, want) or not want.isfinite().all():
            raise ValueError(f"{name}: call {number} differs by up to {float((got - want).abs().max())}")
    if not all(graphs[before:]) or len(graphs) == before:
        raise ValueError(f"{name}: {graphs[before:]} were graphs")


def shapes(seed: int) -> list[tuple[int, int, int]]:
    """M of all sizes, N and K as layers have them, some with few rows for many columns, whose K is split."""
    draws = random.Random(seed + 31 * RANK)
    wide = [(draws.randrange(1, 128), 5376, 10752), (1, 4096, 4096)]
    return wide + [
        (int(2 ** draws.uniform(0, 12)), 64 * draws.randrange(1, 64), 64 * draws.randrange(1, 64))
        for _ in range(SHAPES - len(wide))
    ]


def check_products(_: slice) -> None:
    for dtype in torch.bfloat16, torch.float16:
        for m, n, k in shapes(1):
            for a_transposed, b_transposed in ((False, True), (False, False), (True, False)):
                draw = lambda: [matrix(m, k, dtype, a_transposed), matrix(k, n, dtype, b_transposed)]  # noqa: B023, E731
                check(f"{m} x {n} x {k} of {dtype}", torch.mm, draw)
        say(f"PASS {3 * SHAPES} products of {dtype}")


def check_biased(_: slice) -> None:
    for m, n, k in shapes(2):
        draw = lambda: [  # noqa: E731
            torch.randn(n, device=DEVICE).bfloat16(),  # noqa: B023
            matrix(m, k, torch.bfloat16, False),  # noqa: B023
            matrix(k, n, torch.bfloat16, True),  # noqa: B023
        ]
        check(f"{m} x {n} x {k} with a bias", torch.addmm, draw)
    say(f"PASS {SHAPES} products with a bias")


def check_workspaces(_: slice) -> None:
    """PyTorch frees cuBLAS's workspaces now and then: graphs that have one write into no other tensor."""
    shapes = [(m, 5376, 10752) for m in (59, 77)] + [(1, 4096, 4096), (3001, 4096, 7168)]
    forms = [RecordedCalls(torch.mm) for _ in shapes]
    given = [[matrix(m, k, torch.bfloat16, False), matrix(k, n, torch.bfloat16, True)] for m, n, k in shapes]
    want = [torch.mm(*each) for each in given]
    for _ in range(CALLS):
        for form, each in zip(forms, given, strict=True):
            form(*each)
    for number in range(3):
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        others = [torch.full((1 << 20,), 7, dtype=torch.int32, device=DEVICE) for _ in range(64)]
        if number == 1:
            torch.cuda.empty_cache()
        got = [form(*each) for form, each in zip(forms, given, strict=True)]
        if not all((x == 7).all() for x in others) or not all(map(torch.equal, got, want)):
            raise ValueError(f"round {number}: a graph of a GEMM wrote into other tensors")
    say("PASS workspaces that PyTorch frees")


def check_scaled(_: slice) -> None:
    def scaled(a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b, of_a, of_b, out_dtype=torch.bfloat16, use_fast_accum=True)

    for m, n, k in shapes(3):
        draw = lambda: [  # noqa: E731
            matrix(m, k, torch.float8_e4m3fn, False),  # noqa: B023
            matrix(k, n, torch.float8_e4m3fn, True),  # noqa: B023
            torch.rand(m, 1, device=DEVICE) + 0.5,  # noqa: B023
            torch.rand(1, n, device=DEVICE) + 0.5,  # noqa: B023
        ]
        check(f"{m} x {n} x {k} of float8", scaled, draw)
    say(f"PASS {SHAPES} products of float8")


def check_forgotten(_: slice) -> None:
    """Records keep the graphs that the table of graphs has forgotten, with what the driver reads at an update."""
    kept, kernel_graph._graphs = kernel_graph._graphs, LruCache(1)
    forms = [(RecordedCalls(torch.mm), *shape) for shape in shapes(4)]
    for number in range(CALLS + 3):
        for form, m, n, k in forms:
            a, b = matrix(m, k, torch.bfloat16, False), matrix(k, n, torch.bfloat16, True)
            if not torch.equal(form(a, b), torch.mm(a, b)):
                raise ValueError(f"{m} x {n} x {k}: call {number} differs")
        gc.collect()
    kernel_graph._graphs = kept
    say(f"PASS {SHAPES} products whose graphs were forgotten")


if __name__ == "__main__":
    make = recording.gemm_graph

    def noted(*given: object) -> object:
        found = make(*given)  # type: ignore[arg-type]
        graphs.append(found is not None)
        return found

    recording.gemm_graph = noted  # type: ignore[assignment]
    checks = {"products": check_products, "biased": check_biased, "scaled": check_scaled}
    main(checks | {"workspaces": check_workspaces, "forgotten": check_forgotten})
