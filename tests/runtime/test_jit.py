# SPDX-License-Identifier: MIT
"""`tilescale.jit` and `tilescale.compile`: both styles, outputs, caching, options, attributes of kernels."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.runtime import programs
from tilescale.errors import ArgumentError, LaunchError, UnknownMachineError, UnsupportedError, UsageError


def test_lazy_style_makes_kernels():
    x = torch.randn(100)
    kernel = programs.doubled(100)
    assert isinstance(kernel, tilescale.Kernel)
    assert torch.equal(kernel(x), 2 * x)


def test_eager_style_runs_at_once_and_returns_what_it_allocates():
    for n in (100, 33):
        x = torch.randn(n)
        assert torch.equal(programs.scaled(x), 3 * x)
    assert torch.equal(programs.scaled(x, factor=5), 5 * x)


def test_kernels_are_kept_for_the_same_arguments_and_machine():
    kernel = programs.doubled(96)
    assert programs.doubled(96) is kernel
    assert programs.doubled(97) is not kernel
    with tilescale.use_machine("b200-sxm-8"):
        other = programs.doubled(96)
        assert other.machine.name == "b200-sxm-8"
        assert torch.equal(programs.scaled(torch.ones(4)), torch.full((4,), 3.0))
    assert programs.doubled(96) is kernel
    assert kernel.machine.name != "b200-sxm-8"


def test_a_machine_given_to_jit_stays():
    @tilescale.jit(machine="a100-sxm-8")
    def factory(n: int):
        return programs.double(n)

    with tilescale.use_machine("b200-sxm-8"):
        assert factory(8).machine.name == "a100-sxm-8"


@pytest.mark.parametrize(
    ("out_idx", "given"), [(None, 2), (1, 1), (-1, 1), ([1], 1), ([0], 1), ([1, 0], 0)], ids=lambda v: str(v)
)
def test_outputs_are_allocated_and_returned(out_idx: object, given: int):
    kernel = tilescale.compile(programs.double(10), out_idx=out_idx)
    tensors = [torch.randn(10), torch.zeros(10)][:given]
    result = kernel(*tensors)
    if out_idx is None:
        assert result is None
        assert torch.equal(tensors[1], 2 * tensors[0])
    elif out_idx in (1, -1, [1]):
        assert torch.equal(result, 2 * tensors[0])
    elif given == 0:
        assert [tuple(t.shape) for t in result] == [(10,), (10,)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "float8_e4m3fn"])
def test_outputs_have_the_declared_type(dtype: str):
    x = torch.arange(8).to(getattr(torch, dtype))
    assert tilescale.compile(programs.double(8, dtype), out_idx=1)(x).dtype == x.dtype


def test_an_output_of_unknown_extent_is_an_error():
    n, m = T.dynamic("n"), T.dynamic("m")

    @T.prim_func
    def orphan(X: T.Tensor((n,), "float32"), Y: T.Tensor((m,), "float32")):
        with T.Kernel(1, threads=32):
            Y[0] = X[0]

    with pytest.raises(ArgumentError, match="the shape of output 'Y' does not follow"):
        tilescale.compile(orphan, out_idx=1)(torch.ones(3))


def test_extents_are_bound_at_each_call():
    kernel = tilescale.compile(programs.double(T.dynamic("n")), out_idx=1)
    for n in (1, 40, 7):
        x = torch.randn(n)
        assert torch.equal(kernel(x), 2 * x)


def test_calls_repeat():
    kernel = programs.doubled(40)
    for _ in range(3):
        x = torch.randn(40)
        assert torch.equal(kernel(x), 2 * x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "magic"}, "supported: overlap"),
        ({"out_idx": 2}, "has 2 parameters"),
        ({"out_idx": [0, -3]}, "has 2 parameters"),
    ],
    ids=lambda v: str(v),
)
def test_wrong_options(options: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message):
        tilescale.compile(programs.double(8), **options)(torch.ones(8))


def test_wrong_things_to_compile():
    with pytest.raises(UnknownMachineError):
        tilescale.compile(programs.double(8), machine="abacus")
    with pytest.raises(UsageError, match="expected a @T.prim_func, got a plain function"):
        tilescale.compile(lambda: None)
    with pytest.raises(TypeError):
        tilescale.compile(programs.double(8), colour="red")


def test_options_reach_the_compiler():
    func = programs.double(8)
    assert "sm_" not in tilescale.compile(func, target={"kind": "cuda", "arch": "sm_80"}).source
    fast = tilescale.compile(func, pass_configs={"tl.enable_fast_math": True})
    assert fast.options["pass_configs"] == {"tl.enable_fast_math": True}
    assert fast.source


def test_source_of_a_plain_program():
    kernel = tilescale.compile(programs.double(64))
    assert "__global__" in kernel.source and "double_program" in kernel.source
    assert kernel.get_kernel_source() == kernel.source


@pytest.mark.parametrize("program", [programs.double, programs.total])
def test_source_needs_a_machine_with_a_cuda_target(program: Callable[[int], object], tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text("extends: mi300x-8\nidentify: {architecture: ''}\n", encoding="utf-8")
    assert f"{program.__name__}_program" in tilescale.compile(program(4)).source
    with pytest.raises(UnsupportedError, match="no CUDA compute capability"):
        _ = tilescale.compile(program(4), machine=str(other)).source


def test_ir_is_what_was_traced():
    func = programs.total(4)
    assert tilescale.compile(func).ir is func
    retraced = tilescale.compile(func, machine="gb200-nvl72").ir
    assert "tilescale.allreduce" in retraced.script() and not retraced.same_as(func)


def test_schedule_tells_shares_phases_and_implementations():
    text = tilescale.compile(programs.matmul(4)).schedule
    lines = [line.strip() for line in text.splitlines()]
    assert lines[1] == "each device passes A (32, 16) float32, B (16, 32) float32, C (32, 32) float32"
    assert lines[2].startswith("launch 4 x device, grid 1 of blocks")
    assert lines[3] == "1. each block: copy, fill, gemm"
    assert lines[4] == "2. each device: allreduce(C) between devices"


def test_schedule_shows_loops_and_what_was_asked_for():
    @T.prim_func
    def looped(X: T.Tensor((64,), "float32")):
        with T.Kernel(device=2, block=2, threads=32) as b:
            for _ in T.serial(3):
                with T.Scale("block"):
                    for i in T.Parallel(32):
                        X[b * 32 + i] += 1
                with T.Scale("device"):
                    T.allreduce(X, impl="ring")

    text = tilescale.compile(looped).schedule
    assert "for _ in 0..2:" in text
    assert "element-wise statements" in text
    assert "allreduce(X) between devices by ring" in text


@pytest.mark.parametrize("phase", ["blocks", "devices"])
def test_an_extent_that_a_minimum_bounds_is_estimated_by_its_bound(phase: str):
    @T.prim_func
    def bounded(X: T.Tensor((1 << 20,), "float32"), Y: T.Tensor((1 << 20,), "float32"), B: T.int32):
        with T.Kernel(device=2, block=1, threads=32):
            if phase == "blocks":
                with T.Scale("block"):
                    n = T.min(B, 8)
                    with T.Scale("device") as (rank, _):
                        T.copy(X[0:n], Y[0:n], dst=1 - rank)
            else:
                with T.Scale("device") as (rank, _):
                    T.copy(X[0 : T.min(B, 8)], Y[0 : T.min(B, 8)], dst=1 - rank)

    schedule = tilescale.compile(bounded).schedule
    assert "for at most 32 B" in schedule and " us for" in schedule


def test_an_extent_without_a_minimum_is_bounded_by_its_tensor():
    @T.prim_func
    def open_(X: T.Tensor((1024,), "float32"), Y: T.Tensor((1024,), "float32"), B: T.int32):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                T.copy(X[0:B], Y[0:B], dst=1 - rank)

    assert "for at most 4 KiB" in tilescale.compile(open_).schedule


def test_report_says_what_each_device_did():
    kernel = tilescale.compile(programs.double(64))
    assert kernel.report is None
    kernel(torch.ones(64), torch.ones(64))
    assert [a.programs for a in kernel.report.activity] == [2]


def test_more_devices_than_ranks():
    kernel = tilescale.compile(programs.total(4))
    with pytest.raises(LaunchError, match=r"launches 4 devices .*\(device=4\), the job has 1 rank") as info:
        kernel(torch.ones(64), torch.ones(64))
    assert "tilescale run -n 4" in str(info.value)
    assert info.value.where[0].file == programs.__file__


def test_one_rank_is_enough_for_as_many_devices_as_there_are():
    x, y = torch.randn(64), torch.zeros(64)
    tilescale.compile(programs.total(T.ALL))(x, y)
    assert torch.equal(x, y)


def test_a_kernel_says_where_it_wants_its_tensors():
    assert tilescale.compile(programs.double(8)).device == "cpu"


def test_positions_of_outputs_in_eager_style_are_refused():
    @tilescale.jit(out_idx=[1], machine="h200-sxm-8")
    def plus_one(A, B):
        n = T.const("n")
        A: T.Tensor[[n], T.float32]
        B: T.Tensor[[n], T.float32]
        with T.Kernel(1, threads=64):
            for i in T.Parallel(n):
                B[i] = A[i] + 1

    with pytest.raises(UsageError, match=r"out_idx=\[1\] of a function in eager style") as found:
        plus_one(torch.zeros(64))
    assert "T.empty" in str(found.value)
