# SPDX-License-Identifier: MIT
"""Layers that share a gather, in a job of one rank: when a result is taken, made anew, and let go."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tilescale import ops
from tilescale.errors import ArgumentError
from tilescale.ops import layout, linear
from tilescale.ops.siblings import lay_side_by_side

pytestmark = pytest.mark.usefixtures("emulated")


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of layers of each GEMM."""
    counts: list[int] = []
    made = linear.ColumnParallelLinear.outputs
    monkeypatch.setattr(
        linear.ColumnParallelLinear,
        "outputs",
        lambda layer, x, layers: counts.append(len(layers)) or made(layer, x, layers),
    )
    return counts


def column(features: int = 16, sequence: bool = True) -> ops.ColumnParallelLinear:
    return ops.ColumnParallelLinear.shard(nn.Linear(features, 16).bfloat16(), sequence=sequence)


def pair(sequence: bool = True) -> tuple[ops.ColumnParallelLinear, ops.ColumnParallelLinear]:
    layers = column(sequence=sequence), column(sequence=sequence)
    ops.gather_once(*layers)
    return layers


def rows() -> torch.Tensor:
    return torch.randn(4, 16).bfloat16()


def right(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, layer.weight, layer.bias).detach()


@pytest.mark.parametrize("sequence", [True, False])
def test_one_product_serves_all_in_any_order(sequence: bool, gathers: list[int]):
    up, gate = pair(sequence)
    for first, second in ((up, gate), (gate, up)):
        x = rows()
        for layer in (first, second):
            torch.testing.assert_close(layer(x).detach(), right(layer, x), rtol=1e-2, atol=1e-2)
    assert gathers == [2, 2]


CHANGES: list[Callable[[torch.Tensor, nn.Module], object]] = [
    lambda x, layer: x.detach().mul_(2),
    lambda x, layer: layer.weight.detach().mul_(2),
    lambda x, layer: layer.bias.detach().mul_(2),
    lambda x, layer: setattr(layer, "weight", nn.Parameter(2 * layer.weight.detach())),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [True, False])
def test_what_was_changed_in_between_is_multiplied_anew(change: Callable, grad: bool, gathers: list[int]):
    up, gate = pair()
    x = rows()
    with torch.set_grad_enabled(grad):
        up(x)
        change(x, gate)
        torch.testing.assert_close(gate(x).detach(), right(gate, x), rtol=1e-2, atol=1e-2)
    assert gathers == [2, 2]


def test_a_result_without_a_gradient_serves_no_call_with_one():
    up, gate = pair()
    x = rows()
    with torch.no_grad():
        up(x)
    assert gate(x).requires_grad
    up, gate = pair()
    with torch.autocast("cpu", torch.float16):
        assert up(x).dtype == torch.float16
    assert gate(x).dtype == torch.bfloat16


def test_in_inference_mode_one_gather_serves_all(gathers: list[int]):
    up, gate = pair()
    with torch.inference_mode():
        x = rows()
        up(x), gate(x)
    assert gathers == [2]


@pytest.mark.parametrize("grad", [True, False])
def test_results_that_nobody_takes_go_with_the_input(grad: bool):
    up, _ = pair()
    x = rows().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        y = up(2 * x if grad else x)
    if grad:
        y.sum().backward()
    assert up._siblings._results or grad
    del x, y
    gc.collect()
    assert not up._siblings._results


def test_some_of_the_layers_are_called_with_one_input_after_another():
    """The gradients' graph of a result that no layer took is the last to hold the input of before."""
    up, _ = pair()
    for _ in range(3):
        x = rows()
        torch.testing.assert_close(up(x).detach(), right(up, x), rtol=1e-2, atol=1e-2)


def test_layers_of_different_inputs_go_on_alone(gathers: list[int]):
    """As those of queries, and of keys and values of another sequence."""
    queries, keys = pair(sequence=False)
    for x, y in ((rows(), rows()), (rows(), rows())):
        for layer, given in ((queries, x), (keys, y)):
            torch.testing.assert_close(layer(given).detach(), right(layer, given), rtol=1e-2, atol=1e-2)
    assert gathers == [2, 1, 1, 1]


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("shape", [(0, 4, 16), (2, 0, 16), (2, 0, 3, 16)])
def test_sequences_or_tokens_that_are_none(shape: tuple[int, ...], sequence: bool):
    up, _ = pair(sequence)
    down = ops.RowParallelLinear.shard(nn.Linear(16, 16).bfloat16(), sequence=sequence)
    x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    result = down(up(x))
    result.sum().backward()
    assert result.shape == x.grad.shape == shape and not up.weight.grad.any()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("adjacent", [True, False])
def test_gradients_of_layers_with_one_product(biased: bool, adjacent: bool):
    made = [nn.Linear(16, width, bias=biased) for width in (8, 24, 16)]
    alone = copy.deepcopy(made)
    layers = [ops.ColumnParallelLinear.shard(layer, sequence=False) for layer in made]
    ops.gather_once(*layers)
    if adjacent:
        lay_side_by_side(*layers)
    assert (layout.adjacent([layer.weight for layer in layers]) is not None) == adjacent
    x = torch.randn(2, 5, 16, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    results, others = [layer(x) for layer in layers], [layer(y) for layer in alone]
    for result, wanted in zip(results, others, strict=True):
        torch.testing.assert_close(result, wanted)
        result.add_(1)  # as an activation in place
    sum(result.square().sum() for result in results).backward()
    sum((wanted + 1).square().sum() for wanted in others).backward()
    torch.testing.assert_close(x.grad, y.grad)
    for layer, wanted in zip(layers, alone, strict=True):
        for name, parameter in wanted.named_parameters():
            torch.testing.assert_close(getattr(layer, name).grad, parameter.grad)


@pytest.mark.parametrize("sequence", [True, False])
def test_a_layer_whose_result_is_not_used_has_no_gradient(sequence: bool):
    """As an optimizer asks for: it leaves out parameters without one. Nor has a layer that is not called."""
    layers = [column(sequence=sequence) for _ in range(3)]
    ops.gather_once(*layers)
    x = rows().requires_grad_()
    used, other = layers[0](x), layers[1](x)
    (used.square().sum() + other.detach().sum()).backward()
    assert all(x.grad is not None for x in (x, *layers[0].parameters()))
    assert all(parameter.grad is None for layer in layers[1:] for parameter in layer.parameters())


def test_a_copy_shares_with_its_own_siblings():
    layers = nn.ModuleList(pair())
    layers[0](rows())  # and the other one's result waits
    copied = copy.deepcopy(layers)
    siblings = copied[0]._siblings
    assert siblings is copied[1]._siblings is not layers[0]._siblings and not siblings._results
    assert siblings.layers == list(copied)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (lambda: [nn.Linear(8, 8)], r"layers\[0\] is Linear"),
        (lambda: [column(), column(sequence=False)], r"layers\[1\] has sequence False, layers\[0\] True"),
        (lambda: [column(), column(24)], r"layers\[1\] has in_features 24, layers\[0\] 16"),
    ],
)
def test_only_layers_that_gather_alike_gather_once(layers: Callable[[], list[nn.Module]], said: str):
    with pytest.raises(ArgumentError, match=said):
        ops.gather_once(*layers())


def test_inputs_are_named(mesh: DeviceMesh):
    row = ops.RowParallelLinear.shard(nn.Linear(16, 16).half())
    for call, said in (
        (lambda: row(None), "x is NoneType"),
        (lambda: column()(torch.randn(4, 16)), "x is torch.float32"),
        (lambda: row(rows()), "x is torch.bfloat16, weight is torch.float16"),
        (lambda: column(sequence=False)(rows().half()), "x is torch.float16, weight is torch.bfloat16"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call()


def test_dtensors_are_brought_to_where_a_layer_takes_them(mesh: DeviceMesh):
    layer, x = column(), rows()
    for placement in (Shard(0), Replicate(), Shard(1)):
        given = DTensor.from_local(x, mesh, [placement])
        torch.testing.assert_close(layer(given).detach(), right(layer, x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("grad", [True, False])
def test_results_of_asynchronous_collectives_are_inputs(mesh: DeviceMesh, grad: bool):
    """As those of an embedding by PyTorch's plan, whose sum over the ranks has not been awaited."""
    layer, x = ops.ColumnParallelLinear.shard(nn.Linear(16, 8), mesh), torch.randn(2, 4, 16)
    given = DTensor.from_local(AsyncCollectiveTensor(x), mesh, [Shard(1)])
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(layer(given), nn.functional.linear(x, *(p.to_local() for p in layer.parameters())))
