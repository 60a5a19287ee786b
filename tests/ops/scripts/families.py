# SPDX-License-Identifier: MIT
"""Models of transformers by a plan, against the whole ones: families.py <plan>:<type>:<family>...

Loss, logits, each gradient, the parameters after a step of SGD, and generated tokens.
"""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tilescale
from tests.ops.families import FAMILIES
from tilescale import ops

BOUND = {torch.float32: 2e-3, torch.bfloat16: 0.1}
"""Of differences, in terms of the largest magnitude. A part of a gradient differs by about as much as it is."""


def numbers(tokens: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(2, 64, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def near(what: str, got: Any, want: torch.Tensor, bound: float) -> None:
    got = whole(got.detach()).float()
    most = float(want.detach().abs().max()) + 1e-4
    torch.testing.assert_close(got, want.detach().float(), rtol=0, atol=bound * most, msg=lambda m: f"{what}: {m}")


def check_step(plain: nn.Module, model: nn.Module, bound: float) -> None:
    """Two batches' gradients are accumulated, then a step is taken."""
    with torch.no_grad():
        near("logits", model(numbers(5)).logits, plain(numbers(5)).logits, bound)
    for tokens in (7, 4):
        losses = [each(numbers(tokens), labels=numbers(tokens), use_cache=False).loss for each in (model, plain)]
        near("loss", *losses, bound)
        for loss in losses:
            loss.backward()
    mine = dict(model.named_parameters())
    assert mine.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert (mine[name].grad is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            near(f"gradient of {name}", mine[name].grad, parameter.grad, bound)
    for each in (plain, model):
        torch.optim.SGD(each.parameters(), lr=0.1, foreach=False).step()
    for name, parameter in plain.named_parameters():
        near(name, mine[name], parameter, bound)


def check_generate(plain: nn.Module, model: nn.Module) -> None:
    for tokens in (1, 6):
        how = {"max_new_tokens": 3, "do_sample": False}
        assert model.generate(numbers(tokens), **how).equal(plain.generate(numbers(tokens), **how)), tokens


def check(mesh: DeviceMesh, plan: str, dtype: torch.dtype, name: str) -> None:
    family = FAMILIES[name]
    plain = family.model().to(dtype)
    model = ops.parallelize_module(copy.deepcopy(plain), mesh, getattr(family, plan)(plain))
    if dtype is torch.float32:  # rounded logits have ties
        check_generate(plain, model)
    check_step(plain, model, BOUND[dtype])


if __name__ == "__main__":
    world = tilescale.init()
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")  # those of layers that become PyTorch's: test_families.py
    mesh = init_device_mesh("cpu", (world.size,))
    for each in sys.argv[1:]:
        plan, dtype, name = each.split(":")
        check(mesh, plan, getattr(torch, dtype), name)
        if world.rank == 0:
            print("passed", each, flush=True)
    dist.destroy_process_group()
