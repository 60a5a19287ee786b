# SPDX-License-Identifier: MIT
"""Interfaces that serving engines call, in a job of ranks: the communicator, and FlashInfer's fused all-reduce."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch
import torch.distributed as dist

import tilescale
from tilescale.errors import ArgumentError
from tilescale.ops.allreduce_fusion import AllReduceFusionPattern, allreduce_fusion, create_allreduce_fusion_workspace
from tilescale.ops.communicator import Communicator
from tilescale.ops.engine_plugins import VllmCommunicator

WORLD = tilescale.init()
SIZE, RANK = WORLD.size, WORLD.rank


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The same on all ranks for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def each(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [random(*shape, seed=10 + rank, dtype=dtype) for rank in range(SIZE)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2 * float(want.abs().mean()))


def total(given: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.double() for x in given]).sum(0)


def check_communicator(group: dist.ProcessGroup) -> None:
    """New sums, in another tensor, and in place; numbers of elements that are rounded up, and that are not."""
    comm = Communicator(group)
    assert not comm.disabled
    for shape, dtype in ((4, 64), torch.bfloat16), ((7, 9), torch.float32), ((5, 8), torch.float16):
        given = each(*shape, dtype=dtype)
        x, want = given[RANK].clone(), total(given)
        assert comm.should_custom_ar(x)
        close(comm.custom_all_reduce(x), want)
        assert torch.equal(x, given[RANK])
        out = torch.full_like(x, torch.nan)
        assert comm.all_reduce(x, out=out) is out and torch.equal(x, given[RANK])
        close(out, want)
        across = torch.empty(*shape[::-1], dtype=dtype).t()
        close(comm.all_reduce(x, out=across), want)
        assert comm.all_reduce(x, out=x) is x
        close(x, want)
    rows = each(2 * SIZE, 8)
    close(comm.custom_all_gather(rows[RANK]), torch.cat(rows).double())
    close(comm.custom_reduce_scatter(rows[RANK]), total(rows).chunk(SIZE)[RANK])
    assert comm.custom_reduce_scatter(rows[RANK][1:]) is None
    one = torch.ones(())
    assert comm.custom_all_gather(one) is None and comm.custom_reduce_scatter(one) is None
    for refused in rows[RANK].long(), rows[RANK].t(), rows[RANK][:0]:
        assert not comm.should_custom_ar(refused) and comm.custom_all_reduce(refused) is None
    with comm.capture():
        close(comm.custom_all_reduce(rows[RANK]), total(rows))


def check_log(group: dist.ProcessGroup) -> None:
    """The first rank describes the communicator in the engine's log."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("vllm")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    VllmCommunicator(group=group, device="cpu", symm_mem_enabled=False)
    assert len(lines) == (RANK == 0)
    assert all(f"a group of {SIZE} ranks: all-reduce, all-gather, reduce-scatter" in line for line in lines), lines


def check_another_thread(group: dist.ProcessGroup) -> None:
    comm, given, results = Communicator(group), each(4, 16), []
    thread = threading.Thread(target=lambda: results.append(comm.custom_all_reduce(given[RANK])))
    thread.start()
    thread.join()
    close(results[0], total(given))


def quantized_patterns(
    x: torch.Tensor, residual: torch.Tensor, y: torch.Tensor, normed: torch.Tensor, workspace: Any, how: dict[str, Any]
) -> None:
    """By a scale that is given, of each token, and of each group of 128 as powers of two."""
    exponents, scales = torch.zeros(8, dtype=torch.int32)[:6].as_strided((6, 1), (1, 8)), torch.zeros(6, 1)
    groups = {"scale_out": exponents, "block_quant_group_size": 128}
    options = {2: {"scale_factor": torch.tensor([0.02])}, 4: {"scale_factor": 0.02}, 8: groups, 9: groups}
    for pattern in (2, 4, 8, 9, 10, 11):
        q, y_out, out = torch.zeros(6, 64).to(torch.float8_e4m3fn), torch.empty_like(x), torch.full_like(x, torch.nan)
        outputs = {"residual_in": residual, "residual_out": y_out, "norm_out": out, "quant_out": q}
        more = options.get(pattern, {"scale_out": scales})
        assert allreduce_fusion(x, workspace, pattern, weight_bias=1.0, **outputs, **more, **how) is q
        close(y_out, y)
        factors = {2: torch.tensor([0.02]), 8: ((exponents & 0xFF) << 23).view(torch.float32), 10: scales}
        factor = factors[{4: 2, 9: 8, 11: 10}.get(pattern, pattern)].double()
        error = (q.double() * factor - normed).abs()
        assert (error <= 0.08 * normed.abs() + 0.05).all(), pattern
        if pattern in (4, 9, 11):
            close(out, normed)


def check_fusion(group: dist.ProcessGroup) -> None:
    """FlashInfer's patterns: results in tensors that are given, also those of the input, and new ones."""
    workspace = create_allreduce_fusion_workspace(world_size=SIZE, rank=RANK, group=group)
    assert (workspace.world_size, workspace.rank) == (SIZE, RANK)
    assert workspace.is_buffer_size_sufficient(SIZE, 6, 64, torch.bfloat16)
    given, residual, weight = each(6, 64), random(6, 64, seed=1), random(64, seed=2)
    y = (total(given) + residual.double()).bfloat16().double()
    normed = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    pattern = AllReduceFusionPattern
    close(allreduce_fusion(given[RANK], workspace, pattern.kAllReduce), total(given))
    out = torch.empty_like(residual)
    assert allreduce_fusion(given[RANK], workspace, pattern.kAllReduce, output=out) is out
    close(out, total(given))
    how = {"rms_gamma": weight, "rms_eps": 1e-5, "launch_with_pdl": True, "fp32_acc": True}
    made = allreduce_fusion(given[RANK], workspace, pattern.kARResidualRMSNorm, residual_in=residual, **how)
    close(made, normed * weight.double())
    x, in_place = given[RANK].clone(), residual.clone()
    outputs = {"residual_in": in_place, "residual_out": in_place, "norm_out": x}
    assert allreduce_fusion(x, workspace, 1, weight_bias=1.0, use_oneshot=True, **outputs, **how) is x
    close(x, normed * (weight + 1).double())
    close(in_place, y)
    quantized_patterns(given[RANK], residual, y, normed * (weight.double() + 1), workspace, how)
    for refused in (
        {"pattern": 0, "workspace": None},
        {"pattern": 3},
        {"pattern": 1},
        {"pattern": 1, "residual_in": x, "quant_out": x, **how},
        {"pattern": 2, "residual_in": x, **how},
        {"pattern": 10, "residual_in": x, **how},
        {"pattern": 8, "residual_in": x, "scale_out": x, "block_quant_group_size": 32, **how},
    ):
        try:
            allreduce_fusion(x, **{"workspace": workspace, **refused})
        except ArgumentError:
            continue
        raise AssertionError(f"takes {refused}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    members = dist.new_group(list(range(SIZE)))
    for check in (check_communicator, check_log, check_another_thread, check_fusion):
        check(members)
        print(f"passed {check.__name__}", flush=True)
    dist.destroy_process_group()
