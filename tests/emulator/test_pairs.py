# SPDX-License-Identifier: MIT
"""Floats of four bits, two in a byte, as parameters and outputs."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels.blackwell import unpacked
from tilescale.errors import ArgumentError, UnsupportedError

TYPES = ["uint8", "int8", *(["float4_e2m1fn_x2"] if hasattr(torch, "float4_e2m1fn_x2") else [])]


def pairs(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


FP4 = "float4_e2m1fn"


@T.prim_func
def halved(X: T.Tensor((8, 32), FP4), Y: T.Tensor((8, 32), FP4), Z: T.Tensor((8, 32), "float32")):
    with T.Kernel(2, threads=32) as b:
        tile = T.alloc_fragment((4, 32), "float32")
        for i, j in T.Parallel(4, 32):
            tile[i, j] = T.Cast("float32", X[b * 4 + i, j]) * 0.5
        T.copy(tile, Z[b * 4, 0])
        T.copy(tile, Y[b * 4, 0])


@pytest.mark.parametrize("kind", TYPES)
def test_pairs_are_read_and_written(kind):
    x, y, z = pairs(1, 8, 16), pairs(2, 8, 16), torch.zeros(8, 32)
    given = x.clone()
    dtype = getattr(torch, kind)
    tilescale.emulate(halved, [x.view(dtype), y.view(dtype), z], machine="b200-sxm-8")
    assert torch.equal(x, given)
    assert torch.equal(z, unpacked(x) * 0.5)
    # Halves of values between representable ones go to the even neighbour: 0.25 to 0, 0.75 to 1.
    expected = {0.25: 0.0, 0.75: 1.0}
    assert torch.equal(unpacked(y).abs(), z.abs().apply_(lambda v: expected.get(v, v)))


def test_a_tensor_of_pairs_of_another_shape_is_refused():
    with pytest.raises(ArgumentError, match=r"'X' has shape \(8, 64\)"):
        tilescale.emulate(halved, [pairs(1, 8, 32), pairs(2, 8, 16), torch.zeros(8, 32)], machine="b200-sxm-8")


@pytest.mark.parametrize("given", [None, "meta"])
def test_a_run_without_data_takes_them_too(given):
    args = None if given is None else [torch.empty(8, 16, dtype=torch.uint8, device="meta")] * 2 + [torch.empty(8, 32)]
    assert tilescale.emulate(halved, args, data=False, machine="b200-sxm-8").time_us > 0


def doubled(kind):
    @T.prim_func
    def program(X: T.Tensor((8, 32), kind), Y: T.Tensor((8, 32), kind), Z: T.Tensor((8, 32), "int32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((8, 32), kind)
            T.copy(X, tile)
            T.copy(tile, Y)
            for i, j in T.Parallel(8, 32):
                Z[i, j] = T.Cast("int32", tile[i, j])

    return program


@pytest.mark.parametrize("kind", ["int4", "uint4", FP4])
def test_outputs_of_four_bits_are_packed(kind):
    """As TileLang allocates them: half as many bytes as elements."""
    x = pairs(1, 8, 16)
    given = x if kind != "int4" else x.view(torch.int8)
    if kind == FP4:
        made = tilescale.compile(halved, out_idx=[1], machine="b200-sxm-8")(given, torch.zeros(8, 32))
        assert made.shape == (8, 16) and torch.equal(unpacked(made.view(torch.uint8)) * 2, unpacked(x).round())
        return
    copied, numbers = tilescale.compile(doubled(kind), out_idx=[1, 2])(given)
    assert torch.equal(copied.view(torch.uint8), x)
    low, high = (half.int() for half in (x & 15, x >> 4))
    expected = torch.stack([low, high], dim=-1).reshape(8, 32)
    assert torch.equal(numbers, expected if kind == "uint4" else (expected + 8) % 16 - 8)


def test_a_view_of_packed_elements_as_bytes_is_refused_by_name():
    @T.prim_func
    def program(X: T.Tensor((8, 32), FP4), Y: T.Tensor((8, 16), "uint8")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((8, 32), FP4)
            T.copy(X, tile)
            T.copy(T.view(tile, (8, 16), dtype="uint8"), Y)

    with pytest.raises(UnsupportedError, match="a view of 'tile' as another type: .* share a byte") as caught:
        tilescale.emulate(program, [pairs(1, 8, 16), pairs(2, 8, 16)], machine="b200-sxm-8")
    assert caught.value.where
