# SPDX-License-Identifier: MIT
"""Baselines of other libraries: cuBLAS and NCCL as PyTorch calls them, and its kernels on symmetric memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tilescale.tuning.race import Runner


def library_gemm(shape: tuple[int, int, int]) -> Runner:
    """A GEMM of random matrices on this GPU, by cuBLAS."""
    m, n, k = shape
    a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((m, k), (k, n)))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return Runner(lambda: torch.mm(a, b, out=out))


def library_collective(operation: str, n: int) -> Runner:
    """A collective by NCCL; `n` elements in all: the result of a gather, a rank's own elsewhere. Raises RuntimeError:
    ranks that share GPUs have no NCCL."""
    if not dist.is_initialized():
        raise RuntimeError("there is no NCCL where ranks share GPUs")
    whole = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    other = torch.zeros_like(whole)
    part = whole[: n // dist.get_world_size()]
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(other, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, other),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
    return Runner(calls[operation])


def symmetric_all_reduce(n: int, shots: str) -> Runner:
    """PyTorch's all-reduce on symmetric memory, "one" or "two" shots."""
    import torch.distributed._symmetric_memory as symm

    x = symm.empty(n, dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device())).zero_()
    group = dist.distributed_c10d._get_default_group().group_name
    symm.rendezvous(x, group)
    kernels = {"one": torch.ops.symm_mem.one_shot_all_reduce, "two": torch.ops.symm_mem.two_shot_all_reduce_}
    return Runner(lambda: kernels[shots](x, "sum", group))


# -- GEMMs with a collective -------------------------------------------------------------------------------------------


def _operands(name: str, shape: tuple[int, int, int], units: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's operands: a shard of the rows for a gather, its own columns elsewhere; the second one transposed."""
    m, n, k = shape
    rows = m // units if name == "ag_gemm" else m
    a, weight = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((rows, k), (n, k)))
    return a, weight.t()


def library_operator(name: str, shape: tuple[int, int, int], units: int) -> Runner:
    """NCCL and cuBLAS, one after the other."""
    (m, n, k), (a, b) = shape, _operands(name, shape, units)
    gathered, part = a.new_empty(m, k), a.new_empty(m // units, n)

    def gather() -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, a)
        return gathered @ b

    def scatter() -> torch.Tensor:
        dist.reduce_scatter_tensor(part, a @ b)
        return part

    def add() -> torch.Tensor:
        whole = a @ b
        dist.all_reduce(whole)
        return whole

    return Runner({"ag_gemm": gather, "gemm_rs": scatter, "gemm_ar": add}[name])


def own_operator(name: str, shape: tuple[int, int, int], units: int) -> Runner:
    """The operator of `tilescale.ops`."""
    from tilescale import ops

    a, b = _operands(name, shape, units)
    functions = {
        "ag_gemm": ops.all_gather_matmul,
        "gemm_rs": ops.matmul_reduce_scatter,
        "gemm_ar": ops.matmul_all_reduce,
    }
    return Runner(lambda: functions[name](a, b))


FUSED = ("ag_gemm", "gemm_rs")
"""Operators that PyTorch has in fused form."""


def fused_group() -> str:
    """The name of the group that PyTorch's fused operators take."""
    import torch.distributed._symmetric_memory  # noqa: F401 - it registers the operators

    return str(dist.distributed_c10d._get_default_group().group_name)


def load_kernels(a: torch.Tensor, b: torch.Tensor) -> None:
    """Make CUDA load the kernels for a part: loading waits for the device, on which a fused operator waits for
    peers."""
    parts = torch.stack([torch.mm(a, b)] * 2)
    parts.sum(0)
    torch.cuda.synchronize()


def fused_operator(name: str, shape: tuple[int, int, int], units: int) -> Runner:
    """PyTorch's own, on symmetric memory."""
    a, b = _operands(name, shape, units)
    group = fused_group()
    load_kernels(a[: shape[0] // units], b)
    if name == "ag_gemm":
        return Runner(lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, group))
    return Runner(lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group))
