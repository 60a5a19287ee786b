# SPDX-License-Identifier: MIT
"""Compiled models that use PyTorch's operator names: PyTorch's operators and TileScale's, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/engines.py                     everything
    torchrun --nproc-per-node 2 benchmarks/engines.py --only prefill      one work

Works: prefills, a step of training and decode in a CUDA graph, of four decoder layers of `transformers` at the sizes of
Llama 3 8B, made tensor-parallel by PyTorch and compiled. Contenders: as inductor compiles them; with PyTorch's
asynchronous tensor parallelism; the same with `ops.installed()`; and `ops.installed(graphs=True)` alone. Then
`generate` of such a model, not compiled, with plans of transformers' styles and of TileScale's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import engine_layers  # noqa: E402 - found through the path above
import generations  # noqa: E402
from suite import Suite, command  # noqa: E402

from tilescale.tuning.race import Heat  # noqa: E402


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Works of both kinds."""
    yield from engine_layers.heats(quick, gpus)
    yield from generations.heats(quick, gpus)


if __name__ == "__main__":
    command(Suite(SCRIPT, heats, seeds=(0,)), __doc__)()
