# SPDX-License-Identifier: MIT
"""Laws that hold for every shape, tile, world and layout, on drawn examples."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.emulator.support import DTYPES, assert_rounded, assert_same, blank, drawn_tiles, values, wide

EXAMPLES = settings(max_examples=25, deadline=None, database=None)
worlds = st.integers(1, 8)
dtypes = st.sampled_from(list(DTYPES))


def three(world, shape, dtype):
    """For each device a source and two tensors to fill."""
    return [
        [values(r, *shape, dtype=dtype), blank(*shape, dtype=dtype), blank(*shape, dtype=dtype)] for r in range(world)
    ]


@EXAMPLES
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), tile_rows=st.integers(1, 17), tile_columns=st.integers(1, 17),
    world=worlds, shift=st.integers(0, 7), dtype=dtypes, layer=st.sampled_from(["l0", "l1"]),
)  # fmt: skip
def test_tiles_put_by_one_device_are_read_back_by_another(
    rows, columns, tile_rows, tile_columns, world, shift, dtype, layer
):
    """Copy X tile by tile to a peer's Y, and back from there: for any tiles, all elements arrive and no others."""
    shape, grid = (rows, columns), (-(-columns // tile_columns), -(-rows // tile_rows))

    @T.prim_func
    def program(
        X: T.Tensor((rows, columns), dtype), Y: T.Tensor((rows, columns), dtype), Z: T.Tensor((rows, columns), dtype)
    ):
        with T.Kernel(device=world, block=grid, threads=32) as (bx, by):
            with T.Scale("block"):
                tile = T.alloc((tile_rows, tile_columns), dtype, level=layer)
                with T.Scale("device") as (rank, size):
                    T.copy(X[by * tile_rows, bx * tile_columns], tile)
                    T.copy(tile, Y[by * tile_rows, bx * tile_columns], dst=(rank + shift) % size)
                    T.barrier()
                    T.copy(Y[by * tile_rows, bx * tile_columns], tile, src=(rank + shift) % size)
                    T.copy(tile, Z[by * tile_rows, bx * tile_columns])

    args = three(world, shape, dtype)
    with drawn_tiles():
        tilescale.emulate(program, args)
    for r, (x, y, z) in enumerate(args):
        assert_same(y, args[(r - shift) % world][0])
        assert_same(z, x)


@EXAMPLES
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), dim=st.integers(0, 2), world=worlds, dtype=dtypes)
def test_scatter_of_the_sum_then_gather_is_the_sum(shape, dim, world, dtype):
    dim %= len(shape)
    whole = [n * world if axis == dim else n for axis, n in enumerate(shape)]

    @T.prim_func
    def program(X: T.Tensor(whole, dtype), P: T.Tensor(shape, dtype), Y: T.Tensor(whole, dtype)):
        with T.Kernel(device=world, threads=32):
            with T.Scale("device"):
                T.reduce_scatter(X, P, dim=dim)
                T.all_gather(P, Y, dim=dim - len(shape))
                T.allreduce(X)

    sources = [values(r, *whole, dtype=dtype) for r in range(world)]
    args = [[x.clone(), blank(*shape, dtype=dtype), blank(*whole, dtype=dtype)] for x in sources]
    tilescale.emulate(program, args)
    for reduced, _, gathered in args:
        assert_same(gathered, reduced)
        assert_rounded(reduced, sum(wide(x) for x in sources), work=1e-5)


@EXAMPLES
@given(rows=st.integers(1, 5), columns=st.integers(1, 5), dim=st.integers(0, 1), world=worlds, dtype=dtypes)
def test_all_to_all_twice_is_the_identity(rows, columns, dim, world, dtype):
    shape = (rows * world, columns) if dim == 0 else (rows, columns * world)

    @T.prim_func
    def program(X: T.Tensor(shape, dtype), Y: T.Tensor(shape, dtype), Z: T.Tensor(shape, dtype)):
        with T.Kernel(device=world, threads=32):
            with T.Scale("device"):
                T.all_to_all(X, Y, dim=dim)
                T.all_to_all(Y, Z, dim=dim)

    args = three(world, shape, dtype)
    tilescale.emulate(program, args)
    for r, (x, y, z) in enumerate(args):
        assert_same(z, x)
        assert_same(y, torch.cat([a[0].chunk(world, dim)[r] for a in args], dim))


def _parts(x, world, dim, block):
    """Reference of T.Shard: blocks of `block` along dim dealt to the units in turn."""
    blocks = x.split(block, dim)
    return [torch.cat(blocks[r::world], dim) for r in range(world)]


@EXAMPLES
@given(
    units=st.sampled_from([1, 2, 4]), share=st.integers(1, 4), other=st.integers(1, 6), dim=st.integers(0, 1),
    cyclic=st.booleans(), layer=st.sampled_from(["l0", "l1"]),
)  # fmt: skip
def test_views_on_chip_scatter_and_gather_a_tile(units, share, other, dim, cyclic, layer):
    """Each warpgroup writes its part out and reads another's back through views: the tile is dealt as by the layout."""
    shape = (units * share, other) if dim == 0 else (other, units * share)
    part = (share, other) if dim == 0 else (other, share)
    layout = T.Shard(dim, block=1) if cyclic else T.Shard(dim)

    @T.prim_func
    def program(X: T.Tensor(shape, "float32"), P: T.Tensor((units, *part), "float32"), Y: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=128 * units):
            tile = T.alloc(shape, "float32", level=layer)
            back = T.alloc(shape, "float32", level=layer)
            T.copy(X, tile)
            with T.Scale("warpgroup") as (wg, _):
                T.copy(T.view(tile, layout=layout), P[wg, 0, 0])
                T.copy(P[wg, 0, 0], T.view(back, layout=layout))
            T.copy(back, Y)

    x = values(1, *shape)
    args = [x, blank(units, *part), blank(*shape)]
    tilescale.emulate(program, args)
    assert_same(args[1], torch.stack(_parts(x, units, dim, 1 if cyclic else share)))
    assert_same(args[2], x)


@EXAMPLES
@given(world=worlds, blocks=st.integers(1, 3), block=st.integers(1, 3), other=st.integers(1, 5), dim=st.integers(0, 1))
def test_views_of_tensors_take_every_block_cyclic_share(world, blocks, block, other, dim):
    """The caller deals the global tensor by the layout; inside, each device sees a tensor of its share's shape."""
    extent = world * blocks * block
    shape = (extent, other) if dim == 0 else (other, extent)

    @T.prim_func
    def program(X: T.Tensor(shape, "float32")):
        with T.Kernel(device=world, threads=32):
            with T.Scale("device") as (rank, _):
                mine = T.view(X, layout=T.Shard(dim, block=block))
                for i, j in T.grid(mine.shape[0], mine.shape[1]):
                    mine[i, j] = mine[i, j] * 2 + rank

    parts = _parts(values(1, *shape), world, dim, block)
    args = [[p.clone()] for p in parts]
    tilescale.emulate(program, args)
    for r, (found,) in enumerate(args):
        assert_rounded(found, wide(parts[r]) * 2 + r)


@EXAMPLES
@given(
    m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 12), world=st.integers(1, 4), dtype=st.sampled_from(
        ["float16", "bfloat16", "int8"]
    ),
)  # fmt: skip
def test_products_of_every_shape_split_over_devices(m, n, k, world, dtype):
    """K split over devices, tiles of 16 x 16 x 8 over every edge, partial products reduced tile by tile."""
    accum = "int32" if dtype == "int8" else "float32"

    @T.prim_func
    def program(A: T.Tensor((m, k * world), dtype), B: T.Tensor((k * world, n), dtype), C: T.Tensor((m, n), accum)):
        with T.Kernel(device=world, block=(T.ceildiv(n, 16), T.ceildiv(m, 16)), threads=32) as (bx, by):
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
            with T.Scale("block"):
                a = T.alloc((16, 8), dtype)
                b = T.alloc((8, 16), dtype)
                c = T.alloc((16, 16), accum, level="l0")
                T.clear(c)
                for step in T.serial(T.ceildiv(k, 8)):
                    T.copy(A_dev[by * 16, step * 8], a)
                    T.copy(B_dev[step * 8, bx * 16], b)
                    T.gemm(a, b, c)
                with T.Scale("device"):
                    T.allreduce(c)
                T.copy(c, C[by * 16, bx * 16])

    a, b = values(1, m, k * world, dtype=dtype), values(2, k * world, n, dtype=dtype)
    shards = [(a[:, r * k : (r + 1) * k].clone(), b[r * k : (r + 1) * k].clone()) for r in range(world)]
    args = [[*shard, blank(m, n, dtype=accum)] for shard in shards]
    tilescale.emulate(program, args)
    for _, _, c in args:
        assert_rounded(c, wide(a) @ wide(b), work=1e-5)
