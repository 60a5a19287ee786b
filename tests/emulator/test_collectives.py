# SPDX-License-Identifier: MIT
"""Collectives between devices: whole tensors in a device phase, tiles of the programs with one index."""

import math

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import DTYPES, OPS, WORLDS, assert_rounded, assert_same, blank, values, wide
from tilescale.collectives import records


def whole_tensors(world, name, src, dst, dtype, **options):
    """One collective in a device phase, from X to Y."""

    @T.prim_func
    def program(X: T.Tensor(src, dtype), Y: T.Tensor(dst, dtype)):
        with T.Kernel(device=world):
            with T.Scale("device"):
                getattr(T, name)(X, Y, **options)

    return program


def in_place(world, name, shape, dtype, **options):
    """One collective on X in a device phase."""

    @T.prim_func
    def program(X: T.Tensor(shape, dtype)):
        with T.Kernel(device=world):
            with T.Scale("device"):
                getattr(T, name)(X, **options)

    return program


def run(program, sources, dst=None, dtype="float32"):
    args = [[x.clone()] + ([] if dst is None else [blank(*dst, dtype=dtype)]) for x in sources]
    tilescale.emulate(program, args)
    if dst is not None:
        for given, (after, _) in zip(sources, args, strict=True):
            assert_same(after, given)
    return [a[-1] for a in args]


# -- whole tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_allreduce_of_every_type(op, dtype):
    sources = [values(r, 5, 7, dtype=dtype) for r in range(4)]
    for found in run(in_place(4, "allreduce", (5, 7), dtype, op=op), sources):
        assert_rounded(found, OPS[op]([wide(x) for x in sources]))


@pytest.mark.parametrize("world", WORLDS)
def test_allreduce_over_every_world_size(world):
    sources = [values(r, 13) for r in range(world)]
    for found in run(in_place(world, "allreduce", (13,), "float32"), sources):
        assert_rounded(found, OPS["sum"]([wide(x) for x in sources]))


@pytest.mark.parametrize("op", OPS)
def test_allreduce_into_another_tensor(op):
    @T.prim_func
    def program(X: T.Tensor((5, 7), "float32"), Y: T.Tensor((5, 7), "float32")):
        with T.Kernel(device=4):
            with T.Scale("device"):
                T.allreduce(X, op=op, out=Y)

    sources = [values(r, 5, 7) for r in range(4)]
    for found in run(program, sources, (5, 7)):
        assert_rounded(found, OPS[op]([wide(x) for x in sources]))


def test_half_precision_sums_round_once():
    """8 times 2048 + 1: added in float16 every 1 would be lost."""
    sources = [torch.tensor([2048.0] if r == 0 else [1.0], dtype=torch.float16) for r in range(8)]
    for found in run(in_place(8, "allreduce", (1,), "float16"), sources):
        assert found.item() == 2056  # 2055 is not a float16; ties go to even


def test_integers_wrap():
    sources = [torch.tensor([100, -100], dtype=torch.int8)] * 2
    for found in run(in_place(2, "allreduce", (2,), "int8"), sources):
        assert found.tolist() == [-56, 56]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reduce_scatter(dim, dtype):
    whole, part = [6, 9], [6, 9]
    part[dim] //= 3
    sources = [values(r, *whole, dtype=dtype) for r in range(3)]
    program = whole_tensors(3, "reduce_scatter", whole, part, dtype, dim=dim, impl="direct")  # which rounds once
    found = run(program, sources, part, dtype)
    total = OPS["sum"]([wide(x) for x in sources])
    for mine, expected in zip(found, total.chunk(3, dim), strict=True):
        assert_rounded(mine, expected)


@pytest.mark.parametrize("op", OPS)
def test_reduce_scatter_with_every_op(op):
    sources = [values(r, 8) for r in range(4)]
    found = run(whole_tensors(4, "reduce_scatter", (8,), (2,), "float32", op=op), sources, (2,))
    for mine, expected in zip(found, OPS[op]([wide(x) for x in sources]).chunk(4), strict=True):
        assert_rounded(mine, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 2, -2])
def test_all_gather(dim, dtype):
    part, whole = [2, 3, 5], [2, 3, 5]
    whole[dim] *= 5
    sources = [values(r, *part, dtype=dtype) for r in range(5)]
    for found in run(whole_tensors(5, "all_gather", part, whole, dtype, dim=dim), sources, whole, dtype):
        assert_same(found, torch.cat([wide(x) for x in sources], dim))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, -1])
def test_all_to_all(dim, dtype):
    shape = (6, 12)
    sources = [values(r, *shape, dtype=dtype) for r in range(6)]
    found = run(whole_tensors(6, "all_to_all", shape, shape, dtype, dim=dim), sources, shape, dtype)
    parts = [wide(x).chunk(6, dim) for x in sources]
    for rank, mine in enumerate(found):
        assert_same(mine, torch.cat([sent[rank] for sent in parts], dim))


@pytest.mark.parametrize("world", [1, 2, 7, 8])
@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather", "all_to_all"])
def test_every_collective_over_odd_world_sizes(name, world):
    src = (2 * world, 3) if name != "all_gather" else (2, 3)
    dst = {"reduce_scatter": (2, 3), "all_gather": (2 * world, 3), "all_to_all": (2 * world, 3)}[name]
    sources = [values(r, *src) for r in range(world)]
    expected = {
        "reduce_scatter": lambda r: OPS["sum"]([wide(x) for x in sources]).chunk(world)[r],
        "all_gather": lambda r: torch.cat([wide(x) for x in sources]),
        "all_to_all": lambda r: torch.cat([wide(x).chunk(world)[r] for x in sources]),
    }[name]
    for rank, found in enumerate(run(whole_tensors(world, name, src, dst, "float32"), sources, dst)):
        assert_rounded(found, expected(rank))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast(root, dtype):
    sources = [values(r, 3, 4, dtype=dtype) for r in range(3)]
    for found in run(in_place(3, "broadcast", (3, 4), dtype, root=root), sources):
        assert_same(found, sources[root])


def test_broadcast_from_a_root_that_is_known_at_run_time():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), root: T.int32):
        with T.Kernel(device=3):
            with T.Scale("device"):
                T.broadcast(X, root=root)

    sources = [values(r, 4) for r in range(3)]
    args = [[x.clone(), 1] for x in sources]
    tilescale.emulate(program, args)
    for x, _ in args:
        assert_same(x, sources[1])


# -- combinations of the user's ----------------------------------------------------------------------------------------


def test_allreduce_of_one_tile_with_a_function():
    @T.prim_func
    def program(X: T.Tensor((6,), "int32")):
        with T.Kernel(device=5):
            with T.Scale("device"):
                T.allreduce(X, fn=lambda a, b: a * b + a + b)

    sources = [values(r, 6, dtype="int32") for r in range(5)]
    args = [[x.clone()] for x in sources]
    tilescale.emulate(program, args)
    expected = OPS["prod"]([wide(x) + 1 for x in sources]) - 1
    for (found,) in args:
        assert_same(found, expected)


def test_allreduce_of_two_tiles_keeps_the_index_of_the_maximum():
    @T.prim_func
    def program(V: T.Tensor((16,), "float32"), N: T.Tensor((16,), "int32")):
        with T.Kernel(device=4):
            with T.Scale("device"):
                T.allreduce(
                    V,
                    N,
                    fn=lambda a, b: (T.max(a[0], b[0]), T.if_then_else(a[0] >= b[0], a[1], b[1])),
                )

    stack = torch.stack([values(r, 16) for r in range(4)])
    args = [[stack[r].clone(), torch.full((16,), r, dtype=torch.int32)] for r in range(4)]
    tilescale.emulate(program, args)
    for found, index in args:
        assert_same(found, stack.max(0).values)
        assert_same(index, stack.argmax(0))


def test_results_of_a_function_are_rounded_to_the_tiles_type():
    """Each in turn: a float16 times a float32 is a float32."""

    @T.prim_func
    def program(X: T.Tensor((4,), "float16"), W: T.Tensor((4,), "float32")):
        with T.Kernel(device=3):
            with T.Scale("device"):
                T.allreduce(X, W, fn=lambda a, b: (a[0] * a[1] + b[0], b[1]))

    args = [[values(r, 4, dtype="float16"), values(r + 9, 4)] for r in range(3)]
    first, second, third = ([x.clone() for x in pair] for pair in args)
    tilescale.emulate(program, args)
    before = (first[0] * first[1] + second[0]).half()
    for found, weight in args:
        assert_same(found, (before * second[1] + third[0]).half())
        assert_same(weight, third[1])


@pytest.mark.parametrize("world", [1, 3, 4])
def test_allreduce_of_three_tiles_merges_attention(world):
    """Outputs, maxima and sums of parts of the keys become those of all keys."""
    heads, dim, keys = 6, 8, 5

    def merge(a, b):
        (o1, m1, s1), (o2, m2, s2) = a, b
        m = T.max(m1, m2)
        w1, w2 = T.exp(m1 - m), T.exp(m2 - m)
        return o1 * w1 + o2 * w2, m, s1 * w1 + s2 * w2

    @T.prim_func
    def program(
        X: T.Tensor((heads, dim), "float32"), M: T.Tensor((heads,), "float32"), S: T.Tensor((heads,), "float32")
    ):
        with T.Kernel(device=world):
            with T.Scale("device"):
                T.allreduce(X, M, S, fn=merge)

    scores, content = values(1, world, heads, keys).double() * 4, values(2, world, keys, dim).double()
    args = []
    for part, v in zip(scores, content, strict=True):
        top = part.max(-1).values
        weights = torch.exp(part - top[:, None])
        args.append([(weights @ v).float(), top.float(), weights.sum(-1).float()])
    tilescale.emulate(program, args)
    every = torch.cat(list(scores), -1)
    expected = torch.softmax(every, -1) @ torch.cat(list(content))
    for out, top, total in args:
        torch.testing.assert_close(out.double() / total.double()[:, None], expected, rtol=1e-5, atol=1e-5)
        assert_same(top, every.max(-1).values.float())


# -- tiles of programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["l0", "l1"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_the_programs_with_one_index(dtype, level):
    """A grid of 2 x 3 tiles; each is reduced with its namesakes on 3 devices."""
    rows, columns = 4, 8

    @T.prim_func
    def program(X: T.Tensor((3 * rows, 2 * columns), dtype), Y: T.Tensor((3 * rows, 2 * columns), dtype)):
        with T.Kernel(device=3, block=(2, 3), threads=32) as (bx, by):
            with T.Scale("block"):
                tile = T.alloc((rows, columns), dtype, level=level)
                T.copy(X[by * rows, bx * columns], tile)
                with T.Scale("device"):
                    T.allreduce(tile)
                T.copy(tile, Y[by * rows, bx * columns])

    shape = (3 * rows, 2 * columns)
    sources = [values(r, *shape, dtype=dtype) for r in range(3)]
    for found in run(program, sources, shape, dtype):
        assert_rounded(found, OPS["sum"]([wide(x) for x in sources]))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tiles_scattered_gathered_and_exchanged(dim):
    world, rows, columns, blocks = 4, 8, 16, 3
    part = [rows, columns]
    part[dim] //= world

    @T.prim_func
    def program(
        X: T.Tensor((blocks, rows, columns), "float32"),
        P: T.Tensor((blocks, *part), "float32"),
        W: T.Tensor((blocks, rows, columns), "float32"),
        E: T.Tensor((blocks, rows, columns), "float32"),
    ):
        with T.Kernel(device=world, block=blocks, threads=64) as b:
            with T.Scale("block"):
                tile = T.alloc((rows, columns), "float32")
                share = T.alloc(part, "float32")
                whole = T.alloc((rows, columns), "float32")
                T.copy(X[b, 0, 0], tile)
                with T.Scale("device"):
                    T.reduce_scatter(tile, share, dim=dim)
                    T.all_gather(share, whole, dim=dim)
                T.copy(share, P[b, 0, 0])
                T.copy(whole, W[b, 0, 0])
                with T.Scale("device"):
                    T.all_to_all(tile, whole, dim=dim)
                    T.broadcast(tile, root=world - 1)
                T.copy(whole, E[b, 0, 0])
                T.copy(tile, X[b, 0, 0])

    axis = dim if dim < 0 else dim + 1
    sources = [values(r, blocks, rows, columns) for r in range(world)]
    args = [[x.clone(), blank(blocks, *part), blank(*x.shape), blank(*x.shape)] for x in sources]
    tilescale.emulate(program, args)
    total = OPS["sum"]([wide(x) for x in sources])
    for rank, (tile, share, whole, exchanged) in enumerate(args):
        assert_rounded(share, total.chunk(world, axis)[rank])
        assert_rounded(whole, total)
        assert_same(exchanged, torch.cat([x.chunk(world, axis)[rank] for x in sources], axis))
        assert_same(tile, sources[-1])


def test_programs_may_arrive_in_any_order():
    """More programs than are resident, devices out of step: tiles are still matched correctly."""
    world, blocks = 2, 300

    @T.prim_func
    def program(X: T.Tensor((blocks, 4), "int32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=world, block=blocks, threads=1024) as b:
            with T.Scale("block"):
                tile = T.alloc((4,), "int32")
                T.copy(X[b, 0], tile)
                with T.Scale("device") as (rank, _):
                    if rank == 1 and b % 7 == 0:
                        T.wait(F[0], ">=", 1)
                    if rank == 0 and b == 60:
                        T.signal(F[0], dst=1)
                    T.allreduce(tile)
                T.copy(tile, X[b, 0])

    sources = [values(r, blocks, 4, dtype="int32") for r in range(world)]
    args = [[x.clone(), torch.zeros(1, dtype=torch.int32)] for x in sources]
    tilescale.emulate(program, args)
    for x, _ in args:
        assert_same(x, sources[0] + sources[1])


# -- nodes and devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "devices"), [(2, 3), (4, 8)])
def test_hierarchical_allreduce(nodes, devices):
    """Scatter inside each node, reduce across nodes, gather inside: the all-reduce over all devices."""
    length = devices * 4

    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def program(X: T.Tensor((length,), "float32"), Y: T.Tensor((length,), "float32"), R: T.Tensor((2,), "int32")):
            with T.Kernel(node=nodes, device=devices):
                with T.Scale("device") as (rank, _):
                    part = T.alloc((length // devices,), "float32", level="l2")
                    T.reduce_scatter(X, part)
                    R[1] = rank
                with T.Scale("node") as (node, _):
                    T.allreduce(part)
                    R[0] = node
                with T.Scale("device"):
                    T.all_gather(part, Y)

    sources = [values(r, length) for r in range(nodes * devices)]
    args = [[x.clone(), blank(length), torch.zeros(2, dtype=torch.int32)] for x in sources]
    tilescale.emulate(program, args, machine="h200-sxm-8x4")
    expected = OPS["sum"]([wide(x) for x in sources])
    for number, (_, y, ranks) in enumerate(args):
        assert_rounded(y, expected)
        assert ranks.tolist() == [number // devices, number % devices]


def test_collectives_stay_inside_their_node():
    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def program(X: T.Tensor((4,), "int32"), Y: T.Tensor((4,), "int32")):
            with T.Kernel(node=3, device=2):
                with T.Scale("device"):
                    T.allreduce(X)
                with T.Scale("node"):
                    T.allreduce(Y, op="max")

    sources = [values(r, 4, dtype="int32") for r in range(6)]
    args = [[x.clone(), x.clone()] for x in sources]
    tilescale.emulate(program, args, machine="h200-sxm-8x4")
    for number, (x, y) in enumerate(args):
        node, device = divmod(number, 2)
        assert_same(x, sources[2 * node] + sources[2 * node + 1])
        assert_same(y, torch.stack(sources[device::2]).max(0).values)


def test_the_report_counts_what_was_exchanged():
    world, length = 3, 8
    sources = [values(r, length) for r in range(world)]
    args = [[x.clone()] for x in sources]
    report = tilescale.emulate(in_place(world, "allreduce", (length,), "float32"), args)
    (algorithm,) = {label.partition("(")[2][:-1] for a in report.activity for label in a.collectives}
    assert algorithm in records()
    assert [a.collectives for a in report.activity] == [{f"device allreduce ({algorithm})": 1}] * world
    assert [a.contributed for a in report.activity] == [4 * length] * world
    assert math.isfinite(report.wall_s) and f"device allreduce ({algorithm}) x1" in str(report)
