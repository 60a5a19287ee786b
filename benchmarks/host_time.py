# SPDX-License-Identifier: MIT
"""Time of operators on the host, with new tensors in each call: TileScale's and PyTorch's, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/host_time.py                       everything
    torchrun --nproc-per-node 2 benchmarks/host_time.py --only "backward"     backward passes

Works: all-reduce, all-gather and GEMM, GEMM and reduce-scatter, GEMM and all-reduce of small tensors, each without
gradients, forward and backward with them, and the backward of several calls in one pass; and what PyTorch takes for a
product alone, and for a function of autograd that does nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import host_calls  # noqa: E402 - found through the path above
from suite import Suite, command  # noqa: E402

if __name__ == "__main__":
    command(Suite(SCRIPT, host_calls.heats, seeds=(0,)), __doc__)()
