# SPDX-License-Identifier: MIT
"""Operators at the shapes of kraken's five benchmarks, compared with kraken's.

    PYTHONPATH=kraken torchrun --nproc-per-node 2 benchmarks/kraken_shapes.py          everything
    torchrun --nproc-per-node 2 benchmarks/kraken_shapes.py --only gemm_rs --quick     one work, without kraken

Works: allreduce of 4096 to 1048576 elements; allreduce_bias, allreduce_bias_rms_norm of 1 to 512 rows of 5120; ag_gemm,
gemm_rs of 128 to 1024 rows, N = 6656, K = 4096 to 16384; gather_keys, the first step of kraken's attention over ranks.
kraken is a checkout of https://github.com/meta-pytorch/kraken; without one its rows report that it is missing.
`suite.py` documents how a run continues when a contender hangs.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import triton_kernels  # noqa: E402 - found through the path above
from suite import Suite, command  # noqa: E402

if __name__ == "__main__":
    command(Suite(SCRIPT, triton_kernels.heats), __doc__)()
