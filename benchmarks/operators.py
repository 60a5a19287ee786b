# SPDX-License-Identifier: MIT
"""Operators for PyTorch compared with cuBLAS, NCCL with cuBLAS, and PyTorch's fused ones, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/operators.py                       everything
    torchrun --nproc-per-node 2 benchmarks/operators.py --only gemm_rs        one work

Works: ag_gemm, gemm_rs and gemm_ar at 16 to 8192 rows, the small ones in CUDA graphs, the first two of float8 too; in
graphs, experts (tokens there and back), all_reduce_rms_norm and all_to_all (tokens to heads); sequence_attention,
mla_decode and flash_decode (of pages, of float8 too), compared with one GPU that has all keys; the layers of models by
their names (llama3_8b), gated ones with the activation; and training_step, by one plan of tensor parallelism.
Workspaces are allocated before; the rest of a call, handshakes included, is in its time. `suite.py` documents how a run
continues when a contender hangs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import exchanges  # noqa: E402 - found through the path above
import fused  # noqa: E402
import layers  # noqa: E402
import long_sequences  # noqa: E402
import scaled  # noqa: E402
import training  # noqa: E402
from suite import Suite, command  # noqa: E402

from tilescale.tuning.race import Heat  # noqa: E402


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    for part in (exchanges, long_sequences, scaled, fused, layers, training):
        yield from part.heats(quick, gpus)


if __name__ == "__main__":
    command(Suite(SCRIPT, heats), __doc__)()
