# SPDX-License-Identifier: MIT
"""A program without our additions is TileLang: the same IR, so the same CUDA source for every target."""

import collections
import functools
from typing import Any

import pytest
import tilelang.language
import torch
from tilelang import tvm

import tilelang_core.compile
import tilescale
import tilescale.language
from tests.kernels import blackwell, launches, words
from tests.kernels.base import cuda_texts
from tests.kernels.registry import FAMILIES, KERNELS, TARGETS, PlainKernel

REQUIRED_TILE_OPS = """
    copy async_copy tma_copy fill gemm gemm_sp wgmma_gemm tcgen05_gemm im2col transpose reduce cumsum cummax
    atomicadd atomicmax atomicmin reducer_init finalize_reducer_v2
""".split()

REQUIRED_INTRINSICS = """
    access_ptr infinity clamp loop_break reducer_update launch_thread_idx set_max_nreg sync_grid pdl_sync
    atomic_add_elem_op atomic_add_ret_elem_op atomic_addx2_elem_op atomic_addx4_elem_op atomic_max_elem_op
    atomic_min_elem_op atomic_or_elem_op atomic_load_elem_op atomic_store_elem_op
    shfl_xor_sync shfl_up_sync shfl_down_sync shfl_sync any_sync all_sync ballot match_any_sync
    syncthreads_count syncthreads_and syncthreads_or get_lane_idx get_warp_idx_sync tl_shuffle_elect
    warp_reduce_sum warp_reduce_max warp_reduce_min warp_reduce_bitand warp_reduce_bitor
    mbarrier_wait_parity named_barrier_arrive wait_wgmma
    cluster_arrive cluster_wait cluster_sync block_rank_in_cluster
    ieee_add ieee_mul ieee_fmaf ieee_fdiv ieee_fsqrt __exp __log2 fast_rcp
""".split()

REQUIRED_TIR = """
    if_then_else exp exp2 log log2 sqrt rsqrt sin cos tanh erf sigmoid pow floor ceil round trunc fabs isnan popcount
    reinterpret shift_left shift_right bitwise_and bitwise_or bitwise_xor call_extern tvm_storage_sync
    ptx_arrive_barrier ptx_wait_group
""".split()

REQUIRED_STATEMENTS = {"For", "While", "IfThenElse", "BufferStore", "Bind", "AttrStmt", "Select", "Cast"}

REQUIRED_LOOPS = {"SERIAL", "PARALLEL", "UNROLLED", "VECTORIZED", "THREAD_BINDING"}

REQUIRED_ANNOTATIONS = {
    "num_stages",
    "tl_pipeline_order",
    "cluster_dims",
    "layout_map",
    "safe_value_map",
    "l2_hit_ratio_map",
    "barrier_init",
    "tl.non_restrict_params",
    "tl.ws_schedule",
    "tl.ws_op_id",
    "tl.min_blocks_per_sm",
    "threadblock_swizzle_pattern",
    "dst_block",
    "cluster_mask",
    "use_tma",
    "disable_tma",
    "prefer_instruction",
    "eviction_policy",
}

REQUIRED_SCOPES = {
    "global",
    "shared.dyn",
    "shared.barrier",
    "shared.cluster_barrier",
    "shared.tmem",
    "local",
    "local.var",
    "local.fragment",
    "local.reducer",
}

UNUSUAL = (launches, words, blackwell)
"""Families of what few programs have; all of their texts are compared."""

COMPILED = [
    kernel
    for family in FAMILIES
    for kernel in family.KERNELS
    if family in UNUSUAL
    or kernel is family.KERNELS[-1]
    or kernel.name in {"rows_of_threads", "private_tile_added", "sparse_gemm"}
]
"""Of other families one kernel, as lowering takes long, and those whose tiles belong to single threads."""

every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


@pytest.mark.nightly
@every_kernel
def test_program_is_that_of_tilelang(kernel: PlainKernel) -> None:
    """Names and annotations included: that is the input of TileLang's compiler, for any target."""
    ours, stock = (kernel.program(module).script(show_meta=True) for module in (tilescale.language, tilelang.language))
    assert ours == stock


@pytest.mark.nightly
@every_kernel
def test_program_is_compiled_as_it_is(kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every target: a program reaches TileLang's compiler unchanged."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tilelang_core.compile, "cuda_source", lambda *given: asked.append(given) or "text")
    func = kernel.program(tilescale.language)
    for arch in kernel.targets:
        target = {"kind": "cuda", "arch": arch}
        assert tilescale.compile(func, target=target).source == "text"
        assert asked.pop() == (func, target, None)


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", COMPILED, ids=lambda kernel: kernel.name)
def test_source_is_that_of_tilelang(kernel: PlainKernel) -> None:
    """For Hopper where it can be compiled for that; TileLang's input is the same for every target."""
    ours, stock = cuda_texts(kernel.build, "sm_90a" if "sm_90a" in kernel.targets else kernel.targets[-1])
    assert ours == stock


@pytest.mark.nightly
@every_kernel
def test_inputs_and_references_fit_the_parameters(kernel: PlainKernel) -> None:
    func = kernel.program(tilelang.language)
    args, again = (kernel.inputs(torch.Generator().manual_seed(7)) for _ in range(2))
    expected = kernel.reference(args)
    assert len(args) == len(func.params)
    for param, arg, same in zip(func.params, args, again, strict=True):
        buffer = func.buffer_map[param]
        pairs = str(buffer.dtype) == blackwell.FP4  # two in a byte
        assert arg.dtype == (torch.uint8 if pairs else getattr(torch, str(buffer.dtype)))
        lengths = [*arg.shape[:-1], arg.shape[-1] * (2 if pairs else 1)]
        assert [int(n) for n in buffer.shape if isinstance(n, tvm.tirx.IntImm)] == [
            length for n, length in zip(buffer.shape, lengths, strict=True) if isinstance(n, tvm.tirx.IntImm)
        ]
        torch.testing.assert_close(arg, same, rtol=0, atol=0, equal_nan=True)
    assert expected
    for index, value in expected.items():
        assert value.shape == args[index].shape
        assert value.dtype == (torch.float64 if args[index].dtype.is_floating_point else torch.int64)
        assert not value.isnan().any()


def test_names_are_unique() -> None:
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)


@pytest.mark.parametrize("arch", TARGETS)
def test_every_target_has_enough_kernels(arch: str) -> None:
    assert sum(arch in kernel.targets for kernel in KERNELS) >= 25


def test_collection_covers_the_language() -> None:
    seen = language_in_use()
    assert {f"tl.tileop.{name}" for name in REQUIRED_TILE_OPS} <= seen["op"]
    assert {f"tl.{name}" for name in REQUIRED_INTRINSICS} <= seen["op"]
    assert {f"tirx.{name}" for name in REQUIRED_TIR} <= seen["op"]
    assert REQUIRED_STATEMENTS <= seen["node"]
    assert REQUIRED_LOOPS <= seen["loop"]
    assert REQUIRED_ANNOTATIONS <= seen["annotation"]
    assert REQUIRED_SCOPES <= seen["scope"]


@functools.cache
def language_in_use() -> dict[str, set[str]]:
    """Operation names, node types, loop kinds, annotation keys and memory scopes in the IR of all kernels."""
    seen = collections.defaultdict(set)

    def visit(node: tvm.Object) -> None:
        seen["node"].add(type(node).__name__)
        if isinstance(node, tvm.tirx.Call):
            seen["op"].add(node.op.name)
        if isinstance(node, tvm.tirx.Call | tvm.tirx.For | tvm.tirx.SBlock):
            seen["annotation"].update(node.annotations or {})
        if isinstance(node, tvm.tirx.For):
            seen["loop"].add(tvm.tirx.ForKind(node.kind).name)
        if isinstance(node, tvm.tirx.AttrStmt):
            seen["annotation"].add(node.attr_key)
        if isinstance(node, tvm.tirx.SBlock):
            seen["scope"].update(buffer.scope() for buffer in node.alloc_buffers)

    for kernel in KERNELS:
        func = kernel.program(tilelang.language)
        seen["scope"].update(buffer.scope() for buffer in func.buffer_map.values())
        tvm.tirx.stmt_functor.post_order_visit(func.body, visit)
    return seen


def test_shared_memory_of_a_size_that_the_launch_knows() -> None:
    """Its text is TileLang's, and the emulator runs it."""

    def program(T: Any) -> Any:
        n = T.dynamic("n")

        @T.prim_func
        def reversed_(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
            with T.Kernel(1, threads=128):
                tile = T.alloc_shared((n,), "float32")
                for i in T.Parallel(n):
                    tile[i] = X[i]
                for i in T.Parallel(n):
                    Y[i] = tile[n - 1 - i]

        return reversed_

    ours, stock = cuda_texts(program, "sm_90a")
    assert ours == stock
    X, Y = torch.randn(100), torch.empty(100)
    tilescale.emulate(program(tilescale.language), [X, Y])
    assert torch.equal(Y, X.flip(0))


def test_invariants_stay_where_tilelang_leaves_them() -> None:
    """Quotients by an argument, which lowering of distributed programs computes before the loop."""

    def program(T: Any) -> Any:
        @T.prim_func
        def strided(X: T.Tensor((4096,), "float16"), Y: T.Tensor((4096,), "float16"), n: T.int32):
            with T.Kernel(8, threads=128) as b:
                t = T.get_thread_binding()
                for k in T.serial(8):
                    if k > 2:
                        Y[k * 128 + t] = X[T.truncdiv(b, n) * 128 + t + k]

        return strided

    ours, stock = cuda_texts(program, "sm_90a")
    assert ours == stock
