# SPDX-License-Identifier: MIT
"""Collectives used wrongly: arguments that do not fit, and conditions that keep some units away."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.language.support import on_devices
from tilescale.errors import CollectiveNotReachedError, PhaseError, ShapeError, UsageError

# -- collectives: arguments --------------------------------------------------------------------------------------------


def test_an_unknown_reduction(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.allreduce(tile, op="mean")  # <-

    with mistake(UsageError, "op='mean'", "sum, max, min, prod"):
        on_devices(wrong)


def test_an_unknown_reduction_of_a_scatter(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.reduce_scatter(tile, tile[0:16, :], op="avg")  # <-

    with mistake(UsageError, "op='avg'"):
        on_devices(wrong)


@pytest.mark.parametrize(
    ("call", "offered"),
    [
        (lambda t: T.allreduce(t, impl="magic"), "T.allreduce at level 'device' has one_shot, two_shot, "),
        (lambda t: T.all_gather(t[0:16, :], t, impl="magic"), "T.all_gather at level 'device' has direct, "),
        (lambda t: T.broadcast(t, impl="magic"), "hierarchical_direct, ring, tree for tiles of programs"),
    ],
)
def test_an_unknown_algorithm(mistake, call, offered: str):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        call(tile)  # <-

    with mistake(UsageError, "impl='magic'", offered):
        on_devices(wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda t, other: T.reduce_scatter(t, other[0:16, :]),
        lambda t, other: T.all_gather(t[0:16, :], other),
        lambda t, other: T.all_to_all(t, other),
    ],
)
def test_a_conversion_on_the_way(mistake, call):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        other = T.alloc_shared((64, 64), "bfloat16")
        call(tile, other)  # <-

    with mistake(UsageError, "float32, to 'other', bfloat16: a collective converts nothing", "convert in a program"):
        on_devices(wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: T.allreduce(t, t),
        lambda t: T.allreduce(),
        lambda t: T.allreduce(t, op="sum", fn=lambda a, b: a),
        lambda t: T.allreduce(t, t, op="sum"),
        lambda t: T.allreduce(t, out=t, fn=lambda a, b: a),
    ],
)
def test_tiles_and_functions_that_do_not_fit(mistake, call):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        call(tile)  # <-

    with mistake(UsageError, "T.allreduce of", "fn=combine"):
        on_devices(wrong)


def test_tiles_that_are_summed_into_others(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.allreduce(tile, out=tile)  # <-

    with mistake(PhaseError, "T.allreduce where a block executes", "outside of T.Scale"):
        on_devices(wrong)


def test_a_sum_of_another_shape(mistake):
    with mistake(ShapeError, "T.allreduce of (4, 8) with an out of (8, 4)"):

        @T.prim_func
        def program(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((8, 4), "float32")):
            with T.Kernel(device=2):
                with T.Scale("device"):
                    T.allreduce(X, out=Y)  # <-


@pytest.mark.parametrize(
    ("normed", "columns", "dtype", "impl", "error", "text"),
    [
        ((4, 16), 8, "float32", None, ShapeError, "normed has shape (4, 16)"),
        ((4, 9000), 9000, "float32", "two_shot", ShapeError, "rows of 9000 float32"),
        ((4, 8), 8, "int32", None, UsageError, "T.allreduce_rms_norm of int32"),
        ((4, 8), 8, "float32", "ring", UsageError, "by impl='ring'"),
    ],
)
def test_a_norm_that_does_not_fit(mistake, normed, columns: int, dtype: str, impl: str | None, error, text: str):
    with mistake(error, text):

        @T.prim_func
        def program(
            X: T.Tensor((4, columns), dtype),
            W: T.Tensor((columns,), dtype),
            Y: T.Tensor((4, columns), dtype),
            Z: T.Tensor(normed, dtype),
        ):
            with T.Kernel(device=2):
                with T.Scale("device"):
                    T.allreduce_rms_norm(X, W, Z, Y, impl=impl)  # <-


def test_a_bias_that_does_not_fit(mistake):
    with mistake(ShapeError, "T.allreduce_layer_norm: bias has shape (4,)"):

        @T.prim_func
        def program(X: T.Tensor((4, 8), "float32"), W: T.Tensor((8,), "float32"), B: T.Tensor((4,), "float32")):
            with T.Kernel(device=2):
                with T.Scale("device"):
                    T.allreduce_layer_norm(X, W, B, X, X)  # <-


PACKED = {"scaling": "group", "power_of_two": True, "words": "int32"}


@pytest.mark.parametrize(
    ("dtype", "kind", "scales", "options", "error", "text"),
    [
        ("float32", "float8_e4m3fn", (4,), {"scaling": "row"}, UsageError, "quantized, of float32"),
        ("float16", "float8_e5m2", (4,), {"scaling": "row"}, UsageError, "quantized is float8_e5m2"),
        ("float16", "float8_e4m3fn", (4,), {"scaling": "column"}, UsageError, "scaling is 'column'"),
        ("float16", "float8_e4m3fn", (4,), {}, UsageError, "scaling=None"),
        ("float16", "float8_e4m3fn", (4,), {"scaling": "group"}, ShapeError, "scales has shape (4,)"),
        ("float16", "float8_e4m3fn", (4,), {"scaling": "tensor"}, ShapeError, "scales has shape (4,)"),
        ("float16", "float8_e4m3fn", (4,), {**PACKED, "power_of_two": False}, UsageError, "power_of_two=False"),
        ("float16", "float8_e4m3fn", (4,), {**PACKED, "scaling": "row"}, UsageError, "scaling='row'"),
        ("float16", "float8_e4m3fn", (5,), PACKED, ShapeError, "scales has shape (5,)"),
        ("float16", "float8_e4m3fn", (4,), {**PACKED, "words": "int16"}, UsageError, "scales is int16"),
    ],
)
def test_quantized_rows_that_do_not_fit(mistake, dtype: str, kind: str, scales, options, error, text: str):
    words = options.get("words", "float32")
    options = {name: value for name, value in options.items() if name != "words"}
    with mistake(error, text):

        @T.prim_func
        def program(
            X: T.Tensor((4, 8), dtype),
            W: T.Tensor((8,), dtype),
            Q: T.Tensor((4, 8), kind),
            S: T.Tensor(scales, words),
        ):
            with T.Kernel(device=2):
                with T.Scale("device"):
                    T.allreduce_rms_norm(X, W, None, X, quantized=Q, scales=S, **options)  # <-


def test_a_norm_of_tiles(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.allreduce_rms_norm(tile, tile, tile, tile)  # <-

    with mistake(PhaseError, "T.allreduce_rms_norm where a block executes"):
        on_devices(wrong)


@pytest.mark.parametrize("fn", [lambda a, b: (a[0],), lambda a, b: a[0] + b[0]])
def test_a_function_that_returns_too_little(mistake, fn):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.allreduce(tile, X, fn=fn)  # <-

    with mistake(UsageError, "returned 1 values for 2 tiles"):
        on_devices(wrong)


def test_tiles_that_do_not_belong_together(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.allreduce(tile, reals, fn=lambda a, b: a)  # <-

    with mistake(ShapeError, "(64, 64) and (8,)", "leading dimensions"):
        on_devices(wrong)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: T.reduce_scatter(t, t[0:15, :]), "the whole is (64, 64), a part (15, 64)"),
        (lambda t: T.all_gather(t[0:16, :], t[0:48, :]), "the whole is (48, 64), a part (16, 64)"),
        (lambda t: T.all_to_all(t[0:6, :], t[0:6, :]), "over 4 units from (6, 64)"),
        (lambda t: T.all_to_all(t, t[0:32, :]), "from (64, 64) to (32, 64)"),
        (lambda t: T.all_gather(t[0:16, :], t, dim=2), "dim=2) of a tile with 2 dimensions"),
    ],
)
def test_shapes_that_do_not_divide_among_the_units(mistake, call, text: str):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        call(tile)  # <-

    with mistake(ShapeError, text):
        on_devices(wrong)


def test_one_unit_is_one_unit(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.all_gather(tile[0:16, :], tile)  # <-

    with mistake(ShapeError, "T.all_gather over 1 unit: the whole is (64, 64)"):
        on_devices(wrong, devices=1)


def test_a_gather_in_place_between_devices(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.all_gather(tile)  # <-

    with mistake(UsageError, "needs a dst", "T.all_gather(part, whole)"):
        on_devices(wrong)


@pytest.mark.parametrize("call", [lambda: T.allreduce(3), lambda: T.all_gather("x", None)])
def test_what_is_no_tile(mistake, call):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        call()  # <-

    with mistake(UsageError, "works on tiles, got"):
        on_devices(wrong)


@pytest.mark.parametrize(
    "call", [T.barrier, lambda: T.allreduce(T.alloc((8,), "float32")), lambda: T.broadcast(T.alloc((8,), "float32"))]
)
def test_a_collective_without_a_scale(mistake, call):
    with mistake(UsageError, "needs a T.Scale around it", "one of 'device', 'block', 'warpgroup', 'warp', 'thread'"):

        @T.prim_func
        def f(X: T.Tensor((64, 64), "float32")):
            with T.Kernel(device=2, block=4, threads=64):
                call()  # <-


# -- collectives that not all units reach ------------------------------------------------------------------------------


def reaches(level: str, statements, **launch):
    @T.prim_func
    def f(X: T.Tensor((64,), "float32")):
        with T.Kernel(**{"device": 4, "block": 8, "threads": 256, **launch}) as bx:
            tile = T.alloc((64,), "float32")
            with T.Scale("block"), T.Scale(level) as rank, size:
                statements(tile, rank, bx)

    return f


@pytest.mark.parametrize("level", ["device", "warpgroup", "warp", "block"])
def test_under_a_rank(mistake, level: str):
    @T.macro
    def wrong(tile, rank, bx):
        if rank == 0:
            T.barrier()  # <-

    with mistake(CollectiveNotReachedError, f"T.barrier at level {level!r}", "not all units reach it", "== 0"):
        reaches(level, wrong)


@pytest.mark.parametrize("root", ["rank", "next"])
def test_a_root_that_differs_between_units(mistake, root: str):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.broadcast(tile, root=(T.rank("device") + (root == "next")) % 4)  # <-

    with mistake(UsageError, "depends on the rank of level 'device'", "units name different ones", "the same root"):
        on_devices(wrong)


def test_in_the_other_branch(mistake):
    @T.macro
    def wrong(tile, rank, bx):
        if rank == 0:
            T.clear(tile)
        else:
            T.allreduce(tile)  # <-

    with mistake(CollectiveNotReachedError, "T.allreduce at level 'device'", "the rank of level 'device'"):
        reaches("device", wrong)


def test_under_a_value_computed_from_a_rank(mistake):
    @T.macro
    def wrong(tile, rank, bx):
        x = rank * 2
        y = x + bx
        if y > 0:
            T.broadcast(tile)  # <-

    with mistake(CollectiveNotReachedError, "T.broadcast", "the rank of level 'device'"):
        reaches("device", wrong)


def test_under_a_rank_by_function(mistake):
    @T.macro
    def wrong(tile, rank, bx):
        if T.rank("device") + 1 < T.size("device"):
            T.barrier()  # <-

    with mistake(CollectiveNotReachedError, "the rank of level 'device'"):
        reaches("device", wrong)


def test_in_a_loop_whose_count_depends_on_the_rank(mistake):
    @T.macro
    def wrong(tile, rank, bx):
        for _ in T.serial(rank + 1):
            T.barrier()  # <-

    with mistake(CollectiveNotReachedError, "the rank of level 'device'"):
        reaches("device", wrong)


def test_in_a_loop_that_begins_at_the_rank(mistake):
    @T.macro
    def wrong(tile, rank, bx):
        for _ in T.serial(rank, 8):
            T.barrier()  # <-

    with mistake(CollectiveNotReachedError, "the rank of level 'device'"):
        reaches("device", wrong)


def test_in_a_while_loop_on_the_rank(mistake):
    @T.macro
    def wrong(tile, rank, bx):
        n = T.alloc_var("int32")
        n = 0
        while n < rank:
            n = n + 1
            T.barrier()  # <-

    with mistake(CollectiveNotReachedError, "the rank of level 'device'"):
        reaches("device", wrong)


@pytest.mark.parametrize("level", ["warpgroup", "warp"])
def test_under_a_thread_index(mistake, level: str):
    @T.macro
    def wrong(tile, rank, bx):
        tx = T.get_thread_binding()
        if tx < 64:
            T.barrier()  # <-

    with mistake(CollectiveNotReachedError, "the thread index tx"):
        reaches(level, wrong)


def test_under_a_block_index_at_block_level(mistake):
    @T.macro
    def wrong(tile, rank, bx):
        if bx < 4:
            T.barrier()  # <-

    with mistake(CollectiveNotReachedError, "the block index bx"):
        reaches("block", wrong)


def test_under_a_block_index_that_splits_clusters(mistake):
    @T.macro
    def wrong(tile, rank, bx):
        if bx % 2 == 0:
            T.barrier()  # <-

    with mistake(CollectiveNotReachedError, "the block index bx"):
        reaches("block", wrong, cta_cluster=2)


def test_under_a_block_index_at_cluster_level(mistake):
    with mistake(CollectiveNotReachedError, "the block index bx"):

        @T.prim_func
        def f(X: T.Tensor((64,), "float32")):
            with T.Kernel(cta_cluster=2, block=8, threads=32) as bx:
                if bx // 2 == 0:
                    with T.Scale("cta_cluster"):
                        T.barrier()  # <-


@pytest.mark.parametrize("level", ["device", "warpgroup"])
def test_conditions_that_all_units_share(level: str):
    @T.macro
    def right(tile, rank, bx):
        if bx % 2 == 0:
            for _ in T.serial(bx + 1):
                T.barrier()

    reaches(level, right)


def test_conditions_on_another_level():
    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def f(A: T.Tensor((1,), "float32")):
            with T.Kernel(node=2, device=2, block=1, threads=32):
                with T.Scale("device"):
                    if T.rank("node") == 1:
                        T.allreduce(A)

    args = [[torch.ones(1)] for _ in range(4)]
    tilescale.emulate(f, args, machine="h200-sxm-8x4")
    assert [a.item() for (a,) in args] == [1, 1, 2, 2]
