# SPDX-License-Identifier: MIT
"""Decoders of TileLang's examples, atomics on neighbours that return what was there, a thread that sleeps."""

import pytest
import torch

import tilescale
import tilescale.language as T

FP4_DECODER = "decode_fp4_to_bf16_twiddling"


@pytest.mark.parametrize(("name", "offset"), [("decode_i4u_to_f16", 0), ("decode_i4s_to_f16", 8)])
def test_weights_of_four_bits(name, offset):
    """lop3 puts the elements i and i + 4 of a word side by side."""

    @T.prim_func
    def program(X: T.Tensor((32, 4), "int8"), Y: T.Tensor((32, 8), "float16")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            packed, out = T.alloc_local((4,), "int8"), T.alloc_local((8,), "float16")
            for i in T.serial(4):
                packed[i] = X[t, i]
            T.call_extern("handle", name, T.access_ptr(packed, "r"), T.access_ptr(out, "w"), 8)
            for i in T.serial(8):
                Y[t, i] = out[i]

    x = torch.randint(-128, 128, (32, 4), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    y = torch.full((32, 8), float("nan"), dtype=torch.float16)
    tilescale.emulate(program, [x, y])
    nibbles = torch.stack([x & 15, (x >> 4) & 15], dim=-1).reshape(32, 8)
    assert torch.equal(y, (nibbles[:, [0, 4, 1, 5, 2, 6, 3, 7]] - offset).half())


def test_twiddled_floats_of_four_bits():
    """Values of the examples' C++ for the same bytes."""

    @T.prim_func
    def program(X: T.Tensor((1, 8), "uint8"), Y: T.Tensor((1, 16), "bfloat16")):
        with T.Kernel(1, threads=1):
            packed, out = T.alloc_local((8,), "uint8"), T.alloc_local((16,), "bfloat16")
            for i in T.serial(8):
                packed[i] = X[0, i]
            T.call_extern("handle", FP4_DECODER, T.access_ptr(packed, "r"), T.access_ptr(out, "w"), 2)
            for i in T.serial(16):
                Y[0, i] = out[i]

    y = torch.zeros(1, 16, dtype=torch.bfloat16)
    tilescale.emulate(program, [torch.tensor([[95, 130, 194, 217, 207, 235, 15, 163]], dtype=torch.uint8), y])
    assert y.tolist() == [[4, -0.0, -1, -4, -1.5, 1.5, -0.5, -0.0, -6, 3, -1.5, -4, 4, 2, -1.5, 4]]


@pytest.mark.parametrize("width", [2, 4])
def test_neighbours_are_added_to_and_return_what_was_there(width):
    add = {2: T.atomic_addx2, 4: T.atomic_addx4}[width]

    @T.prim_func
    def program(A: T.Tensor((32,), "float32"), B: T.Tensor((3, 32), "float32"), P: T.Tensor((3, 32), "float32")):
        with T.Kernel(1, threads=1):
            for k, i in T.grid(3, 32 // width):
                at = i * width
                P[k, at : at + width] = add(A[at], B[k, at], return_prev=True)

    A, B, P = torch.randn(32), torch.randn(3, 32), torch.zeros(3, 32)
    held = A.clone()
    tilescale.emulate(program, [A, B, P])
    for k in range(3):
        assert torch.equal(P[k], held)
        held += B[k]
    assert torch.equal(A, held)


def test_a_thread_that_sleeps_lets_others_run():
    @T.prim_func
    def program(F: T.Tensor((1,), "int32"), Y: T.Tensor((1,), "int32")):
        with T.Kernel(2, threads=1) as b:
            seen = T.alloc_var("int32")
            if b == 0:
                while seen == 0:
                    T.call_extern("void", "__nanosleep", 100)
                    seen = T.atomic_load(F[0], memory_order="acquire")
                Y[0] = seen
            else:
                T.atomic_store(F[0], 3, memory_order="release")

    F, Y = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    tilescale.emulate(program, [F, Y])
    assert Y.tolist() == [3]
