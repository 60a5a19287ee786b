# SPDX-License-Identifier: MIT
"""`flashinfer.comm.allreduce_fusion`, the fused all-reduce that vLLM and SGLang call, over TileScale's operators.

The arguments are FlashInfer's (0.7), so that a caller changes only the import of the function, and of the workspace.
Patterns of float4, and those of experts, are not supported.
"""

from __future__ import annotations

from typing import Any

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.all_reduce import all_reduce
from tilescale.ops.all_reduce_rms_norm import all_reduce_rms_norm
from tilescale.ops.all_reduce_rms_norm_float8 import all_reduce_rms_norm_float8
from tilescale.ops.group import group_name, rank_of, size_of


class AllReduceFusionPattern:
    """The numbers of FlashInfer's patterns that are supported."""

    kAllReduce = 0  # noqa: N815 - FlashInfer's names
    kARResidualRMSNorm = 1  # noqa: N815
    kARResidualRMSNormFP8Quant = 2  # noqa: N815
    kARResidualRMSNormOutFP8Quant = 4  # noqa: N815
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8  # noqa: N815
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9  # noqa: N815
    kARResidualRMSNormDynamicFP8Quant = 10  # noqa: N815
    kARResidualRMSNormOutDynamicFP8Quant = 11  # noqa: N815


_STATIC, _GROUPS, _ROWS = (2, 4), (8, 9), (10, 11)
"""Patterns that quantize, by the extent of a scale; the second of each also returns the norm."""

_QUANTIZED, _WITH_NORM = (*_STATIC, *_GROUPS, *_ROWS), (_STATIC[1], _GROUPS[1], _ROWS[1])

class AllReduceFusionWorkspace:
    """The group of a fused all-reduce; the operators have the memory. `group`: its name."""

    backend = "tilescale"

    def __init__(self, group: Any = None):
        self.group = group_name(group)
        self.world_size, self.rank = size_of(self.group), rank_of(self.group)

    def is_buffer_size_sufficient(self, *shape: Any, **options: Any) -> bool:
        """True: operators make their workspaces on demand."""
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
    block_quant_group_size: int | None = None,
    **others: Any,
) -> torch.Tensor:
    """The sum of all ranks' (tokens, features), or with residual and RMSNorm; collective. Raises ArgumentError: another
    pattern, arguments that a pattern does not use, or arguments that the operators do not support.

    Args:
        input, residual_in, rms_gamma, rms_eps: as `ops.all_reduce_rms_norm` takes them; the residual is required.
        workspace: of `create_allreduce_fusion_workspace` here.
        pattern: of `AllReduceFusionPattern`.
        output: where `kAllReduce` puts the sum; None for a new tensor.
        residual_out, norm_out: where the sum with the residual, and its norm, are put; either may be `input` or
            `residual_in`, and None for a new tensor. Patterns that quantize give the norm where their name has `Out`.
        quant_out: float8_e4m3fn, like `input`, of patterns that quantize; None for a new tensor.
        scale_out: the scales of `Dynamic` patterns, (tokens, 1) of float32; of `Packed` ones, (tokens, groups / 4) of
            int32, in each word the exponents of four powers of two. Required there. Words of adjacent tokens are
            adjacent, as in FlashInfer and DeepGEMM, else they are copied.
        scale_factor: the scale of the patterns with a static one: a float32 tensor of one element, or a number.
        weight_bias: is added to `rms_gamma`: 1 for Gemma.
        block_quant_group_size: 128, of `Packed` patterns.
        launch_with_pdl, trigger_completion_at_end, use_oneshot, fp32_acc, layout_code: have no effect.

    Returns:
        The sum, the norm, or the quantized norm.
    """
    if pattern not in (0, 1, *_QUANTIZED):
        raise ArgumentError(f"pattern is {pattern}", hint=f"supported: 0, 1, {', '.join(map(str, _QUANTIZED))}")
    if not isinstance(workspace, AllReduceFusionWorkspace):
        raise ArgumentError(
            f"workspace is {type(workspace).__name__}",
            hint="pass what create_allreduce_fusion_workspace of the same module gives",
        )
    served = {
        "quant_out": (quant_out, _QUANTIZED),
        "scale_out": (scale_out, (*_GROUPS, *_ROWS)),
        "scale_factor": (scale_factor, _STATIC),
        "block_quant_group_size": (block_quant_group_size, _GROUPS),
    }
    for name, (x, patterns) in {**served, **{name: (x, ()) for name, x in others.items()}}.items():
        if x is not None and x is not False and pattern not in patterns:
            raise ArgumentError(f"{name} is given", hint=f"pattern {pattern} has no use for it")
    if pattern == AllReduceFusionPattern.kAllReduce:
        return all_reduce(input, out=output, group=workspace.group)
    if residual_in is None or rms_gamma is None:
        raise ArgumentError("residual_in or rms_gamma is None", hint=f"pattern {pattern} takes both")
    given: dict[str, Any] = {"eps": rms_eps, "weight_offset": weight_bias, "group": workspace.group}
    if pattern not in _QUANTIZED:
        return all_reduce_rms_norm(input, rms_gamma, residual_in, out=(norm_out, residual_out), **given)[0]
    if pattern not in _STATIC and scale_out is None:
        raise ArgumentError("scale_out is None", hint=f"pattern {pattern} puts the scales there")
    given.update(_scaling(pattern, scale_factor, block_quant_group_size, input), return_normed=pattern in _WITH_NORM)
    out = quant_out, scale_out, residual_out
    given["out"] = (*out, norm_out) if pattern in _WITH_NORM else out
    return all_reduce_rms_norm_float8(input, rms_gamma, residual_in, **given)[0]


def _scaling(pattern: int, factor: Any, group_size: int | None, x: torch.Tensor) -> dict[str, Any]:
    """Scaling arguments of the operator. Raises ArgumentError if they are missing."""
    if pattern in _ROWS:
        return {}
    if (factor if pattern in _STATIC else group_size) is None:
        name = "scale_factor" if pattern in _STATIC else "block_quant_group_size"
        raise ArgumentError(f"{name} is None", hint=f"pattern {pattern} takes it")
    if pattern in _GROUPS:
        return {"group_size": group_size, "packed": True}
    return {"scale": factor if isinstance(factor, torch.Tensor) else x.new_full((1,), factor, dtype=torch.float32)}
