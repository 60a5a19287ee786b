# SPDX-License-Identifier: MIT
"""The pass over inductor's graphs in a job of ranks: what it replaces, and that results are those of eager PyTorch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tilescale
from tilescale import ops
from tilescale.ops import strategy
from tilescale.ops.graph_patterns import replaced

WORLD = tilescale.init()
SIZE, RANK, HIDDEN, INNER = WORLD.size, WORLD.rank, 32, 48

GATHER, SCATTER, SUM, NORM = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_reduce_rms_norm"


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The same on all ranks for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layout(x: torch.Tensor) -> list[tuple[int, int]]:
    """Extents and strides, without the strides of dimensions of one element, which are meaningless."""
    return [(n, stride if n > 1 else 0) for n, stride in zip(x.shape, x.stride(), strict=True)]


def close(got: Any, want: Any) -> None:
    """Layouts of eager PyTorch, and values up to roundings that it makes and the operators do not."""
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and layout(one) == layout(other)
        scale = float(other.float().abs().max())
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2 * scale)


def compiled(
    block: Callable[..., Any], *inputs: tuple[torch.Tensor, ...], dynamic: bool = False, **wanted: int
) -> None:
    """Compile a function, compare it with itself on each of several inputs, and count what was replaced in it."""
    torch._dynamo.reset()
    want = [[x.clone() for x in block(*given)] for given in inputs]
    with ops.installed(graphs=True):
        made = torch.compile(block, fullgraph=True, dynamic=dynamic)
        got = [[x.clone() for x in made(*given)] for given in inputs]
        found = Counter({name: count for (name, reason), count in replaced.items() if not reason})
    for one, other in zip(got, want, strict=True):
        close(one, other)
    assert found == wanted, (found, dict(replaced))


UP, MORE, DOWN = random(HIDDEN, INNER, seed=1), random(INNER, HIDDEN, seed=2).t(), random(INNER, HIDDEN, seed=3)


def shards(*shape: int) -> tuple[torch.Tensor, ...]:
    return (random(*shape, seed=10 + RANK),)


def check_one_of_each() -> None:
    """A gather for two GEMMs, a reduce-scatter, a sum of a GEMM, and a norm of a sum, in one graph."""
    weight, residual = random(HIDDEN, seed=5), random(2, 4, HIDDEN, seed=6)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = functional.all_gather_tensor(x, 1, dist.group.WORLD)
        hidden = torch.relu(whole @ UP) * (whole @ MORE)
        part = functional.reduce_scatter_tensor(hidden @ DOWN, "avg", 1, dist.group.WORLD)
        y = residual + functional.all_reduce(part, "sum", dist.group.WORLD)
        return functional.all_reduce(x @ UP, "sum", dist.group.WORLD), transformers_norm(y, weight), y

    compiled(block, shards(2, 4, HIDDEN), **{GATHER: 1, SCATTER: 1, SUM: 1, NORM: 1})


def check_gather_and_scatter() -> None:
    """Two GEMMs of one gather, then a reduce-scatter; along each dimension of the tokens, sum and mean."""

    def block(x: torch.Tensor, dim: int, op: str) -> tuple[torch.Tensor, ...]:
        whole = functional.all_gather_tensor(x, dim, dist.group.WORLD)
        hidden = torch.relu(whole @ UP) * (whole @ MORE)
        return (functional.reduce_scatter_tensor(hidden @ DOWN, op, dim, dist.group.WORLD),)

    for shape, dim, op in (
        ((4, HIDDEN), 0, "sum"),
        ((2, 4, HIDDEN), 0, "sum"),
        ((2, 4, HIDDEN), 1, "avg"),
        ((1, 6, HIDDEN), 1, "sum"),
    ):
        compiled(lambda x, dim=dim, op=op: block(x, dim, op), shards(*shape), **{GATHER: 1, SCATTER: 1})


def check_gathered_rows_that_others_need() -> None:
    """Biases, of one GEMM of two; and the gathered rows, and a GEMM whose other operand is made of them."""
    bias = random(INNER, seed=4)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = functional.all_gather_tensor(x, 0, dist.group.WORLD)
        return torch.addmm(bias, whole, UP), whole @ MORE, whole.t() @ whole, whole + 1

    compiled(block, shards(4, HIDDEN), **{GATHER: 1})


def check_dynamic_rows() -> None:
    """One graph for several numbers of rows."""

    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = functional.all_gather_tensor(x, 1, dist.group.WORLD)
        return (functional.reduce_scatter_tensor(torch.relu(whole @ UP) @ DOWN, "sum", 1, dist.group.WORLD),)

    def summed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (functional.all_reduce(x @ UP, "sum", dist.group.WORLD),)

    compiled(block, *(shards(2, rows, HIDDEN) for rows in (4, 6, 10)), dynamic=True, **{GATHER: 1, SCATTER: 1})
    compiled(summed, *(shards(2, rows, HIDDEN) for rows in (3, 5, 10)), dynamic=True, **{SUM: 1})


def transformers_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def gemma_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * (1.0 + weight.float())).type_as(x)


def check_norms() -> None:
    """With and without a residual, of each kind; in front of the sum a GEMM that is not worth overlapping."""
    weight, residual = random(HIDDEN, seed=5), random(2, 3, HIDDEN, seed=6)
    strategy.overlaps = lambda job, team: False
    for norm in transformers_norm, torch_norm, gemma_norm:

        def added(x: torch.Tensor, norm: Callable[..., Any] = norm) -> tuple[torch.Tensor, ...]:
            y = residual + functional.all_reduce(x @ DOWN, "sum", dist.group.WORLD)
            return norm(y, weight), y

        def alone(x: torch.Tensor, norm: Callable[..., Any] = norm) -> tuple[torch.Tensor, ...]:
            return (norm(functional.all_reduce(x, "sum", dist.group.WORLD), weight),)

        compiled(added, shards(2, 3, INNER), **{NORM: 1})
        compiled(alone, shards(5, HIDDEN), **{NORM: 1})
    strategy.overlaps = lambda job, team: True
    compiled(added, shards(2, 3, INNER), **{SUM: 1})


def check_what_stays() -> None:
    """Unsupported types, maxima, columns, results with other users, and a residual of another shape."""
    group = dist.group.WORLD
    weight, row = random(HIDDEN, seed=5), random(HIDDEN, seed=7)

    def gathers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (functional.all_gather_tensor(x, 0, group) @ UP.float(),)

    def columns(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (functional.reduce_scatter_tensor(x @ DOWN, "sum", 1, group),)

    def largest(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return functional.all_reduce(x @ DOWN, "max", group), functional.reduce_scatter_tensor(
            x @ DOWN, "max", 0, group
        )

    def needed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = x @ DOWN
        return functional.all_reduce(part, "sum", group), part

    def broadcast(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch_norm(row + functional.all_reduce(x, "sum", group), weight),)

    def last(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = (x + functional.all_reduce(x, "sum", group)).float()
        return (weight * (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + 1e-5)).bfloat16(),)

    compiled(gathers, (random(4, HIDDEN, dtype=torch.float32),))
    compiled(columns, shards(4, INNER))
    compiled(largest, shards(4, INNER))
    compiled(needed, shards(4, INNER))
    compiled(broadcast, shards(4, HIDDEN))
    compiled(last, shards(4, HIDDEN))


def check_llama() -> None:
    """A Llama of transformers made parallel by DTensors, its layer compiled: results and gradients of each plan."""
    mesh = init_device_mesh("cpu", (SIZE,))
    strategy.overlaps = lambda job, team: True
    for sequence, wanted in (
        (True, {GATHER: 4, SCATTER: 2}),  # two gathers and two sums of the forward, two gathers of the backward
        (False, {SUM: 7}),  # two sums of the forward, and the gradients of five inputs
    ):
        layers, angles = llama(mesh, sequence)
        whole = random(2, 4 * SIZE, HIDDEN, seed=8)
        x = whole.chunk(SIZE, 1)[RANK].contiguous() if sequence else whole
        want = step(layers, x, angles)
        torch._dynamo.reset()
        for layer in layers:
            layer.compile(dynamic=False)
        with ops.installed(graphs=True):
            got = step(layers, x, angles)
            found = Counter({name: count for (name, reason), count in replaced.items() if not reason})
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=3e-2 * float(other.abs().max()))
        assert found == wanted, (sequence, found, dict(replaced))


def llama(mesh: DeviceMesh, sequence: bool) -> tuple[nn.ModuleList, Any]:
    """A layer, and the angles of its positions."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=8, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1,
        num_attention_heads=2 * SIZE, num_key_value_heads=SIZE, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaModel(config).bfloat16()
    split, whole = Shard(1), Replicate()
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {
        name: RowwiseParallel(output_layouts=split if sequence else whole)
        for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    if sequence:
        plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": split}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,))
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model.layers, model.rotary_emb(random(1, 4 * SIZE, HIDDEN), torch.arange(4 * SIZE)[None])


def step(layers: nn.ModuleList, x: torch.Tensor, angles: Any) -> list[torch.Tensor]:
    """The result, and the gradients of the input and of all parameters."""
    layers.zero_grad()
    given = y = x.clone().requires_grad_()
    for layer in layers:
        y = layer(y, position_embeddings=angles)
    y.float().pow(2).sum().backward()
    grads = [given.grad, *(p.grad for p in layers.parameters())]
    return [y.detach().float(), *((g.full_tensor() if hasattr(g, "full_tensor") else g).float() for g in grads)]


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch._inductor.config.fx_graph_cache = False  # cached graphs are not replaced again
    for name in sys.argv[1:] or CHECKS:
        CHECKS[name]()
        print(f"passed {name}", flush=True)
    dist.destroy_process_group()
