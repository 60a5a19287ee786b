# SPDX-License-Identifier: MIT
"""Operators fulfil their PyTorch contracts, over shapes, types and views: `torch.library.opcheck`, and strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.halves import half_at_night
from tilescale import ops
from tilescale.ops import operator

FLOAT8 = "rowwise torch.float8_e4m3fn torch.float8_e5m2"
UNCOMPILED = ("test_schema", "test_autograd_registration", "test_faketensor")


pytestmark = pytest.mark.usefixtures("emulated")


VIEWS: dict[str, Callable[..., torch.Tensor]] = {
    "contiguous": lambda *shape, dtype: torch.randn(shape).to(dtype),
    "transposed": lambda *shape, dtype: torch.randn(shape).to(dtype).mT.contiguous().mT,
    "a part": lambda *shape, dtype: torch.randn(2, *shape[:-1], shape[-1] + 3).to(dtype)[1, ..., 3:],
}

CASES: dict[str, Callable[..., list[Any]]] = {
    "all_gather": lambda new, rows: [new(rows, 16), 1, ""],
    "reduce_scatter": lambda new, rows: [new(rows, 2), 0, "sum", ""],
    "all_reduce": lambda new, rows: [new(rows, 3), "sum", ""],
    "broadcast": lambda new, rows: [new(rows, 3), 0, ""],
    "broadcast_backward": lambda new, rows: [new(rows, 3), 0, ""],
    "all_gather_float8": lambda new, rows: [new(rows, 16), 1, ""],
    "reduce_scatter_float8": lambda new, rows: [new(rows, 16), 1, ""],
    "all_reduce_float8": lambda new, rows: [new(rows, 16), ""],
    "scatter": lambda new, rows: [new(rows, 3), 0, 1, ""],
    "scatter_backward": lambda new, rows: [new(rows, 3), 0, 1, ""],
    "gather": lambda new, rows: [new(rows, 3), 0, 1, ""],
    "batch_send_recv": lambda new, rows: [[new(rows, 3), new(1, 2)], [0, 0], [new(3, rows), new(2, 1)], [0, 0], ""],
    "all_to_all": lambda new, rows: [new(rows, 3), 0, 1, ""],
    "all_to_all_v": lambda new, rows: [new(rows, 3), [rows], [rows], ""],
    "all_gather_matmul": lambda new, rows: (
        [new(rows, 16), [new(16, 8), new(16, 24)], new(1, 32)[0], [], True, "", "", False, ""]
    ),
    "matmul_reduce_scatter": lambda new, rows: [new(rows, 16), new(16, 8), new(1, 8)[0], [], "", ""],
    "matmul_all_reduce": lambda new, rows: [new(rows, 16), new(16, 8), None, [], "", ""],
    "all_gather_columns_matmul": lambda new, rows: [new(rows, 64), new(64, 8), new(1, 8)[0], ""],
    "matmul_all_gather": lambda new, rows: [new(rows, 16), new(16, 8), None, ""],
    "column_parallel": lambda new, rows: [new(1, rows, 16), [new(8, 16), new(24, 16)], [], "", "", False],
    "column_parallel_input_gradient": lambda new, rows: [new(rows, 32), [new(8, 16), new(24, 16)], "", ""],
    "side_by_side": lambda new, rows: [new(1, rows, 16), [new(8, 16), new(24, 16)], []],
    "side_by_side_input_gradient": lambda new, rows: [new(rows, 32), [new(8, 16), new(24, 16)]],
    "row_parallel": lambda new, rows: [new(1, rows, 16), new(8, 16), None, "", True, ""],
    "all_reduce_layer_norm": lambda new, rows: ([new(rows, 16), new(1, 16)[0], new(1, 16)[0], new(rows, 16), 1e-6, ""]),
    "all_reduce_rms_norm": lambda new, rows: [new(rows, 16), new(1, 16)[0], new(rows, 16), 1e-6, 1.0, ""],
    "all_reduce_rms_norm_float8": lambda new, rows: (
        [x.detach() for x in (new(rows, 16), new(1, 16)[0], new(rows, 16))] + [None, "row", True, True, 1e-6, 0.0, ""]
    ),
    "matmul_float8": lambda new, rows: [new(rows, 16), new(16, 16), None, FLOAT8],
}


def given_of(name: str, view: str, rows: int, dtype: torch.dtype, grad: bool) -> list[Any]:
    return CASES[name](lambda *shape: VIEWS[view](*shape, dtype=dtype).requires_grad_(grad), rows)


def check(tests: str | tuple[str, ...], name: str, view: str, *shapes: tuple[int, torch.dtype]) -> None:
    """PyTorch's tests of an operator, for numbers of rows and types, with gradients of bfloat16."""
    for rows, dtype in shapes:
        if name != "matmul_float8" or dtype == torch.bfloat16:
            given = given_of(name, view, rows, dtype, grad=dtype == torch.bfloat16)
            torch.library.opcheck(getattr(torch.ops.tilescale, name), given, test_utils=tests)


@pytest.mark.parametrize(("name", "view"), half_at_night([*CASES], [*VIEWS]))
def test_operators_are_what_they_are_registered_as(name: str, view: str):
    check(UNCOMPILED, name, view, (4, torch.bfloat16), (1, torch.float16))


@pytest.mark.parametrize("name", CASES)
def test_operators_are_compiled(name: str):
    check("test_aot_dispatch_dynamic", name, "transposed", (4, torch.bfloat16))


@pytest.mark.nightly
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CASES)
def test_operators_are_what_they_are_registered_as_for_other_shapes(name: str, view: str):
    check(UNCOMPILED, name, view, (1, torch.bfloat16), (4, torch.float16))
    check("test_aot_dispatch_dynamic", name, view, *itertools.product((1, 4), (torch.bfloat16, torch.float16)))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("paged", [False, True])
def test_decode_is_what_it_is_registered_as(paged: bool, kind: torch.dtype):
    q, scale = torch.randn(2, 4, 64).bfloat16(), torch.ones(2) if kind != torch.bfloat16 else None
    k, v = torch.randn(2, 2, 16, 2, 64).to(kind).unbind(1)
    table = torch.tensor([[1, 0], [0, -1]], dtype=torch.int32) if paged else None
    lengths = torch.tensor([18, 3], dtype=torch.int32)
    given = [q, k, v, lengths, table, scale, scale, 0.1, 64, False, ""]
    # PyTorch's own test of schemas multiplies all tensors, which float8 on the CPU does not have.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.tilescale.decode, given, test_utils=tests)
    if scale is None:
        torch.library.opcheck(torch.ops.tilescale.decode, given, test_utils="test_schema")


@pytest.mark.parametrize("view", VIEWS)
def test_attention_is_what_it_is_registered_as(view: str):
    q, k, v, grad, out = (VIEWS[view](1, 4, heads, 64, dtype=torch.float16) for heads in (4, 2, 2, 4, 4))
    how = True, False, True, 0.1, ""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.tilescale.sequence_attention, [*leaves, *how])
    sums = torch.randn(1, 2, 4, 2).abs() + 9
    torch.library.opcheck(torch.ops.tilescale.sequence_attention_backward, [grad, q, k, v, out, sums, *how])


ROOM, NARROW = 512, torch.float8_e4m3fn

ROUTED: dict[str, Callable[[ops.Routing], list[Any]]] = {
    "moe_tables": lambda to: [torch.arange(12).view(6, 2) % 4, torch.rand(6, 2).requires_grad_(), 4, 6, ROOM, ""],
    "moe_dispatch": lambda to: [leaf(6, 16), to.order, to.sent, to.received, to.places, to.before, ROOM, ""],
    "moe_combine": lambda to: (
        [leaf(ROOM, 16), torch.rand(ROOM).requires_grad_(), to.order, to.sent, to.received, to.places, to.before, 6, ""]
    ),
    "moe_returns": lambda to: [torch.rand(ROOM), to.received, to.places, to.before, 6, ""],
    "grouped_matmul": lambda to: [leaf(ROOM, 16), leaf(4, 16, 8), to.counts, to.owners, to.used],
    "grouped_outer": lambda to: [leaf(ROOM, 16).detach(), leaf(ROOM, 8).detach(), to.counts],
    "grouped_matmul_scaled": lambda to: (
        [narrow(ROOM, 128), narrow(4, 128, 128).mT, torch.ones(ROOM, 1), torch.ones(4, 1, 1), to.owners]
    ),
    "all_to_all_v_counted": lambda to: [leaf(4, 3), torch.tensor([4]), 4, ""],
}


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def narrow(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(NARROW)


@pytest.mark.parametrize("name", ROUTED)
def test_operators_of_experts_are_what_they_are_registered_as(name: str):
    given = ROUTED[name](ops.moe_route(torch.arange(12).view(6, 2) % 4, 4, torch.rand(6, 2), room=ROOM))
    tests = ["test_autograd_registration", "test_faketensor"]
    if not any(isinstance(x, torch.Tensor) and x.dtype == NARROW for x in given):
        tests.append("test_schema")  # it multiplies all tensors, which float8 on the CPU does not have
    if name != "moe_dispatch":
        tests.append("test_aot_dispatch_dynamic")  # it compares rows of no token, too, which are never written
    torch.library.opcheck(getattr(torch.ops.tilescale, name), given, test_utils=tests)


ELSEWHERE = {
    "decode", "sequence_attention", "sequence_attention_backward",
    "moe_layer", "moe_layer_backward",
}  # fmt: skip
"""Operators with tests of their own, here and in test_torch_library.py."""


def test_every_operator_is_checked():
    assert {name for name in operator._known if not name.endswith("_in_a_test")} == {*CASES, *ROUTED, *ELSEWHERE}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CASES)
def test_results_are_contiguous(name: str, view: str):
    """With the strides of a new tensor, of dimensions of one element, too."""
    for rows in (1, 3, 8):
        made = getattr(torch.ops.tilescale, name)(*given_of(name, view, rows, torch.bfloat16, grad=False))
        for each in made if isinstance(made, list | tuple) else [made]:
            assert each.stride() == torch.empty(each.shape).stride(), f"{tuple(each.shape)} has {each.stride()}"


def test_a_small_gather_has_the_strides_of_its_shape():
    assert ops.all_gather(torch.ones(1, 2)).stride() == (2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_slices_have_any_strides_along_one_element(dtype: torch.dtype):
    """They pass for contiguous ones, as of one column of a row, or of some tokens of one sequence."""
    for x in (torch.arange(6, dtype=dtype)[4::2], torch.arange(30, dtype=dtype).view(2, 5, 3)[1:, :4]):
        assert x.is_contiguous() and x.stride() != torch.empty(x.shape).stride()
        for call in (
            ops.all_gather, ops.all_reduce, ops.reduce_scatter, ops.all_to_all, lambda a: ops.all_gather_v(a)[0],
            lambda a: ops.broadcast(a, 0), lambda a: ops.gather(a, 0), lambda a: ops.scatter(a, 0),
            lambda a: ops.all_to_all_v(a, [1], [1]), lambda a: ops.batch_send_recv([ops.Send(a, 0), ops.Recv(a, 0)])[0],
        ):  # fmt: skip
            made = call(x)
            assert torch.equal(made, x) and made.stride() == torch.empty(x.shape).stride()
        place = torch.empty_strided(x.shape, x.stride(), dtype=dtype)
        assert ops.all_reduce(x, out=place) is place and torch.equal(place, x)


def test_a_product_of_one_element_has_the_strides_of_its_shape():
    a, b = torch.ones(1, 16).bfloat16(), torch.ones(16, 1).bfloat16()
    for product in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce, ops.matmul_all_gather):
        assert product(a, b).stride() == (1, 1)
