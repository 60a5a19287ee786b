# SPDX-License-Identifier: MIT
"""Errors and remarks of `ops.parallelize_module` about plans without the apparent effect."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tilescale import ops
from tilescale.errors import ArgumentError
from tilescale.ops import layout, token_wise

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(dtype)


def test_names_that_no_module_has_are_told_of(mesh: DeviceMesh):
    with pytest.warns(UserWarning, match="'up' could not be resolved"):
        made = ops.parallelize_module(model(), mesh, {"up": ColwiseParallel(), **PLAN})
    assert isinstance(made[0], ops.ColumnParallelLinear) and isinstance(made[2], ops.RowParallelLinear)


class Adapted(nn.Linear):
    """As libraries of adapters and quantisation derive theirs."""


def adapted() -> nn.Module:
    return nn.Sequential(Adapted(16, 32), nn.ReLU(), nn.Linear(32, 16)).bfloat16()


@pytest.mark.parametrize(
    ("make", "plan", "said"),
    [
        (lambda: model(torch.float64), PLAN, r"layers \['0', '2'\] become PyTorch's.*weights are torch.float64"),
        (adapted, PLAN, r"layers \['0'\] become PyTorch's.*Adapted is not torch.nn.Linear itself"),
        (model, {"0": ColwiseParallel(use_local_output=False)}, r"layers \['0'\].*use_local_output is False"),
        (model, {"0": ColwiseParallel(output_layouts=Replicate())}, r"\['0'\].*output_layouts is R"),
        (model, {"2": RowwiseParallel(output_layouts=Shard(0))}, r"\['2'\].*output_layouts is S\(0\)"),
    ],
)
def test_linear_layers_that_become_pytorchs_are_named_once_with_the_reason(
    mesh: DeviceMesh, make: Callable[[], nn.Module], plan: dict, said: str
):
    before = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = ops.parallelize_module(copy.deepcopy(before), mesh, plan)
    (warning,) = [str(each.message) for each in caught]
    assert re.search(said, warning)
    for name in re.findall(r"'(\d)'", warning):
        assert type(made.get_submodule(name)) is type(before.get_submodule(name))


def test_float32_layers_become_ours(mesh: DeviceMesh):
    """Their computation may be in another type."""
    made = ops.parallelize_module(model(torch.float32), mesh, PLAN)
    assert isinstance(made[0], ops.ColumnParallelLinear) and isinstance(made[2], ops.RowParallelLinear)


def test_adapters_of_split_layers_are_refused(mesh: DeviceMesh):
    """They take the shard for the whole layer; other modules may wrap it."""
    made = ops.parallelize_module(model(), mesh, PLAN)
    adapter = type("Linear", (nn.Module,), {"__module__": "peft.tuners.lora.layer"})()
    for layer in (made[0], made[2]):
        with pytest.raises(ArgumentError, match="adapter of PEFT, Linear, around a layer that is split"):
            adapter.base_layer = layer
        nn.Module().base_layer = layer
    adapter.base_layer = nn.Linear(2, 2)
    adapter.original_module = made[0]


class Conv1D(nn.Module):
    """A linear layer of another class, as GPT-2 of transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 16))


@pytest.mark.parametrize(
    ("last", "said"),
    [(lambda: nn.Linear(16, 0, bias=False), "has 0 output features"), (Conv1D, "'1', which is .*parallelize.Conv1D")],
)
def test_a_refused_plan_changes_nothing(mesh: DeviceMesh, last: Callable[[], nn.Module], said: str):
    layers = nn.Sequential(model(), last())
    before = {name: (type(m), m.__dict__.get("in_features")) for name, m in layers.named_modules()}
    parameters = list(layers.parameters())
    plan = {"0.0": ColwiseParallel(), "0.2": RowwiseParallel(), "1": ColwiseParallel()}
    with pytest.raises(ArgumentError, match=said):
        ops.parallelize_module(layers, mesh, plan)
    assert {name: (type(m), m.__dict__.get("in_features")) for name, m in layers.named_modules()} == before
    assert all(one is other for one, other in zip(parameters, layers.parameters(), strict=True))


class Raises(SequenceParallel):
    """A style that changes a module, then fails."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        raise RuntimeError("of the style")


def state_of(layers: nn.Module) -> list[Any]:
    """Classes of all modules, and their attributes, tables item by item."""
    held = [(type(each), vars(each)) for each in layers.modules()]
    return [(kind, {n: list(x.items()) if isinstance(x, dict) else x for n, x in each.items()}) for kind, each in held]


def test_a_style_that_raises_changes_nothing(mesh: DeviceMesh):
    layers = nn.Sequential(model(), nn.RMSNorm(16), nn.RMSNorm(16)).bfloat16()
    hook = layers[0].register_forward_pre_hook(lambda *_: None)
    before, x = state_of(layers), torch.randn(4, 16).bfloat16()
    want = layers(x)
    plan = {"0.0": ColwiseParallel(), "0.2": RowwiseParallel(), "0": PrepareModuleInput(), "1": SequenceParallel()}
    with pytest.raises(RuntimeError, match="of the style"):
        ops.parallelize_module(layers, mesh, {**plan, "2": Raises()})
    assert state_of(layers) == before
    assert torch.equal(layers(x), want)
    hook.remove()
    assert not layers[0]._forward_pre_hooks


def tied() -> nn.ModuleDict:
    made = nn.ModuleDict({"embed": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)}).bfloat16()
    made["head"].weight = made["embed"].weight
    return made


def test_ties_that_a_plan_breaks_are_told_of(mesh: DeviceMesh):
    with pytest.warns(UserWarning, match=r"\['embed.weight', 'head.weight'\] were tied"):
        ops.parallelize_module(tied(), mesh, {"head": ColwiseParallel(input_layouts=Shard(1))})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = nn.Linear(16, 16).bfloat16()
        ops.parallelize_module(nn.Sequential(one, one), mesh, {"0": ColwiseParallel()})


@pytest.mark.parametrize("result", [Shard(-1), Replicate()])
def test_an_embedding_and_a_linear_layer_that_lie_alike_stay_tied(mesh: DeviceMesh, result: Any):
    """The linear layer is ours, or PyTorch's. The embedding's gradient is the sum of both uses."""
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=result)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*were tied")
        made = ops.parallelize_module(tied(), mesh, plan)
    assert isinstance(made["head"], ops.ColumnParallelLinear) == (result == Shard(-1))
    whole, ids = tied(), torch.tensor([[1, 3, 3]])
    whole.load_state_dict({name: x.full_tensor() for name, x in made.state_dict().items()})
    assert [name for name, _ in made.named_parameters()] == ["embed.weight"]
    for model in (made, whole):
        model["head"](model["embed"](ids)).float().pow(2).sum().backward()
    torch.testing.assert_close(made["embed"].weight.grad.full_tensor(), whole["embed"].weight.grad, rtol=0.02, atol=0.1)


def test_other_arguments_are_named(mesh: DeviceMesh):
    for given, said in (
        ((None, mesh, {}), "module is NoneType"),
        ((model(), mesh, {"0": "colwise"}), r"parallelize_plan\['0'\] is str"),
        ((model(), mesh, "colwise"), "parallelize_plan is str"),
        ((model(), None, PLAN), "device_mesh is None"),
    ):
        with pytest.raises(ArgumentError, match=said):
            ops.parallelize_module(*given)
    with pytest.raises(ArgumentError, match="src_data_rank is 0, group no mesh"):
        ops.RowParallelLinear.shard(nn.Linear(16, 16), src_data_rank=0)


def test_without_a_plan_nothing_is_done(mesh: DeviceMesh):
    with pytest.warns(UserWarning, match="will do nothing"):
        assert type(ops.parallelize_module(model(), mesh)[0]) is nn.Linear


@pytest.mark.parametrize("norm", [lambda: nn.RMSNorm(16), lambda: nn.LayerNorm(16), lambda: nn.Dropout(0.0)])
def test_norms_of_tokens_work_on_shards(mesh: DeviceMesh, norm: Callable[[], nn.Module]):
    """As PyTorch's: the same results, gradients, parameters; only norms are replaced. Gradients are summed."""
    ours, theirs = (nn.Sequential(norm().bfloat16()) for _ in range(2))
    ops.parallelize_module(ours, mesh, {"0": SequenceParallel()})
    parallelize_module(theirs, mesh, {"0": SequenceParallel()})
    ours = copy.deepcopy(ours)
    x = torch.randn(2, 8, 16).bfloat16()
    results = []
    for model in (ours, theirs):
        given = x.clone().requires_grad_()
        y = model(given)
        y.to_local().float().pow(2).sum().backward()
        results.append([y.to_local(), given.grad, *(p.grad.to_local() for p in model.parameters())])
        assert y.placements == (Shard(1),)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert {p.grad.placements for p in ours.parameters()} <= {(Replicate(),)}
    assert list(ours.state_dict()) == list(theirs.state_dict()) and type(ours[0]).__name__ == type(theirs[0]).__name__


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [True, False])
def test_gradients_of_norms_are_summed_once_however_they_are_made(mesh: DeviceMesh, compiled: bool):
    with torch.device("meta"):
        norm = nn.Sequential(nn.RMSNorm(16)).bfloat16()
    made = ops.parallelize_module(norm, mesh, {"0": SequenceParallel()}).to_empty(device="cpu")
    nn.init.normal_(made[0].weight)

    def run(x: torch.Tensor) -> torch.Tensor:
        return made(x).to_local()

    run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    x, wanted = torch.randn(2, 8, 16).bfloat16(), 0.0
    for _ in range(3):
        run(x).float().sum().backward()
        wanted = wanted + nn.functional.rms_norm(x.float(), (16,), eps=None).sum((0, 1))
        assert made[0].weight.grad.placements == (Replicate(),)
        torch.testing.assert_close(made[0].weight.grad.to_local().float(), wanted, rtol=0.1, atol=0.5)


def test_a_warm_up_meets_the_sums_of_norms_gradients(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    find = token_wise.operator_of
    monkeypatch.setattr(token_wise, "operator_of", lambda name: asked.append(name) or find(name))
    made = ops.parallelize_module(nn.Sequential(nn.RMSNorm(16).bfloat16()), mesh, {"0": SequenceParallel()})
    ops.warm_up(made, torch.randn(2, 8, 16).bfloat16())
    assert asked == ["all_reduce"] and made[0].weight.grad is None


def test_of_others_nothing_is_said(mesh: DeviceMesh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.parallelize_module(model(), mesh, PLAN)


class Latent(nn.Module):
    """Attention whose queries and keys come from fewer features; the layer that makes those is not split."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(16, 20)
        self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(12, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.low(x).split((8, 12), -1)
        return self.q(low) + self.k(high) + self.v(x)


COLUMNS = {name: ColwiseParallel() for name in "qkv"}


def test_layers_of_several_sizes_in_one_block(mesh: DeviceMesh):
    """A gather stays in front of a block whose layers take local tensors."""
    block, x = Latent().bfloat16(), torch.randn(2, 8, 16).bfloat16()
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    with pytest.warns(UserWarning, match=r"gathers of \[''\] stay PyTorch's.*use_local_output is True"):
        made = ops.parallelize_module(copy.deepcopy(block), mesh, {"": gather, **COLUMNS})
    torch.testing.assert_close(made(x), block(x))
    torch.testing.assert_close(ops.parallelize_module(block, mesh, COLUMNS)(x), made(x))


def siblings(mesh: DeviceMesh, **types: torch.dtype) -> nn.Module:
    made = nn.ModuleDict({name: nn.Linear(16, 8, dtype=types.get(name, torch.bfloat16)) for name in "qkv"})
    return ops.parallelize_module(made, mesh, COLUMNS)


def test_layers_of_several_types_keep_them(mesh: DeviceMesh):
    made = siblings(mesh, k=torch.float16)
    assert [made[name].weight.dtype for name in "qkv"] == [torch.bfloat16, torch.float16, torch.bfloat16]


@pytest.mark.usefixtures("emulated")
def test_layers_that_share_a_product_are_copied_and_saved(mesh: DeviceMesh):
    made, x, file = siblings(mesh), torch.randn(2, 8, 16).bfloat16(), io.BytesIO()
    wanted = [made[name](x) for name in "qkv"]
    assert layout.adjacent([made[name].weight.to_local() for name in "qkv"]) is not None
    copied, state = copy.deepcopy(made), copy.deepcopy(made.state_dict())
    torch.save(made.state_dict(), file)
    file.seek(0)
    for value in made.state_dict().values():  # which are the parameters themselves
        value.zero_()
    assert not any(made[name](x).any() for name in "qkv")
    for given in (state, torch.load(file, weights_only=False)):
        made.load_state_dict(given)
        for model in (made, copied):
            for name, result in zip("qkv", wanted, strict=True):
                torch.testing.assert_close(model[name](x), result)
        for value in made.parameters():
            value.data.zero_()
