# SPDX-License-Identifier: MIT
"""All-reduce, residual and RMSNorm (Zhang and Sennrich, arXiv:1910.07467), as they follow one another in a transformer.

For few rows one kernel does all of it (`T.allreduce_rms_norm`): two consecutive kernels take longer to start than the
transfer. More rows are summed as a whole, by the fastest algorithm for their size; then blocks add the residual and
normalise, each row in one pass. Blocks that normalise parts of the sum as a copy queue brings them were slower: 72 us
for 8 MiB and 727 for 128 MiB on two H200, where the sum alone takes 31 and 387.
"""

from collections.abc import Sequence
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.hda.current import current_machine
from tilescale.language.norm import ROW_BYTES
from tilescale.ops import whole_tensors
from tilescale.ops.arguments import MULTIPLE, SUMS, check_like, check_number, check_out, check_tensor, dense
from tilescale.ops.group import collective, group_name, team_of
from tilescale.ops.kernels import Choice, kernel, kernels
from tilescale.ops.layout import THREADS, delivered, dtype_of, place_in
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.runtime.ahead import also_needed, is_dry

TILE = 16384
"""Elements that a block normalises at once; a row may have up to twice as many."""

LARGEST = 8 << 20
"""Bytes that a rank sends in one kernel at most: its lines take longer for more than plain messages and a norm."""

STEP = 512 << 10
"""Bytes that a network moves in the time of a second step, some 1.5 us: the most that a rank sends in one step."""

ALGORITHMS = ONE_SHOT, TWO_SHOT = "one_shot", "two_shot"
"""Algorithms by which one kernel makes all of it."""

COLUMNS = 1024
"""Columns that the threads of a block load at once."""

TALL = 64
"""Rows of a block, at most."""


@plain_calls_repeat
@collective
def all_reduce_rms_norm(
    a: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out: Sequence[torch.Tensor | None] | None = None,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of all ranks' tensors, plus the residual; and that normalised, row by row. Collective.

    Args:
        a: (..., features), of the same shape on all ranks; features are a multiple of 8, up to 32768.
        weight: (features,), the same on all ranks.
        residual: like `a`, the same on all ranks; None for zeros.
        eps: is added to the mean of the squares.
        weight_offset: is added to the weight: 1 for Gemma.
        out: the memory of both results, where no gradients are recorded: tensors like `a`, or None for a new one. Each
            may be `a` or the residual.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        y * (weight + weight_offset) / sqrt(mean(y ** 2) + eps), and y, the sum with the residual: the next residual.
        The sum is rounded, y is rounded, and the norm is that of the rounded y, as if made one after the other. Both
        can be differentiated.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    flat, given = checked(a, weight, residual, SUMS, eps, weight_offset)
    options = eps, weight_offset, group_name(group)
    check_outs(out, [(a.shape, a.dtype)] * 2, a, weight, residual)
    if out is None or _operator.is_seen:
        made = _operator(flat, weight, given, *options)
    else:
        made = _operator.plain(flat, weight, given, *options, places=rows_in(out, flat))
    normed, y = (delivered(x.view(a.shape), place) for x, place in zip(made, out or (None, None), strict=True))
    return normed, y


def checked(
    a: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    served: tuple[torch.dtype, ...],
    eps: float,
    weight_offset: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows and their residual as matrices. Raises ArgumentError for unsupported ones."""
    check_tensor("a", a, served=served)
    features = a.shape[-1] if a.ndim else 0
    if not features or features % MULTIPLE or features > 2 * TILE:
        raise ArgumentError(f"a has {features} features", hint=f"supported: multiples of {MULTIPLE} up to {2 * TILE}")
    check_tensor("weight", weight, 1, SUMS)
    check_like("weight", weight, "a", a)
    check_number("eps", eps)
    check_number("weight_offset", weight_offset)
    for name, x in ("residual", residual), ("bias", bias):
        if x is not None:
            check_tensor(name, x, None, SUMS)
            check_like(name, x, "a", a)
    for name, x, shape in ("weight", weight, (features,)), ("bias", bias, (features,)), ("residual", residual, a.shape):
        if x is not None and tuple(x.shape) != tuple(shape):
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}, a {tuple(a.shape)}", hint=f"give {tuple(shape)}")
    return a.reshape(-1, features), None if residual is None else residual.reshape(-1, features)


def check_outs(
    out: Sequence[torch.Tensor | None] | None,
    wanted: Sequence[tuple[Sequence[int], torch.dtype]],
    a: torch.Tensor,
    *others: torch.Tensor | None,
) -> None:
    """Raise ArgumentError where a tensor of `out` differs from the result in shape or type; each may be None."""
    if out is None:
        return
    if not isinstance(out, (tuple, list)) or len(out) != len(wanted):
        raise ArgumentError(f"out is {type(out).__name__}", hint=f"pass a tuple of {len(wanted)} tensors")
    for i, (place, (shape, dtype)) in enumerate(zip(out, wanted, strict=True)):
        if place is not None and any(place is other for other in out[:i]):
            raise ArgumentError(f"out[{i}] is the memory of another result", hint="give each its own, or None")
        check_out(place, shape, a, *others, name=f"out[{i}]", dtype=dtype)


def rows_in(out: Sequence[torch.Tensor | None], a: torch.Tensor) -> list[torch.Tensor | None]:
    """Places for results of as many rows as `a`, as matrices; None where programs cannot write them."""
    return [None if (place := place_in(x, 0)) is None else place.view(len(a), place.shape[-1]) for x in out]


@operator("all_reduce_rms_norm")
def _operator(
    a: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    group: str,
    *,
    places: Sequence[torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised rows of matrices, and the sums that they are made of."""
    normed, y = (a.new_empty(a.shape) if place is None else place for place in places)
    if not a.shape[0]:
        return normed, y
    M, N = a.shape
    added = weight[:1, None] if residual is None else dense(residual)  # one that is not read costs nothing
    team, has_residual = team_of(group), residual is not None
    algorithm, how = algorithm_of(a, team), (N, dtype_of(a), has_residual, eps)
    choice = lambda name: (by_one_kernel, team, *how, name, weight_offset)  # noqa: E731
    if is_dry():
        others = by_two_kernels(a, has_residual, eps, weight_offset, team)
        also_needed(kernels, *map(choice, algorithms_of(a, team)), *others)
    if algorithm is not None:
        kernel(*choice(algorithm))(dense(a), added, dense(weight), normed, y)
        return normed, y
    impl = whole_tensors.algorithm("allreduce", team, a.nbytes)
    normed, y = (x.new_empty(x.shape) if x.data_ptr() == a.data_ptr() else x for x in (normed, y))
    made = kernel(program, team, *how, impl, weight_offset)
    made(dense(a), torch.empty_like(normed), added, dense(weight), normed, y)
    return normed, y


def algorithm_of(a: torch.Tensor, team: Team) -> str | None:
    """The algorithm by which one kernel makes all of it from a matrix; None where unsupported or slower."""
    return None if whole_tensors.spans_nodes(team) else _algorithm(a.nbytes, a.shape[1] * a.itemsize, team.size)


def by_two_kernels(a: torch.Tensor, has_residual: bool, eps: float, weight_offset: float, team: Team) -> list[Choice]:
    """Kernels for matrices with more rows, which are summed before they are normalized."""
    given = a.shape[1], dtype_of(a), has_residual, eps
    return [(program, team, *given, impl, weight_offset) for impl in whole_tensors.algorithms("allreduce", team)]


def algorithms_of(a: torch.Tensor, team: Team) -> tuple[str, ...]:
    """The algorithms by which one kernel computes the sum and the norm of a matrix with any number of rows."""
    return () if algorithm_of(a[:1], team) is None else ALGORITHMS


def _algorithm(nbytes: int, row: int, ranks: int) -> str | None:
    twice = 2 * nbytes * (ranks - 1) // ranks
    if ranks == 1 or row > ROW_BYTES or twice > LARGEST or not whole_tensors.has_stores(current_machine()):
        return None
    return ONE_SHOT if nbytes * (ranks - 1) - twice <= STEP else TWO_SHOT


_operator.register_fake(lambda a, *_: (a.new_empty(a.shape), a.new_empty(a.shape)))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, weight, residual, ctx.eps, ctx.weight_offset, ctx.group = inputs
    ctx.save_for_backward(weight, output[1])
    ctx.has_residual = residual is not None


def _backward(ctx: Any, of_normed: torch.Tensor, of_y: torch.Tensor) -> tuple[Any, ...]:
    """dy = r (g - n mean(g n)) with r = 1 / rms(y), n = r y, g = (w + offset) d; and the gradient of y itself."""
    weight, y = ctx.saved_tensors
    scale = torch.rsqrt(y.float().pow(2).mean(1, keepdim=True) + ctx.eps)
    n, d = y.float() * scale, of_normed.float()
    g = d * (weight.float() + ctx.weight_offset)
    dy = (scale * (g - n * (g * n).mean(1, keepdim=True)) + of_y.float()).to(y.dtype)
    da = operator_of("all_reduce")(dy, "sum", ctx.group)
    return da, (d * n).sum(0).to(weight.dtype), dy if ctx.has_residual else None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup)


def tile_of(N: int) -> tuple[int, int]:
    """Rows and columns of a block's tile: whole rows, padded so that all threads have equally many columns."""
    wide = -(-N // COLUMNS) * COLUMNS if N > COLUMNS else 1 << (N - 1).bit_length()
    return min(1 << max(TILE // wide, 1).bit_length() - 1, TALL), wide


@T.macro
def round_to(y, dtype):
    """The values that are left when a tile is stored."""
    for i, j in T.Parallel(y.shape[0], y.shape[1]):
        y[i, j] = T.cast(T.cast(y[i, j], dtype), "float32")


@T.macro
def normalise(y, R, W, Out, Y, row, M, N, has_residual, eps, offset):
    """Normalise a tile of rounded sums, zero beyond N, into the existing rows of Y and Out."""
    high, wide = y.shape
    squares, total = T.alloc((high, wide), "float32", level="l0"), T.alloc((high,), "float32", level="l0")
    if has_residual:
        for i, j in T.Parallel(high, wide):
            if (row + i < M) & (j < N):
                y[i, j] += T.cast(R[row + i, j], "float32")
        round_to(y, Y.dtype)
    for i, j in T.Parallel(high, wide):
        squares[i, j] = y[i, j] * y[i, j]
    T.reduce_sum(squares, total, dim=1)
    for i, j in T.Parallel(high, wide):
        if (row + i < M) & (j < N):
            Y[row + i, j] = y[i, j]
            Out[row + i, j] = y[i, j] * T.rsqrt(total[i] / N + eps) * (T.cast(W[j], "float32") + offset)


def by_one_kernel(
    size: int, N: int, dtype: str, has_residual: bool, eps: float, algorithm: str, offset: float = 0.0
) -> Any:
    """All of it, for any number of rows."""
    M = T.dynamic("M")

    @T.prim_func
    def all_reduce_rms_norm(
        X: T.Tensor((M, N), dtype),
        R: T.Tensor((M, N) if has_residual else (1, 1), dtype),
        W: T.Tensor((N,), dtype),
        Out: T.Tensor((M, N), dtype),
        Y: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(device=size):
            with T.Scale("device"):
                added = R if has_residual else None
                T.allreduce_rms_norm(X, W, Out, Y, residual=added, eps=eps, impl=algorithm, weight_offset=offset)

    return all_reduce_rms_norm


def program(
    size: int, N: int, dtype: str, has_residual: bool, eps: float, impl: str | None, offset: float = 0.0
) -> Any:
    """The sum of whole tensors, by an algorithm; then blocks normalise it."""
    M, (high, wide) = T.dynamic("M"), tile_of(N)

    @T.prim_func
    def all_reduce_rms_norm(
        X: T.Tensor((M, N), dtype),
        S: T.Tensor((M, N), dtype),
        R: T.Tensor((M, N) if has_residual else (1, 1), dtype),
        W: T.Tensor((N,), dtype),
        Out: T.Tensor((M, N), dtype),
        Y: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(device=size, block=T.ceildiv(M, high), threads=THREADS) as tile:
            with T.Scale("device"):
                T.allreduce(X, out=S, impl=impl)
            with T.Scale("block"):
                total = T.alloc((high, wide), "float32", level="l0")
                T.clear(total)
                for i, j in T.Parallel(high, wide):
                    if (tile * high + i < M) & (j < N):
                        total[i, j] = S[tile * high + i, j]
                normalise(total, R, W, Out, Y, tile * high, M, N, has_residual, eps, offset)

    return all_reduce_rms_norm
