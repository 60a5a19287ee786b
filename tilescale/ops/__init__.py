# SPDX-License-Identifier: MIT
"""Finished operators for PyTorch, each a program of the language behind a `torch.library` operator.

    ag_gemm.py gemm_rs.py gemm_ar.py    products with communication beside them
    all_gather.py reduce_scatter.py all_reduce.py all_to_all.py    collectives
    linear.py parallelize.py            layers, and the plan that puts them into a model
    workspace.py                        memory beside the arguments, made once
    group.py arguments.py kernels.py    who takes part, what is served, kernels that are kept
    products.py flat.py                 what programs share
    small.py                            what is too small to overlap
"""

from tilescale.ops.ag_gemm import all_gather_matmul
from tilescale.ops.all_gather import all_gather
from tilescale.ops.all_reduce import all_reduce
from tilescale.ops.all_to_all import all_to_all
from tilescale.ops.gemm_ar import matmul_all_reduce
from tilescale.ops.gemm_rs import matmul_reduce_scatter
from tilescale.ops.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear, gather_once
from tilescale.ops.parallelize import parallelize_module
from tilescale.ops.reduce_scatter import reduce_scatter
from tilescale.ops.workspace import Workspace, workspace

__all__ = [
    "ColumnParallelLinear",
    "ParallelLinear",
    "RowParallelLinear",
    "Workspace",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "gather_once",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "parallelize_module",
    "reduce_scatter",
    "workspace",
]
