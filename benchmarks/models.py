# SPDX-License-Identifier: MIT
"""Layers of real models, tensor-parallel: PyTorch's own, eager and compiled, and ours, on this computer's GPUs.

    torchrun --nproc-per-node 2 benchmarks/models.py                                      everything
    torchrun --nproc-per-node 2 benchmarks/models.py --only "llama3_8b training_step"     one model's work

Works: a step of training, prefills of even and odd length, prefills of a new length in each call, and decode in CUDA
graphs and eager, of a few decoder layers of `transformers` at the sizes of Llama 3 8B, Qwen3 14B, Gemma 3 27B, Mixtral
8x7B and Qwen3 30B A3B. Contenders: PyTorch's tensor parallelism eager, compiled, and compiled with asynchronous tensor
parallelism or with CUDA graphs; ours eager, compiled, and compiled with CUDA graphs. Losses of the first steps, and
results, are compared with those of one GPU before anything is timed. Rows of training steps have the peak of memory,
and the share of the time in which a trace finds the GPU idle, in percent. The first run takes longer, as kernels are
compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import decoder_layers  # noqa: E402 - found through the path above
from suite import Suite, command  # noqa: E402

if __name__ == "__main__":
    command(Suite(SCRIPT, decoder_layers.heats, seeds=(0,)), __doc__)()
