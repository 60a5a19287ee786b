# SPDX-License-Identifier: MIT
"""`T.alloc` and `T.view`: memory layers, whose a tile is, and the part of it that a unit sees."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale.errors import AllocationTooLargeError, LayoutError, PhaseError, ShapeError, UnknownLayerError, UsageError
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse


def allocated(func, machine: str = "h200-sxm-8") -> dict[str, str]:
    (launch,) = analyse(func, Machine.load(machine)).launches
    return {buffer.name: buffer.scope() for buffer in launch.buffers}


def owners(func) -> dict[str, str]:
    (launch,) = analyse(func, Machine.load("h200-sxm-8")).launches
    names = {buffer.data: buffer.name for buffer in launch.buffers}
    return {names[var]: level for var, level in launch.owners}


def test_layers_become_scopes():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(2, threads=128) as bx:
            a = T.alloc((8,), "float32", level="l0")
            b = T.alloc((8, 8), "bfloat16", level="l1")
            c = T.alloc(8, "int32", level="l2")
            d = T.alloc([8], "float32")
            A[bx] = a[0] + b[0, 0] + c[0] + d[0]

    assert allocated(f) == {"a": "local.fragment", "b": "shared.dyn", "c": "global", "d": "shared.dyn"}


def test_a_layer_of_several_scopes():
    with tilescale.use_machine("wafer-mesh"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(core=2):
                a = T.alloc((8,), "float32", level="l0")
                A[0] = a[0]

    assert allocated(f, "wafer-mesh") == {"a": "shared.dyn"}
    with tilescale.use_machine("cpu-node"):

        @T.prim_func
        def g(A: T.Tensor((8,), "float32")):
            with T.Kernel(socket=2, core=2):
                a = T.alloc((8,), "float32", level="l2")
                A[0] = a[0]

    assert allocated(g, "cpu-node") == {"a": "global"}


def test_a_tile_belongs_to_the_units_that_execute():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, cta_cluster=2, block=4, threads=128):
            with T.Scale("cta_cluster"):
                a = T.alloc((8,), "float32")
                with T.Scale("block"):
                    b = T.alloc((8,), "float32")
                    c = T.alloc_shared((8,), "float32")
                    with T.Scale("warpgroup"):
                        d = T.alloc((8,), "float32", level="l0")
                        e = T.alloc_fragment((8,), "float32")
                        with T.Scale("device"):
                            g = T.alloc((8,), "float32")
                            A[0] = a[0] + b[0] + c[0] + d[0] + e[0] + g[0]

    assert owners(f) == {
        "a": "cta_cluster", "b": "block", "c": "block", "d": "warpgroup", "e": "warpgroup", "g": "warpgroup",
    }  # fmt: skip


def test_symbolic_extents():
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device"):
                work = T.alloc((n,), "float32", level="l2")
                T.copy(A, work)
                T.allreduce(work)
                T.copy(work, A)

    args = [[torch.full((5,), 1.0 + r)] for r in range(2)]
    tilescale.emulate(f, args)
    assert args[0][0].tolist() == [3.0] * 5


# -- views -------------------------------------------------------------------------------------------------------------


def shares(layout, shape=(4, 8), level="warp", units=4) -> torch.Tensor:
    """Stores of each unit: a tile in which every element has the rank of the unit that saw it."""

    @T.prim_func
    def f(A: T.Tensor(shape, "int32")):
        with T.Kernel(1, threads=32 * units):
            a = T.alloc(shape, "int32")
            with T.Scale(level) as rank, size:
                T.fill(T.view(a, layout=layout), rank)
            T.copy(a, A)

    tile = torch.full(shape, -1, dtype=torch.int32)
    tilescale.emulate(f, [tile])
    return tile


ROWS, COLUMNS = torch.meshgrid(torch.arange(4), torch.arange(8), indexing="ij")


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        (T.FullRow, ROWS),
        (T.FullCol, COLUMNS // 2),
        (T.Shard(0), ROWS),
        (T.Shard(1), COLUMNS // 2),
        (T.Shard(-1), COLUMNS // 2),
        (T.Shard(1, block=1), COLUMNS % 4),
        (lambda i, j: i, ROWS),
        (lambda i, j: j // 2, COLUMNS // 2),
        (lambda i, j: j % 4, COLUMNS % 4),
    ],
    ids="FullRow FullCol Shard0 Shard1 Shard-1 cyclic rows blocks function-cyclic".split(),
)
def test_views_of_a_tile(layout, wanted: torch.Tensor):
    assert shares(layout).tolist() == wanted.tolist()


def test_a_replica_is_the_whole_tile_of_every_warp():
    @T.prim_func
    def f(A: T.Tensor((4, 8), "int32"), S: T.Tensor((4, 2), "int32")):
        with T.Kernel(1, threads=128):
            a = T.alloc((4, 8), "int32")
            with T.Scale("warp") as (rank, _):
                mine = T.view(a, layout=T.Replica)
                T.fill(mine, 10 * rank)
                T.allreduce(mine, op="max")  # read as a whole, a replica has to be the same on all
                S[rank, 0] = mine.shape[0]
                S[rank, 1] = mine.shape[1]
            T.copy(a, A)

    a, shapes = torch.full((4, 8), -1, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    tilescale.emulate(f, [a, shapes])
    assert (a == 30).all() and shapes.tolist() == [[4, 8]] * 4


def test_view_of_a_slice_and_of_a_view():
    @T.prim_func
    def f(A: T.Tensor((8, 8), "int32")):
        with T.Kernel(1, threads=256):
            a = T.alloc((8, 8), "int32")
            T.fill(a, -1)
            with T.Scale("warpgroup") as g, gs:
                mine = T.view(a[4:8, :], layout=T.FullRow)
                with T.Scale("warp") as w, ws:
                    T.fill(T.view(mine, layout=T.FullCol), g * 10 + w)
            T.copy(a, A)

    a = torch.zeros(8, 8, dtype=torch.int32)
    tilescale.emulate(f, [a])
    rows = [[-1] * 8] * 4 + [[0, 0, 1, 1, 2, 2, 3, 3]] * 2 + [[10, 10, 11, 11, 12, 12, 13, 13]] * 2
    assert a.tolist() == rows


@pytest.mark.parametrize(
    ("layout", "shard"),
    [
        (T.FullRow, (2, 8)),
        (T.FullCol, (8, 2)),
        (T.Replica, (8, 8)),
        (T.Shard(1, block=1), (8, 2)),
        (T.Shard(0, block=2), (2, 8)),
        (lambda i, j: j // 2, (8, 2)),
    ],
)
def test_views_of_a_parameter_say_what_each_device_passes(layout, shard: tuple[int, int]):
    @T.prim_func
    def f(A: T.Tensor((8, 8), "int32"), S: T.Tensor((2,), "int32")):
        with T.Kernel(device=4, block=1, threads=32):
            with T.Scale("device"):
                mine = T.view(A, layout=layout)
                S[0] = mine.shape[0]
                S[1] = mine.shape[1]
                for i, j in T.grid(mine.shape[0], mine.shape[1]):
                    mine[i, j] += 1  # a replica's final contents are the same on every device

    args = [[torch.zeros(shard, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)] for _ in range(4)]
    tilescale.emulate(f, args)
    for mine, shape in args:
        assert shape.tolist() == list(shard) and (mine == 1).all()


def test_symbolic_shards():
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n, 4), "float32"), S: T.Tensor((1,), "int32")):
        with T.Kernel(device=T.ALL, block=1, threads=32):
            with T.Scale("device"):
                S[0] = T.view(A, layout=T.FullRow).shape[0]

    args = [[torch.zeros(3, 4), torch.zeros(1, dtype=torch.int32)] for _ in range(4)]
    tilescale.emulate(f, args)
    assert [s.item() for _, s in args] == [3] * 4


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_unknown_layer(mistake):
    with mistake(UnknownLayerError, "no memory layer 'L1'", "l0 (registers), l1 (shared memory)"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(2, threads=128):
                a = T.alloc((8,), "float32", level="L1")  # <-
                A[0] = a[0]


def test_a_layer_without_tiles(mistake):
    with mistake(UsageError, "no tiles in layer 'l3' (host memory)", "l0, l1, l2"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(2, threads=128):
                a = T.alloc((8,), "float32", level="l3")  # <-
                A[0] = a[0]


@pytest.mark.parametrize(
    ("level", "shape", "asked", "there"),
    [
        ("l1", (256, 512), "512 KiB", "227 KiB"),
        ("l0", (256, 256), "256 KiB", "127.5 KiB"),
        ("l2", (1 << 19, 1 << 17), "256 GiB", "140.4 GiB"),
    ],
)
def test_a_tile_too_large(mistake, level: str, shape: tuple[int, int], asked: str, there: str):
    with mistake(AllocationTooLargeError, asked, there, repr(level), "h200-sxm-8", "make the tile smaller"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(2, threads=128):
                a = T.alloc(shape, "float32", level=level)  # <-
                A[0] = a[0, 0]


def test_the_programs_of_a_cluster_hold_a_tile_together(mistake):
    @T.prim_func
    def f(A: T.Tensor((256, 256), "float32")):
        with T.Kernel(cta_cluster=2, block=2, threads=256):
            with T.Scale("cta_cluster"):
                a = T.alloc((256, 256), "float32", level="l0")
                T.copy(A, a)

    with mistake(AllocationTooLargeError, "512 KiB", "510 KiB", "l0"):

        @T.prim_func
        def g(A: T.Tensor((256, 512), "float32")):
            with T.Kernel(cta_cluster=2, block=2, threads=256):
                with T.Scale("cta_cluster"):
                    a = T.alloc((256, 512), "float32", level="l0")  # <-
                    T.copy(A, a)


@pytest.mark.parametrize("shape", [(-64,), (64, 4 / 2), "float32", None])
@pytest.mark.parametrize("alloc", [T.alloc, T.alloc_flags])
def test_shapes_that_are_none(mistake, alloc, shape):
    with mistake(ShapeError, f"of shape {shape!r}: an extent is an integer from 0 on"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=4, block=2, threads=128):
                alloc(shape, "int32")  # <-


@pytest.mark.parametrize("dtype", ["f32", (8,), None])
@pytest.mark.parametrize("alloc", [T.alloc, T.alloc_flags])
def test_data_types_that_are_none(mistake, alloc, dtype):
    with mistake(UsageError, f"dtype={dtype!r} is not a data type", "torch's type"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=4, block=2, threads=128):
                alloc((8,), dtype)  # <-


def test_extents_of_zero_and_types_of_torch():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            T.alloc((0, 8), torch.float16)
            flags = T.alloc_flags((0,), torch.int64)
            tile = T.alloc((8,), torch.float32)
            T.fill(tile, 3)
            for i in T.serial(0):
                T.wait(flags[i], ">=", 1)
            T.copy(tile, A)

    tilescale.emulate(f, [a := torch.zeros(8)])
    assert a.tolist() == [3] * 8


@pytest.mark.parametrize("level", ["l0", "l1"])
def test_on_chip_tile_in_a_device_phase(mistake, level: str):
    with mistake(PhaseError, "phase of level 'device'", "runs no threads", "T.Scale('block')"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=2, block=2, threads=128):
                with T.Scale("device"):
                    a = T.alloc((8,), "float32", level=level)  # <-
                    A[0] = a[0]


def test_alloc_outside_a_launch(mistake):
    with mistake(UsageError, "T.alloc needs a launch"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            a = T.alloc((8,), "float32", level="l2")  # <-
            with T.Kernel(2, threads=128):
                A[0] = a[0]


def test_view_without_a_scale(mistake):
    with mistake(UsageError, "T.view needs a T.Scale around it", "with T.Scale"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=2, block=2, threads=128):
                a = T.view(A, layout=T.FullRow)  # <-
                A[0] = a[0]


def test_a_dimension_that_does_not_divide(mistake):
    with mistake(ShapeError, "dimension 1 of (8, 10) has 10 elements", "among 4 units", "multiple of 4"):

        @T.prim_func
        def f(A: T.Tensor((8, 10), "float32")):
            with T.Kernel(device=4, block=2, threads=128):
                with T.Scale("device"):
                    a = T.view(A, layout=T.FullCol)  # <-
                    a[0, 0] = 1


def test_blocks_that_do_not_divide(mistake):
    with mistake(ShapeError, "has 8 elements", "in blocks of 4", "multiple of 16"):

        @T.prim_func
        def f(A: T.Tensor((8, 10), "float32")):
            with T.Kernel(device=4, block=2, threads=128):
                with T.Scale("device"):
                    a = T.view(A, layout=T.Shard(0, block=4))  # <-
                    a[0, 0] = 1


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (lambda i, j: i // 4 + j // 4, "splits dimensions 0, 1"),
        (lambda i, j: 0, "splits no dimension"),
        (lambda i, j: i * i % 4, "not a block or cyclic split of dimension 0"),
        (lambda i, j: min(i, 3), "not a block or cyclic split"),
        (lambda i: i, "the layout function failed"),
        (lambda i, j: i // 0, "the layout function failed"),
        ("rows", "layout='rows' is not a layout"),
        (T.Shard(2), "splits dimension 2, but the tile has 2"),
    ],
)
def test_layouts_that_are_none(mistake, layout, text: str):
    with mistake(LayoutError, text):

        @T.prim_func
        def f(A: T.Tensor((8, 8), "float32")):
            with T.Kernel(device=4, block=2, threads=128):
                with T.Scale("device"):
                    a = T.view(A, layout=layout)  # <-
                    a[0, 0] = 1


def test_layout_errors_say_what_is_recognised():
    with pytest.raises(LayoutError, match=r"T\.Replica, T\.FullRow.*block-cyclic"):

        @T.prim_func
        def f(A: T.Tensor((8, 8), "float32")):
            with T.Kernel(device=4, block=2, threads=128):
                with T.Scale("device"):
                    T.view(A, layout=lambda i, j: i + j)


def test_layout_function_of_symbolic_extents(mistake):
    n = T.dynamic("n")
    with mistake(LayoutError, "constant extents", "T.FullRow"):

        @T.prim_func
        def f(A: T.Tensor((n, 8), "float32")):
            with T.Kernel(device=4, block=2, threads=128):
                with T.Scale("device"):
                    a = T.view(A, layout=lambda i, j: i % 4)  # <-
                    a[0, 0] = 1


def test_view_of_a_slice_of_a_parameter(mistake):
    with mistake(UsageError, "slice of 'A'", "view the whole tensor and slice the view"):

        @T.prim_func
        def f(A: T.Tensor((8, 8), "float32")):
            with T.Kernel(device=4, block=2, threads=128):
                with T.Scale("device"):
                    a = T.view(A[0:4, :], layout=T.FullRow)  # <-
                    a[0, 0] = 1


@pytest.mark.parametrize("swapped", [False, True])
def test_a_layout_without_its_name(mistake, swapped: bool):
    with mistake(UsageError, "T.view(layout=) takes one tile", "T.view(buffer, layout=...)"):

        @T.prim_func
        def f(A: T.Tensor((8, 8), "float32")):
            with T.Kernel(device=4, block=2, threads=128):
                with T.Scale("device"):
                    T.view(*((T.FullRow, A) if swapped else (A, T.FullRow)))  # <-


def test_a_dimension_that_is_no_number(mistake):
    with pytest.raises(LayoutError, match="a dimension is named by its number"):
        T.Shard("rows")


@pytest.mark.parametrize("arguments", [{"shape": (4, 16)}, {"dtype": "int32"}])
def test_layout_beside_a_reshape(mistake, arguments: dict):
    with mistake(UsageError, "T.view(layout=) takes one tile", "a second T.view"):

        @T.prim_func
        def f(A: T.Tensor((8, 8), "float32")):
            with T.Kernel(device=4, block=2, threads=128):
                with T.Scale("device"):
                    a = T.view(A, layout=T.FullRow, **arguments)  # <-
                    a[0, 0] = 1
