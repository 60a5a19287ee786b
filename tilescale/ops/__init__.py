# SPDX-License-Identifier: MIT
"""x"""
from tilescale.ops.ag_gemm import all_gather_matmul
from tilescale.ops.gemm_rs import matmul_reduce_scatter
from tilescale.ops.all_gather import all_gather
from tilescale.ops.reduce_scatter import reduce_scatter
from tilescale.ops.workspace import workspace
