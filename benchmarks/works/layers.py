# SPDX-License-Identifier: MIT
"""GEMMs of transformers' layers, split over the GPUs: an operator and its peers at the shapes of models.

All contenders apply silu(gate) * up to the GEMM of gate and up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fused import Gated, Gathered, Scattered, contest

from tilescale.tuning.race import Heat

ROWS = {4096: "eager", 256: "graph"}
"""Tokens of all GPUs together, and their timing mode."""


@dataclass(frozen=True)
class Model:
    """The sizes of a layer.

    Attributes:
        hidden: features between blocks.
        projected: outputs and inputs of the GEMM in front of attention: of q, k and v, or of DeepSeek's q_b.
        attended: features that attention gives, all heads together.
        inner: features inside the feed-forward block.
    """

    hidden: int
    projected: tuple[int, int]
    attended: int
    inner: int


MODELS = {
    "llama3_8b": Model(4096, (6144, 4096), 4096, 14336),
    "llama3_70b": Model(8192, (10240, 8192), 8192, 28672),
    "qwen3_32b": Model(5120, (10240, 5120), 8192, 25600),
    "deepseek_v3": Model(7168, (24576, 1536), 16384, 18432),
}
"""Sizes from the configurations on the Hugging Face hub; of DeepSeek-V3 its dense layers."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """M x N x K: N of each GPU in front of attention and of the feed-forward block, K of each GPU after them."""
    if gpus == 1 or quick:
        return
    for name, model in MODELS.items():
        outputs, inputs = model.projected
        products = (
            ("qkv", Gathered, outputs // gpus, inputs),
            ("o", Scattered, model.hidden, model.attended // gpus),
            ("gate_up", Gated, 2 * model.inner // gpus, model.hidden),
            ("down", Scattered, model.hidden, model.inner // gpus),
        )
        for m, mode in ROWS.items():
            for layer, work, n, k in products:
                yield contest(f"{name} {layer}", (m, n, k), gpus, mode, work(m, n, k).contenders())
