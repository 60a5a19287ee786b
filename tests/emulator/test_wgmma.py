# SPDX-License-Identifier: MIT
"""GEMMs of a warpgroup whose operands descriptors name, spelled out by TileLang's emitter and by hand."""

from typing import Any

import pytest
import torch
from tilelang.cuda.intrinsics.macro.wgmma_macro_generator import TensorCoreIntrinEmitter
from tilelang.layout import (
    make_full_bank_swizzled_layout,
    make_half_bank_swizzled_layout,
    make_linear_layout,
    make_quarter_bank_swizzled_layout,
)

import tilescale
import tilescale.language as T
from tests.kernels.base import cuda_texts
from tilescale.errors import OutOfBoundsError, UnsupportedError

ON_H200 = {"kind": "cuda", "arch": "sm_90a"}


def swizzled(buffer: Any, along: int) -> Any:
    """The layout with the widest swizzle that rows of `along` elements allow."""
    units = along * T.dtype(buffer.dtype).bits // 128
    if units % 8 == 0:
        return make_full_bank_swizzled_layout(buffer)
    if units % 4 == 0:
        return make_half_bank_swizzled_layout(buffer)
    return make_quarter_bank_swizzled_layout(buffer) if units % 2 == 0 else make_linear_layout(buffer)


def assign(emitter: TensorCoreIntrinEmitter, a_layout: Any, b_layout: Any) -> None:
    emitter.a_shared_layout, emitter.b_shared_layout = a_layout, b_layout


def emitted(
    T: Any, shape: tuple[int, int, int], kind: str, total: str, transposes: bool, groups: int = 1, held: bool = False
) -> Any:
    """C = A @ B, by TileLang's emitter; `held`, A in registers."""
    m, n, k = shape
    emitter = TensorCoreIntrinEmitter(
        a_dtype=kind, b_dtype=kind, accum_dtype=total, b_transposed=transposes, block_row_warps=4 * groups,
        block_col_warps=1, warp_row_tiles=m // (4 * groups), warp_col_tiles=n, chunk=k,
    )  # fmt: skip
    b_shape = (n, k) if transposes else (k, n)

    @T.prim_func
    def program(A: T.Tensor((m, k), kind), B: T.Tensor(b_shape, kind), C: T.Tensor((m, n), total)):
        with T.Kernel(1, threads=128 * groups):
            a, b = T.alloc_shared((m, k), kind), T.alloc_shared(b_shape, kind)
            registers, c = T.alloc_fragment((m, k), kind), T.alloc_fragment((m, n), total)
            a_layout, b_layout = swizzled(a, k), swizzled(b, k if transposes else emitter.wgmma_inst_n)
            assign(emitter, a_layout, b_layout)
            T.annotate_layout({a: a_layout, b: b_layout, c: emitter.make_mma_store_layout(c)})
            T.copy(A, a)
            T.copy(B, b)
            b_form, b_descriptor = emitter.compute_wgmma_b_desc_params(b), T.alloc_wgmma_desc()
            emitter.init_wgmma_b_desc(b_descriptor, b, b_form)
            if held:
                T.annotate_layout({registers: emitter.make_mma_load_layout(registers)})
                T.copy(a, registers)
            else:
                a_form, a_descriptor = emitter.compute_wgmma_a_desc_params(a), T.alloc_wgmma_desc()
                emitter.init_wgmma_a_desc(a_descriptor, a, a_form)
            emitter.wgmma_arrive()
            for j in T.unroll(emitter.wgmma_num_inst_n):
                for i in T.unroll(emitter.wgmma_num_inst_m):
                    for step in T.unroll(emitter.wgmma_num_k_atoms):
                        if held:
                            emitter.wgmma_rs_atom(registers, b_descriptor, c, i, j, step, b_form, T.bool(True))
                        else:
                            emitter.wgmma_ss_atom(
                                a_descriptor, b_descriptor, c, i, j, step, a_form, b_form, T.bool(True)
                            )
            emitter.wgmma_commit()
            emitter.wgmma_wait(0)
            T.copy(c, C)

    return program


def integers(shape: tuple[int, ...], kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float().to(getattr(torch, kind))


CASES = {
    "32 bytes along n, swizzled by 64 along k": ((64, 64, 32), "float16", "float32", False),
    "swizzled by 128 bytes": ((64, 64, 64), "float16", "float32", False),
    "several panels along n": ((64, 256, 64), "float16", "float16", False),
    "both along k": ((64, 128, 64), "bfloat16", "float32", True),
    "two instructions along m": ((128, 64, 128), "float16", "float32", True),
    "swizzled by 32 bytes": ((64, 16, 16), "float16", "float32", True),
    "float8": ((64, 32, 64), "float8_e4m3fn", "float32", True),
    "int8": ((64, 64, 64), "int8", "int32", True),
    "tf32": ((64, 64, 32), "float32", "float32", True),
    "two warp groups": ((128, 64, 64), "float16", "float32", False, 2),
    "a in registers": ((64, 64, 64), "float16", "float32", False, 1, True),
    "a in registers of two warp groups": ((128, 32, 32), "bfloat16", "float32", True, 2, True),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_emitter_spells_out(name: str):
    case = CASES[name]
    (m, n, k), kind, total, transposes = case[:4]
    a, b = integers((m, k), kind, 1), integers((n, k) if transposes else (k, n), kind, 2)
    c = torch.full((m, n), 85).to(getattr(torch, total))
    program = emitted(T, *case)
    tilescale.emulate(program, [a, b, c])
    assert torch.equal(c.double(), a.double() @ (b.double().T if transposes else b.double()))
    assert tilescale.emulate(program, data=False).time_us > 0


def test_its_text_is_that_of_tilelang():
    ours, stock = cuda_texts(lambda T: emitted(T, *CASES["two warp groups"]), "sm_90a")
    assert ours == stock and "tl::wgmma_ss<" in ours


def by_hand(sign: int = 1, adds: int = 1, swizzle: int = 0, rows: int = 64) -> Any:
    """C = C + A[:, 16:32] @ B.T; core matrices of tiles without a swizzle, sums in buffers of threads."""

    @T.prim_func
    def program(A: T.Tensor((64, 32), "float16"), B: T.Tensor((rows, 16), "float16"), C: T.Tensor((64, 8), "float32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((rows, 16), "float16")
            # 8 rows of 8 elements follow one another, these along k, and these along rows
            T.annotate_layout(
                {
                    a: T.Layout((64, 32), lambda i, j: i // 8 * 256 + j // 8 * 64 + i % 8 * 8 + j % 8),
                    b: T.Layout((rows, 16), lambda i, j: i // 8 * 128 + j // 8 * 64 + i % 8 * 8 + j % 8),
                }
            )
            T.copy(A, a)
            T.copy(B, b)
            sums = T.alloc_local((8,), "float32")
            row, column = 16 * (tx // 32) + tx % 32 // 4, tx % 4 * 2
            for i in T.serial(4):
                sums[4 + i] = C[row + 8 * (i // 2), column + i % 2]
            a_descriptor, b_descriptor = T.alloc_wgmma_desc(), T.alloc_wgmma_desc()
            T.initialize_wgmma_descriptor(a_descriptor, T.address_of(a[0, 0]), swizzle, 8, 32)
            T.increase_descriptor_offset(a_descriptor, 2 * 128)
            T.initialize_wgmma_descriptor(b_descriptor, T.access_ptr(b, "r"), 0, 8, 16)
            T.warpgroup_arrive()
            T.ptx_wgmma_ss(
                "float32", "m64n8k16", T.bool(True), T.bool(True), "fp16", "fp16", "fp32", a_descriptor.data, 0,
                b_descriptor.data, 0, sums.data, 4, adds, sign, 1,
            )  # multiplies # fmt: skip
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            for i in T.serial(4):
                C[row + 8 * (i // 2), column + i % 2] = sums[4 + i]

    return program


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("adds", [0, 1])
def test_what_is_written_by_hand(sign: int, adds: int):
    a, b, c = integers((64, 32), "float16", 1), integers((8, 16), "float16", 2), integers((64, 8), "float32", 3)
    expected = adds * c + sign * (a[:, 16:].float() @ b.float().T)
    tilescale.emulate(by_hand(sign, adds, rows=8), [a, b, c])
    assert torch.equal(c, expected)


def test_a_descriptor_of_another_swizzle_reads_other_elements():
    a, b, c = integers((64, 32), "float16", 1), integers((8, 16), "float16", 2), torch.zeros(64, 8)
    tilescale.emulate(by_hand(swizzle=3, rows=8), [a, b, c])
    assert not torch.equal(c, a[:, 16:].float() @ b.float().T)


def test_a_matrix_beyond_its_tile_is_an_error():
    @T.prim_func
    def program(A: T.Tensor((8, 16), "float16")):
        with T.Kernel(1, threads=128):
            tile, sums = T.alloc_shared((8, 16), "float16"), T.alloc_local((4,), "float32")
            T.copy(A, tile)
            descriptor = T.alloc_wgmma_desc()
            T.initialize_wgmma_descriptor(descriptor, T.access_ptr(tile, "r"), 0, 8, 16)
            T.ptx_wgmma_ss(
                "float32", "m64n8k16", T.bool(True), T.bool(True), "fp16", "fp16", "fp32", descriptor.data, 0,
                descriptor.data, 0, sums.data, 0, 0, 1, 1,
            )  # fmt: skip

    with pytest.raises(OutOfBoundsError, match=r"tile\[position 128\] is outside the buffer") as error:
        tilescale.emulate(program, [integers((8, 16), "float16", 2)])
    assert error.value.where


def test_registers_without_a_layout_say_what_to_write():
    @T.prim_func
    def program(A: T.Tensor((64, 16), "float16")):
        with T.Kernel(1, threads=128):
            tile, sums = T.alloc_shared((64, 16), "float16"), T.alloc_fragment((64, 8), "float32")
            T.copy(A, tile)
            descriptor = T.alloc_wgmma_desc()
            T.initialize_wgmma_descriptor(descriptor, T.access_ptr(tile, "r"), 0, 8, 16)
            T.ptx_wgmma_ss(
                "float32", "m64n8k16", T.bool(True), T.bool(True), "fp16", "fp16", "fp32", descriptor.data, 0,
                descriptor.data, 0, sums.data, 0, 0, 1, 1,
            )  # fmt: skip

    with pytest.raises(UnsupportedError, match="whose distribution over threads is unknown") as error:
        tilescale.emulate(program, [torch.zeros(64, 16).half()])
    assert "T.annotate_layout" in str(error.value.hint)
