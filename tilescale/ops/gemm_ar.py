# SPDX-License-Identifier: MIT
"""Product and all-reduce: the sum of a @ b over the ranks, on every rank.

Large products are summed by the owners of rows as in gemm_rs.py, and the copy queue sends finished chunks on to
everybody. Small ones are multiplied first: see ways.py; between nodes chunk by chunk: see unfused.py.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.ops import ways
from tilescale.ops.arguments import as_autocast, check_product, dense, operand, result_type, scales_of, unread
from tilescale.ops.dtensors import takes_dtensors
from tilescale.ops.flat import dtype_of
from tilescale.ops.float8 import Float8, gradients_of_times, rounded, spelled
from tilescale.ops.group import group_name, size_of, team_of
from tilescale.ops.kernels import chosen, kernel
from tilescale.ops.operator import operator
from tilescale.ops.products import (
    CHUNK,
    CHUNKS,
    ROWS,
    Product,
    add_arrived,
    add_bias,
    in_parts,
    multiply,
    rescale,
    send_parts,
    tiling,
)
from tilescale.ops.unfused import Scales, summed_product
from tilescale.ops.workspace import workspace_of
from tilescale.runtime.kernel import Kernel


@takes_dtensors(None, a=1, b=0, bias=None)
def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    float8: Float8 | None = None,
    group: Any = None,
) -> torch.Tensor:
    """The sum of a @ b over all ranks (+ bias, once), on every rank. Collective.

    Args:
        a: (M, K) on each rank, its own columns of the whole.
        b: (K, N), contiguous or the transpose of a contiguous matrix (`weight.t()` of a torch.nn.Linear); K and N are
            multiples of 8.
        bias: (N,), the same on all ranks.
        scales: where a and b are float8_e4m3fn, what they are multiplied with, float32: one number, or one for each row
            of a and for each column of b. Then b is the transpose of a contiguous matrix, K and N are multiples of 16.
        float8: how bfloat16 matrices are rounded to float8 on the way, `Float8()`; K and N are multiples of 16.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        (M, N), of the type of a, bfloat16 for float8. It can be differentiated, but with `scales`: the gradient of the
        result is taken to be the same on all ranks, as it is where all go on with the same in a tensor-parallel layer.

    Raises:
        ArgumentError: names the argument that is not served, and what is.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    a, b, bias = as_autocast(a, b, bias)
    check_product(a, b, bias, scaled=scales is not None, rounds=float8 is not None)
    name = group_name(group)
    if a.shape[0] > ROWS * size_of(name):
        raise ArgumentError(f"a has {a.shape[0]} rows", hint=f"served are up to {ROWS} for each rank")
    if scales is None:
        return _operator(a, b, bias, name, spelled(float8))
    return _scaled(a, b, bias, *scales_of(scales, a, [b]), name)


@operator("matmul_all_reduce")
def _operator(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: str, float8: str) -> torch.Tensor:
    """The sum of the products."""
    if not float8:
        return _summed(a, b, bias, None, team_of(group))
    left, (right,), scales = rounded(a, [b], float8)
    return _summed(left, right, bias, scales, team_of(group))


@operator("matmul_all_reduce_scaled")
def _scaled(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, of_a: torch.Tensor, of_b: torch.Tensor, group: str
) -> torch.Tensor:
    """The sum of the products of float8 matrices; a scale for each row of a and each column of b."""
    return _summed(a, b, bias, (of_a, of_b), team_of(group))


def _summed(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scales: Scales, team: Team) -> torch.Tensor:
    if not len(a):
        return a.new_empty(0, b.shape[1], dtype=result_type(a))
    job = ways.Job("allreduce", -(-len(a) // team.size), (b.shape[1],), a.shape[1], a.dtype)
    if not ways.overlaps(job, team):
        return summed_product(a, b, bias, scales, team)
    return _overlapped(a, b, bias, scales, team)


def _overlapped(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scales: Scales, team: Team
) -> torch.Tensor:
    (M, K), N, made = a.shape, b.shape[1], result_type(a)
    (right, transposed), rows = operand(b), -(-M // team.size)
    given, (of_b, of_a) = _padded(dense(a), rows * team.size), unread(a.dtype, a.device)
    if scales is not None:
        of_a, of_b = _padded(scales[0], rows * team.size).view(team.size, rows), scales[1]
    shape, space = (team.size, rows, N), workspace_of(team)
    (parts,) = space.own(made, shape)
    inbox, gathered = space.symmetric(made, shape, shape)
    result = a.new_empty(shape, dtype=made)
    added = unread(made, a.device)[0] if bias is None else dense(bias)
    call = _kernel(team, rows, N, K, (dtype_of(a), dtype_of(b)), transposed, bias is not None)
    call(given.view(team.size, rows, K), right, added, of_a, of_b, parts, inbox, gathered, result)
    return result.view(-1, N)[:M]


@chosen
def _kernel(team: Team, rows: int, N: int, K: int, dtypes: tuple[str, str], transposed: bool, biased: bool) -> Kernel:
    tiles = in_parts(tiling(rows, team.size, N, transposed), rows)
    return kernel(program, team, Product(N, K, dtypes[0], tiles, transposed, biased, other=dtypes[1]))


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """With more rows, whatever is in them."""
    if len(x) == rows:
        return x
    made = x.new_empty(rows, *x.shape[1:])
    made[: len(x)] = x
    return made


@_operator.register_fake
def _(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: str, float8: str) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@_scaled.register_fake
def _(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, of_a: torch.Tensor, of_b: torch.Tensor, group: str
) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, bias, _, ctx.float8 = inputs
    ctx.save_for_backward(a, b)
    ctx.biased = bias is not None


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    return *gradients_of_times(grad, a, b, ctx.float8), grad.sum(0) if ctx.biased else None, None, None


_operator.register_autograd(_backward, setup_context=_setup)


def program(size: int, of: Product) -> Any:
    """As gemm_rs.py has it; then finished chunks of own rows go to everybody."""
    N, K, dtype, tiles, rows = of.N, of.K, of.dtype, of.tiles, T.dynamic("rows")
    tiles_n = -(-N // tiles.n)
    kind, scales = ("float32", ((size, rows), (N,))) if of.scaled else (dtype, ((1, 1), (1,)))

    @T.prim_func
    def matmul_all_reduce(
        A: T.Tensor((size, rows, K), dtype),
        B: T.Tensor(of.b_shape, of.b_dtype),
        bias: T.Tensor((N if of.biased else 1,), of.result),
        of_A: T.Tensor(scales[0], kind),
        of_B: T.Tensor(scales[1], kind),
        parts: T.Tensor((size, rows, N), of.result),  # by owner
        inbox: T.Tensor((size, rows, N), of.result),  # by source
        G: T.Tensor((size, rows, N), of.result),
        C: T.Tensor((size, rows, N), of.result),
    ):
        grid = (*tiles.grid(rows, N), size)
        with T.Kernel(device=size, block=grid, threads=tiles.threads) as (tile, group, turn):
            done, arrived = T.alloc_flags((size, CHUNKS)), T.alloc_flags((size, CHUNKS))
            summed, gathered = T.alloc_flags((CHUNKS,)), T.alloc_flags((size, CHUNKS))
            with T.Scale("device") as (rank, _):
                send_parts(parts, inbox, done, arrived, rank, size, rows, tiles.m, tiles_n)
                for i in T.serial(T.ceildiv(rows, CHUNK)):
                    for step in T.serial(1, size):
                        first, last = i * CHUNK, T.min(i * CHUNK + CHUNK, rows)
                        T.copy(
                            C[rank, first:last, :],
                            G[rank, first:last, :],
                            dst=(rank + step) % size,
                            signal=gathered[rank, i],
                            after=(summed[i], ">=", T.ceildiv(last - first, tiles.m) * tiles_n),
                        )
            with T.Scale("block"), T.Scale("device") as (rank, _):
                a = T.alloc((tiles.m, of.depth), dtype, level="l1")
                b = T.alloc(of.b_tile, of.b_dtype, level="l1")
                c = T.alloc((tiles.m, tiles.n), "float32", level="l0")
                out = T.alloc((tiles.m, tiles.n), of.result, level="l1")
                owner = (rank + 1 + turn) % size  # the own rows last
                m, n = tiles.place(tile, group)
                T.clear(c)
                multiply(A, owner, m, B, n, a, b, c, K, tiles, of.transposed)
                if of.scaled:
                    rescale(c, of_A, owner, m, of_B, 0, n, rows, N)
                if owner != rank:
                    T.copy(c, out)
                    T.copy(out, parts[owner, m, n])
                    T.signal(done[owner, m // CHUNK])
                else:
                    add_arrived(c, inbox, arrived, rank, size, m, n, rows, N, out)
                    if of.biased:
                        add_bias(c, bias, n, N)
                    T.copy(c, out)
                    T.copy(out, C[rank, m, n])
                    T.signal(summed[m // CHUNK])
            with T.Scale("device"):  # the grid of the product has ended: its blocks hold nobody up
                pass
            with T.Scale("block"), T.Scale("device") as (rank, _):
                shard = (rank + size - 1 - turn) % size
                m, n = tiles.place(tile, group)
                if shard != rank:
                    T.wait(gathered[shard, m // CHUNK], ">=", 1)
                    for i, j in T.Parallel(tiles.m, tiles.n):
                        if m + i < rows and n + j < N:
                            C[shard, m + i, n + j] = G[shard, m + i, n + j]

    return matmul_all_reduce
