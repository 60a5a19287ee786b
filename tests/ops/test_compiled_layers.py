# SPDX-License-Identifier: MIT
"""Layers under torch.compile, in a job of one rank: whole graphs, no recompilation, the results of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils.checkpoint import checkpoint

from tilescale import ops

HIDDEN, LAYERS = 32, 2


pytestmark = pytest.mark.usefixtures("emulated", "fresh_compiler")


class Block(nn.Module):
    """Gated GEMMs of three layers with one input, after a norm."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.inner = nn.ModuleDict({name: nn.Linear(HIDDEN, 2 * HIDDEN, bias=bias) for name in ("up", "gate", "more")})
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        up, gate, more = (self.inner[name](given) for name in ("up", "gate", "more"))
        return x + self.down(nn.functional.silu(gate) * up + more)


def blocks(mesh: DeviceMesh, sequence: bool, bias: bool = False) -> nn.ModuleList:
    torch.manual_seed(0)
    made = nn.ModuleList(Block(bias) for _ in range(LAYERS)).bfloat16()
    output = Shard(1) if sequence else Replicate()
    plan = {
        "*.inner.*": ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate()),
        "*.down": RowwiseParallel(output_layouts=output),
    }
    ops.parallelize_module(made, mesh, plan | ({"*.norm": SequenceParallel()} if sequence else {}))
    if sequence:
        for block in made:
            ops.gather_once(*block.inner.values())
    return made


def through(made: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in made:
        x = block(x)
    return x


def after(made: nn.ModuleList, x: torch.Tensor, run: Callable = through) -> list[torch.Tensor]:
    """The result, and all gradients."""
    made.zero_grad()
    given = x.detach().requires_grad_()
    y = run(made, given)
    y.float().pow(2).sum().backward()
    grads = [p.grad for p in made.parameters()]
    return [y.detach(), given.grad, *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)]


def tokens(count: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, count, HIDDEN).bfloat16()


def compiled(made: nn.ModuleList, **how: object) -> nn.ModuleList:
    for block in made:
        block.compile(backend="aot_eager", fullgraph=True, **how)
    return made


@pytest.mark.parametrize(
    ("sequence", "bias"), [(True, True), (False, True), pytest.param(False, False, marks=pytest.mark.nightly)]
)
def test_blocks_are_compiled_once_for_all_of_them(mesh: DeviceMesh, sequence: bool, bias: bool):
    eager, made = blocks(mesh, sequence, bias), compiled(blocks(mesh, sequence, bias))
    for step in range(4):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            x = tokens(8)
            for one, other in zip(after(made, x), after(eager, x), strict=True):
                assert torch.equal(one, other)
    for step in range(3):
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=step > 0):
            x = tokens(8)
            assert torch.equal(through(made, x), through(eager, x))


def test_numbers_of_tokens_that_change_are_compiled_once_more(mesh: DeviceMesh):
    eager, made = blocks(mesh, True), compiled(blocks(mesh, True), dynamic=True)
    for step, (count, batch) in enumerate(((8, 2), (12, 2), (16, 3), (20, 4))):
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            x = tokens(count, batch)
            for one, other in zip(after(made, x), after(eager, x), strict=True):
                assert torch.equal(one, other)


def test_a_whole_model_is_one_graph(mesh: DeviceMesh):
    eager, made = blocks(mesh, True), blocks(mesh, True)
    run = torch.compile(through, backend="aot_eager", fullgraph=True)
    for step in range(3):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            x = tokens(8)
            for one, other in zip(after(made, x, run), after(eager, x), strict=True):
                assert torch.equal(one, other)


def test_blocks_whose_result_is_a_layers_share_one_graph(mesh: DeviceMesh):
    """As of models that add the residual last. With several sequences, too: their results lie as the blocks' inputs."""
    made, graphs = blocks(mesh, True), CompileCounterWithBackend("aot_eager")
    for block in made:
        block.forward = partial(last_layer, block)
        block.compile(backend=graphs, fullgraph=True, dynamic=False)
    for count in (1, 3):
        assert through(made, tokens(8, count).requires_grad_()).is_contiguous()
    assert graphs.frame_count == 2  # one for each number of sequences


def last_layer(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.down(block.inner["up"](x)) + x


def test_one_gather_serves_siblings_in_a_graph(mesh: DeviceMesh):
    made, targets = blocks(mesh, True), []

    def seen(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable:
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(through, backend=seen, fullgraph=True)(made, tokens(8))
    assert sum("column_parallel" in str(target) for target in targets) == LAYERS


def test_graphs_of_a_training_step_gather_tokens_once(mesh: DeviceMesh):
    """Rows for the gradient of a weight are those of the forward GEMM: not gathered again in either graph."""
    made, targets = blocks(mesh, True)[:1], []

    def seen(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable:
        targets.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    made[0].compile(backend=aot_autograd(fw_compiler=seen, partition_fn=min_cut_rematerialization_partition))
    after(made, tokens(8))
    forward, backward = targets
    assert "tilescale.column_parallel.default" in forward and "aten.mm.default" in backward
    assert "tilescale.all_gather.default" not in forward + backward


def test_siblings_in_graphs_of_their_own(mesh: DeviceMesh):
    eager, made = blocks(mesh, True), blocks(mesh, True)
    for block in made:
        for layer in block.inner.values():
            layer.compile(backend="aot_eager", fullgraph=True)
    for step in range(4):
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            x = tokens(8)
            for one, other in zip(after(made, x), after(eager, x), strict=True):
                assert torch.equal(one, other)


def test_blocks_that_are_computed_again_are_compiled(mesh: DeviceMesh):
    eager, made = blocks(mesh, True), blocks(mesh, True)

    def again(made: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in made:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    x = tokens(8)
    run = torch.compile(again, backend="aot_eager", fullgraph=True)
    for one, other in zip(after(made, x, run), after(eager, x, again), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sequence", [True, False])
def test_layers_share_the_input_of_a_part_that_is_computed_again(mesh: DeviceMesh, sequence: bool):
    """As of an MLP alone, whose norm is outside."""
    eager, made, targets = blocks(mesh, sequence), blocks(mesh, sequence), []

    def seen(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable:
        targets.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    def again(made: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in made:
            x = x + checkpoint(gated, block, block.norm(x), use_reentrant=False)
        return x

    x = tokens(8)
    graphs = aot_autograd(fw_compiler=seen, partition_fn=min_cut_rematerialization_partition)
    for one, other in zip(
        after(made, x, torch.compile(again, backend=graphs, fullgraph=True)), after(eager, x, again), strict=True
    ):
        torch.testing.assert_close(one, other)
    name = f"tilescale.{'column_parallel' if sequence else 'side_by_side'}.default"
    assert targets[0].count(name) == LAYERS


@pytest.mark.parametrize("sequence", [True, False])
def test_a_graph_leaves_nothing_with_its_input(mesh: DeviceMesh, sequence: bool):
    """As of an MLP that is compiled by itself, and called with the same tensor in each step."""
    eager, made = blocks(mesh, sequence)[0], blocks(mesh, sequence)[0]
    run, x = torch.compile(gated, backend="aot_eager", fullgraph=True), tokens(8).requires_grad_()
    for step in range(3):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            results = [function(block, x) for function, block in ((run, made), (gated, eager))]
        for block, result in zip((made, eager), results, strict=True):
            block.zero_grad()
            result.float().pow(2).sum().backward()
        assert torch.equal(*results) and not vars(x)
        for one, other in zip(made.inner.parameters(), eager.inner.parameters(), strict=True):
            assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor())
        with torch.no_grad():
            for parameter in (*made.parameters(), *eager.parameters()):
                parameter.mul_(0.5)


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", torch.float16)])
def test_siblings_share_results_of_one_mode(mesh: DeviceMesh, mode: Callable[[], Any]):
    """In a graph as in eager calls: a result without gradients does not serve where they are recorded."""
    eager, made = blocks(mesh, True)[0], blocks(mesh, True)[0]

    def call(block: Block, x: torch.Tensor) -> torch.Tensor:
        with mode():
            gate = block.inner["gate"](x)
        return gate.float() * block.inner["up"](x) + block.inner["more"](x)

    x, grads = tokens(8).requires_grad_(), []
    for function, block in ((torch.compile(call, backend="aot_eager", fullgraph=True), made), (call, eager)):
        function(block, x).float().pow(2).sum().backward()
        grads.append([x.grad, *(block.inner[name].weight.grad.full_tensor() for name in ("up", "more"))])
        x.grad = None
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def gated(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.down(nn.functional.silu(block.inner["gate"](x)) * block.inner["up"](x) + block.inner["more"](x))


def test_gradients_are_a_graph_as_well():
    """PyTorch's graph of a backward pass is a module, which is made under the compiler's eyes."""
    up = ops.ColumnParallelLinear.shard(nn.Linear(HIDDEN, HIDDEN).bfloat16())
    grads = []

    def step(x: torch.Tensor) -> None:
        up(x).float().pow(2).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        for run in (torch.compile(step, backend="aot_eager"), step):
            run(x := torch.ones(8, HIDDEN, dtype=torch.bfloat16, requires_grad=True))
            grads.append((x.grad, up.weight.grad))
            up.zero_grad()
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.nightly
def test_inductor_fuses_what_is_between(mesh: DeviceMesh):
    eager, made = blocks(mesh, True), blocks(mesh, True)
    x = tokens(8)
    for one, other in zip(after(made, x, torch.compile(through, fullgraph=True)), after(eager, x), strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.1 * float(other.float().abs().max()))
