# SPDX-License-Identifier: MIT
"""Models that are trained as people train: FSDP2 over one dimension of a mesh, tensor parallelism over the other.

Parameters in float32 are computed with in bfloat16 by FSDP2's `MixedPrecisionPolicy`, or by autocast; activations are
checkpointed, gradients accumulated over several batches, and checkpoints saved and loaded by
`torch.distributed.checkpoint`. Losses are those of the same model by PyTorch's own tensor parallelism.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel import parallelize_module as by_torch
from torch.utils.checkpoint import checkpoint

import tilescale
from tilescale import ops
from tilescale.ops import layer_gemms

HIDDEN, BLOCKS, BATCH, TOKENS, STEPS = 32, 2, 2, 8, 2
WORLD = tilescale.init()
dist.init_process_group("gloo")
MESH = init_device_mesh("cpu", (2, WORLD.size // 2), mesh_dim_names=("dp", "tp"))
ALL = "all" in sys.argv
"""Whether every option is tried with and without parts of the sequence, and not each with one of them."""

CASTS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.up, self.gate = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(given)) * self.up(given))


class Model(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def plan(sequence: bool) -> dict:
    layout = Shard(1) if sequence else Replicate()
    columns = {f"blocks.*.{name}": ColwiseParallel(input_layouts=layout) for name in ("up", "gate")}
    rows = {"blocks.*.down": RowwiseParallel(output_layouts=layout)}
    return columns | rows | ({"blocks.*.norm": SequenceParallel(use_local_output=True)} if sequence else {})


def made(
    parallelize: Callable,
    sequence: bool,
    dtype: torch.dtype,
    *,
    casts: bool = False,
    shards: bool = True,
    checkpoints: bool = False,
    **how: object,
) -> Model:
    """The same model each time, its layers over "tp" and, if it `shards`, its parameters over "dp"."""
    torch.manual_seed(0)
    model = Model(checkpoints).to(dtype)
    parallelize(model, MESH["tp"], plan(sequence), **how)
    policy = {"mp_policy": CASTS} if casts else {}
    for part in (*model.blocks, model) if shards else ():
        fully_shard(part, mesh=MESH["dp"], **policy)
    return model


def tokens(dtype: torch.dtype, sequence: bool) -> torch.Tensor:
    """This rank's tokens; other ones for each rank of "dp"."""
    generator = torch.Generator().manual_seed(1 + MESH["dp"].get_local_rank())
    whole = torch.randn(BATCH, TOKENS, HIDDEN, generator=generator).to(dtype)
    return whole.chunk(MESH["tp"].size(), 1)[MESH["tp"].get_local_rank()].contiguous() if sequence else whole


def trained(model: Model, sequence: bool, dtype: torch.dtype, *, casts: bool = False, parts: int = 1) -> list[float]:
    """The losses of some steps, with gradients of `parts` batches added up in each."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(STEPS):
        losses.append(0.0)
        for part in tokens(dtype, sequence).chunk(parts):
            with torch.autocast("cpu", torch.bfloat16) if casts else contextlib.nullcontext():
                y = model(part)
            loss = y.float().pow(2).mean() / parts
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check(name: str, got: list[float], want: list[float]) -> None:
    torch.testing.assert_close(
        torch.tensor(got), torch.tensor(want), rtol=1e-2, atol=1e-3, msg=lambda m: f"{name}: {m}"
    )
    assert got[-1] < 0.97 * got[0], got


def check_precisions() -> None:
    """Parameters of either type, cast by FSDP2, by autocast, or not at all."""
    for dtype, cast, by_day in (
        (torch.bfloat16, None, True),
        (torch.float32, "fsdp", False),
        (torch.float32, "autocast", True),
        (torch.float32, None, False),
    ):
        for sequence in (True, False) if ALL else (by_day,):
            results, data = [], torch.bfloat16 if cast == "fsdp" else dtype
            for parallelize in (ops.parallelize_module, by_torch):
                model = made(parallelize, sequence, dtype, casts=cast == "fsdp")
                results.append(trained(model, sequence, data, casts=cast == "autocast"))
            check(f"{dtype} {cast} {sequence}", *results)


def check_what_is_computed_in_float32_is_told_of() -> None:
    layer_gemms._warn_of_float32.cache_clear()
    for casts, told in ((True, 0), (False, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(made(ops.parallelize_module, True, torch.float32, shards=False), True, torch.float32, casts=casts)
        assert sum("compute in float32" in str(each.message) for each in caught) == told, caught


def check_memory_options() -> None:
    """Checkpointed activations, gathered rows that are kept, and gradients of parts of a batch, alone and together."""
    for sequence in (True, False):
        want = trained(made(by_torch, sequence, torch.bfloat16), sequence, torch.bfloat16)
        for checkpoints, keep in ((True, False), (False, True), (True, True)):  # neither: `check_precisions`
            if not ALL and sequence != keep:
                continue
            model = made(ops.parallelize_module, sequence, torch.bfloat16, checkpoints=checkpoints, keep_gathered=keep)
            check(f"{sequence} {checkpoints} {keep}", trained(model, sequence, torch.bfloat16), want)
        if not ALL and not sequence:
            continue
        results = [
            trained(made(parallelize, sequence, torch.bfloat16), sequence, torch.bfloat16, parts=2)
            for parallelize in (ops.parallelize_module, by_torch)
        ]
        check("accumulated", *results)


def check_compiled_layers() -> None:
    want = trained(made(ops.parallelize_module, True, torch.bfloat16), True, torch.bfloat16)
    model = made(ops.parallelize_module, True, torch.bfloat16, keep_gathered=True)
    model.blocks[0].compile(backend="aot_eager", fullgraph=True)  # the others are alike
    check("compiled", trained(model, True, torch.bfloat16), want)


def check_checkpoints() -> None:
    """DCP loads checkpoints of one model into another one, for layers of either kind."""
    model = made(ops.parallelize_module, True, torch.float32, casts=True)
    trained(model, True, torch.bfloat16)
    folder = WORLD.all_gather(tempfile.mkdtemp() if WORLD.rank == 0 else "")[0]
    dcp.save({"model": model.state_dict()}, checkpoint_id=Path(folder))
    for parallelize in (ops.parallelize_module, by_torch):
        other = made(parallelize, True, torch.float32, casts=True)
        state = other.state_dict()
        for value in state.values():
            value.zero_()
        dcp.load({"model": state}, checkpoint_id=Path(folder))
        other.load_state_dict(state)
        for name, one in model.state_dict().items():
            assert torch.equal(one.full_tensor(), other.state_dict()[name].full_tensor()), name


def check_parameters_made_on_no_device() -> None:
    """Layers on the meta device get memory after they are parallelised."""
    with torch.device("meta"):
        model = Model(False).bfloat16()
    ops.parallelize_module(model, MESH["tp"], plan(True))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=MESH["dp"])
    model.to_empty(device="cpu")
    same = made(ops.parallelize_module, True, torch.bfloat16)
    with torch.no_grad():
        for one, other in zip(model.parameters(), same.parameters(), strict=True):
            one.copy_(other)
    results = [trained(each, True, torch.bfloat16) for each in (model, same)]
    check("meta", *results)


def check_weights_lie_side_by_side() -> None:
    """The backward pass copies no weight of layers that share a gather, until one is moved."""
    seen = []
    joined = layer_gemms._joined

    def noted(weights: list[torch.Tensor]) -> torch.Tensor:
        whole = joined(weights)
        seen.append(whole.data_ptr() == weights[0].data_ptr())
        assert torch.equal(whole, torch.cat(weights))
        return whole

    layer_gemms._joined = noted
    layouts = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(HIDDEN, n, bias=False) for name, n in (("q", 32), ("k", 16))}).bfloat16()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([part(x) for part in self.parts.values()], -1)

    block = {"": PrepareModuleInput(**layouts), "parts.*": ColwiseParallel()}
    layers = ops.parallelize_module(Both(), MESH["tp"], block)
    for _ in range(2):
        layers(torch.randn(2, 4, HIDDEN).bfloat16().requires_grad_()).sum().backward()
        model["k"].weight = nn.Parameter(model["k"].weight.detach().clone())
    layer_gemms._joined = joined
    assert seen == [True, False], seen


if __name__ == "__main__":
    for name, each in list(globals().items()):
        if name.startswith("check_"):
            each()
            if WORLD.rank == 0:
                print("passed", name, flush=True)
