# SPDX-License-Identifier: MIT
"""Finished operators for PyTorch, each a program of the language behind a `torch.library` operator."""

from typing import TYPE_CHECKING, NoReturn

from tilescale.errors import unknown_attribute
from tilescale.ops.ag_columns_gemm import all_gather_columns_matmul
from tilescale.ops.ag_gemm import all_gather_matmul
from tilescale.ops.all_gather import all_gather
from tilescale.ops.all_gather_v import all_gather_v
from tilescale.ops.all_reduce import all_reduce
from tilescale.ops.all_reduce_layer_norm import all_reduce_layer_norm
from tilescale.ops.all_reduce_rms_norm import all_reduce_rms_norm
from tilescale.ops.all_reduce_rms_norm_float8 import all_reduce_rms_norm_float8
from tilescale.ops.all_to_all import all_to_all
from tilescale.ops.all_to_all_v import all_to_all_v
from tilescale.ops.broadcast import broadcast
from tilescale.ops.decode import flash_decode, mla_decode
from tilescale.ops.decode_step import DecodeStep
from tilescale.ops.expert_parallel import ParallelExperts, parallelize_experts
from tilescale.ops.float8 import Float8
from tilescale.ops.gather import gather
from tilescale.ops.gemm_ag import matmul_all_gather
from tilescale.ops.gemm_ar import matmul_all_reduce
from tilescale.ops.gemm_rs import matmul_reduce_scatter
from tilescale.ops.grouped_gemm import grouped_matmul
from tilescale.ops.halo_exchange import halo_exchange
from tilescale.ops.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from tilescale.ops.moe_choice import Router
from tilescale.ops.moe_dispatch import moe_combine, moe_dispatch
from tilescale.ops.moe_layer import moe_layer
from tilescale.ops.moe_route import Routing, moe_route
from tilescale.ops.parallelize import parallelize_module
from tilescale.ops.reduce_scatter import reduce_scatter
from tilescale.ops.scatter import scatter
from tilescale.ops.send_recv import Recv, Send, batch_send_recv, recv, send
from tilescale.ops.sequence_attention import (
    sequence_attention,
    sequence_attention_backward,
    sequence_attention_forward,
    sequence_positions,
)
from tilescale.ops.siblings import gather_once
from tilescale.ops.symm_mem import install, installed, uninstall
from tilescale.ops.warm_up import warm_up
from tilescale.ops.workspace import Workspace, workspace

__all__ = [
    "ColumnParallelLinear",
    "DecodeStep",
    "Float8",
    "ParallelExperts",
    "ParallelLinear",
    "Recv",
    "Router",
    "Routing",
    "RowParallelLinear",
    "Send",
    "Workspace",
    "all_gather",
    "all_gather_columns_matmul",
    "all_gather_matmul",
    "all_gather_v",
    "all_reduce",
    "all_reduce_layer_norm",
    "all_reduce_rms_norm",
    "all_reduce_rms_norm_float8",
    "all_to_all",
    "all_to_all_v",
    "batch_send_recv",
    "broadcast",
    "flash_decode",
    "gather",
    "gather_once",
    "grouped_matmul",
    "halo_exchange",
    "install",
    "installed",
    "matmul_all_gather",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "mla_decode",
    "moe_combine",
    "moe_dispatch",
    "moe_layer",
    "moe_route",
    "parallelize_experts",
    "parallelize_module",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
    "sequence_attention",
    "sequence_attention_backward",
    "sequence_attention_forward",
    "sequence_positions",
    "uninstall",
    "warm_up",
    "workspace",
]

if not TYPE_CHECKING:  # type checkers know all names

    def __getattr__(name: str) -> NoReturn:
        raise unknown_attribute(__name__, name, __all__)
