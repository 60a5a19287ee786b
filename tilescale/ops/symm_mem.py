# SPDX-License-Identifier: MIT
"""TileScale's operators in place of the fused ones of PyTorch's symmetric memory.

Inductor's `_micro_pipeline_tp`, torchtitan's asynchronous tensor parallelism and the sequence-parallel passes of vLLM
call four operators, `torch.ops.symm_mem.fused_*`. `install` replaces their CUDA implementations, so these programs run
TileScale's without a change. Inputs that TileScale does not support go to PyTorch's implementation.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.ag_columns_gemm import all_gather_columns_matmul
from tilescale.ops.ag_gemm import all_gather_matmul
from tilescale.ops.all_gather import all_gather
from tilescale.ops.arguments import check_gemm
from tilescale.ops.gemm_rs import matmul_reduce_scatter
from tilescale.ops.group import otherwise, size_of, team_of
from tilescale.ops.wide_results import TYPES, gathered_results, scattered_result

calls: Counter[tuple[str, str]] = Counter()
"""Number of calls of each operator since `install`, by its name and why PyTorch's implementation ran; "" if ours."""

_library: torch.library.Library | None = None
_graphs = False


def install(*, graphs: bool = False) -> None:
    """Let PyTorch's fused tensor-parallel operators on CUDA run TileScale's implementations, in this process.

    These are `fused_all_gather_matmul`, `fused_matmul_reduce_scatter`, `fused_all_gather_scaled_matmul` and
    `fused_scaled_matmul_reduce_scatter` of `torch.ops.symm_mem`. Every rank of their groups installs them. Unsupported
    inputs run PyTorch's implementation, with one UserWarning for each reason. Installing twice changes nothing.

    Args:
        graphs: whether inductor, in all that `torch.compile` compiles from now on, also replaces functional collectives
            next to GEMMs and RMSNorms, as DTensors emit them: all-gather and GEMMs, GEMM and reduce-scatter or
            all-reduce, all-reduce with residual and RMSNorm (both the same on all ranks). Unsupported ones stay
            unchanged. Compiled graphs keep their operators after `uninstall`.
    """
    global _library
    if graphs:
        _install_graph_pass()
    if _library is not None:
        return
    _theirs()  # defines the operators
    calls.clear()
    _library = torch.library.Library("symm_mem", "IMPL")
    for name, implementation in IMPLEMENTATIONS.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that one is replaced
            _library.impl(name, _or_theirs(name, implementation), "CUDA", allow_override=True)


def uninstall() -> None:
    """Give PyTorch's operators their own implementations back, and inductor the pass that it had."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None
    _uninstall_graph_pass()


@contextlib.contextmanager
def installed(*, graphs: bool = False) -> Iterator[None]:
    """`install` until the block ends; earlier installations stay."""
    operators, passes = _library is not None, _graphs
    install(graphs=graphs)
    try:
        yield
    finally:
        if not operators:
            uninstall()
        elif not passes:
            _uninstall_graph_pass()


def _install_graph_pass() -> None:
    from tilescale.ops import graph_pass  # loads inductor

    global _graphs
    graph_pass.install()
    _graphs = True


def _uninstall_graph_pass() -> None:
    global _graphs
    if _graphs:
        from tilescale.ops import graph_pass

        graph_pass.uninstall()
    _graphs = False


def _theirs() -> Any:
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory


def _or_theirs(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Ours, or PyTorch's for inputs that are not supported: checks of ours come before any communication."""
    fallback = getattr(_theirs(), f"_{name}")

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch.no_grad(), otherwise():
                result = implementation(*args, **kwargs)
        except ArgumentError as error:
            _report(name, error.message)
            return fallback(*args, **kwargs)
        calls[name, ""] += 1
        return result

    return call


def _report(name: str, reason: str) -> None:
    if not calls[name, reason]:
        warnings.warn(f"symm_mem::{name} runs PyTorch's implementation: {reason}", stacklevel=3)
    calls[name, reason] += 1


def _gather(
    A: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """all_gather(A, gather_dim) @ B for each B."""
    if gather_dim in (-1, A.ndim - 1):
        return _gather_inner(A, Bs, group, return_A)
    return gather_matmul(A, Bs, gather_dim, group, return_A)


def _gather_inner(
    A: torch.Tensor, Bs: list[torch.Tensor], group: str, return_A: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The same along the inner dimension: overlapped for one B, without the gathered A."""
    if len(Bs) == 1 and not return_A:
        made = all_gather_columns_matmul(A.flatten(0, -2), Bs[0], group=group)
        return None, [made.view(*A.shape[:-1], -1)]
    like = A.new_empty(1, size_of(group) * A.shape[-1])
    for B in Bs:
        check_gemm(like, B, None)
    whole = all_gather(A, -1, group=group)
    return whole if return_A else None, [whole @ B for B in Bs]


def _gather_scaled(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: list[torch.Tensor],
    gather_dim: int,
    group: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[torch.dtype | None],
    use_fast_accum: list[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gather and GEMMs in float8; a scale for the tensor, for each local row, or for each row of all ranks."""
    dtypes = _theirs()._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    for result_scale, out_dtype in zip(result_scales, dtypes, strict=True):
        _check_result(result_scale, out_dtype)
    _check_dim("gather_dim", gather_dim, A)
    scale = A_scale
    if A_scale.numel() > 1:
        scale = A_scale.movedim(gather_dim, 0).reshape(-1)
        if scale.numel() != A.shape[:-1].numel():
            scale = scale.chunk(size_of(group))[team_of(group).rank]
    if any(dtype != torch.bfloat16 for dtype in dtypes):
        first = A.movedim(gather_dim, 0)
        rows, results = gathered_results(first.flatten(0, -2), Bs, scale, B_scales, biases, dtypes, group)
        unflattened = partial(_unflattened, first.shape, gather_dim, size_of(group))
        return unflattened(rows), [unflattened(result) for result in results]
    return gather_matmul(A, Bs, gather_dim, group, True, bias=biases, scales=(scale, B_scales))


def gather_matmul(
    A: torch.Tensor, Bs: list[torch.Tensor], dim: int, group: str, return_A: bool, **given: Any
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    _check_dim("gather_dim", dim, A)
    first = A.movedim(dim, 0)
    made = all_gather_matmul(first.flatten(0, -2), list(Bs), group=group, return_gathered=return_A, **given)
    results, kept = made if return_A else (made, None)
    unflattened = partial(_unflattened, first.shape, dim, size_of(group))
    return None if kept is None else unflattened(kept), [unflattened(x) for x in results]


def _unflattened(shape: torch.Size, dim: int, size: int, x: torch.Tensor) -> torch.Tensor:
    """Rows of all ranks, each of a shape, with their first dimension in place `dim`."""
    return x.view(size, *shape[:-1], -1).flatten(0, 1).movedim(0, dim)


def _scatter(A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group: str) -> torch.Tensor:
    """reduce_scatter(A @ B, reduce_op, scatter_dim); of columns by the GEMM of the transposed matrices."""
    if scatter_dim in (-1, A.ndim - 1):
        columns = matmul_scatter(B.t(), A.flatten(0, -2).t(), reduce_op, 0, group)
        return columns.t().contiguous().view(*A.shape[:-1], -1)
    return matmul_scatter(A, B, reduce_op, scatter_dim, group).contiguous()


def _scatter_scaled(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group: str,
    output_shape: list[int],
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """The GEMM and reduce-scatter in float8. The result is viewed as `output_shape`, dimension `orig_scatter_dim` of it
    split."""
    _check_result(result_scale, out_dtype)
    dim = scatter_dim_after_maybe_reshape
    _check_scatter(A, reduce_op, dim, group)
    scale = A_scale if A_scale.numel() == 1 else A_scale.movedim(dim, 0).reshape(-1)
    if out_dtype == torch.bfloat16:
        added = None if bias is None else bias * size_of(group)  # PyTorch's adds it on every rank
        result = matmul_scatter(A, B, reduce_op, dim, group, bias=added, scales=(scale, B_scale))
    else:
        assert out_dtype is not None  # by `_check_result`
        first = A.movedim(dim, 0)
        rows = scattered_result(first.flatten(0, -2), B, scale, B_scale, bias, out_dtype, reduce_op, group)
        result = _owned(first.shape, dim, size_of(group), rows)
    shape = list(output_shape)
    shape[orig_scatter_dim] //= size_of(group)
    return result.reshape(shape).contiguous()


def matmul_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, dim: int, group: str, **given: Any
) -> torch.Tensor:
    _check_scatter(A, reduce_op, dim, group)
    first, size = A.movedim(dim, 0), size_of(group)
    result = matmul_reduce_scatter(first.flatten(0, -2), B, group=group, **given)
    if reduce_op == "avg":
        result = result / size
    return _owned(first.shape, dim, size, result)


def _owned(shape: torch.Size, dim: int, size: int, rows: torch.Tensor) -> torch.Tensor:
    """This rank's rows of GEMMs of a shape, with their first dimension in place `dim`."""
    return rows.view(shape[0] // size, *shape[1:-1], -1).movedim(0, dim)


def _check_scatter(A: torch.Tensor, reduce_op: str, dim: int, group: str) -> None:
    if reduce_op not in ("sum", "avg"):
        raise ArgumentError(f"reduce_op is {reduce_op!r}", hint="supported: sum, avg")
    _check_dim("scatter_dim", dim, A)
    if A.shape[dim] % size_of(group):
        raise ArgumentError(f"dimension {dim} of A is {A.shape[dim]}", hint=f"a multiple of {size_of(group)}")


def _check_dim(name: str, dim: int, A: torch.Tensor) -> None:
    if not 0 <= dim < A.ndim - 1:
        raise ArgumentError(f"{name} is {dim} of {A.ndim} dimensions", hint="pass a dimension of rows, not columns")


def _check_result(scale: torch.Tensor | None, dtype: torch.dtype | None) -> None:
    """Raises ArgumentError for a result that is scaled, or of float8, the type of operands."""
    if scale is not None:
        raise ArgumentError("the result is scaled", hint="leave result_scale out")
    if dtype not in TYPES:
        raise ArgumentError(f"out_dtype is {dtype}", hint=f"supported: {', '.join(map(str, TYPES))}")


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "fused_all_gather_matmul": _gather,
    "fused_all_gather_scaled_matmul": _gather_scaled,
    "fused_matmul_reduce_scatter": _scatter,
    "fused_scaled_matmul_reduce_scatter": _scatter_scaled,
}
"""TileScale's implementation of each operator of `torch.ops.symm_mem`."""

PATTERNS = {
    "all_gather_into_tensor, then mm or addmm by any number of weights": "all_gather_matmul",
    "mm, then reduce_scatter_tensor": "matmul_reduce_scatter",
    "mm, then all_reduce": "matmul_all_reduce",
    "all_reduce, then add and RMSNorm": "all_reduce_rms_norm",
}
"""Replacement in graphs for each operator that `install(graphs=True)` covers; see graph_patterns.py."""
