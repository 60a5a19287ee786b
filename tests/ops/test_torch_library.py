# SPDX-License-Identifier: MIT
"""Operators as PyTorch's compiler sees them, in a job of one rank."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilescale
from tests.ops.float8_experts import random_expert
from tilescale import ops
from tilescale.errors import ArgumentError, UsageError
from tilescale.hda.current import current_machine
from tilescale.ops import ag_gemm, replicated
from tilescale.ops.operator import Operator

pytestmark = pytest.mark.usefixtures("emulated")


FLOAT8 = "rowwise torch.float8_e4m3fn torch.float8_e5m2"


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def mlp(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    gated = ops.all_gather_matmul(x, [gate.t(), up.t()], bias=[bias, None], activation="silu", gated=True)
    y = ops.matmul_reduce_scatter(gated, down.t())
    return ops.all_to_all(ops.matmul_all_reduce(y, down), 1, 0)


def float8_mlp() -> Callable[..., torch.Tensor]:
    recipe = ops.Float8(gradients=torch.float8_e4m3fn)
    layer = ops.ColumnParallelLinear.shard(torch.nn.Linear(16, 32).bfloat16(), sequence=False, float8=recipe)

    def call(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gated = ops.all_gather_matmul(x, [gate.t(), up.t()], activation="silu", gated=True, float8=recipe)
        y = ops.matmul_reduce_scatter(gated, down.t(), float8=ops.Float8("tensorwise"))
        return ops.matmul_all_reduce(layer(y), down.t(), float8=recipe)

    return call


def test_a_graph_without_a_break_computes_the_same():
    computes_the_same(mlp, [leaf(4, 16), leaf(32, 16), leaf(32, 16), leaf(16, 32), leaf(32)])
    computes_the_same(float8_mlp(), [leaf(4, 16), leaf(32, 16), leaf(32, 16), leaf(16, 32)])
    computes_the_same(experts, [leaf(6, 16), leaf(4, 24, 16), torch.rand(6, 2).requires_grad_()])
    computes_the_same(layer_of_experts, [leaf(6, 16), leaf(4, 32, 16), leaf(4, 16, 16), torch.rand(6, 4)])


def test_a_graph_has_experts_in_float8():
    def call(x: torch.Tensor) -> torch.Tensor:
        routing = ops.moe_route(torch.arange(4).repeat_interleave(3).view(6, 2), 4, room=512)
        rows, scales = ops.moe_dispatch(x.to(torch.float8_e4m3fn), routing, torch.ones(6, 1))
        return ops.moe_combine(rows.float() * scales, routing)

    x = torch.randn(6, 16)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


def test_a_graph_has_layers_whose_parameters_are_dtensors(mesh: DeviceMesh):
    up, gate = (ops.ColumnParallelLinear.shard(torch.nn.Linear(16, 32).bfloat16(), mesh) for _ in range(2))
    down = ops.RowParallelLinear.shard(torch.nn.Linear(32, 16).bfloat16(), mesh)
    ops.gather_once(up, gate)
    computes_the_same(lambda x: down(up(x) * gate(x)), [leaf(4, 16)])
    computes_the_same(lambda x: down(up(x)), [leaf(4, 16)])


def test_a_graph_has_groups_of_each_kind(mesh: DeviceMesh):
    for group in (mesh, mesh["tp"], mesh.get_group(), mesh.get_group().group_name):
        computes_the_same(lambda x, group=group: ops.all_reduce(x, group=group), [leaf(4, 16)])


def test_a_graph_names_the_rank_and_the_number_of_ranks(mesh: DeviceMesh):
    """So that PyTorch's cache has a graph for each."""
    seen: list[str] = []

    def keep(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable:
        seen.extend(node.args[-1] for node in graph.graph.nodes if "all_reduce" in str(node.target))
        return graph

    torch.compile(lambda x: ops.all_reduce(ops.all_reduce(x), group=mesh), backend=keep)(torch.ones(3))
    assert seen == ["@0/1", f"{mesh.get_group().group_name}@0/1"]


def test_a_mistake_is_named_by_the_compiler():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a has 16 columns, b has 4 rows"):
        torch.compile(lambda x: ops.all_gather_matmul(x, x), fullgraph=True, backend="aot_eager")(leaf(4, 16))


def test_transformations_that_differentiate_are_refused():
    """As is forward mode: results would have no tangents, without a word."""
    x = torch.randn(3)

    def forward_mode() -> None:
        with forward_ad.dual_level():
            ops.all_reduce(forward_ad.make_dual(x, x))

    for call in (
        lambda: torch.func.grad(lambda x: ops.all_reduce(x).sum())(x),
        lambda: torch.func.vjp(lambda x: ops.all_gather_matmul(x.view(1, 3), x.view(3, 1)), x),
        lambda: torch.func.jvp(ops.all_gather, (x,), (x,)),
        forward_mode,
    ):
        with pytest.raises(UsageError, match="differentiated by torch.func or in forward mode"):
            call()
    given = torch.randn(2, 3, requires_grad=True)
    torch.func.vmap(ops.all_reduce)(given).sum().backward()
    assert torch.equal(given.grad, torch.ones(2, 3))


@pytest.mark.parametrize("activation", ag_gemm.ACTIVATIONS)
def test_activations_are_differentiated_twice(activation: str):
    x, w = torch.randn(4, 16), torch.randn(16, 8)
    results = []
    for call in (
        lambda x, w: ops.all_gather_matmul(x, [w, w], activation=activation, gated=True),
        lambda x, w: ag_gemm.ACTIVATIONS[activation](x @ w) * (x @ w),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        first = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.detach().abs().max()))


def test_a_graph_returns_gathered_rows_and_writes_where_wanted():
    x, w = leaf(4, 16).detach(), leaf(16, 8).detach()
    for b, how in ((w, {}), ([w, w], {}), ([w, w], {"gated": True})):
        call = lambda x, b=b, how=how: ops.all_gather_matmul(x, b, return_gathered=True, **how)  # noqa: E731
        made, want = torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x)
        assert torch.equal(made[1], x)
        for one, other in zip(*(tree_leaves(each) for each in (made, want)), strict=True):
            assert torch.equal(one, other)
    places = [torch.empty(4, 8).bfloat16() for _ in range(2)]
    call = lambda x, out: ops.all_gather_matmul(x, [w, w], out=out)  # noqa: E731
    made = torch.compile(call, fullgraph=True, backend="aot_eager")(x, places)
    assert all(one is other and torch.equal(one, x @ w) for one, other in zip(made, places, strict=True))


def test_a_graph_has_numbers_of_rows_that_devices_say():
    """As many as they are in each call, without a warning of what the compiler ignores."""
    call = lambda x, sent: ops.all_to_all_v(2 * x, sent)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 0, 4):
        x = torch.randn(rows, 2)
        with torch._dynamo.config.patch(error_on_recompile=rows == 4), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            made, received = compiled(x, torch.tensor([rows]))
        assert torch.equal(made, 2 * x) and received.tolist() == [rows]
    with pytest.raises(ArgumentError, match="a has 4 rows, sent names 3"):
        compiled(x, torch.tensor([3]))
    host = torch.compile(lambda x: ops.all_to_all_v(x, [4])[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(host(x), x)


def computes_the_same(function: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> None:
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = [t.detach().clone().requires_grad_() for t in given]
        out = call(*leaves)
        out.float().pow(2).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def layer_of_experts(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    routed = ops.moe_layer(x, logits, up, down, router=ops.Router(2, groups=2, top_groups=1))
    return ops.moe_layer(routed, (torch.arange(12).view(6, 2) % 4, logits[:, :2]), up, down, room=256)[0]


def experts(x: torch.Tensor, w: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    chosen = torch.arange(4).repeat_interleave(3).view(6, 2)
    routing = ops.moe_route(chosen, 4, share, room=512)
    y = ops.grouped_matmul(ops.moe_dispatch(x, routing), w.mT, routing)
    return ops.moe_combine(y, routing, routing.weights)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_layer_of_experts_is_an_operator(keeps: bool):
    """With as many results as its backward needs."""
    x, up, down = (t.detach() for t in (leaf(6, 16), leaf(4, 32, 16), leaf(4, 16, 16)))
    experts = torch.arange(12).view(6, 2) % 4, torch.rand(6, 2), up, down
    given = x, *experts, None, None, None, 6, 512, False, False, keeps, ""
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tilescale.moe_layer, given, test_utils=kinds)
    if keeps:
        _, _, rows, hidden, *tables = torch.ops.tilescale.moe_layer(*given)
        given = x, rows, hidden, tables, up, down, True, ""
        torch.library.opcheck(torch.ops.tilescale.moe_layer_backward, given, test_utils=kinds)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_layer_of_float8_experts_is_an_operator(keeps: bool):
    gate_up, down, *scales = (t[None] for t in random_expert(128, 128))
    x, chosen = torch.randn(3, 128).bfloat16(), torch.zeros(3, 1).long()
    given = x, chosen, torch.ones(3, 1), gate_up, down, *scales, None, 3, 128, False, not keeps, keeps, ""
    torch.library.opcheck(torch.ops.tilescale.moe_layer, given, test_utils="test_faketensor")
    if keeps:
        _, _, rows, hidden, *tables = torch.ops.tilescale.moe_layer(*given)
        given = x, rows, hidden, tables, gate_up.bfloat16(), down.bfloat16(), False, ""
        torch.library.opcheck(torch.ops.tilescale.moe_layer_backward, given, test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("all_gather_matmul", lambda x, w: (x, [w], None, [], True, "", "silu", False, "")),
        ("all_gather_matmul", lambda x, w: (x, [w, w], None, [], True, "", "silu", True, FLOAT8)),
        ("matmul_reduce_scatter", lambda x, w: (x, w, None, [], "", "")),
        ("matmul_all_reduce", lambda x, w: (x, w, None, [], "", FLOAT8)),
        ("matmul_float8", lambda x, w: (x, w, None, FLOAT8)),
        ("all_gather", lambda x, w: (x, 1, "")),
        ("reduce_scatter", lambda x, w: (x, 0, "sum", "")),
        ("all_reduce", lambda x, w: (x, "sum", "")),
        ("all_to_all", lambda x, w: (x, 0, 1, "")),
        ("broadcast", lambda x, w: (x, 0, "")),
        ("scatter", lambda x, w: (x, 0, 1, "")),
        ("gather", lambda x, w: (x, 0, 1, "")),
        ("all_reduce_layer_norm", lambda x, w: (x, w[0], w[0], x, 1e-6, "")),
        ("all_reduce_rms_norm", lambda x, w: (x, w[0], x, 1e-6, 0.0, "")),
    ],
)
def test_schemas_and_fake_implementations(name: str, given):
    operator = getattr(torch.ops.tilescale, name)
    torch.library.opcheck(operator, given(leaf(4, 16), leaf(16, 16)), test_utils=("test_schema", "test_faketensor"))


def test_fake_implementations_of_float8():
    x, w = (leaf(n, 16).detach().to(torch.float8_e4m3fn) for n in (4, 16))
    of_x, of_w = torch.ones(4), torch.ones(32)
    for name, given in (
        ("all_gather_matmul", (x, [w.t(), w.t()], None, [of_x, of_w], False, "", "silu", True, "")),
        ("matmul_all_reduce", (x, w.t(), None, [of_x, of_w[:16]], "", "")),
        ("matmul_reduce_scatter", (x, w.t(), None, [of_x, of_w[:16]], "", "")),
    ):
        torch.library.opcheck(getattr(torch.ops.tilescale, name), given, test_utils="test_faketensor")


def test_gemms_with_scales_have_no_backward():
    x, w = (leaf(n, 16).detach().to(torch.float8_e4m3fn) for n in (4, 16))
    bias = torch.zeros(16, dtype=torch.bfloat16, requires_grad=True)
    how = {"bias": bias, "scales": (torch.ones(4), torch.ones(16))}
    for call in (ops.all_gather_matmul, ops.matmul_all_reduce, ops.matmul_reduce_scatter):
        with pytest.raises(RuntimeError, match="no backward"):
            call(x, w.t(), **how).sum().backward()


def test_a_plain_call_is_one_of_the_function(monkeypatch: pytest.MonkeyPatch):
    """PyTorch's dispatcher is used under autograd, modes, transformations, profilers and fakes only."""
    seen: list[torch.dtype] = []

    def doubled(x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        return x + x

    made = Operator("doubled_in_a_test", doubled)
    made.register_fake(lambda x, others: torch.empty_like(x))
    made.register_autograd(lambda ctx, grad: (grad * 2, [None]), setup_context=lambda ctx, inputs, output: None)

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, wanted = torch.ones(3), torch.full((3,), 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(made, "_dispatched", None)
        assert torch.equal(made(x, [x]), wanted)
        with torch.no_grad():
            assert torch.equal(made(leaf(3).float() * 0 + 1, [x]), wanted)
    given = torch.ones(3, requires_grad=True)
    made(given, [x]).sum().backward()
    assert torch.equal(given.grad, wanted)
    assert made(x, [torch.ones(3, requires_grad=True)]).requires_grad
    with Looks():
        made(x, [x])
    assert seen[0] is torch.ops.tilescale.doubled_in_a_test.default
    with torch.profiler.profile() as profile:
        made(x, [x])
    assert "tilescale::doubled_in_a_test" in {event.name for event in profile.events()}
    with FakeTensorMode() as fake:
        assert made(fake.from_tensor(x), []).shape == (3,)


def test_a_backward_has_arguments_by_their_names(monkeypatch: pytest.MonkeyPatch):
    """Saved tensors first, others as whether there is any; arguments without a gradient are last. No tensor is compared
    for it: PyTorch takes longer over that than over the call."""

    def compared(*_: Any) -> bool:
        raise AssertionError("a tensor is compared")

    for name in ("__eq__", "__ne__"):
        monkeypatch.setattr(torch.Tensor, name, compared)
    seen: list[tuple[Any, ...]] = []

    def scaled(
        x: torch.Tensor, parts: list[torch.Tensor], bias: torch.Tensor | None, more: list[torch.Tensor], by: int
    ) -> torch.Tensor:
        return by * x

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        seen.append((len(ctx.saved_tensors), ctx.bias, ctx.more, ctx.by))
        return ctx.by * grad

    made = Operator("scaled_in_a_test", scaled)
    made.register_autograd(backward, saves="x parts")
    x, part = torch.ones(2, requires_grad=True), torch.ones(1)
    made(x, [part, part], None, [part], 3).sum().backward()
    made(x, [], part, [], 2).sum().backward()
    assert x.grad.tolist() == [5, 5] and seen == [(3, False, True, 3), (1, True, False, 2)]


def test_gradients_of_layers_with_one_product_are_differentiated_again(mesh: DeviceMesh):
    """Each is a part of one product."""
    made = [torch.nn.Linear(16, 8, bias=False) for _ in range(2)]
    layers = [ops.ColumnParallelLinear.shard(layer, mesh, sequence=False) for layer in made]
    ops.gather_once(*layers)
    weights, x = [layer.weight for layer in layers], torch.randn(4, 16)
    first = torch.autograd.grad((layers[0](x) * layers[1](x)).square().sum(), weights, create_graph=True)
    second = torch.autograd.grad(sum(grad.full_tensor().square().sum() for grad in first), weights)
    plain = [w.full_tensor().detach().requires_grad_() for w in weights]
    want = torch.autograd.grad(((x @ plain[0].t()) * (x @ plain[1].t())).square().sum(), plain, create_graph=True)
    for one, other in zip(second, torch.autograd.grad(sum(g.square().sum() for g in want), plain), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize("again", [False, True])
def test_gradients_lie_as_their_parameters(mesh: DeviceMesh, again: bool):
    layer = ops.ColumnParallelLinear.shard(torch.nn.Linear(16, 32, bias=False).bfloat16(), mesh)
    (grad,) = torch.autograd.grad(layer(leaf(4, 16)).pow(2).sum(), layer.weight, create_graph=again)
    for what in ("shape", "dtype", "placements", "device_mesh"):
        assert getattr(grad, what) == getattr(layer.weight, what)
    assert grad.stride() == layer.weight.stride() and grad.requires_grad == again
    assert grad.to_local().shape == grad.shape and grad.full_tensor().equal(grad.to_local())


def test_backward_is_for_the_machine_of_its_forward():
    """Also in a thread of its own, in which PyTorch makes that of GPUs."""
    seen: list[str] = []
    made = Operator("tripled_in_a_test", tripled)
    made.register_fake(lambda x: torch.empty_like(x))

    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        seen.append(current_machine().name)
        return 3 * grad

    made.register_autograd(backward, setup_context=lambda ctx, inputs, output: None)
    everywhere = ops.ColumnParallelLinear.shard(torch.nn.Linear(16, 32).bfloat16(), sequence=False)
    with pytest.MonkeyPatch.context() as patch, tilescale.use_machine("wafer-mesh") as machine:
        result = made(leaf(3))
        layered = everywhere(leaf(4, 16))
        summed = lambda grad, op, group: seen.append(current_machine().name) or grad  # noqa: E731
        patch.setattr(replicated, "operator_of", lambda name: summed)
        for y in (result, layered):
            thread = threading.Thread(target=y.sum().backward)
            thread.start()
            thread.join()
    assert seen == [machine.name, machine.name]


def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x
