# SPDX-License-Identifier: MIT
"""Names of TileLang's and TVM's operations: nobody else spells them, so what is renamed upstream is renamed here."""

from __future__ import annotations

# -- tiles -------------------------------------------------------------------------------------------------------------

TILE_OPERATIONS = "tl.tileop."
"""What the names of all operations on tiles begin with."""

COPY = "tl.tileop.copy"
FILL = "tl.tileop.fill"
GEMM = "tl.tileop.gemm"
REDUCE = "tl.tileop.reduce"
FINALIZE_REDUCER_V1 = "tl.tileop.finalize_reducer"
FINALIZE_REDUCER_V2 = "tl.tileop.finalize_reducer_v2"
FINALIZE_REDUCER = (FINALIZE_REDUCER_V1, FINALIZE_REDUCER_V2)
ATOMICADD = "tl.tileop.atomicadd"
ATOMICMAX = "tl.tileop.atomicmax"
ATOMICMIN = "tl.tileop.atomicmin"
ATOMICS_ON_TILES = (ATOMICADD, ATOMICMAX, ATOMICMIN)
REDUCER_UPDATE = "tl.reducer_update"
ASYNC_COPY = "tl.tileop.async_copy"
C2D_IM2COL = "tl.tileop.c2d_im2col"
CUMMAX = "tl.tileop.cummax"
CUMSUM = "tl.tileop.cumsum"
GEMM_BLOCKSCALED = "tl.tileop.gemm_blockscaled"
GEMM_SP = "tl.tileop.gemm_sp"
IM2COL = "tl.tileop.im2col"
REDUCER_INIT = "tl.tileop.reducer_init"
TCGEN05_GEMM_BLOCKSCALED = "tl.tileop.tcgen05_gemm_blockscaled"
TCGEN05_GEMM_SP = "tl.tileop.tcgen05_gemm_sp"
TRANSPOSE = "tl.tileop.transpose"
WGMMA_GEMM = "tl.tileop.wgmma_gemm"
WGMMA_GEMM_SP = "tl.tileop.wgmma_gemm_sp"
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
IF_THEN_ELSE = "tirx.if_then_else"
SHIFT_LEFT = "tirx.shift_left"
SHIFT_RIGHT = "tirx.shift_right"
HOST_ARITHMETIC = (IF_THEN_ELSE, SHIFT_LEFT, SHIFT_RIGHT)
"""Calls that fold to a number when their operands are numbers."""

TL, TIR = "tl.", "tirx."
"""What the names of TileLang's operations begin with, and those of TVM's."""

# -- copies that are done later, barriers, clusters --------------------------------------------------------------------

STORAGE_SYNC = "tirx.tvm_storage_sync"
SYNC_WARP = "tl.sync_warp"
ARRIVE_BARRIER = "tirx.ptx_arrive_barrier"
ARRIVE_CLUSTER_BARRIER = "tl.ptx_arrive_cluster_barrier"
WAIT_BARRIER_PARITY = "tl.mbarrier_wait_parity"
WAIT_TMA_STORES = "tl.tma_store_wait"
WAIT_WGMMA = "tl.wait_wgmma"
WAIT_FOR_KERNEL_BEFORE = "tl.pdl_sync"
PTX_ARRIVE_BARRIER_EXPECT_TX = "tirx.ptx_arrive_barrier_expect_tx"
PTX_COMMIT_GROUP = "tirx.ptx_commit_group"
PTX_WAIT_BARRIER = "tirx.ptx_wait_barrier"
PTX_WAIT_GROUP = "tirx.ptx_wait_group"
BLOCK_RANK_IN_CLUSTER = "tl.block_rank_in_cluster"
CLUSTER_ARRIVE = "tl.cluster_arrive"
CLUSTER_ARRIVE_RELAXED = "tl.cluster_arrive_relaxed"
CLUSTER_SYNC = "tl.cluster_sync"
CLUSTER_WAIT = "tl.cluster_wait"
DEALLOCATE_TMEM = "tl.deallocate_tmem"
FENCE_PROXY_ASYNC = "tl.fence_proxy_async"
MBARRIER_EXPECT_TX = "tl.mbarrier_expect_tx"
NAMED_BARRIER_ARRIVE = "tl.named_barrier_arrive"
PDL_TRIGGER = "tl.pdl_trigger"
PTX_CP_ASYNC = "tl.ptx_cp_async"
PTX_CP_ASYNC_BARRIER_NOINC = "tl.ptx_cp_async_barrier_noinc"
PTX_FENCE_BARRIER_INIT = "tl.ptx_fence_barrier_init"
PTX_LDMATRIX = "tl.ptx_ldmatrix"
PTX_MMA = "tirx.ptx_mma"
OF_DESCRIPTORS = (
    "tl.initialize_wgmma_descriptor", "tl.initialize_tcgen05_descriptor", "tl.increase_descriptor_offset",
    "tl.ptx_wgmma_ss", "tl.ptx_wgmma_rs", "tl.ptx_wgmma_sp_ss", "tl.ptx_wgmma_sp_rs",
    "tl.ptx_tcgen05_mma_ss", "tl.ptx_tcgen05_mma_ts", "tl.ptx_tcgen05_mma_blockscaled_ss",
)  # fmt: skip
"""Descriptors of matrices in shared memory, and products whose operands they are."""
PTX_TCGEN05_CP_WARPX4 = "tl.ptx_tcgen05_cp_warpx4"
PTX_TCGEN05_SF_WARP_TRANSPOSE = "tl.ptx_tcgen05_sf_warp_transpose"
SYNC_GRID = "tl.sync_grid"
TCGEN05_AFTER_THREAD_SYNC = "tl.tcgen05_after_thread_sync"
TCGEN05_BEFORE_THREAD_SYNC = "tl.tcgen05_before_thread_sync"
TCGEN05_MMA_ARRIVE = "tl.tcgen05_mma_arrive"
TMA_STORE_ARRIVE = "tl.tma_store_arrive"
WARPGROUP_ARRIVE = "tl.warpgroup_arrive"
WARPGROUP_COMMIT_BATCH = "tl.warpgroup_commit_batch"
WARPGROUP_FENCE_OPERAND = "tl.warpgroup_fence_operand"
WARPGROUP_WAIT = "tl.warpgroup_wait"

# -- threads and warps -------------------------------------------------------------------------------------------------

OF_THREADS = ("tl.", "tirx.ptx_", STORAGE_SYNC, "tirx.tvm_warp_")
"""What the names of operations begin with that reach nothing but what they are handed."""

ELECT = "tl.tl_shuffle_elect"
SET_MAX_REGISTERS = "tl.set_max_nreg"
PRODUCER_REGISTERS = "tl.annotate_producer_reg_dealloc"
CONSUMER_REGISTERS = "tl.annotate_consumer_reg_alloc"
THREAD_INDEX = "tl.launch_thread_idx"
GET_WARP_OR_LANE = ("tl.get_warp", "tl.get_lane")
"""What the names of operations that tell threads apart begin with."""

TVM_THREAD_ALLREDUCE = "tirx.tvm_thread_allreduce"
ACTIVEMASK = "tl.activemask"
ALL_OF = "tl.all_of"
ALL_SYNC = "tl.all_sync"
ANY_OF = "tl.any_of"
ANY_SYNC = "tl.any_sync"
BALLOT = "tl.ballot"
BALLOT_SYNC = "tl.ballot_sync"
GET_LANE_IDX = "tl.get_lane_idx"
GET_WARP_GROUP_IDX = "tl.get_warp_group_idx"
GET_WARP_IDX = "tl.get_warp_idx"
GET_WARP_IDX_SYNC = "tl.get_warp_idx_sync"
MATCH_ALL_SYNC = "tl.match_all_sync"
MATCH_ANY_SYNC = "tl.match_any_sync"
SYNCTHREADS_AND = "tl.syncthreads_and"
SYNCTHREADS_COUNT = "tl.syncthreads_count"
SYNCTHREADS_OR = "tl.syncthreads_or"
WARP_SHUFFLE = "tirx.tvm_warp_shuffle"
WARP_REDUCE = "tl.warp_reduce_"
"""What the names of exchanges, and reductions, within a warp begin with."""

# -- memory ------------------------------------------------------------------------------------------------------------

ATOMICS = "tl.atomic"
"""What the names of atomic operations on elements begin with."""


def atomic(op: str, *, returns: bool = False) -> str:
    """The atomic operation on an element, which may return what was there."""
    return f"{ATOMICS}_{op}_{'ret_' if returns else ''}elem_op"


# -- values ------------------------------------------------------------------------------------------------------------

FAST = "tl.__"
"""What the names of functions that trade accuracy for time begin with."""

BITWISE_AND = "tirx.bitwise_and"
BITWISE_NOT = "tirx.bitwise_not"
BITWISE_OR = "tirx.bitwise_or"
BITWISE_XOR = "tirx.bitwise_xor"
CLZ = "tirx.clz"
DP4A = "tirx.dp4a"
FABS = "tirx.fabs"
TIR_FMA = "tirx.fma"
ISFINITE = "tirx.isfinite"
ISINF = "tirx.isinf"
ISNAN = "tirx.isnan"
LARGE_UINT_IMM = "tirx.large_uint_imm"
NEXTAFTER = "tirx.nextafter"
POPCOUNT = "tirx.popcount"
REINTERPRET = "tirx.reinterpret"
FFS = "tl.__ffs"
FNS = "tl.__fns"
LDG = "tl.__ldg"
ABS2 = "tl.abs2"
ADD2 = "tl.add2"
CLAMP = "tl.clamp"
FAST_RCP = "tl.fast_rcp"
FMA = "tl.fma"
FMA2 = "tl.fma2"
FMUL = "tl.fmul"
IEEE_ADD = "tl.ieee_add"
IEEE_FDIV = "tl.ieee_fdiv"
IEEE_FMAF = "tl.ieee_fmaf"
IEEE_FRCP = "tl.ieee_frcp"
IEEE_FRSQRT = "tl.ieee_frsqrt"
IEEE_FSQRT = "tl.ieee_fsqrt"
IEEE_MUL = "tl.ieee_mul"
IEEE_SUB = "tl.ieee_sub"
INFINITY = "tl.infinity"
MAX2 = "tl.max2"
MAX2_NAN = "tl.max2_nan"
MAX_NAN = "tl.max_nan"
MIN2 = "tl.min2"
MIN2_NAN = "tl.min2_nan"
MIN_NAN = "tl.min_nan"
MUL2 = "tl.mul2"
POW_OF_INT = "tl.pow_of_int"
ROUND_TIES_AWAY_FROM_ZERO = "tl.round_ties_away_from_zero"
SUB2 = "tl.sub2"

# -- statements, hints, and others -------------------------------------------------------------------------------------

BREAK_LOOP = "tirx.break_loop"
CALL_PURE_EXTERN = "tirx.call_pure_extern"
CONTINUE_LOOP = "tirx.continue_loop"
LIKELY = "tirx.likely"
PREFETCH = "tirx.prefetch"
TYPE_ANNOTATION = "tirx.type_annotation"
DEVICE_ASSERT = "tl.device_assert"
DEVICE_ASSERT_WITH_MSG = "tl.device_assert_with_msg"
NO_SET_MAX_NREG = "tl.no_set_max_nreg"
PACK_B16 = "tl.pack_b16"
PACK_B8X4 = "tl.pack_b8x4"
PREFETCH_TMA_DESCRIPTOR = "tl.prefetch_tma_descriptor"
RNG_INIT = "tl.rng_init"
RNG_RAND = "tl.rng_rand"
RNG_RAND_FLOAT = "tl.rng_rand_float"

LOOP_BREAK = "tl.loop_break"
LEAVE_LOOP = (LOOP_BREAK, BREAK_LOOP, CONTINUE_LOOP)

MIN_BLOCKS = "tl.min_blocks_per_sm"
LAUNCH_THREADS = "tl.launch_threads"
"""Annotation of a launch: its threads, three extents."""

NON_RESTRICT = "tl.non_restrict_params"
"""Attribute of a function: the data variables of tensors that may overlap others."""

INLINE_BINDS_OF_IF = "tl.if_stmt_binding_inline_replayable_binds"
DISABLE_WARP_SPECIALIZED = "tl.disable_warp_specialized"
"""Pass settings."""
