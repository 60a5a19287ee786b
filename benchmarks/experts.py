# SPDX-License-Identifier: MIT
"""A layer of experts over this computer's GPUs: by PyTorch, by separate operators of TileScale, and by one operator.

    torchrun --nproc-per-node 2 benchmarks/experts.py                             everything
    torchrun --nproc-per-node 2 benchmarks/experts.py --only "forward 16x"        one work

Works: forward, and forward with backward, of 16 to 4096 tokens a rank of 2048 features, each to eight of 64 experts of
768, eager and in CUDA graphs. Contenders: all_to_all_single and torch._grouped_mm; ops.moe_route, moe_dispatch,
grouped_matmul and moe_combine; NCCL with our GEMMs; ops.moe_layer. And in float8 forward of 16 to 4096 tokens a rank of
7168 features, each to eight of 32 experts a rank of 2048: the grouped GEMMs alone; ops.moe_layer, also with sums in
float8, or with scales of rows. And training of the first shape: ops.moe_layer in bfloat16 and in float8.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import expert_float8  # noqa: E402 - found through the path above
import expert_layers  # noqa: E402
from suite import Suite, command  # noqa: E402

from tilescale.tuning.race import Heat  # noqa: E402


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """In bfloat16, then in float8."""
    yield from expert_layers.heats(quick, gpus)
    yield from expert_float8.heats(quick, gpus)


if __name__ == "__main__":
    command(Suite(SCRIPT, heats, seeds=(0,)), __doc__)()
