# SPDX-License-Identifier: MIT
"""A decode step of decoder layers as one launch, compared with its phases in order and with PyTorch, on these GPUs.

    torchrun --nproc-per-node 2 benchmarks/persistent.py                       everything
    torchrun --nproc-per-node 2 benchmarks/persistent.py --only "1 layer 1x"   one work
    torchrun --nproc-per-node 1 benchmarks/persistent.py                       on one GPU

Layers of Llama 3 8B, and of Qwen3-MoE with 64 experts, with 1024 cached tokens, tensor-parallel. Their floor is the
time of reading their weights once; of experts, those of the chosen ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import decode_steps  # noqa: E402 - found through the path above
from suite import Suite, command  # noqa: E402

if __name__ == "__main__":
    command(Suite(SCRIPT, decode_steps.heats, seeds=(0, 1)), __doc__)()
