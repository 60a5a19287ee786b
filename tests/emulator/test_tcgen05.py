# SPDX-License-Identifier: MIT
"""GEMMs in tensor memory of operands that descriptors name, spelled out by TileLang's emitter."""

from typing import Any

import pytest
import torch
from tilelang.cuda.language.intrinsics import TCGEN05TensorCoreIntrinEmitter
from tilelang.utils.language import to_buffer_region

import tilescale
import tilescale.language as T
from tests.emulator.test_wgmma import assign, integers, swizzled
from tests.kernels.base import cuda_texts
from tilescale.errors import UnsupportedError

MACHINE = "b200-sxm-8"


def assign_in_tensor_memory(emitter: TCGEN05TensorCoreIntrinEmitter, **layouts: Any) -> None:
    for name, layout in layouts.items():
        getattr(emitter, f"_assign_{name}_tmem_layout")(layout)


def emitted(T: Any, shape: tuple[int, int, int], kind: str, transposes: bool, held: bool = False) -> Any:
    """C = A @ B; `held`, A in tensor memory."""
    m, n, k = shape
    emitter = TCGEN05TensorCoreIntrinEmitter(
        a_dtype=kind, b_dtype=kind, accum_dtype="float32", b_transposed=transposes, block_row_warps=1,
        block_col_warps=1, warp_row_tiles=m, warp_col_tiles=n, chunk=k,
    )  # fmt: skip
    emitter.get_tcgen5_mma_meta(m, n, k, True)
    form, b_shape = emitter.compute_tcgen05_instr_desc(), (n, k) if transposes else (k, n)

    @T.prim_func
    def program(A: T.Tensor((m, k), kind), B: T.Tensor(b_shape, kind), C: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((m, k), kind), T.alloc_shared(b_shape, kind)
            total, done = T.alloc_tmem((m, n), "float32"), T.alloc_barrier(1)
            result = T.alloc_fragment((m, n), "float32")
            a_layout, b_layout = swizzled(a, k), swizzled(b, k if transposes else n)
            total_layout = emitter.make_mma_store_layout(total, is_ts=held)
            assign(emitter, a_layout, b_layout)
            assign_in_tensor_memory(emitter, c=total_layout)
            T.annotate_layout({a: a_layout, b: b_layout, total: total_layout})
            T.copy(A, a)
            T.copy(B, b)
            b_form = emitter.compute_tcgen05_b_desc_params(b)
            total_form = emitter.compute_tcgen05_c_tmem_params(to_buffer_region(total))
            if held:
                values, left = T.alloc_fragment((m, k), kind), T.alloc_tmem((m, k), kind)
                left_layout = emitter.make_mma_store_layout(left, operand="A")
                assign_in_tensor_memory(emitter, a=left_layout)
                T.annotate_layout({left: left_layout})
                T.copy(a, values)
                T.copy(values, left)
                left_form = emitter.compute_tcgen05_a_tmem_params(to_buffer_region(left))
            else:
                a_form = emitter.compute_tcgen05_a_desc_params(a)
            if T.get_thread_binding() // 32 == 0:
                b_descriptor = T.alloc_tcgen05_smem_desc()
                emitter.init_tcgen05_b_desc(b_descriptor, b, b_form)
                if not held:
                    a_descriptor = T.alloc_tcgen05_smem_desc()
                    emitter.init_tcgen05_a_desc(a_descriptor, a, a_form)
                for j in T.unroll(emitter.tcgen05_num_inst_n):
                    for i in T.unroll(emitter.tcgen05_num_inst_m):
                        for step in T.unroll(emitter.tcgen05_num_k_atoms):
                            if held:
                                emitter.tcgen05_ts_atom(
                                    b_descriptor, i, j, step, left_form, b_form, total_form, form, T.bool(True)
                                )
                            else:
                                emitter.tcgen05_ss_atom(
                                    a_descriptor, b_descriptor, i, j, step, a_form, b_form, total_form, form,
                                    T.bool(True),
                                )  # fmt: skip
                emitter.tcgen05_atom_arrive(done)
            T.mbarrier_wait_parity(done, 0)
            T.copy(total, result)
            T.copy(result, C)

    return program


CASES = {
    "both along k": ((128, 128, 128), "bfloat16", True),
    "b along n": ((128, 64, 64), "float16", False),
    "several instructions": ((256, 64, 64), "float16", True),
    "float8": ((128, 64, 128), "float8_e4m3fn", True),
    "a in tensor memory": ((128, 64, 64), "bfloat16", True, True),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_emitter_spells_out(name: str):
    (m, n, k), kind, transposes = CASES[name][:3]
    a, b = integers((m, k), kind, 1), integers((n, k) if transposes else (k, n), kind, 2)
    c = torch.full((m, n), 85.0)
    program = emitted(T, *CASES[name])
    tilescale.emulate(program, [a, b, c], machine=MACHINE)
    assert torch.equal(c.double(), a.double() @ (b.double().T if transposes else b.double()))
    assert tilescale.emulate(program, data=False, machine=MACHINE).time_us > 0


def test_its_text_is_that_of_tilelang():
    ours, stock = cuda_texts(lambda T: emitted(T, *CASES["both along k"]), "sm_100a")
    assert ours == stock and "tcgen05mma_ss" in ours


def test_products_of_fewer_rows_say_what_to_write():
    a, b = integers((64, 64), "float16", 1), integers((64, 64), "float16", 2)
    with pytest.raises(UnsupportedError, match="GEMMs of 128 rows in tensor memory, this one has 64") as error:
        tilescale.emulate(emitted(T, (64, 64, 64), "float16", True), [a, b, torch.zeros(64, 64)], machine=MACHINE)
    assert error.value.where
