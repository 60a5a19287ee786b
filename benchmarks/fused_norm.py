# SPDX-License-Identifier: MIT
"""All-reduce, residual and RMSNorm by one kernel, compared with a sum and a norm, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/fused_norm.py                    everything
    torchrun --nproc-per-node 2 benchmarks/fused_norm.py --only "6x6144"    one shape

The norm of the others is compiled by PyTorch; NCCL sums in place, and symm_mem what lies in symmetric memory. Graphs
hold ten calls, which may begin before the previous one has ended, where kernels allow it.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import fused_norms  # noqa: E402 - found through the path above
from suite import Suite, command  # noqa: E402

if __name__ == "__main__":
    command(Suite(SCRIPT, fused_norms.heats, seeds=(0,)), __doc__)()
