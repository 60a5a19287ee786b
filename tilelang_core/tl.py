# SPDX-License-Identifier: MIT
"""Names of TileLang's and TVM's operations: nobody else spells them, so what is renamed upstream is renamed here."""

from __future__ import annotations

TILE_OPERATIONS = "tl.tileop."
"""What the names of all operations on tiles begin with."""

COPY = "tl.tileop.copy"
FILL = "tl.tileop.fill"
GEMM = "tl.tileop.gemm"
REDUCE = "tl.tileop.reduce"
FINALIZE_REDUCER = ("tl.tileop.finalize_reducer", "tl.tileop.finalize_reducer_v2")
ATOMICS_ON_TILES = ("tl.tileop.atomicadd", "tl.tileop.atomicmax", "tl.tileop.atomicmin")
TMA_COPY = "tl.tileop.tma_copy"
TCGEN05_GEMM = "tl.tileop.tcgen05_gemm"

REGION = "tl.region"
"""A tile argument: a load of its first element, how it is accessed, its extents."""

ADDRESS_OF = "tirx.address_of"
ACCESS_PTR = "tirx.tvm_access_ptr"
DECLARED_PTR = "tl.access_ptr"
TUPLE = "tirx.tvm_tuple"
CALL_EXTERN = "tirx.call_extern"
ASSUME = "tirx.assume"
HOST_ARITHMETIC = ("tirx.if_then_else", "tirx.shift_left", "tirx.shift_right")
"""Calls that fold to a number when their operands are numbers."""

STORAGE_SYNC = "tirx.tvm_storage_sync"
SYNC_WARP = "tl.sync_warp"
ARRIVE_BARRIER = "tirx.ptx_arrive_barrier"
ARRIVE_CLUSTER_BARRIER = "tl.ptx_arrive_cluster_barrier"
WAIT_BARRIER_PARITY = "tl.mbarrier_wait_parity"
WAIT_TMA_STORES = "tl.tma_store_wait"
WAIT_WGMMA = "tl.wait_wgmma"
WAIT_FOR_KERNEL_BEFORE = "tl.pdl_sync"

OF_THREADS = ("tl.", "tirx.ptx_", STORAGE_SYNC, "tirx.tvm_warp_")
"""What the names of operations begin with that reach nothing but what they are handed."""

ELECT = "tl.tl_shuffle_elect"
SET_MAX_REGISTERS = "tl.set_max_nreg"
PRODUCER_REGISTERS = "tl.annotate_producer_reg_dealloc"
CONSUMER_REGISTERS = "tl.annotate_consumer_reg_alloc"
THREAD_INDEX = "tl.launch_thread_idx"
GET_WARP_OR_LANE = ("tl.get_warp", "tl.get_lane")
"""What the names of operations that tell threads apart begin with."""

ATOMICS = "tl.atomic"
"""What the names of atomic operations on elements begin with."""

LOOP_BREAK = "tl.loop_break"
LEAVE_LOOP = (LOOP_BREAK, "tirx.break_loop", "tirx.continue_loop")

LAUNCH_THREADS = "tl.launch_threads"
"""Annotation of a launch: its threads, three extents."""

NON_RESTRICT = "tl.non_restrict_params"
"""Attribute of a function: the data variables of tensors that may overlap others."""

INLINE_BINDS_OF_IF = "tl.if_stmt_binding_inline_replayable_binds"
DISABLE_WARP_SPECIALIZED = "tl.disable_warp_specialized"
"""Pass settings."""
