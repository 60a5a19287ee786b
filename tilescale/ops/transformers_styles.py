# SPDX-License-Identifier: MIT
"""TileScale's linear layers in the tensor-parallel plans of Hugging Face transformers, as styles by name.

transformers cuts and loads the parameters, as for its own styles `colwise` and `rowwise`; the layers are TileScale's.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel, RowwiseParallel

from tilescale.ops.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear, check_shard


def register() -> None:
    """Let plans of transformers name `tilescale_colwise` and `tilescale_rowwise`, in this process."""
    for name, style in STYLES.items():
        ALL_PARALLEL_STYLES.register(name, style)


class _Linear:
    """A style whose modules become layers of TileScale; all ranks have all tokens between them."""

    kind: type[ParallelLinear]

    def install_forward(self, module: nn.Linear, mesh: Any) -> nn.Linear:
        """Turn a module into the layer; its parameters are cut later in the plan. Raises ArgumentError: it is not a
        torch.nn.Linear, as where weights are quantised, or its features cannot be split evenly among the ranks."""
        check_shard(self.kind, module, mesh, None)
        if self.kind.cut:
            module.in_features //= mesh.size()
        else:
            module.out_features //= mesh.size()
        return self.kind.adopt(module, mesh, sequence=False)


class TileScaleColwise(_Linear, ColwiseParallel):
    """Each rank has some of the outputs; the sum of the input's gradients is TileScale's all-reduce."""

    kind = ColumnParallelLinear


class TileScaleRowwise(_Linear, RowwiseParallel):
    """Each rank has some of the inputs; the GEMM and the sum over the ranks are `matmul_all_reduce`."""

    kind = RowParallelLinear


STYLES: dict[str, Any] = {"tilescale_colwise": TileScaleColwise(), "tilescale_rowwise": TileScaleRowwise()}
"""Styles that plans may name."""
