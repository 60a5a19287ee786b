# SPDX-License-Identifier: MIT
"""Small transformers, trained as one process would and tensor-parallel: the losses of each of 20 steps are the same.

One is that of PyTorch's own tests, with its plan; one is Llama-style, and has gates.

Those of float8 fall as those of bfloat16 do. And DTensors, of which such models are made: operators take them, and
give them.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from itertools import product
from types import ModuleType
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.utils._python_dispatch import TorchDispatchMode

import tilescale
from tilescale import ops
from tilescale.errors import ArgumentError
from tilescale.ops import strategy

HIDDEN, HEADS, TOKENS, BATCH, VOCABULARY, LAYERS, STEPS, FLOAT8_STEPS = 64, 4, 16, 2, 48, 1, 8, 4
WORLD = tilescale.init()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (w(x).view(batch, tokens, -1, HIDDEN // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(numbers)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


PLAN = {
    "embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.ffn_norm": SequenceParallel(),
    "layers.*.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.feed_forward.w[13]": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def losses(model: nn.Module, steps: int = STEPS) -> list[float]:
    """Of each step on the same batch of random tokens."""
    numbers = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    # All at once, as optimisers do on GPUs: PyTorch takes no DTensors and others side by side then.
    optimiser, found = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True), []
    for _ in range(steps):
        logits = model(numbers[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), numbers[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(loss.item())
    return found


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    hidden = ops.all_gather_matmul(x, [up.t()])[0]
    return ops.matmul_reduce_scatter(hidden, down.t(), bias=bias)


def check_dtensors(mesh: DeviceMesh) -> None:
    """Results and gradients equal those of the whole tensors, with the placements of the arguments; others are named.
    """
    layouts = Shard(0), Shard(0), Shard(1), Replicate()
    whole = [torch.randn(shape).half() for shape in ((6, 16), (32, 16), (24, 32), (24,))]
    plain = [x.float().requires_grad_() for x in whole]
    want = plain[0] @ plain[1].t() @ plain[2].t() + plain[3]
    want.pow(2).sum().backward()
    for call in (mlp, torch.compile(mlp, fullgraph=True, backend="aot_eager")):
        given = [distribute_tensor(x, mesh, [lies]).requires_grad_() for x, lies in zip(whole, layouts, strict=True)]
        got = call(*given)
        got.float().pow(2).sum().backward()
        assert got.placements == (Shard(0),) and [x.grad.placements for x in given] == [x.placements for x in given]
        for one, other in zip([got, *(x.grad for x in given)], [want, *(x.grad for x in plain)], strict=True):
            bound = 0.01 * float(other.detach().abs().max())
            torch.testing.assert_close(one.full_tensor().float(), other, rtol=0, atol=bound)
    x, up, down, bias = given
    everywhere = ops.matmul_all_reduce(down, distribute_tensor(whole[1], mesh, [Shard(0)]), bias=bias[:16])
    assert everywhere.placements == (Replicate(),)
    torch.testing.assert_close(everywhere.full_tensor(), whole[2] @ whole[1] + whole[3][:16], rtol=1e-2, atol=1e-1)
    for wrong, said in (
        (lambda: ops.matmul_reduce_scatter(x, down.t()), r"a lies as S\(0\)"),
        (lambda: ops.all_gather_matmul(x, [up.t(), up]), r"b\[1\] lies as"),
        (lambda: ops.all_gather_matmul(distribute_tensor(whole[0][:5], mesh, [Shard(0)]), up.t()), "of a is 5"),
        (lambda: ops.all_gather_matmul(x, up.t(), group=dist.new_group([0, 1])), "group is another one"),
        (lambda: ops.all_reduce(distribute_tensor(whole[0], mesh, [Replicate()])), "a is a DTensor"),
    ):
        with pytest.raises(ArgumentError, match=said):
            wrong()


def check_layers_take_dtensors(mesh: DeviceMesh) -> None:
    """All placements, like PyTorch's layers; layers that cannot be split are named."""
    lies = Shard(0), Shard(1), Shard(2), Replicate()
    for kind, sequence in product((ops.ColumnParallelLinear, ops.RowParallelLinear), (True, False)):
        linear, x = nn.Linear(16, 32).half(), torch.randn(2, 4, 16).half()
        layer, want = kind.shard(copy.deepcopy(linear), mesh, sequence=sequence), linear(x).detach()
        slope = linear.weight.detach().sum(0).expand_as(x)
        if kind is ops.ColumnParallelLinear:
            want = want.chunk(2, 2)[WORLD.rank]
        elif sequence:
            want = want.chunk(2, 1)[WORLD.rank]
        for placement in lies:
            given = distribute_tensor(x, mesh, [placement]).requires_grad_()
            got = layer(given)
            torch.testing.assert_close(got.detach(), want, rtol=1e-2, atol=1e-2)
            got.sum().backward()
            torch.testing.assert_close(given.grad.full_tensor(), slope, rtol=1e-2, atol=2e-2)
        odd = distribute_tensor(torch.randn(2, 3, 15).half(), mesh, [Replicate()])
        said = "dimension . of x is" if kind is ops.RowParallelLinear else "x has shape"
        with pytest.raises(ArgumentError, match=said):
            layer(odd)
        with pytest.raises(ArgumentError, match="x lies on"):
            layer(distribute_tensor(x, init_device_mesh("cpu", (1, 2)), [Replicate(), Replicate()]))


class Calls(TorchDispatchMode):
    """Number of calls of each operator of TileScale, and PyTorch's communication."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func.name().split("::")
        if space in ("tilescale", "_c10d_functional") and "wait" not in name and "wrap" not in name:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class ByName(FeedForward):
    """Call with a keyword input, in addition to another one."""

    def forward(self, other: torch.Tensor, *, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden)


def check_plans_of_blocks(mesh: DeviceMesh) -> None:
    """A gather moves into the layers also if the input has a name. Where it stays, its gradient is summed once."""
    tokens, whole = Shard(1), Replicate()
    layers = {f"w{i}": ColwiseParallel() for i in (1, 3)} | {"w2": RowwiseParallel(output_layouts=Shard(1))}
    names = {"input_kwarg_layouts": {"hidden": tokens}, "desired_input_kwarg_layouts": {"hidden": whole}}
    same, both = ({"input_layouts": tokens, "desired_input_layouts": x} for x in (tokens, whole))
    moved = {"column_parallel": 1, "row_parallel": 1, "all_gather_matmul": 1}
    moved |= {"column_parallel_input_gradient": 1, "all_gather": 1, "all_gather_into_tensor": 0}
    stays = {"reduce_scatter_tensor": 1, "all_reduce": 0}
    x = torch.randn(BATCH, 4, HIDDEN).bfloat16()
    for style, wanted in ((names | same, moved), (names | both, stays)):
        block = ByName().bfloat16()
        plain, given = copy.deepcopy(block), x.clone().requires_grad_()
        plain(torch.zeros_like(given), hidden=given).float().pow(2).sum().backward()
        parallel = ops.parallelize_module(block, mesh, {"": PrepareModuleInput(**style)} | layers)
        mine = x.chunk(2, 1)[WORLD.rank].clone().requires_grad_()
        with Calls() as calls:
            parallel(torch.zeros_like(mine), hidden=mine).float().pow(2).sum().backward()
        assert {name: calls.counts[name] for name in wanted} == wanted, calls.counts
        want = given.grad.chunk(2, 1)[WORLD.rank].float()
        torch.testing.assert_close(mine.grad.float(), want, rtol=0, atol=0.05 * float(want.abs().max()))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(other)


def check_a_plain_tensor_in_a_block_has_all_tokens(mesh: DeviceMesh) -> None:
    """As the plan says of the layer's input: the block's gather is of its other input."""
    block, x = TwoInputs().bfloat16(), torch.randn(BATCH, 4, HIDDEN).bfloat16()
    gather = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    columns = {"": gather, "a": ColwiseParallel(), "b": ColwiseParallel()}
    parallel = ops.parallelize_module(copy.deepcopy(block), mesh, columns)
    given = x.clone().requires_grad_()
    for got, want in zip(parallel(x.chunk(2, 1)[WORLD.rank], given), block(x, x), strict=True):
        torch.testing.assert_close(got, want.chunk(2, -1)[WORLD.rank], rtol=1e-2, atol=1e-2)
    got.sum().backward()
    torch.testing.assert_close(given.grad, block.b.weight.sum(0).expand_as(x), rtol=1e-2, atol=2e-2)


def check_whose_parameters_all_take(mesh: DeviceMesh) -> None:
    """Those of a rank of the mesh, as PyTorch does it, or each its own; what is frozen stays so."""
    for source, seed in ((0, 0), (1, 1), (None, WORLD.rank)):
        torch.manual_seed(WORLD.rank)
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).half()
        model[0].weight.requires_grad_(False)
        with mesh:
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            model = ops.parallelize_module(model, parallelize_plan=plan, src_data_rank=source)
        torch.manual_seed(seed)
        wanted = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).half()
        cuts = {"0.weight": 0, "0.bias": 0, "1.weight": 1}
        for name, x in wanted.named_parameters():
            part = x.chunk(2, cuts[name])[WORLD.rank] if name in cuts else x
            assert torch.equal(model.get_parameter(name).to_local(), part), (source, name)
        assert [x.requires_grad for x in model.parameters()] == [False, True, True, True]
    torch.manual_seed(0)


def check_shipped(mesh: DeviceMesh) -> None:
    """The transformer that PyTorch ships, by its plan, with one of its names replaced."""
    # Its module loads PyTorch's test runner, which loads a package that is not needed here.
    sys.modules.setdefault("expecttest", ModuleType("expecttest")).TestCase = TestCase
    from torch.testing._internal.distributed._tensor import common_dtensor as shipped

    sizes = {"n_layers": 1, "vocab_size": VOCABULARY, "max_seq_len": TOKENS, "dim": HIDDEN, "n_heads": HEADS}
    model = shipped.Transformer(shipped.ModelArgs(**sizes, dropout_p=0.0, weight_tying=False)).half()
    alone = losses(copy.deepcopy(model))
    shipped.parallelize_module = ops.parallelize_module
    parallel = shipped.Transformer.parallelize(model, mesh, use_seq_parallel=True, local_output_for_attn=True)
    kinds = [type(layer).__name__ for layer in parallel.modules() if isinstance(layer, nn.Linear)]
    assert kinds.count("ColumnParallelLinear") == 4 and kinds.count("RowParallelLinear") == 2
    together = losses(parallel)
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=3e-3, atol=0)
    assert alone[-1] < 0.7 * alone[0]


def check_gradients_have_gradients(mesh: DeviceMesh) -> None:
    """As penalties on gradients need them, of all weights and biases, by plans of either kind."""
    for lies in (Shard(1), Replicate()):
        plain, x = FeedForward(), torch.randn(BATCH, 4, HIDDEN)
        columns = {f"w{i}": ColwiseParallel(input_layouts=lies) for i in (1, 3)}
        plan = columns | {"w2": RowwiseParallel(output_layouts=lies)}
        parallel = ops.parallelize_module(copy.deepcopy(plain), mesh, plan)
        mine = distribute_tensor(x, mesh, [lies]).to_local()
        for y, model in ((plain(x), plain), (DTensor.from_local(parallel(mine), mesh, [lies]).full_tensor(), parallel)):
            grads = torch.autograd.grad(y.pow(3).sum(), model.parameters(), create_graph=True)
            sum((x.full_tensor() if model is parallel else x).pow(2).sum() for x in grads).backward()
        for name, parameter in plain.named_parameters():
            got, want = parallel.get_parameter(name).grad.full_tensor(), parameter.grad
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()), msg=f"{lies} {name}")


def check_float8(model: nn.Module, mesh: DeviceMesh) -> None:
    """GEMMs in float8 learn like those in bfloat16, though not identically."""
    wanted, seen = losses(copy.deepcopy(model), FLOAT8_STEPS), []
    for gradients in (torch.float8_e5m2, torch.bfloat16):
        parallel = ops.parallelize_module(copy.deepcopy(model), mesh, PLAN, float8=ops.Float8(gradients=gradients))
        seen.append(losses(parallel, FLOAT8_STEPS))
        torch.testing.assert_close(torch.tensor(seen[-1]), torch.tensor(wanted), rtol=5e-3, atol=0)
    assert seen[0] != seen[1], "gradients are rounded, or not"


def check_whole_parameters(parallel: nn.Module, alone: nn.Module) -> None:
    """Parameters appear as whole tensors: checkpoints have names and shapes, norms of gradients are one."""
    given = {name: tuple(x.shape) for name, x in parallel.state_dict().items()}
    assert given == {name: tuple(x.shape) for name, x in alone.state_dict().items()}
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) for model in (parallel, alone)]
    torch.testing.assert_close(norms[0].full_tensor().float(), norms[1].float(), rtol=2e-2, atol=0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    strategy._overlaps = lambda machine, job, ranks: True  # as if the model were large
    torch.manual_seed(0)
    model = Llama().half()
    alone_model = copy.deepcopy(model)
    alone = losses(alone_model)
    mesh = init_device_mesh("cpu", (WORLD.size,), mesh_dim_names=("tp",))
    parallel = ops.parallelize_module(model, mesh["tp"], PLAN)
    kinds = [type(layer).__name__ for layer in parallel.modules() if isinstance(layer, nn.Linear)]
    assert kinds.count("ColumnParallelLinear") == 5 * LAYERS and kinds.count("RowParallelLinear") == 2 * LAYERS
    together = losses(parallel)
    if WORLD.rank == 0:
        print(alone, together, sep="\n")
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=3e-3, atol=0)
    assert alone[-1] < 0.7 * alone[0]
    check_shipped(mesh["tp"])
    check_dtensors(mesh["tp"])
    check_layers_take_dtensors(mesh["tp"])
    check_plans_of_blocks(mesh["tp"])
    check_a_plain_tensor_in_a_block_has_all_tokens(mesh["tp"])
    check_whose_parameters_all_take(mesh["tp"])
    check_whole_parameters(parallel, alone_model)
    check_gradients_have_gradients(mesh["tp"])
    check_float8(Llama().bfloat16(), mesh["tp"])
    if WORLD.rank == 0:
        print("passed", flush=True)
    dist.destroy_process_group()
