# SPDX-License-Identifier: MIT
"""Arguments of a call: what is refused and how, layouts in memory, DTensors, and which arguments a call changes."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import tilescale
import tilescale.language as T
from tests.kernels.registry import KERNELS
from tests.runtime import programs
from tilescale.errors import ArgumentError
from tilescale.hda.current import current_machine
from tilescale.passes.mod_analysis import written_parameters
from tilescale.passes.pipeline import analyse
from tilescale.runtime.placement import local_tensor

both_calls = pytest.mark.parametrize(
    "call",
    [lambda func, *given: tilescale.compile(func)(*given), lambda func, *given: tilescale.emulate(func, given)],
    ids=["compiled", "emulated"],
)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([torch.ones(8)], "called with 1 arguments"),
        ([torch.ones(8)] * 3, "called with 3 arguments"),
        ([torch.ones(8), torch.ones(9)], r"'Y' has shape \(9,\)"),
        ([torch.ones(8), torch.ones(8, 1)], r"'Y' has shape \(8, 1\)"),
        ([torch.ones(8), torch.ones(8, dtype=torch.float64)], "'Y' is torch.float64"),
        ([torch.ones(8), torch.ones(8, device="meta")], "'Y' is on meta, this program runs on cpu"),
        ([torch.ones(8), [0.0] * 8], "'Y' is list"),
        ([torch.ones(8).to_sparse(), torch.ones(8)], "'X' is a tensor of layout torch.sparse_coo"),
        ([torch.ones(8), torch.ones(8).to_sparse()], "'Y' is a tensor of layout torch.sparse_coo"),
        ([torch.ones(8), None], "'Y' is None, and 'double_program' uses it"),
    ],
)
def test_wrong_arguments(args: list[Any], message: str):
    with pytest.raises(ArgumentError, match=message) as info:
        tilescale.compile(programs.double(8))(*args)
    assert any(word in str(info.value) for word in ("double_program", "runs on cpu", "layout"))
    assert info.value.hint


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of a class that it may change
@both_calls
def test_a_nested_tensor_is_refused(call: Callable[..., Any]):
    with pytest.raises(ArgumentError, match="'X' is a nested tensor"):
        call(programs.double(8), torch.nested.nested_tensor([torch.ones(8)]), torch.ones(8))


@both_calls
@pytest.mark.parametrize("place", [0, 1])
def test_a_tensor_without_data_is_refused(call: Callable[..., Any], place: int):
    with FakeTensorMode():
        fake = torch.ones(8)
    given = [torch.ones(8), torch.ones(8)]
    given[place] = fake
    with pytest.raises(ArgumentError, match=f"'{'XY'[place]}' is a FakeTensor, which has no data"):
        call(programs.double(8), *given)


@both_calls
def test_what_no_statement_names_may_be_none(call: Callable[..., Any]):
    n = T.dynamic("n")

    @T.prim_func
    def second(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32"), Z: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                Y[i] = Y[i] + n

    y = torch.ones(8)
    call(second, None, y, None)
    torch.testing.assert_close(y, torch.full((8,), 9.0), rtol=0, atol=0)
    with pytest.raises(ArgumentError, match="'Y' is None"):
        call(second, y, None, None)


@both_calls
def test_an_extent_has_to_follow_from_what_is_passed(call: Callable[..., Any]):
    n = T.dynamic("n")

    @T.prim_func
    def scaled(X: T.Tensor((n,), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                Y[i] = n

    with pytest.raises(ArgumentError, match="n in the shape of 'X' does not follow from the arguments"):
        call(scaled, None, torch.ones(4))


def test_the_error_names_the_parameters_to_pass():
    with pytest.raises(ArgumentError, match="it takes 1: X"):
        tilescale.compile(programs.double(8), out_idx=1)()


def test_numbers_are_arguments_too():
    @T.prim_func
    def add(X: T.Tensor((8,), "float32"), amount: T.float32):
        with T.Kernel(1, threads=8):
            for i in T.Parallel(8):
                X[i] = X[i] + amount

    kernel, x = tilescale.compile(add), torch.zeros(8)
    kernel(x, 2.5)
    assert torch.equal(x, torch.full((8,), 2.5))
    with pytest.raises(ArgumentError, match="'amount' is str"):
        kernel(x, "2.5")


def shifted(dtype: str) -> Any:
    @T.prim_func
    def add(Y: T.Tensor((2,), "float32"), amount: getattr(T, dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(2):
                Y[i] = T.cast(amount, "float32") * 2

    return add


@both_calls
@pytest.mark.parametrize(
    ("dtype", "wrong", "says"),
    [
        ("int32", 3.7, "is 3.7, the program declares int32"),
        ("int32", 2**40, "goes from -2147483648 to 2147483647"),
        ("int32", float("nan"), "is nan, the program declares int32"),
        ("uint8", -1, "goes from 0 to 255"),
        ("int64", -(2**63) - 1, "goes from -9223372036854775808"),
        ("float32", 1e39, "float32 goes from -3.4"),
        ("float16", np.float64(1e5), "float16 goes from -65504.0 to 65504.0"),
        ("bool", 2, "goes from 0 to 1"),
    ],
)
def test_numbers_must_be_of_their_type(call: Callable[..., Any], dtype: str, wrong: Any, says: str):
    with pytest.raises(ArgumentError, match=re.escape(f"'amount' {says}" if says.startswith("is") else says)):
        call(shifted(dtype), torch.zeros(2), wrong)


@pytest.mark.parametrize(
    ("dtype", "given", "seen"),
    [
        ("int32", np.int64(-5), -5),
        ("int32", 4.0, 4),
        ("uint8", 255, 255),
        ("float32", 3, 3),
        ("float32", float("inf"), float("inf")),
        ("float16", 2049.0, 2048),
        ("bool", True, 1),
    ],
)
def test_numbers_are_rounded_to_their_type(dtype: str, given: Any, seen: float):
    y = torch.zeros(2)
    tilescale.compile(shifted(dtype))(y, given)
    assert y.tolist() == [2 * seen] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_tensors_need_not_be_contiguous(dtype: torch.dtype):
    kernel = tilescale.compile(programs.double(8, str(dtype).removeprefix("torch.")))
    x, y = torch.arange(16).to(dtype)[::2], torch.zeros(8, 3, dtype=dtype)
    kernel(x, y[:, 1])
    assert torch.equal(y[:, 1], 2 * x)
    assert not y[:, 0].any() and not y[:, 2].any()


def test_tensors_may_require_gradients():
    x, y = torch.randn(8, requires_grad=True), torch.zeros(8)
    tilescale.compile(programs.double(8))(x, y)
    assert torch.equal(y, 2 * x.detach())


@both_calls
def test_what_cannot_take_results_is_refused(call: Callable[..., Any]):
    program, x = programs.double(8), torch.ones(8)
    lazy = torch.complex(torch.zeros(8), torch.zeros(8)).conj().imag
    for wrong, says in (torch.zeros(1).expand(8), "several of its elements are one"), (lazy, "lazy negative"):
        with pytest.raises(ArgumentError, match=f"'Y' is written and .*{says}"):
            call(program, x, wrong)
    y = torch.zeros(8)
    call(program, torch.ones(1).expand(8), y)
    assert y.tolist() == [2] * 8
    call(program, torch.complex(torch.zeros(8), torch.ones(8)).conj().imag, y)
    assert y.tolist() == [-2] * 8


@both_calls
def test_autograd_notices_what_is_written(call: Callable[..., Any]):
    w, y = torch.ones(8, requires_grad=True), torch.zeros(8)
    loss, x = (w * y).sum(), torch.ones(8)
    call(programs.double(8), x, y)
    assert (x._version, y._version > 0) == (0, True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_written_parameters_cover_the_results(kernel: Any):
    """Changes of other arguments do not come back from the emulating rank."""
    program = analyse(kernel.program(T), current_machine())
    results = kernel.reference(kernel.inputs(torch.Generator().manual_seed(1)))
    assert results.keys() <= written_parameters(program)


@pytest.mark.parametrize(
    ("func", "written"),
    [(programs.matmul(4), {2}), (programs.total(4), {1}), (programs.cyclic(4), {0}), (programs.stuck(4), {0})],
    ids=["matmul", "total", "cyclic", "stuck"],
)
def test_written_parameters_see_through_views(func: Any, written: set[int]):
    assert written_parameters(analyse(func, current_machine())) == written


# -- DTensor ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Build meshes of 8 ranks without communication."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield lambda ranks: DeviceMesh("cpu", torch.tensor(ranks))
    dist.destroy_process_group()


def argument(func: Any, name: str, mesh: Any, *placements: Any) -> Any:
    """Arguments that the runtime derives from a DTensor."""
    program = analyse(func, current_machine())
    parameter = next(p for p in program.parameters if p.name == name)
    return local_tensor(program, parameter, DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False))


@pytest.mark.parametrize(("name", "right"), [("A", Shard(1)), ("B", Shard(0)), ("C", Replicate())])
def test_a_placement_must_be_that_of_the_view(mesh: Any, name: str, right: Any):
    func, all_ranks = programs.matmul(8), mesh(list(range(8)))
    local = argument(func, name, all_ranks, right)
    assert type(local) is torch.Tensor and local.shape == (4, 4)
    for wrong in {Shard(0), Shard(1), Replicate(), Partial()} - {right}:
        with pytest.raises(ArgumentError, match=f"'{name}' is a DTensor placed") as info:
            argument(func, name, all_ranks, wrong)
        assert str(wrong) in str(info.value) and str(right) in str(info.value)
        assert info.value.where[0].file == programs.__file__


def test_the_ranks_must_be_in_order(mesh: Any):
    with pytest.raises(ArgumentError, match="over ranks"):
        argument(programs.matmul(8), "A", mesh([1, 0, 2, 3, 4, 5, 6, 7]), Shard(1))


def test_mesh_dimensions_stand_for_levels(mesh: Any):
    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def nested(X: T.Tensor((64, 64), "float32")):
            with T.Kernel(node=2, device=4, block=1, threads=32):
                with T.Scale("device"):
                    T.barrier()
                    T.view(X, layout=T.FullCol)

        grid = mesh([[0, 1, 2, 3], [4, 5, 6, 7]])
        argument(nested, "X", grid, Replicate(), Shard(1))
        for wrong in [(Shard(1), Replicate()), (Shard(1), Shard(1))]:
            with pytest.raises(ArgumentError, match=r"lays it out as \(R, S\(1\)\) over node, device"):
                argument(nested, "X", grid, *wrong)
        with pytest.raises(ArgumentError, match="is a DTensor placed"):
            argument(nested, "X", mesh(list(range(8))), Shard(1))


def test_blocks_in_turns_have_no_placement(mesh: Any):
    with pytest.raises(ArgumentError, match="in blocks of 2 along dimension 0, which no placement says"):
        argument(programs.cyclic(8), "X", mesh(list(range(8))), Shard(0))


def test_a_tensor_of_its_own_takes_any_placement(mesh: Any):
    for placement in Shard(0), Replicate(), Partial():
        assert argument(programs.total(8), "X", mesh(list(range(8))), placement).shape == (4, 4)
