# SPDX-License-Identifier: MIT
"""All-gather and GEMM: gather(a) @ b, the rows of a lying over the ranks.

The program is sequential. By its schedule the copy queue sends this rank's rows to all ranks, chunk by chunk, while the
grid multiplies them in place; rows of other ranks arrive in a workspace and are multiplied as they arrive. Local rows
are not copied, and no SM moves data.
Few rows are gathered first: see strategy.py; between nodes chunk by chunk: see unfused.py.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.ops import strategy, whole_tensors
from tilescale.ops.ag_gemm_programs import program
from tilescale.ops.arguments import (
    BLOCK,
    as_autocast,
    check_flags,
    check_gemm,
    check_like,
    check_out,
    check_strided,
    dense,
    has_blocks,
    operands,
    result_type,
    scales_of,
    unread,
)
from tilescale.ops.block_gemm import block_tiling, scales_of_columns, scales_of_shards
from tilescale.ops.dtensors import takes_dtensors
from tilescale.ops.float8 import Float8, multiple_of, of_gradients, rounded, spelled
from tilescale.ops.gemm_operators import check_has_backward, pair_of
from tilescale.ops.gemm_tiles import (
    GATHER_CHUNKS,
    ROWS,
    GemmSpec,
    at_once,
    concurrent_stores,
    is_persistent,
    slices,
    tiling,
)
from tilescale.ops.group import collective, group_name, size_of, team_of
from tilescale.ops.kernels import Choice, ChosenKernels
from tilescale.ops.layout import adjacent, delivered, dtype_of, room_for
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.padding import padded, trimmed
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.ops.row_counts import prepare
from tilescale.ops.unfused import Scales, gathered_gemms
from tilescale.ops.workspace import workspace_of
from tilescale.runtime.ahead import is_dry

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
"""Activations of the epilogue, as PyTorch computes them."""

RESULTS, PART = 3, 128
"""Results of weights side by side in memory that one grid makes, at most; columns of which each has a multiple."""


@plain_calls_repeat
@collective
@takes_dtensors(1, a=0, b=1, bias=0)
def all_gather_matmul(
    a: torch.Tensor,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    gated: bool = False,
    scales: tuple[torch.Tensor, Any] | None = None,
    float8: Float8 | None = None,
    out: Any = None,
    group: Any = None,
    return_gathered: bool = False,
) -> Any:
    """The rows of all ranks times b (+ bias), gathered while they are multiplied. Collective.

    Args:
        a: (rows, K) on each rank, the same number of rows on all, contiguous or not; anywhere in device memory.
        b: (K, N), contiguous or the transpose of a contiguous matrix (`weight.t()` of a torch.nn.Linear). Or a list of
            such matrices, each with its own N: one gather for all. They are copied in each call where K or an N is not
            a multiple of 8, of 16 in float8.
        bias: (N,), or a list like b with None where there is none.
        activation: "relu", "silu" or "gelu_tanh", of all results, in float32; its backward multiplies once more.
        gated: whether b is [gate, up], two matrices of one N, and the result is activation(a @ gate) * (a @ up):
            SwiGLU with "silu" (Shazeer, arXiv:2002.05202).
        scales: where a and b are float8_e4m3fn, their factors, float32: one number, or one for each row of a and for
            each column of b; or one for each 128 numbers of a row of a, (rows, K / 128), and for each 128 x 128 of b,
            (K / 128, N / 128), rounded up. The second is a list if b is one. Then b is the transpose of a contiguous
            matrix, or several, and a bias is bfloat16.
        float8: how bfloat16 matrices are rounded to float8 before the GEMM, `Float8()`.
        out: the result's memory, or a list like the result, where no gradients are recorded, and no other tensor's. If
            it is contiguous and N a multiple of 8 (16 in float8), overlapped GEMMs write it without a copy.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.
        return_gathered: whether to return (result, a of all ranks), in place of the result.

    Returns:
        (ranks * rows, N), of the type of a, bfloat16 for float8; a list of them if b is one, unless it is gated. It can
        be differentiated, but with `scales`: `matmul_reduce_scatter` is its backward, and `reduce_scatter` of rows.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    a, *weights = as_autocast(a, *b) if isinstance(b, Sequence) else as_autocast(a, b)
    several = isinstance(b, Sequence) and bias is None
    biases = as_autocast(*bias) if isinstance(bias, Sequence) else as_autocast(bias) * (len(weights) if several else 1)
    if not weights:
        raise ArgumentError("b is an empty list", hint="give a matrix, or a list of some")
    if len(biases) != len(weights):
        raise ArgumentError(f"b is {len(weights)} matrices, bias {len(biases)}", hint="one bias, or None, for each")
    for i, (weight, added) in enumerate(zip(weights, biases, strict=True)):
        name = f"b[{i}]" if isinstance(b, Sequence) else "b"
        check_gemm(a, weight, added, name, scaled=scales is not None, rounds=float8 is not None)
        check_like(f"b[{i}]", weight, "b[0]", weights[0])
    if a.shape[0] > ROWS:
        raise ArgumentError(f"a has {a.shape[0]} rows on each rank", hint=f"supported: up to {ROWS}")
    if activation not in (None, *ACTIVATIONS):
        raise ArgumentError(f"activation is {activation!r}", hint=f"supported: {', '.join(ACTIVATIONS)}")
    check_flags(gated=gated, return_gathered=return_gathered)
    widths = [weight.shape[1] for weight in weights]
    if gated and (len(widths) != 2 or widths[0] != widths[1]):
        raise ArgumentError(f"gated is set, b has {widths} columns", hint="give b as [gate, up], two of one shape")
    added, last = _joined(a, weights, biases), (group_name(group), activation or "", gated)
    pair, recipe = None if scales is None else scales_of(scales, a, weights), spelled(float8)
    places = _places(out, a, weights[: 1 if gated else None], added, isinstance(b, Sequence) and not gated, last[0])
    if places and not _operator.is_seen:
        results = _made(a, weights, added, pair, return_gathered, *last, recipe, places)
    else:
        results = _operator(a, weights, added, list(pair or ()), return_gathered, *last, recipe)
    made = results[: 1 if gated else len(weights)]
    if places and _operator.is_seen:
        made = [place.copy_(x) for place, x in zip(places, made, strict=True)]
    result = made if isinstance(b, Sequence) and not gated else made[0]
    return (result, results[-1]) if return_gathered else result


def _joined(a: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> torch.Tensor | None:
    """One bias for all columns; None if there is none."""
    if len(biases) == 1 or all(bias is None for bias in biases):
        return biases[0]
    nothing = partial(a.new_zeros, dtype=result_type(a))
    pairs = zip(weights, biases, strict=True)
    return torch.cat([nothing(w.shape[1]) if bias is None else bias for w, bias in pairs])


def _places(
    out: Any, a: torch.Tensor, weights: list[torch.Tensor], bias: torch.Tensor | None, several: bool, group: str
) -> list[torch.Tensor]:
    """The requested result tensors, none without `out`. Raises ArgumentError for tensors that do not fit."""
    if out is None:
        return []
    places = list(out) if several and isinstance(out, Sequence) else [out]
    if len(places) != len(weights):
        raise ArgumentError(f"b is {len(weights)} matrices, out {len(places)}", hint="give a list with one for each")
    for i, (place, weight) in enumerate(zip(places, weights, strict=True)):
        shape = size_of(group) * a.shape[0], weight.shape[1]
        name = f"out[{i}]" if several else "out"
        check_strided(name, place)
        check_out(place, shape, a, weight, bias, name=name, dtype=result_type(a))
    return places


@operator("all_gather_matmul")
def _operator(
    a: torch.Tensor,
    weights: list[torch.Tensor],
    bias: torch.Tensor | None,
    scales: list[torch.Tensor],
    keeps: bool,
    group: str,
    activation: str,
    gated: bool,
    float8: str,
) -> list[torch.Tensor]:
    """The operator as PyTorch registers it: results for each weight, then the gathered rows if `keeps`. Float8 matrices
    have two `scales`, for rows of a and for columns of all weights; others an empty list."""
    return _made(a, weights, bias, pair_of(scales), keeps, group, activation, gated, float8)


def _made(
    a: torch.Tensor,
    weights: list[torch.Tensor],
    bias: torch.Tensor | None,
    scales: Scales,
    keeps: bool,
    group: str,
    activation: str,
    gated: bool,
    float8: str,
    places: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Multiply matrices with N and K of any size, into `places` if given; then, if `keeps`, the gathered rows."""
    team = team_of(group)
    left, rights, added, scales = padded(a, weights, bias, scales, multiple_of(float8))
    if float8:
        left, rights, scales = rounded(left, rights, float8)
    results = _gemms(left, rights, added, scales, keeps and not float8, team, activation, gated, places)
    if keeps and float8:
        results.append(whole_tensors.gathered(dense(a), team))
    widths = [*(weight.shape[1] for weight in weights[: 1 if gated else None]), a.shape[1]]
    trim = zip_longest(results, widths[: len(results)], places)
    return [delivered(trimmed(x, columns), place) for x, columns, place in trim]


def _gemms(
    a: torch.Tensor,
    weights: list[torch.Tensor],
    bias: torch.Tensor | None,
    scales: Scales,
    keeps: bool,
    team: Team,
    activation: str,
    gated: bool,
    places: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The results, followed by the gathered rows if they are to be kept."""
    columns = tuple(w.shape[1] for w in weights)
    ending = strategy.GATING if gated else strategy.ACTIVATING if activation else 0.0
    job = strategy.CollectiveGemm("all_gather", a.shape[0], columns, a.shape[1], a.dtype, gated, ending)
    if is_dry():
        _prepare(job, a, weights, bias is not None, team, activation, gated, has_blocks(scales))
    if a.nbytes and not strategy.overlaps(job, team):
        biases = [None] * len(weights) if bias is None else bias.split(columns)
        return gathered_gemms(a, weights, biases, scales, keeps, team, partial(_ended, activation, gated))
    results, gathered = _overlapped(a, weights, bias, scales, team, activation, gated, places)
    if keeps:
        results.append(torch.cat([a if rank == team.rank else rows for rank, rows in enumerate(gathered)]))
        workspace_of(team).was_read()
    return results


def _prepare(
    job: strategy.CollectiveGemm,
    a: torch.Tensor,
    weights: list[torch.Tensor],
    biased: bool,
    team: Team,
    activation: str,
    gated: bool,
    blocks: bool,
) -> None:
    """Add the kernels of all row counts to those of a dry run."""
    together, order, joined = _grids(weights, gated)
    for i in order:
        rights, transposed, widths = _operands(together[i], joined)
        dtypes = dtype_of(a), dtype_of(rights[0])
        how = widths, job.K, dtypes, i == order[0], transposed, biased, activation, gated, blocks
        prepare(job, (a.dtype, torch.float32)[: 1 + (a.itemsize == 1)], _kernel, team, *how)


def _grids(
    weights: list[torch.Tensor], gated: bool
) -> tuple[list[list[torch.Tensor]], list[int], torch.Tensor | None]:
    """The weights of each grid, and the order of the grids: the largest GEMM has the most time to hide the gather, so
    it is the one that gathers. Weights side by side in memory have one grid, for all of them as one matrix."""
    joined = None if gated else _joined_weights(weights)
    together = [weights] if gated or joined is not None else [[weight] for weight in weights]
    return together, sorted(range(len(together)), key=lambda i: -sum(w.shape[1] for w in together[i])), joined


def _joined_weights(weights: list[torch.Tensor]) -> torch.Tensor | None:
    """Transposed weights that follow one another in memory, as one matrix, (N, K), each with whole tiles of the result;
    else None."""
    if not 1 < len(weights) <= RESULTS or any(w.shape[1] % PART for w in weights):
        return None
    return adjacent([w.t() for w in weights])


def _operands(
    weights: list[torch.Tensor], joined: torch.Tensor | None
) -> tuple[list[torch.Tensor], bool, tuple[int, ...]]:
    """The matrices of a grid, whether they are transposed, and the columns of each result."""
    if joined is None:
        return *operands(weights), (weights[0].shape[1],)
    return [joined], True, tuple(w.shape[1] for w in weights)


def _ended(activation: str, gated: bool, made: list[torch.Tensor]) -> list[torch.Tensor]:
    """Apply activation and gate by PyTorch."""
    ending = ACTIVATIONS.get(activation, lambda x: x)
    return [ending(made[0]) * made[1]] if gated else [ending(c) for c in made]


def _overlapped(
    a: torch.Tensor,
    weights: list[torch.Tensor],
    bias: torch.Tensor | None,
    scales: Scales,
    team: Team,
    activation: str,
    gated: bool,
    places: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The results, and the workspace in which the rows of the others are."""
    (rows, K), size = a.shape, team.size
    together, order, joined = _grids(weights, gated)
    widths = [sum(w.shape[1] for w in each) for each in together]
    biases: Sequence[torch.Tensor | None] = [None] * len(together) if bias is None else dense(bias).split(widths)
    of_a = None if scales is None else scales_of_shards(scales[0], 1)
    shapes = [(size, rows, K * a.itemsize), *([] if of_a is None else [(size, *of_a.shape[1:-1], of_a.shape[-1] * 4)])]
    room = workspace_of(team).symmetric(torch.uint8, *shapes)
    gathered = [x.view(kind) for x, kind in zip(room[: 1 + (rows > 0)], (a.dtype, torch.float32), strict=False)]
    columns = [w.shape[1] for w in weights[: 1 if gated else None]]
    wanted: Sequence[torch.Tensor | None] = places or [None] * len(columns)
    results = [room_for(out, (size * rows, N), a, result_type(a)) for out, N in zip(wanted, columns, strict=True)]
    for i in order if rows else []:
        rights, transposed, parts = _operands(together[i], joined)
        vector, matrix = unread(a.dtype, a.device)
        own = biases[i]
        added = unread(result_type(a), a.device)[0] if own is None else own
        of_columns = scales_of_columns(scales[1].split(_extents(together, scales))[i]) if scales else vector
        how = transposed, bias is not None, activation, gated, has_blocks(scales)
        call = _kernel(team, rows, parts, K, (dtype_of(a), dtype_of(rights[0])), i == order[0], *how)
        given = dense(a).view(1, rows, K), rights[0], rights[-1], added, matrix if of_a is None else of_a, of_columns
        made = [results[i]] if len(parts) == 1 else [*results, results[0]][:RESULTS]
        call(*given, *(x.view(size, rows, -1) for x in made), *gathered)
    return results, gathered[0]


def _extents(together: list[list[torch.Tensor]], scales: Scales) -> list[int]:
    """Numbers of scales of the columns of weights that are multiplied together."""
    unit = BLOCK if has_blocks(scales) else 1
    return [sum(-(-w.shape[1] // unit) for w in each) for each in together]


@ChosenKernels
def _kernel(
    team: Team,
    rows: int,
    widths: tuple[int, ...],
    K: int,
    dtypes: tuple[str, str],
    gathers: bool,
    transposed: bool,
    biased: bool,
    activation: str,
    gated: bool,
    blocks: bool,
) -> Choice:
    N, (parts, unit) = sum(widths), (widths, math.gcd(*widths)) if len(widths) > 1 else ((), 0)
    if blocks:
        tiles = block_tiling(rows, gated)
        of = GemmSpec(N, K, dtypes[0], tiles, True, biased, activation, gated, dtypes[1], True, parts)
        return program, team, of, gathers
    tiles = tiling(rows, team.size, N, transposed, 1 + gated, unit)
    of = GemmSpec(N, K, dtypes[0], tiles, transposed, biased, activation, gated, other=dtypes[1], parts=parts)
    if is_persistent(rows, GATHER_CHUNKS) and not of.scaled:
        return program, team, concurrent_stores(of), gathers, 1, at_once()
    return program, team, of, gathers, slices(rows, team.size, tiles, N, of.row_bytes) if gathers else 1


@_operator.register_fake
def _(
    a: torch.Tensor,
    weights: list[torch.Tensor],
    bias: Any,
    scales: Any,
    keeps: bool,
    group: str,
    activation: str,
    gated: bool,
    float8: str,
) -> list[torch.Tensor]:
    rows, own = a.shape[0] * size_of(group), weights[: 1 if gated else None]
    made = [a.new_empty(rows, weight.shape[1], dtype=result_type(a)) for weight in own]
    return [*made, a.new_empty(rows, a.shape[1])] if keeps else made


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    a, weights, bias, ctx.scales, _, ctx.group, ctx.activation, ctx.gated, ctx.float8 = inputs
    # The input of an activation or a gate is recomputed, so the bias is needed.
    ctx.save_for_backward(a, bias if ctx.activation or ctx.gated else None, *weights)
    ctx.biased = bias is not None
    ctx.set_materialize_grads(False)  # gathered rows that are not used send nothing back


def _backward(ctx: Any, results: list[torch.Tensor | None]) -> tuple[Any, ...]:
    """da = scatter(sum of dc b^T); db = gather(a)^T dc; the gather is repeated rather than kept."""
    check_has_backward(ctx)
    a, bias, *weights = ctx.saved_tensors
    rows, own = size_of(ctx.group) * a.shape[0], weights[: 1 if ctx.gated else None]
    pairs = zip(results, own, strict=False)
    grads = [a.new_zeros(rows, weight.shape[1]) if grad is None else grad for grad, weight in pairs]
    if ctx.activation or ctx.gated:
        before = _operator(a, weights, bias, [], False, ctx.group, "", False, ctx.float8)
        slope = _SLOPES.get(ctx.activation, lambda grad, x: grad)
        if ctx.gated:
            gate, up = before
            ending = ACTIVATIONS.get(ctx.activation, lambda x: x)
            grads = [slope(grads[0] * up, gate), grads[0] * ending(gate)]
        else:
            grads = [slope(grad, x) for grad, x in zip(grads, before, strict=True)]
    joined = grads[0] if len(grads) == 1 else torch.cat(grads, 1)
    across = weights[0].t() if len(weights) == 1 else torch.cat([w.t() for w in weights])
    da = operator_of("matmul_reduce_scatter")(joined, across, None, [], ctx.group, of_gradients(ctx.float8))
    if len(results) > len(own) and results[-1] is not None:
        da = da + operator_of("reduce_scatter")(results[-1], 0, "sum", ctx.group)
    gathered = operator_of("all_gather")(a, 0, ctx.group)
    # The transpose of (N, K), the layout of a torch.nn.Linear's weight.
    db = [(grad.t() @ gathered).t() for grad in joined.split([w.shape[1] for w in weights], 1)]
    return da, db, joined.sum(0) if ctx.biased else None


def _silu_slope(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As PyTorch's, whose fused step has no derivative."""
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(grad, x)
    share = torch.sigmoid(x)
    return grad * share * (1 + x * (1 - share))


_SLOPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": lambda grad, x: torch.ops.aten.threshold_backward(grad, x, 0),
    "silu": _silu_slope,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}

_operator.register_autograd(_backward, setup_context=_setup)
