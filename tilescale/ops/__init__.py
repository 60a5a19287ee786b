# SPDX-License-Identifier: MIT
"""Finished operators for PyTorch, each a program of the language behind a `torch.library` operator.

ag_gemm.py gemm_rs.py gemm_ar.py    GEMMs with overlapped communication; ag_gemm_programs.py: the first one's
gemm_operators.py                   what operators with a GEMM share
block_gemm.py                       block scales of all three, and the GEMM of one rank
ag_columns_gemm.py gemm_ag.py       the same along columns
all_gather.py reduce_scatter.py all_reduce.py broadcast.py all_to_all.py    collectives
gather.py scatter.py                to and from one rank
send_recv.py halo_exchange.py       messages between ranks, any number at once
all_gather_v.py all_to_all_v.py     collectives of unequal parts
float8_wire.py float8_lines.py      collectives that send numbers as float8, by one kernel and over any network
all_reduce_rms_norm.py all_reduce_rms_norm_float8.py all_reduce_layer_norm.py    the end of a transformer block
decode_step.py decode_weights.py decode_expert_weights.py    a model's decode step as one launch
decode_program.py decode_products.py decode_inputs.py decode_attention.py decode_experts.py    the program of its layers
decode_float8.py decode_sizes.py    its products with float8 weights, its sizes and tasks
decode.py sequence_attention.py attention_backward.py    attention over several ranks; key_cache.py: of decode
moe_layer.py moe_choice.py expert_programs.py    mixture of experts: the layer, its router, its programs
moe_gradient.py                     its backward
moe_float8.py expert_float8.py grouped_float8.py    the layer in float8, its program, its GEMMs
moe_low_latency.py low_latency_program.py few_rows_gemm.py    the layer for few tokens, its program, its GEMMs
expert_parallel.py                  models whose experts are split over the ranks
moe_route.py moe_tables.py moe_dispatch.py grouped_gemm.py    its parts as separate operators
linear.py siblings.py layer_products.py    layers, those with one input, and their operators
parallelize.py                      the plan that puts them in models
token_wise.py                       norms where tokens are split over the ranks
partial_gradients.py                gradients of replicated values that meet a rank's features
workspace.py                        symmetric and local workspaces, made once
symm_mem.py                         replacements of PyTorch's fused operators; install.py: a report of them
wide_results.py                     their float8 GEMMs with results in float16 and float32
graph_pass.py graph_patterns.py     instead of functional collectives in inductor's graphs
communicator.py allreduce_fusion.py engine_plugins.py    what vLLM and SGLang call
transformers_styles.py              the layers as styles of Hugging Face transformers
warm_up.py row_counts.py            all kernels of a model, compiled at once before it runs, for any row count
group.py arguments.py kernels.py    teams, argument checks, cached kernels
padding.py                          N and K of any number
dtensors.py                         DTensors in and out
operator.py                         what an operator of torch.library is, at the cost of its function
plain_calls.py                      calls of public functions that repeat, recorded
call_form.py                        arguments of a call but for their tensors
products.py persistent.py layout.py row_exchange.py softmax.py sequence_parts.py    what programs share
float8.py rounding.py               how products round bfloat16 to float8, forward and backward
strategy.py                         whether a product is overlapped
whole_tensors.py unfused.py chunks.py    without overlap, and between nodes
"""

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
