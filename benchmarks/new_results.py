# SPDX-License-Identifier: MIT
"""Eager collectives that allocate their results: TileScale's and NCCL's, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/new_results.py                          everything
    torchrun --nproc-per-node 2 benchmarks/new_results.py --only "all_reduce"      one collective

Works: all_reduce, all_gather, reduce_scatter, all_to_all of 4 KiB to 64 MiB a rank. For small tensors this is the
host's time, as in PyTorch programs without CUDA graphs; up to 1 MiB rows of mode "host" have that alone, and rows of
mode "graph" the device's. `collectives.py` measures devices, on the same tensors each time.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import eager_calls  # noqa: E402 - found through the path above
from suite import Suite, command  # noqa: E402

if __name__ == "__main__":
    command(Suite(SCRIPT, eager_calls.heats, seeds=(0,)), __doc__)()
