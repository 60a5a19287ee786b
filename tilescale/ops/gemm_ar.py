# SPDX-License-Identifier: MIT
"""Product and all-reduce: the sum of a @ b over the ranks, on every rank.

Large products are summed by the owners of rows as in gemm_rs.py, and the copy queue sends finished chunks on to
everybody. Small ones are multiplied first: see small.py; between nodes chunk by chunk: see chunks.py.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.ops import chunks, small
from tilescale.ops.arguments import check_product, dense, operand
from tilescale.ops.group import group_name, size_of, team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.operator import operator
from tilescale.ops.products import (
    CHUNK,
    CHUNKS,
    ROWS,
    Product,
    add_arrived,
    add_bias,
    multiply,
    send_parts,
    tiling,
)
from tilescale.ops.workspace import workspace_of

WHOLE_BYTES = 32 << 20
"""What is summed as a whole at most, behind the product: less has too few chunks to hide the first and the last one.

Measured on two H200, N 8192 and K 3584: with 2048 rows 299 us chunk by chunk, 158 and 106 one after the other.
"""


def matmul_all_reduce(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, group: Any = None
) -> torch.Tensor:
    """The sum of a @ b over all ranks (+ bias, once), on every rank. Collective.

    Args:
        a: (M, K) on each rank, its own columns of the whole.
        b: (K, N), contiguous or the transpose of a contiguous matrix (`weight.t()` of a torch.nn.Linear); K and N are
            multiples of 8.
        bias: (N,), the same on all ranks.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        (M, N). It can be differentiated, where all ranks go on with the same: the gradient of the result is taken to be
        the same on all ranks, as it is in a tensor-parallel layer.

    Raises:
        ArgumentError: names the argument that is not served, and what is.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_product(a, b, bias)
    name = group_name(group)
    if a.shape[0] > ROWS * size_of(name):
        raise ArgumentError(f"a has {a.shape[0]} rows", hint=f"served are up to {ROWS} for each rank")
    return _operator(a, b, bias, name)


@operator("matmul_all_reduce")
def _operator(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    """The sum of the products."""
    team, (M, N) = team_of(group), (a.shape[0], b.shape[1])
    if not M:
        return a.new_empty(0, N)
    if team.size > 1 and small.is_whole(M * N * a.itemsize, team, WHOLE_BYTES):
        return _in_chunks(a, b, bias, team)
    right, transposed = operand(b)
    added = right.view(-1)[:1] if bias is None else dense(bias)
    return _large(dense(a), right, transposed, added, bias is not None, N, group)


def _in_chunks(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, team: Team) -> torch.Tensor:
    """The sum of the products, of a chunk of rows at a time."""
    made: list[torch.Tensor] = []

    def multiplied(part: slice) -> torch.Tensor:
        rows = a[part]
        product = a.new_empty(small.room(len(rows)), b.shape[1])
        # The bias is added once, before parts are rounded.
        if bias is None or team.rank:
            torch.mm(rows, b, out=product[: len(rows)])
        else:
            torch.addmm(bias, rows, b, out=product[: len(rows)])
        return product

    def summed(product: torch.Tensor, part: slice) -> None:
        made.append(small.summed(product, team)[: part.stop - part.start])

    chunks.sent_after(chunks.chunks(a.shape[0], b.shape[1] * a.itemsize, team), multiplied, summed)
    return made[0] if len(made) == 1 else torch.cat(made)


def _large(
    a: torch.Tensor, right: torch.Tensor, transposed: bool, added: torch.Tensor, biased: bool, N: int, group: str
) -> torch.Tensor:
    team, (M, K) = team_of(group), a.shape
    if M % team.size:
        a = torch.nn.functional.pad(a, (0, 0, 0, -M % team.size))
    rows = a.shape[0] // team.size
    shape = (team.size, rows, N)
    space = workspace_of(team)
    (parts,) = space.own(a.dtype, shape)
    inbox, gathered = space.symmetric(a.dtype, shape, shape)
    result = a.new_empty(shape)
    dtype, tiles = str(a.dtype).removeprefix("torch."), tiling(rows, team.size, N, transposed)
    made = kernel(program, team, Product(N, K, dtype, tiles, transposed, biased))
    made(a.view(team.size, rows, K), right, added, parts, inbox, gathered, result)
    return result.view(-1, N)[:M]


@_operator.register_fake
def _(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, bias, _ = inputs
    ctx.save_for_backward(a, b)
    ctx.biased = bias is not None


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    # As the transpose of (N, K), which is how the weight of a torch.nn.Linear lies.
    return grad @ b.t(), (grad.t() @ a).t(), grad.sum(0) if ctx.biased else None, None


_operator.register_autograd(_backward, setup_context=_setup)


def program(size: int, of: Product) -> Any:
    """As gemm_rs.py has it; then finished chunks of own rows go to everybody."""
    N, K, dtype, tiles, rows = of.N, of.K, of.dtype, of.tiles, T.dynamic("rows")
    tiles_n = -(-N // tiles.n)

    @T.prim_func
    def matmul_all_reduce(
        A: T.Tensor((size, rows, K), dtype),
        B: T.Tensor(of.b_shape, dtype),
        bias: T.Tensor((N if of.biased else 1,), dtype),
        parts: T.Tensor((size, rows, N), dtype),  # by owner
        inbox: T.Tensor((size, rows, N), dtype),  # by source
        G: T.Tensor((size, rows, N), dtype),
        C: T.Tensor((size, rows, N), dtype),
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
                b = T.alloc(of.b_tile, dtype, level="l1")
                c = T.alloc((tiles.m, tiles.n), "float32", level="l0")
                out = T.alloc((tiles.m, tiles.n), dtype, level="l1")
                owner = (rank + 1 + turn) % size  # the own rows last
                m, n = tiles.place(tile, group)
                T.clear(c)
                multiply(A, owner, m, B, n, a, b, c, K, tiles.stages, of.transposed)
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
