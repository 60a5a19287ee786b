# SPDX-License-Identifier: MIT
"""Operators for PyTorch beside cuBLAS alone, NCCL and cuBLAS, and PyTorch's own fused ones, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/operators.py                       everything
    torchrun --nproc-per-node 2 benchmarks/operators.py --only gemm_rs        one work

Works: ag_gemm, gemm_rs and gemm_ar at 16 to 8192 rows, the small ones in CUDA graphs; in graphs too, experts (tokens
there and back) and all_reduce_rms_norm. Workspaces are made before; all else that a call needs, handshakes included, is
in its time. `suite.py` says how a run goes on when one contender hangs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import exchanges  # noqa: E402 - found through the path above
import fused  # noqa: E402
from suite import Suite, command  # noqa: E402

from tilescale.tuning.race import Heat  # noqa: E402


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """All works."""
    yield from exchanges.heats(quick, gpus)
    yield from fused.heats(quick, gpus)


if __name__ == "__main__":
    command(Suite(SCRIPT, heats), __doc__)()
