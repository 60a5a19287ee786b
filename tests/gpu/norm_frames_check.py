# SPDX-License-Identifier: MIT
"""All-reduce with a norm, and float8 rows, into results with neighbours in memory that have to stay as they are.

    torchrun --nproc-per-node 2 tests/gpu/norm_frames_check.py [names]

Rows around 512 and other limits, in an eager call and in a graph; prints PASS or FAIL for each number and rank.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu import named_checks, norm_check  # noqa: E402
from tests.gpu.norm_check import ALGORITHMS, EPS, GROUP, Rows, check_float8, check_result, float8, rows_of  # noqa: E402
from tests.gpu.ranks import DEVICE, join  # noqa: E402
from tilescale.ops.group import team_of  # noqa: E402
from tilescale.ops.kernels import kernel  # noqa: E402

LIMIT_S = 400.0
SOME = (1, 198, 199, 396, 397, 511, 512, 513, 1024)
"""Numbers of rows around those of clusters that are resident at once, and around 512."""
ROWS = {6144: (*SOME, *range(500, 511), *range(514, 521)), 1032: SOME, 6148: SOME}
"""The same by columns: whole groups of 128; not whole groups; not whole units of 16 bytes."""
MARGIN, UNTOUCHED = 1 << 16, 0x5A
STATIC = 0.02

Call = Callable[[], Any]


class Framed(NamedTuple):
    """A tensor, and the memory around it."""

    whole: torch.Tensor
    inner: torch.Tensor

    def check(self) -> None:
        """Raises ValueError where something was written outside."""
        for margin in (self.whole[:MARGIN], self.whole[-MARGIN:]):
            touched = (margin != UNTOUCHED).nonzero()
            if len(touched):
                raise ValueError(f"{len(touched)} bytes around {tuple(self.inner.shape)} were written")


def framed(shape: tuple[int, ...], dtype: torch.dtype) -> Framed:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    whole = torch.full((nbytes + 2 * MARGIN,), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
    return Framed(whole, whole[MARGIN:-MARGIN].view(dtype).view(shape))


def normed(rows: Rows, algorithm: str) -> tuple[list[Framed], Call, Call]:
    """The results, a call that makes them, and their check."""
    frames = [framed(tuple(rows.x.shape), rows.x.dtype) for _ in range(2)]
    result = frames[0].inner, frames[1].inner
    return frames, norm_check.by_one(rows, result, algorithm), lambda: check_result(rows, result)


def quantized(rows: Rows, algorithm: str, scaling: str) -> tuple[list[Framed], Call, Call]:
    """The same in float8."""
    M, N = rows.x.shape
    of_scales = {"tensor": (1, 1), "row": (M, 1), "group": (M, -(-N // GROUP))}[scaling]
    options = {"tensor": {"scale": STATIC}, "row": {}, "group": {"group_size": GROUP}}[scaling]
    kinds = ((M, N), float8.FLOAT8), (of_scales, torch.float32), ((M, N), rows.x.dtype)
    frames = [framed(shape, dtype) for shape, dtype in kinds]
    q, scales, y = (frame.inner for frame in frames)
    scales.fill_(STATIC)
    made = kernel(float8.by_one_kernel, team_of(""), N, "bfloat16", True, EPS, algorithm, 1.0, scaling, False, False)
    given = rows.x, rows.residual, rows.weight, rows.weight.new_empty(1, 1), y, q
    places = scales if scaling == "group" else scales.view(-1)
    return frames, lambda: made(*given, places), lambda: check_float8(rows, (q, scales, y), options)


def check_rows(count: int, columns: int) -> None:
    rows = rows_of((count, columns), torch.bfloat16)
    for algorithm, scaling in itertools.product(ALGORITHMS, (None, "tensor", "row", "group")):
        frames, call, check = normed(rows, algorithm) if scaling is None else quantized(rows, algorithm, scaling)
        for run in (call, captured(call)):
            rows.renew()
            run()
            check()
            for frame in frames:
                frame.check()


def captured(call: Call) -> Call:
    """Replays a graph of the call."""

    def run() -> None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()

    return run


def checks() -> Iterator[tuple[str, Call]]:
    for columns, counts in ROWS.items():
        for count in counts:
            yield f"{count}x{columns}", lambda count=count, columns=columns: check_rows(count, columns)


if __name__ == "__main__":
    join()
    named_checks.run(checks(), LIMIT_S)
