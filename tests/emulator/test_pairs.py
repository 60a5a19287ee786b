# SPDX-License-Identifier: MIT
"""Floats of four bits, two in a byte, as parameters and outputs."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels.blackwell import unpacked
from tilescale.errors import ArgumentError, RaceError, ShapeError

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


PAIR = "float4_e2m1fnx2"


def viewed(kind, shape, other, others):
    """A tile that is written as one type and read as another, by a copy."""

    @T.prim_func
    def program(X: T.Tensor(shape, kind), Y: T.Tensor(others, other)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared(shape, kind)
            T.copy(X, tile)
            T.copy(T.view(tile, others, dtype=other), Y)

    return program


@pytest.mark.parametrize("kind", ["int4", "uint4", FP4])
@pytest.mark.parametrize(("other", "each"), [("uint8", 1), ("int16", 2), ("float32", 4)])
def test_packed_elements_are_viewed_as_what_is_in_memory(kind, other, each):
    x = pairs(1, 8, 16)
    y = torch.zeros(8, 16 // each, dtype=getattr(torch, other))
    tilescale.emulate(viewed(kind, (8, 32), other, (8, 16 // each)), [x, y], machine="b200-sxm-8")
    assert torch.equal(y.view(torch.uint8), x)
    x, y = y.view(torch.uint8), pairs(2, 8, 16)
    given = x.view(getattr(torch, other))
    tilescale.emulate(viewed(other, (8, 16 // each), kind, (8, 32)), [given, y], machine="b200-sxm-8")
    assert torch.equal(y, x)


def test_elements_of_a_view_are_written_where_they_lie():
    """Bytes over fp4, and fp4 over bytes: single ones, some under a condition, slices."""

    @T.prim_func
    def program(X: T.Tensor((4, 8), "uint8"), Y: T.Tensor((4, 16), FP4), Z: T.Tensor((4, 8), "uint8")):
        with T.Kernel(1, threads=32):
            numbers, held = T.alloc_shared((4, 16), FP4), T.alloc_shared((4, 8), "uint8")
            words = T.view(numbers, (4, 8), dtype="uint8")
            halves = T.view(held, (4, 16), dtype="uint4")
            for i, j in T.Parallel(4, 8):
                words[i, j] = X[i, j]
            T.copy(X, held)
            words[3, 2] = words[0, 1]
            for i, j in T.Parallel(4, 8):
                if (i + j) % 2 == 0:
                    words[i, j] = words[i, j] + T.uint8(1)
                halves[i, 2 * j + 1] = halves[i, 2 * j]
            T.copy(numbers, Y)
            T.copy(held, Z)

    x, y, z = pairs(1, 4, 8), pairs(2, 4, 8), pairs(3, 4, 8)
    tilescale.emulate(program, [x, y, z], machine="b200-sxm-8")
    expected = x.clone()
    expected[3, 2] = x[0, 1]
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(8), indexing="ij")
    assert torch.equal(y, expected + ((rows + columns) % 2 == 0).to(torch.uint8))
    assert torch.equal(z, (x & 15) * 17)


def test_two_units_that_write_one_byte_by_two_views_race():
    @T.prim_func
    def program(Y: T.Tensor((4,), "uint8")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((4,), "uint8")
            with T.Scale("warp") as (w, _):
                halves = T.view(tile, (8,), dtype="uint4")
                halves[w] = T.Cast("uint4", w)
            T.copy(tile, Y)

    with pytest.raises(RaceError):
        tilescale.emulate(program, [pairs(1, 4)], machine="b200-sxm-8")


@pytest.mark.parametrize("other", ["float32", FP4])
def test_a_view_larger_than_its_memory_is_refused_with_the_line(other):
    @T.prim_func
    def program(X: T.Tensor((6,), "uint8"), Y: T.Tensor((16,), other)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((6,), "uint8")
            T.copy(X, tile)
            T.copy(T.Tensor((16,), other, tile.data), Y)

    y = torch.zeros(16) if other == "float32" else pairs(2, 8)
    with pytest.raises(ShapeError, match="a view of 'tile' .* takes .* bits, there are 48") as caught:
        tilescale.emulate(program, [pairs(1, 6), y], machine="b200-sxm-8")
    assert caught.value.where


def test_a_view_may_end_before_its_memory():
    """Also where its size does not divide that of the memory."""

    @T.prim_func
    def program(X: T.Tensor((6,), "uint8"), Y: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((6,), "uint8")
            T.copy(X, tile)
            T.copy(T.Tensor((1,), "int32", tile.data), Y)

    x, y = pairs(1, 6), torch.zeros(1, dtype=torch.int32)
    tilescale.emulate(program, [x, y])
    assert torch.equal(y, x[:4].view(torch.int32))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this PyTorch has no packed float4")
def test_pairs_are_a_type_of_elements():
    """`float4_e2m1fnx2`, as TileLang calls PyTorch's type: copied, converted, seen as bytes and as single numbers."""

    @T.prim_func
    def program(
        X: T.Tensor((8, 16), PAIR),
        Y: T.Tensor((8, 16), PAIR),
        Z: T.Tensor((8, 32), "float32"),
        W: T.Tensor((8, 32), "float32"),
        V: T.Tensor((8, 16), "uint8"),
    ):
        with T.Kernel(1, threads=32):
            tile, held = T.alloc_shared((8, 16), PAIR), T.alloc_fragment((8, 16), PAIR)
            T.copy(X, tile)
            T.copy(tile, held)
            T.copy(held, Y)
            single = T.view(tile, (8, 32), dtype=FP4)
            for i, j in T.Parallel(8, 32):
                W[i, j] = T.Cast("float32", single[i, j])
            for i, j in T.Parallel(8, 16):
                Z[i, T.Ramp(2 * j, 1, 2)] = T.Cast("float32x2", X[i, j])
            T.copy(T.view(X, (8, 16), dtype="uint8"), V)

    x, y, v = pairs(1, 8, 16), pairs(2, 8, 16), pairs(3, 8, 16)
    z, w = torch.zeros(8, 32), torch.zeros(8, 32)
    kind = torch.float4_e2m1fn_x2
    tilescale.emulate(program, [x.view(kind), y.view(kind), z, w, v], machine="b200-sxm-8")
    assert torch.equal(y, x) and torch.equal(v, x)
    assert torch.equal(z, unpacked(x)) and torch.equal(w, unpacked(x))
    made = tilescale.compile(program, out_idx=[1], machine="b200-sxm-8")(x.view(kind), z, w, v)
    assert made.dtype == kind and torch.equal(made.view(torch.uint8), x)
    assert tilescale.emulate(program, None, data=False, machine="b200-sxm-8").time_us > 0


def test_vectors_are_a_view_of_numbers():
    @T.prim_func
    def program(X: T.Tensor((8, 16), "float32"), Y: T.Tensor((8, 16), "float32")):
        with T.Kernel(1, threads=32):
            tile, fours = T.alloc_shared((8, 16), "float32"), T.alloc_shared((8, 4), "float32x4")
            T.copy(X, tile)
            T.copy(T.view(tile, (8, 4), dtype="float32x4"), fours)
            for i, j in T.Parallel(8, 4):
                fours[i, j] = fours[i, j] + fours[i, j]
            T.copy(fours, T.view(Y, (8, 4), dtype="float32x4"))

    x, y = torch.rand(8, 16), torch.zeros(8, 16)
    tilescale.emulate(program, [x, y])
    assert torch.equal(y, 2 * x)


def test_views_have_strides():
    """A transposed tensor; blocks of a tensor, as bytes of two packed elements each."""

    @T.prim_func
    def program(
        X: T.Tensor((8, 8), "float32"),
        Y: T.Tensor((8, 8), "float32"),
        Z: T.Tensor((8, 8), "uint4"),
        W: T.Tensor((4, 2, 2, 2), "uint8"),
    ):
        with T.Kernel(1, threads=32):
            T.copy(T.view(X, (8, 8), strides=(1, 8)), Y)
            T.copy(T.view(Z, (4, 2, 2, 2), dtype="uint8", strides=(8, 2, 4, 1)), W)

    x, y, z, w = torch.rand(8, 8), torch.zeros(8, 8), pairs(1, 8, 4), pairs(2, 4, 2, 2, 2)
    tilescale.emulate(program, [x, y, z, w])
    assert torch.equal(y, x.T)
    assert torch.equal(w, z.view(4, 2, 2, 2).permute(0, 2, 1, 3))
