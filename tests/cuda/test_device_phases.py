# SPDX-License-Identifier: MIT
"""Device phases taken apart: what the host does with whole tensors, what becomes a grid, what is declined."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda import programs
from tests.cuda.support import notes, program, source
from tests.cuda.test_thread_groups import interpret
from tilelang_core import ir
from tilescale.backends.cuda import headers
from tilescale.backends.tilelang.lowering.host_step import HostStep
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.plan import plan
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine
from tilescale.program.model import Control, GridPhase, Launch, Part, Sequence


def steps(func: Any, sizes: dict[str, int] | None = None, machine: str = "h200-sxm-8", nccl: bool = True) -> list[str]:
    """The plan in words: host steps by operation and implementation, grids by programs x threads."""
    levels = tuple((sizes or {"device": 4}).items())
    target = LoweringTarget(Machine.load(machine), levels, 1 << 36, headers.__name__, nccl)
    return list(_words(plan(program(func, machine), target)[0], None))


def _words(part: Part, launch: Launch | None) -> Iterator[str]:
    if isinstance(part, Launch):
        yield from _words(part.body, part)
    elif isinstance(part, Sequence):
        for inner in part.parts:
            yield from _words(inner, launch)
    elif isinstance(part, Control):
        yield type(part.stmt).__name__
        for inner in part.parts:
            yield from (f"  {line}" for line in _words(inner, launch))
    elif isinstance(part, GridPhase):
        yield f"grid {ir.constant(launch.grid[0])} x {launch.thread_count}"
    elif isinstance(part, HostStep) and not isinstance(part.stmt, ir.Bind):
        yield f"{(ir.op_name(part.call) or '').rpartition('.')[2]} {part.impl}".strip()


def on_devices(statements: Any, devices: int = 4) -> Any:
    """Trace the macro `statements(X, Y, L, flags)` in a device phase."""

    @T.prim_func
    def f(
        X: T.Tensor((64, 32), "float32"),
        Y: T.Tensor((64, 32), "float32"),
        L: T.Tensor((64,), "float32"),
        flags: T.Tensor((8,), "int32"),
    ):
        with T.Kernel(device=devices):
            with T.Scale("device") as (rank, size):
                statements(X, Y, L, flags, rank, size)

    return f


def test_all_kinds_of_statements():
    assert steps(programs.steps()) == [
        "fill",
        "barrier",
        "For",
        "  grid 1 x 1",
        "  allreduce nccl",
        "  grid 2 x 256",
        "grid 1 x 1",
        "grid 6 x 64",
    ]


def test_a_put_with_signal_is_a_copy_and_a_program_that_tells():
    assert steps(programs.whole_copy("copy_engine")) == ["copy copy_engine", "grid 1 x 1"]
    assert steps(programs.whole_copy("lsu", rows=256)) == ["grid 4 x 256", "grid 1 x 1"]
    assert steps(programs.whole_copy(rows=256)) == ["grid 4 x 256", "grid 1 x 1"]


def test_a_combination_of_the_users_goes_tile_by_tile_or_gathers_first():
    assert steps(programs.merged_tensors("one_shot", rows=256)) == ["grid 4 x 256"]
    assert steps(programs.merged_tensors("nccl", rows=256)) == [
        "all_gather nccl",
        "all_gather nccl",
        "grid 4 x 256",
        "grid 1 x 256",
    ]
    assert steps(programs.merged_tensors(rows=1 << 16))[0] == "all_gather nccl"


@pytest.mark.parametrize(
    ("impl", "wanted"),
    [("nccl", ["all_gather nccl"]), ("copy_engine", ["all_gather copy_engine"]), ("direct", ["all_gather direct"])],
)
def test_implementations_of_an_all_gather(impl: str, wanted: list[str]):
    @T.prim_func
    def gather(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((256, 32), "float32")):
        with T.Kernel(device=4):
            with T.Scale("device"):
                T.all_gather(X, Y, impl=impl)

    assert steps(gather) == wanted
    source(gather)


def test_groups_of_one_level_of_several():
    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def both(X: T.Tensor((64, 32), "float32"), L: T.Tensor((64,), "float32")):
            with T.Kernel(node=2, device=4):
                with T.Scale("device"):
                    T.allreduce(X)
                    T.allreduce(X, L, fn=programs.merge)
                with T.Scale("node"):
                    T.allreduce(X, op="max")

    sizes = {"node": 2, "device": 4}
    assert steps(both, sizes, "h200-sxm-8x4") == [
        "allreduce one_shot",
        "all_gather nccl",
        "all_gather nccl",
        "grid 1 x 256",
        "grid 1 x 256",
        "allreduce nccl",
    ]
    assert "between nodes: nccl" in notes(both, "h200-sxm-8x4")[-1]


def test_sizes_that_are_left_open():
    rows = T.dynamic("rows")

    @T.prim_func
    def shift(X: T.Tensor((rows, 32), "float32"), Y: T.Tensor((rows, 32), "float32"), flags: T.Tensor((4,), "int32")):
        with T.Kernel(device=T.ALL):
            with T.Scale("device") as (rank, size):
                for step in T.serial(size):
                    T.copy(X, Y, dst=(rank + 1) % size, signal=flags[0])
                    T.wait(flags[0], ">=", size * step)

    assert steps(shift) == ["For", "  copy copy_engine", "  grid 1 x 1"]
    assert "a size known at launch" in notes(shift)[0]
    source(shift)


def test_values_of_a_device_phase_reach_later_grids():
    text = source(programs.steps())
    last = text[text.rindex("mixed_3_kernel(") :]
    assert "device_rank) + (int64_t)1" in last, "`right` was bound in the device phase"


def test_parallel_loops_of_any_extent_are_spread():
    @T.prim_func
    def scale(X: T.Tensor((1000, 7), "float32"), Z: T.Tensor((9001,), "float32")):
        with T.Kernel(device=4):
            with T.Scale("device"):
                T.barrier()
                for i, j in T.Parallel(1000, 7):
                    X[i, j] = X[i, j] * 2
                for i in T.Parallel(9001):
                    Z[i] = Z[i] * 2

    assert steps(scale) == ["barrier", "grid 2 x 256", "grid 3 x 256"]
    source(scale)


@pytest.mark.parametrize("shape", [(3, 100, 70), (5, 2, 4096), (2, 3, 5000)])
def test_nests_of_parallel_loops_are_spread_over_all_programs(shape: tuple[int, int, int]):
    """Run as the plain function that the kernel is: every element is reached once."""

    @T.prim_func
    def add(X: T.Tensor(shape, "int32")):
        with T.Kernel(device=2):
            with T.Scale("device"):
                for i, j, k in T.Parallel(*shape):
                    X[i, j, k] += (i * shape[1] + j) * shape[2] + k

    (words,) = steps(add, {"device": 2})
    assert -(-math.prod(shape) // 4096) <= int(words.split()[1]) <= 2 * math.prod(shape) // 4096
    x = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    given = x.clone()
    interpret(add, [given])
    assert torch.equal(given, 2 * x)


def test_a_combination_of_many_devices_is_no_longer_text_than_a_few_make():
    """The combination of the first devices is computed once, not again for each next device."""
    of_four, of_eight = (len(source(programs.merged_tensors("one_shot", devices=n))) for n in (4, 8))
    assert of_eight < 2.5 * of_four


def test_a_sum_into_another_tensor_is_one_step():
    @T.macro
    def statements(X, Y, L, flags, rank, size):
        T.allreduce(X, out=Y)

    assert steps(on_devices(statements)) == ["allreduce one_shot"]
    assert steps(on_devices(statements, 1), {"device": 1}) == ["allreduce one_shot"], "its own tensor is copied"
    text = tilescale.compile(on_devices(statements), machine="h200-sxm-8", schedule="sequential").python
    assert "T.allreduce(X, out=Y)" in text


def norm(devices: int, residual: bool = True, impl: str | None = "one_shot") -> Any:
    rows = T.dynamic("rows")

    @T.prim_func
    def f(
        X: T.Tensor((rows, 64), "float16"),
        R: T.Tensor((rows, 64), "float16"),
        W: T.Tensor((64,), "float16"),
        Z: T.Tensor((rows, 64), "float16"),
    ):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                T.allreduce_rms_norm(X, W, Z, R, residual=R if residual else None, eps=0.25, impl=impl)

    return f


def test_a_sum_with_a_norm_is_one_step():
    for impl in ("one_shot", "two_shot"):
        assert steps(norm(4, impl=impl)) == [f"allreduce {impl}"]
    with pytest.raises(UnsupportedError, match="T.allreduce of X, R, W, Z between devices has no CUDA lowering"):
        steps(norm(1), {"device": 1})


@pytest.mark.parametrize(("residual", "words"), [(True, "residual=R, eps=0.25"), (False, "eps=0.25")])
def test_a_sum_with_a_norm_in_words(residual: bool, words: str):
    for impl, by in (None, ""), ("two_shot", ', impl="two_shot"'):
        text = tilescale.compile(norm(4, residual, impl), machine="h200-sxm-8", schedule="sequential").python
        assert f"T.allreduce_rms_norm(X, W, Z, R, {words}{by})" in text


@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_in_words(has_bias: bool):
    @T.prim_func
    def f(X: T.Tensor((8, 64), "float16"), W: T.Tensor((64,), "float16"), Z: T.Tensor((8, 64), "float16")):
        with T.Kernel(device=2):
            with T.Scale("device"):
                T.allreduce_layer_norm(X, W, W if has_bias else None, X, Z, residual=Z, impl="one_shot")

    assert steps(f, {"device": 2}) == ["allreduce one_shot"]
    text = tilescale.compile(f, machine="h200-sxm-8", schedule="sequential").python
    words = f"T.allreduce_layer_norm(X, W, {'W' if has_bias else None}, X, Z, residual=Z, eps=1e-05"
    assert f'{words}, impl="one_shot")' in text


def test_quantized_rows_in_words():
    @T.prim_func
    def f(
        X: T.Tensor((8, 256), "float16"),
        W: T.Tensor((256,), "float16"),
        Y: T.Tensor((8, 256), "float16"),
        Q: T.Tensor((8, 256), "float8_e4m3fn"),
        S: T.Tensor((8, 2), "float32"),
    ):
        with T.Kernel(device=2):
            with T.Scale("device"):
                how = {"scaling": "group", "power_of_two": True, "weight_offset": 1.0, "eps": 0.25}
                T.allreduce_rms_norm(X, W, None, Y, quantized=Q, scales=S, impl="one_shot", **how)

    assert steps(f, {"device": 2}) == ["allreduce one_shot"]
    text = tilescale.compile(f, machine="h200-sxm-8", schedule="sequential").python
    options = 'weight_offset=1.0, scaling="group", power_of_two=True, impl="one_shot"'
    assert f"T.allreduce_rms_norm(X, W, None, Y, quantized=Q, scales=S, eps=0.25, {options})" in text


def test_ranks_that_share_gpus_do_without_nccl():
    @T.macro
    def statements(X, Y, L, flags, rank, size):
        T.allreduce(X)
        T.broadcast(Y, root=1)
        T.reduce_scatter(X, Y[0:16, :])

    made = ["allreduce one_shot", "broadcast direct", "reduce_scatter direct"]
    assert steps(on_devices(statements), nccl=False) == made


def test_the_host_decides_on_values_in_device_memory():
    @T.macro
    def until(X, Y, L, flags, rank, size):
        while flags[0] < 3:
            T.allreduce(X, impl="nccl")
            if L[0] > 0.5 and size > 2:
                T.barrier()
            for _ in T.serial(flags[1]):
                T.clear(Y)
            flags[0] += 1

    assert steps(on_devices(until)) == [
        "While", "  allreduce nccl", "  IfThenElse", "    barrier", "  For", "    fill", "  grid 1 x 1"
    ]  # fmt: skip


def test_the_choice_is_in_the_schedule():
    text = tilescale.compile(programs.put_with_signal()).schedule
    assert "T.copy(tile, Y, dst=): lsu (estimated" in text and "tma" in text
    assert (
        "T.allreduce of X, logsum between devices: one_shot (estimated"
        in tilescale.compile(programs.merged_tensors()).schedule
    )


# -- what is declined --------------------------------------------------------------------------------------------------


@T.macro
def by_groups(X, Y, L, flags, rank, size):
    T.broadcast(X, impl="hierarchical_direct")  # <-


@T.macro
def by_bulk_copies(X, Y, L, flags, rank, size):
    T.copy(X, Y, dst=0, impl="tma")  # <-


@T.macro
def until_a_function(X, Y, L, flags, rank, size):
    if T.abs(L[0]) > 0:  # <-
        T.allreduce(X)


@T.macro
def until_a_value(X, Y, L, flags, rank, size):
    first = L[0]
    if first > 0:  # <-
        T.allreduce(X)


@T.macro
def until_a_variable(X, Y, L, flags, rank, size):
    total = T.alloc_var("float32")
    total = L[0]
    if total > 0:  # <-
        T.allreduce(X)


@T.macro
def read_before(X, Y, L, flags, rank, size):
    first = L[0]
    T.barrier()
    L[1] = first  # <-


@T.macro
def kept_across(X, Y, L, flags, rank, size):
    total = T.alloc_var("float32")
    total = L[0]
    T.barrier()
    L[1] = total  # <-


@pytest.mark.parametrize(
    ("statements", "found"),
    [
        (read_before, "'first', read from memory before"),
        (kept_across, "'total', which lives across"),
        (by_groups, "impl='hierarchical_direct' of T.broadcast: available here: direct, nccl, copy_engine"),
        (by_bulk_copies, "impl='tma': moves shared memory, the tile lies in global memory"),
        (until_a_function, "'fabs' in what decides what to launch"),
        (until_a_value, "'first', read from memory before"),
        (until_a_variable, "'total', which lives on the chip and decides what to launch"),
    ],
)
def test_what_has_no_lowering_names_its_line(statements: Any, found: str, mistake):
    func = on_devices(statements)
    with mistake(UnsupportedError, found):
        source(func)


def test_programs_cannot_start_the_copy_engine(mistake):
    @T.prim_func
    def f(X: T.Tensor((64, 32), "float32")):
        with T.Kernel(device=4, block=4, threads=64) as bx:
            tile = T.alloc((16, 32), "float32", level="l1")
            with T.Scale("block"), T.Scale("device"):
                T.copy(tile, X[bx * 16, 0], dst=0, impl="copy_engine")  # <-

    with mistake(UnsupportedError, "copy_engine", "is started by the host"):
        source(f)


def test_too_much_shared_memory_names_the_launch():
    """Stock TileLang also prefetches element-wise loads of a loop: the text shows their cost."""

    @T.prim_func
    def f(A: T.Tensor((512, 512), "float32"), C: T.Tensor((512, 128), "float32")):
        with T.Kernel(device=4, block=4, threads=128) as bx:
            with T.Scale("block"), T.Scale("device"):
                acc = T.alloc((128, 128), "float32", level="l0")
                T.clear(acc)
                for k in T.Pipelined(4, num_stages=2):
                    first = T.alloc((128, 128), "float32", level="l1")
                    second = T.alloc((128, 128), "float32", level="l1")
                    for i, j in T.Parallel(128, 128):
                        first[i, j] = A[bx * 128 + i, k * 128 + j]
                    T.copy(A[k * 128, 0], second)
                    T.gemm(first, second, acc)
                T.barrier()
                T.copy(acc, C[bx * 128, 0])

    with pytest.raises(
        tilescale.errors.AllocationTooLargeError, match=r"'f' takes 262144 bytes .* has 232448"
    ) as caught:
        source(f)
    assert caught.value.where[0].file == __file__
