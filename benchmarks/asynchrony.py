# SPDX-License-Identifier: MIT
"""Gain by asynchrony: programs that overlap, wait and call, compared with libraries, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/asynchrony.py                      everything, in about four minutes
    torchrun --nproc-per-node 2 benchmarks/asynchrony.py --only ag_gemm       one work
    python benchmarks/asynchrony.py                                           the works of one GPU

Works: ag_gemm, gemm_rs, grouped_experts, product_allreduce, put, small_put, allreduce, mla_decode on all GPUs; gemm,
cluster_gemm, mla_decode, plain_call on one. `tilescale.tuning.race` documents the measurement. Kernels are first
compiled by concurrent jobs, which fill TileLang's cache for the races. Rows of each work are written when it is done. A
step that takes too long ends the run; with --resume the next one goes on without the contender whose step it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import calls  # noqa: E402 - found through the path above
import grouped  # noqa: E402
import one_gpu  # noqa: E402
import overlap  # noqa: E402
import sums  # noqa: E402
from suite import Suite, command  # noqa: E402

from tilescale.tuning.race import Heat  # noqa: E402


def heats(quick: bool, gpus: int) -> Iterable[Heat]:
    """Return all works for `gpus` GPUs."""
    return [heat for part in (overlap, grouped, sums, calls, one_gpu) for heat in part.heats(quick, gpus)]


if __name__ == "__main__":
    command(Suite(SCRIPT, heats), __doc__)()
