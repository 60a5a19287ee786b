# SPDX-License-Identifier: MIT
"""`flashinfer.comm.allreduce_fusion`, the fused all-reduce that vLLM and SGLang call, over TileScale's operators.

The arguments are FlashInfer's (0.7), so that a caller changes where it imports the function from, and what it makes a
workspace with. Patterns that quantize, and those of experts, are not supported.
"""

from __future__ import annotations

from typing import Any

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.all_reduce import all_reduce
from tilescale.ops.all_reduce_rms_norm import all_reduce_rms_norm
from tilescale.ops.group import group_name, rank_of, size_of


class AllReduceFusionPattern:
    """The numbers of FlashInfer's patterns that are supported."""

    kAllReduce = 0  # noqa: N815 - FlashInfer's names
    kARResidualRMSNorm = 1  # noqa: N815


class AllReduceFusionWorkspace:
    """The group of a fused all-reduce; the operators have the memory.

    Attributes:
        group: its name.
    """

    backend = "tilescale"

    def __init__(self, group: Any = None):
        self.group = group_name(group)
        self.world_size, self.rank = size_of(self.group), rank_of(self.group)

    def is_buffer_size_sufficient(self, *shape: Any, **options: Any) -> bool:
        """Always: operators make their workspaces for what comes."""
        return True

    def destroy(self) -> None:
        """Nothing is to be released."""


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: Any = None,
    force_oneshot_support: bool = False,
    group: Any = None,
    **options: Any,
) -> AllReduceFusionWorkspace:
    """The workspace of a process group, None for all ranks of the job; sizes and options have no effect.

    Raises ArgumentError if the group has another number of ranks than `world_size`.
    """
    made = AllReduceFusionWorkspace(group)
    if world_size not in (None, made.world_size):
        raise ArgumentError(
            f"world_size is {world_size}, the group has {made.world_size} ranks", hint="pass the group: group="
        )
    return made


def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: Any = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    *,
    weight_bias: float = 0.0,
    **others: Any,
) -> torch.Tensor:
    """The sum of all ranks' (tokens, features), or with residual and RMSNorm; collective.

    Args:
        input, residual_in, rms_gamma, rms_eps: as `ops.all_reduce_rms_norm` takes them; the residual is required.
        workspace: of `create_allreduce_fusion_workspace` here.
        pattern: `kAllReduce` or `kARResidualRMSNorm`.
        output: where `kAllReduce` puts the sum; None for a new tensor.
        residual_out, norm_out: where the sum with the residual, and its norm, are put; either may be `input` or
            `residual_in`, and None for a new tensor.
        weight_bias: is added to `rms_gamma`: 1 for Gemma.
        launch_with_pdl, trigger_completion_at_end, use_oneshot, fp32_acc, layout_code: have no effect.

    Returns:
        The sum, or the norm.

    Raises:
        ArgumentError: another pattern, quantized outputs, or what the operators refuse.
    """
    if pattern not in (AllReduceFusionPattern.kAllReduce, AllReduceFusionPattern.kARResidualRMSNorm):
        raise ArgumentError(f"pattern is {pattern}", hint="supported: kAllReduce (0), kARResidualRMSNorm (1)")
    given = {"quant_out": quant_out, "scale_out": scale_out, "scale_factor": scale_factor, **others}
    for name, x in given.items():
        if x is not None and x is not False:
            raise ArgumentError(f"{name} is given", hint="patterns that quantize, or of experts, are not supported")
    group = workspace.group
    if pattern == AllReduceFusionPattern.kAllReduce:
        return all_reduce(input, out=output, group=group)
    if residual_in is None or rms_gamma is None:
        raise ArgumentError("residual_in or rms_gamma is None", hint="kARResidualRMSNorm takes both")
    weight = rms_gamma + weight_bias if weight_bias else rms_gamma
    normed, y = all_reduce_rms_norm(input, weight, residual_in, eps=rms_eps, group=group)
    if residual_out is not None:
        residual_out.copy_(y)
    return normed if norm_out is None else norm_out.copy_(normed)
