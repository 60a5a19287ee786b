# SPDX-License-Identifier: MIT
"""Calls of public functions for autograd to see: later ones of a form call the operator at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cuda.fakes import Device, aligned, record_on_cpu
from tests.cuda.test_recording import ENOUGH
from tilescale.backends.cuda.running import repeated
from tilescale.ops.operator import operator
from tilescale.ops.plain_calls import plain_calls_repeat


@operator("product_in_a_test")
def product(a: torch.Tensor, weights: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """Scaled products with each weight."""
    return [scale * (a @ weight) for weight in weights]


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    a, *weights = ctx.saved_tensors
    da = sum(ctx.scale * (grad @ weight.t()) for grad, weight in zip(grads, weights, strict=True))
    return da, [ctx.scale * (a.t() @ grad) for grad in grads]


product.register_autograd(_backward, saves="a weights")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Rank 0 of two, whose tensors count as a GPU's."""
    record_on_cpu(monkeypatch)
    return Device(monkeypatch)


class Public:
    """A public function, and how often it has checked its arguments."""

    def __init__(self, function: Callable[..., Any]):
        def checked(*given: Any, **named: Any) -> Any:
            self.checks += 1
            return function(*given, **named)

        self.checks, self.call = 0, plain_calls_repeat(checked)


def check(public: Public, rows: int, scale: float, a_grad: bool = True, b_grad: bool = True) -> None:
    """Result and gradients of a call with new tensors."""
    a, b = aligned(rows, 8, grad=a_grad), aligned(8, 5, grad=b_grad)
    made = public.call(a, b, scale=scale)
    torch.testing.assert_close(made, scale * (a @ b))
    wanted = [x for x in (a, b) if x.requires_grad]
    assert made.requires_grad == bool(wanted) and not made._is_view()
    if wanted:
        up = torch.randn_like(made)
        found, right = (torch.autograd.grad(y, wanted, up) for y in (made, scale * (a @ b)))
        torch.testing.assert_close(found, right)


def test_later_calls_are_those_of_the_operator():
    public = Public(lambda a, b, *, scale: product(a, [b], scale)[0])
    for rows, scale in ((4, 2.0), (4, 3.0), (6, 2.0)):
        for _ in range(ENOUGH):
            check(public, rows, scale)
        checks = public.checks
        for _ in range(4):
            check(public, rows, scale)
        assert public.checks == checks, "arguments are not checked again"


def test_forms_differ_by_the_tensors_for_autograd():
    public = Public(lambda a, b, *, scale: product(a, [b], scale)[0])
    for _ in range(3 * ENOUGH):
        for a_grad, b_grad in ((True, True), (True, False), (False, True), (False, False)):
            check(public, 4, 2.0, a_grad, b_grad)
    checks = public.checks
    with torch.no_grad():
        a, b = aligned(4, 8, grad=True), aligned(8, 5, grad=True)
        for _ in range(ENOUGH):
            made = public.call(a, b, scale=2.0)
            assert not made.requires_grad
            torch.testing.assert_close(made, 2.0 * (a @ b))
    check(public, 4, 2.0, True, False)
    assert checks < 4 * 2 * ENOUGH


def test_lists_and_several_results():
    public = Public(lambda a, b, *, scale=1.0: (product(a, b, scale), a))
    for _ in range(2 * ENOUGH):
        checks, a, weights = public.checks, aligned(3, 8, grad=True), [aligned(8, n, grad=True) for n in (5, 2)]
        (one, other), same = public.call(a, weights)
        assert same is a
        torch.testing.assert_close((one, other), (a @ weights[0], a @ weights[1]))
        (one.sum() + 2 * other.sum()).backward()
        torch.testing.assert_close(weights[1].grad, 2 * a.detach().sum(0)[:, None].expand(8, 2))
    assert public.checks == checks, "the last one calls the operator"


kept: list[float] = []
"""Exponents of calls whose context was set up."""


@operator("power_in_a_test")
def power(x: torch.Tensor, exponent: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A power, and its derivative."""
    return x**exponent, exponent * x ** (exponent - 1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    kept.append(inputs[1])
    ctx.shape, ctx.sizes = inputs[0].shape, [len(inputs[0])]
    ctx.save_for_backward(None, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _of_power(ctx: Any, grad: torch.Tensor, nothing: None) -> tuple[Any, ...]:
    none, derivative = ctx.saved_tensors
    assert none is nothing is None and ctx.shape == derivative.shape and ctx.sizes == [len(grad)]
    return (grad * derivative,)


power.register_autograd(_of_power, setup_context=_keep)


def test_what_a_backward_needs_is_recorded_with_the_forward():
    for exponent in (2.0, 3.0):
        for _ in range(ENOUGH):
            before, x = len(kept), aligned(4, 8, grad=True)
            y, derivative = power(x, exponent)
            assert not derivative.requires_grad
            up = torch.randn(4, 8)
            (found,) = torch.autograd.grad(y, x, up)
            torch.testing.assert_close(found, up * exponent * x.detach() ** (exponent - 1))
        assert len(kept) == before, "the last one is recorded"


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, *, scale: product(a, [b], scale)[0] + 0,
        lambda a, b, *, scale: product(a + 0, [b], scale)[0],
        lambda a, b, *, scale: product(a, [b.t().t()], scale)[0],
        lambda a, b, *, scale: product(product(a, [b], scale)[0], [torch.eye(5)], 1.0)[0],
        lambda a, b, *, scale: scale * (a @ b),
        lambda a, b, *, scale: repeated.not_recorded() or product(a, [b], scale)[0],
    ],
    ids=["another result", "another argument", "a view", "two operators", "none", "marked"],
)
def test_functions_that_do_more_are_called(function: Callable[..., Any]):
    public = Public(function)
    for _ in range(2 * ENOUGH):
        check(public, 4, 2.0)
    assert public.checks == 2 * ENOUGH


def test_functions_that_return_values_are_called():
    """These may follow the device's data."""
    public = Public(lambda a, b: (product(a, [b], 2.0)[0], int(a.detach().sum())))
    for _ in range(2 * ENOUGH):
        a, b = aligned(3, 8, grad=True), aligned(8, 5, grad=True)
        made, total = public.call(a, b)
        torch.testing.assert_close(made, 2.0 * (a @ b))
        assert total == int(a.detach().sum())


def test_calls_within_a_capture_and_errors_of_the_operator(device: Device):
    public = Public(lambda a, b, *, scale: product(a, [b], scale)[0])
    for _ in range(2 * ENOUGH):
        check(public, 4, 2.0)
    checks, device.capturing = public.checks, True
    check(public, 4, 2.0)
    assert public.checks == checks
    device.capturing = False
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        public.call(aligned(4, 8, grad=True), aligned(7, 5, grad=True), scale=2.0)
    check(public, 4, 2.0)
