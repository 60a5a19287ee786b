# SPDX-License-Identifier: MIT
"""All-to-all: part j of every rank's tensor goes to rank j.

Cut along one dimension and joined along another it changes what a tensor is split by: from tokens to heads and back, as
Ulysses attention does (Jacobs et al., arXiv:2309.14509). The program is sequential. By its schedule the copy queue
sends parts of large tensors in their layout, and blocks copy them into the result as they arrive, without a
transposition before or after. Small ones are transposed around one kernel, as long as a copy queue takes longer by the
machine model.
"""

import math
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.ops import whole_tensors
from tilescale.ops.arguments import BYTES, as_moved, check_dim, check_divides, check_tensor, dense
from tilescale.ops.group import collective, group_name, size_of, team_of
from tilescale.ops.kernels import kernel, scheduled
from tilescale.ops.layout import CHUNKS, THREADS, WIDTHS, chunk_rows, dtype_of, join, split, tile_rows
from tilescale.ops.operator import operator
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.ops.strategy import exchanges_as_a_whole
from tilescale.ops.workspace import workspace_of
from tilescale.passes.overlap.schedule import SOURCE, Move


@plain_calls_repeat
@collective
def all_to_all(a: torch.Tensor, cut: int = 0, joined: int = 0, *, group: Any = None) -> torch.Tensor:
    """Cut every rank's tensor along a dimension, and join the parts addressed to this rank along one. Collective.

    Args:
        a: of the same shape on all ranks; the extent of `cut` is a multiple of their number.
        cut: part j along this dimension goes to rank j.
        joined: along which the parts that come are joined, that of rank 0 first.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        With cut 2 and joined 1, (batch, tokens / ranks, heads, size) becomes (batch, tokens, heads / ranks, size). It
        can be differentiated: its backward is the same with both dimensions exchanged.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=BYTES)
    cut, joined, name = check_dim("cut", cut, a), check_dim("joined", joined, a), group_name(group)
    check_divides("a", a, cut, size_of(name))
    return as_moved(_operator, a, cut, joined, name)


@operator("all_to_all")
def _operator(a: torch.Tensor, cut: int, joined: int, group: str) -> torch.Tensor:
    team = team_of(group)
    part = [n // team.size if dim == cut else n for dim, n in enumerate(a.shape)]
    shape = [n * team.size if dim == joined else n for dim, n in enumerate(part)]
    if not a.numel():
        return a.new_empty(shape)
    inner = [math.prod(part[dim:]) for dim in (cut, joined)]
    width = next((w for w in WIDTHS if not any(n % w for n in inner)), None)
    transposed = (cut > 0) + (joined > 0)
    # A tensor that needs no transposition is exchanged as a whole, and so is one whose parts have no 16 contiguous
    # bytes: parts are padded, one after the other.
    if not transposed or width is None or exchanges_as_a_whole(a.nbytes, transposed, team):
        return join(whole_tensors.exchanged(dense(split(a, cut, team.size)), team), joined, team.size)
    (Q, Q2), rows = (n // width for n in inner), math.prod(part) // width
    given, result = dense(a).view(rows // Q, team.size, Q, width), a.new_empty(shape)
    _exchange(given, result.view(rows // Q2, team.size, Q2, width), team)
    return result


def _exchange(given: torch.Tensor, result: torch.Tensor, team: Team) -> None:
    given = given[0] if given.shape[0] == 1 else given
    (inbox,) = workspace_of(team).symmetric(given.dtype, given.shape)
    width = given.shape[-1]
    made = kernel(program, team, width, dtype_of(given), chunk_rows(width, given.itemsize), given.ndim == 3)
    made(given, result, inbox)


@_operator.register_fake
def _(a: torch.Tensor, cut: int, joined: int, group: str) -> torch.Tensor:
    shape = list(a.shape)
    shape[cut] //= size_of(group)
    shape[joined] *= size_of(group)
    return a.new_empty(shape)


_operator.register_autograd(lambda ctx, grad: _operator(grad, ctx.joined, ctx.cut, ctx.group))


def program(size: int, width: int, dtype: str, chunk: int, is_whole: bool) -> Any:
    """`sequential`, whose parts the queue sends to their owners in their layout, about `chunk` rows together; tiles
    copy the local part from its source, and the others as they arrive."""
    move = Move("all_to_all", ("A", "G"), chunk=chunk, chunks=CHUNKS, local=SOURCE)
    return scheduled(sequential(size, width, dtype, is_whole), move)


def sequential(size: int, width: int, dtype: str, is_whole: bool) -> Any:
    """The exchange, then a grid that copies the parts into the result.

    A part is P times Q rows of A, or Q rows if it `is_whole`, and P2 times Q2 rows of C in the same order.
    """
    P, Q, P2, Q2 = (T.dynamic(name) for name in ("P", "Q", "P2", "Q2"))
    high, rows = tile_rows(width), Q if is_whole else P * Q
    shape = (size, Q, width) if is_whole else (P, size, Q, width)

    @T.prim_func
    def all_to_all(A: T.Tensor(shape, dtype), C: T.Tensor((P2, size, Q2, width), dtype)):
        with T.Kernel(device=size, block=(T.ceildiv(rows, high), size), threads=THREADS) as (tile, source):
            G = T.alloc(shape, dtype, level="l2")
            with T.Scale("device"):
                T.all_to_all(A, G, dim=0 if is_whole else 1)
            with T.Scale("block"):
                move_rows(G, C, source, tile * high, rows, high, is_whole)

    return all_to_all


@T.macro
def move_rows(G, C, source, first, rows, high, is_whole):
    """Rows of a part of G, from number `first` on, into C."""
    Q, Q2 = G.shape[-2], C.shape[2]
    for i, j in T.Parallel(high, C.shape[3]):
        if first + i < rows:
            p, q = (0, first + i) if is_whole else ((first + i) // Q, (first + i) % Q)
            place = (first + i) // Q2, (first + i) % Q2
            C[place[0], source, place[1], j] = G[source, q, j] if is_whole else G[p, source, q, j]
