# SPDX-License-Identifier: MIT
"""A layer of SwiGLU experts that are split over the ranks, as one operator.

Forward is one program: the routing tables, the tokens to their experts, the first GEMM with SwiGLU in its epilogue, the
second GEMM, the weighted sums back to the ranks of the tokens. Backward makes the same transfers for the gradients. All
sizes are on the device.
"""

from dataclasses import replace
from typing import Any

import torch

from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.ops.arguments import (
    GEMM_TYPES,
    MULTIPLE,
    NARROW,
    as_autocast,
    check_count,
    check_like,
    check_same,
    check_tensor,
    dense,
)
from tilescale.ops.expert_programs import LEAST_COLUMNS, LayerForm, layer_program
from tilescale.ops.float8 import Float8
from tilescale.ops.float8_wire import GROUP
from tilescale.ops.gemm_tiles import at_once
from tilescale.ops.group import collective, group_name, size_of, team_of
from tilescale.ops.kernels import one_of
from tilescale.ops.layout import dtype_name, dtype_of, more_rows, new_tensors
from tilescale.ops.moe_choice import Router
from tilescale.ops.moe_float8 import (
    Scale,
    check_recipe,
    dequantized,
    quantized,
    scales_of_experts,
    scales_of_tokens,
)
from tilescale.ops.moe_gradient import SAVED, gradients, words_of
from tilescale.ops.moe_low_latency import layer_of_few, scales_of_groups, scales_or_dummy
from tilescale.ops.moe_route import check_choices, room_for
from tilescale.ops.moe_tables import (
    ALIGN,
    DROPPED,
    arriving_choices,
    form_of_counts,
    forms_of_tables,
    new_tables,
    padded_choices,
)
from tilescale.ops.operator import operator
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.ops.row_exchange import UNIT_BYTES, sharers
from tilescale.ops.workspace import workspace_of

NARROW_ROWS = 32
"""Choices of a rank's tokens for each of its experts, at most, for which tiles of the GEMMs are narrow."""

Pair = tuple[torch.Tensor, torch.Tensor]


@plain_calls_repeat
@collective
def moe_layer(
    x: torch.Tensor,
    choice: torch.Tensor | Pair,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    router: Router | None = None,
    bias: torch.Tensor | None = None,
    shared: Pair | None = None,
    replicas: torch.Tensor | None = None,
    scales: Pair | None = None,
    x_scales: torch.Tensor | None = None,
    float8: Float8 | None = None,
    wire: str | None = None,
    most: int | None = None,
    room: int | None = None,
    group: Any = None,
) -> torch.Tensor | Pair:
    """The weighted sum of what its experts make of each token: down (silu(gate x) * up x). Collective.

    The ranks have equally many experts each, one rank's after the other's. Sums are made in one order, so results have
    the same bits each time. Nothing waits for the host, and a CUDA graph may have it. It can be differentiated: with
    respect to x, weights or logits, gate_up, down and shared; but not float8 tensors.

    In float8, tokens are quantized before they are sent, and activations before they are multiplied by down: each 128
    numbers of a row have a scale, a power of two, by which they become at most 448. Gradients have GEMMs of bfloat16.

    Args:
        x: (..., features), bfloat16 or float16: the tokens of this rank. Their number may differ from rank to rank, and
            be 0, if `most` is given.
        choice: the numbers of a token's experts and their weights, both (tokens, choices): int32 or int64, and float32,
            bfloat16 or float16; another number than those of experts stands for none. Or the logits of a router,
            (tokens, experts), with `router`.
        gate_up: (experts of this rank, 2 * inner, features), the rows of the gate first. Like x, or float8_e4m3fn with
            `scales`, and then x is bfloat16.
        down: (experts of this rank, features, inner), of the type of gate_up. Features are a multiple of 8, inner of
            16; of float8 both of 128.
        router: how experts are chosen from logits.
        bias: (experts,), with logits: see `Router.choose`.
        shared: gate_up (2 * n, features) and down (features, n) of an expert that all tokens take, on every rank.
        replicas: (experts, n), int32 or int64: the ranks' experts that replicate each one that can be chosen, followed
            by -1. Tokens are distributed over them.
        scales: of gate_up and down in float8, float32: one number for each 128 rows and 128 columns, (experts of this
            rank, 2 * inner / 128, features / 128) and (experts of this rank, features / 128, inner / 128), as the
            `weight_scale_inv` of DeepSeek-V3; or one for each expert and row, or for each expert.
        x_scales: of x in float8_e4m3fn, for float8 experts: (..., features / 128), one number for each 128 of a row; or
            one for each row, or for all.
        float8: `Float8("blockwise", torch.bfloat16)`: bfloat16 weights are quantized in the call, by such squares.
        wire: "float8_e4m3fn": the weighted sums of float8 experts travel back as float8, each 128 numbers with a scale.
        most: tokens that any rank has at most, the same on all ranks. Left out, all have equally many.
        room: rows for the choices of all ranks that fall on this one's experts, each of which takes a multiple of 128;
            the same on all ranks. Choices beyond it are dropped, those of the last experts first. Left out, there is
            memory for all possible choices: ranks * most * min(choices, experts of a rank) rows.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        Like x, bfloat16 for float8. With `room`: it, and how many choices of each expert of this rank were dropped,
        int32.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    x, gate_up, down = as_autocast(x, gate_up, down)
    check_recipe(float8, scales, wire)
    if x_scales is not None and shared is not None:
        raise ArgumentError("shared is given, x is float8", hint="add its result to that of the layer")
    _check_experts(x, gate_up, down, scales is not None, float8 is not None, x_scales is not None)
    shared = _checked_shared(shared, x)
    rows, name = x.flatten(0, -2), group_name(group)
    chosen, weights = _chosen(choice, router, bias, replicas, size_of(name) * len(gate_up))
    most = _most_tokens(rows, chosen, most)
    space = room_for(size_of(name) * most, chosen.shape[1], len(gate_up)) if room is None else room
    check_count("room", space)
    given, extents = (rows, chosen, weights, gate_up, down), (most, -(-space // ALIGN) * ALIGN)
    all_scales = *scales_of_experts(scales, gate_up, down), scales_of_tokens(x_scales, x)
    y, dropped = _by_experts(given, all_scales, extents, float8 is not None, bool(wire), name)
    if shared is not None:
        y = y + _mlp(rows, *shared)
    return y.view(x.shape) if room is None else (y.view(x.shape), dropped)


def _by_experts(
    given: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor | None, ...],
    extents: tuple[int, int],
    rounds: bool,
    narrow_sums: bool,
    group: str,
) -> Pair:
    """The sums, and the number of dropped choices of each local expert; no kernel runs where no rank has a token."""
    rows, chosen, *others = given
    gate_up = given[3]
    if not extents[0]:
        y = rows.to(rows.dtype if rows.dtype in GEMM_TYPES else torch.bfloat16, copy=True)
        for learned in (t for t in others if t.requires_grad and t.dtype not in NARROW):
            y = y + learned[:0].sum()  # zeros are its gradient
        return y, chosen.new_zeros(len(gate_up), dtype=torch.int32)
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    y, dropped, *_ = _layer(*given, *scales, *extents, rounds, narrow_sums, keeps, group)
    return y, dropped


def _check_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, scaled: bool, rounds: bool, quantized: bool
) -> None:
    is_float8 = scaled or rounds
    if quantized and not scaled:
        raise ArgumentError("x_scales is given, scales is None", hint="float8 tokens are for float8 experts")
    check_tensor("x", x, None, NARROW if quantized else (torch.bfloat16,) if is_float8 else GEMM_TYPES)
    for name, weight in ("gate_up", gate_up), ("down", down):
        if not scaled and isinstance(weight, torch.Tensor) and weight.dtype in NARROW:
            raise ArgumentError(f"{name} is {weight.dtype}", hint="give scales of gate_up and down")
        check_tensor(name, weight, 3, NARROW if scaled else GEMM_TYPES)
        check_same("device", name, weight, "x", x)
        if not scaled:
            check_same("dtype", name, weight, "x", x)
    experts, features, inner = down.shape
    if x.ndim < 2 or x.shape[-1] != features or gate_up.shape != (experts, 2 * inner, features) or not experts:
        raise ArgumentError(
            f"x has shape {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}",
            hint="(..., features), (experts, 2 * inner, features) and (experts, features, inner)",
        )
    of_features, of_inner = (GROUP, GROUP) if is_float8 else (MULTIPLE, LEAST_COLUMNS)
    if features % of_features or inner % of_inner or not features or not inner:
        raise ArgumentError(
            f"down has shape {tuple(down.shape)}", hint=f"features: a multiple of {of_features}, inner of {of_inner}"
        )


def _checked_shared(shared: Any, x: torch.Tensor) -> Pair | None:
    """The weights of the expert that all tokens take, if there is one. Raises ArgumentError: other weights."""
    if shared is None:
        return None
    if not isinstance(shared, tuple | list) or len(shared) != 2:
        raise ArgumentError(f"shared is {type(shared).__name__}", hint="pass two weights: gate_up and down")
    gate_up, down = as_autocast(*shared)
    for name, weight in ("shared[0]", gate_up), ("shared[1]", down):
        check_tensor(name, weight, 2)
        check_like(name, weight, "x", x)
    if len(down) != x.shape[-1] or gate_up.shape != (2 * down.shape[1], len(down)):
        raise ArgumentError(
            f"shared has shapes {tuple(gate_up.shape)} and {tuple(down.shape)}, x has {x.shape[-1]} features",
            hint="(2 * n, features) and (features, n)",
        )
    return gate_up, down


def _most_tokens(rows: torch.Tensor, chosen: torch.Tensor, most: int | None) -> int:
    check_same("device", "choice", chosen, "x", rows)
    if len(chosen) != len(rows):
        raise ArgumentError(f"choice has {len(chosen)} tokens, x has {len(rows)}", hint="one for each")
    most = len(rows) if most is None else most
    check_count("most", most, least=0)
    if not chosen.shape[1]:
        raise ArgumentError("choice has no choices", hint="give each token one expert at least")
    if len(rows) > most:
        raise ArgumentError(f"x has {len(rows)} tokens, most is {most}", hint="raise most, on all ranks")
    return most


def _chosen(
    choice: Any, router: Router | None, bias: torch.Tensor | None, replicas: torch.Tensor | None, experts: int
) -> Pair:
    """The experts of each token, and their weights. `experts`: of all ranks."""
    chosen, weights = _routed(choice, router, bias)
    if replicas is not None:
        _check_replicas(replicas, chosen)
        experts = len(replicas)
    if isinstance(choice, torch.Tensor) and choice.shape[1] > experts:
        where = "the ranks have" if replicas is None else "replicas has"
        raise ArgumentError(
            f"choice has logits of {choice.shape[1]} experts, {where} {experts}", hint="of each expert there is one"
        )
    return chosen if replicas is None else _replaced(chosen, replicas), weights


def _routed(choice: Any, router: Router | None, bias: torch.Tensor | None) -> Pair:
    """The experts that are given, or that a router chooses, and their weights."""
    if isinstance(choice, torch.Tensor):
        if not isinstance(router, Router):
            raise ArgumentError(f"choice is logits, router is {type(router).__name__}", hint="pass ops.Router(choices)")
        return router.choose(choice, bias)
    if not isinstance(choice, tuple | list) or len(choice) != 2 or router is not None:
        raise ArgumentError(
            f"choice is {type(choice).__name__}", hint="pass numbers of experts and their weights, or logits and router"
        )
    if bias is not None:
        raise ArgumentError("bias is given without logits", hint="experts that are chosen already have no use for it")
    chosen, weights = choice
    check_choices(chosen, weights)
    return chosen, weights


def _check_replicas(replicas: torch.Tensor, chosen: torch.Tensor) -> None:
    check_tensor("replicas", replicas, 2, (torch.int32, torch.int64))
    check_same("device", "replicas", replicas, "choice", chosen)
    if not replicas.numel():
        raise ArgumentError(f"replicas has shape {tuple(replicas.shape)}", hint="(experts, n), one of each at least")


def _replaced(chosen: torch.Tensor, replicas: torch.Tensor) -> torch.Tensor:
    """The experts of the ranks that replicate the chosen ones, round-robin."""
    is_one = (chosen >= 0) & (chosen < len(replicas))
    number = torch.where(is_one, chosen, 0).long()
    which = torch.arange(len(chosen), device=chosen.device)[:, None] % (replicas >= 0).sum(1).clamp(min=1)[number]
    return torch.where(is_one, replicas[number, which], -1)


def _mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, -1)
    return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)


@operator("moe_layer")
def _layer(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    of_gate_up: Scale,
    of_down: Scale,
    of_x: Scale,
    most: int,
    room: int,
    rounds: bool,
    narrow_sums: bool,
    keeps: bool,
    group: str,
) -> list[torch.Tensor]:
    """The sums, and the number of dropped choices; then the tensors saved for a backward, with `keeps`. Weights are
    quantized if it `rounds` them."""
    if rounds:
        (gate_up, of_gate_up), (down, of_down) = quantized(gate_up), quantized(down)
    team, experts, scales = team_of(group), (gate_up, down), (of_gate_up, of_down, of_x)
    if not (keeps or narrow_sums):
        few = layer_of_few(x, (chosen, weights), experts, scales, most, room, team)
        if few is not None:
            return few
    choice = padded_choices(chosen, most, -1), padded_choices(weights.float(), most, 0)
    made = _by_tables(x, choice, experts, scales, (most, room, chosen.shape[1]), narrow_sums, keeps, team)
    result, rows, hidden, of_rows, counts, dropped, *tables = made
    return [result[: len(x)], dropped, *([rows, hidden, of_rows, counts, *tables] if keeps else [])]


def _by_tables(
    x: torch.Tensor,
    choice: Pair,
    experts: Pair,
    scales: tuple[Scale, Scale, Scale],
    extents: tuple[int, int, int],
    narrow_sums: bool,
    keeps: bool,
    team: Team,
) -> list[torch.Tensor]:
    """The sums of `most` tokens; the rows of the experts, the results of their first GEMM if it `keeps` them, and the
    tables. `scales`: of both weights and of x. `extents`: `most`, `room`, and choices of a token."""
    (numbers, shares), (gate_up, down), (most, room, choices) = choice, experts, extents
    of_gate_up, of_down, of_x = scales
    (local, features, inner), size, is_float8 = down.shape, team.size, of_down is not None
    dtype = torch.bfloat16 if is_float8 else x.dtype
    by_rows = None if of_down is None else of_down.ndim == 2
    form = LayerForm(dtype_name(dtype), by_rows, keeps, of_x is not None, narrow_sums)
    of_choices, sent = arriving_choices(size, most, choices), (down.dtype, NARROW[0] if narrow_sums else dtype)
    of_groups = [(size, most * features // GROUP) if kind in NARROW else (1, 1) for kind in sent]
    in_chosen, in_shares, *inboxes, in_scales, in_sum_scales = workspace_of(team).symmetric(
        torch.int32, of_choices, of_choices, *(words_of(features, kind, size, most) for kind in sent), *of_groups
    )
    in_rows, in_sums = (
        words.view(kind).view(size, -1, GROUP if kind in NARROW else features)
        for words, kind in zip(inboxes, sent, strict=True)
    )
    of_rows, of_hidden, none = (room, features), (room, 2 * inner), (1, 1)
    *tables, wide, hidden, rows, scales_of_rows, active, scales_of_active, made, counted = new_tensors(
        x,
        *forms_of_tables(size, local, most, room, choices),
        *((of_rows if keeps or not is_float8 else none, dtype), (of_hidden if keeps else none, dtype)),
        *((form.shape(*of_rows), down.dtype), (form.shape(features // GROUP, room), torch.float32)),
        *(((room, inner), down.dtype), (form.shape(inner // GROUP, room), torch.float32)),
        *((of_rows, dtype), form_of_counts(size, local, most, choices)),
        apart=range(SAVED) if keeps else (DROPPED,),
    )
    result = x.new_empty(most, features, dtype=dtype)
    shape = local, choices, features, inner, dtype_of(numbers)
    choice_of = lambda narrow: (layer_program, team, *shape, replace(form, narrow=narrow), at_once())  # noqa: E731
    is_narrow = not is_float8 and most * choices <= local * NARROW_ROWS
    one_of(choice_of, is_narrow, (False,) if is_float8 else (False, True))(
        *(more_rows(dense(x), most), scales_of_groups(x, of_x, most), numbers, shares),
        *(dense(gate_up), scales_or_dummy(of_gate_up, x.device), dense(down), scales_or_dummy(of_down, x.device)),
        *(in_chosen, in_shares.view(torch.float32), in_rows, in_scales.view(torch.float32)),
        *(in_sums, in_sum_scales.view(torch.float32), counted, *tables),
        *(wide, hidden, rows, scales_of_rows, active, scales_of_active, made, result),
        sharers(features, UNIT_BYTES // dtype.itemsize, most),
    )
    return [result, wide, hidden, *tables]


@_layer.register_fake
def _(x: torch.Tensor, chosen: torch.Tensor, _: torch.Tensor, *given: Any) -> list[torch.Tensor]:
    _, down, _, of_down, _, most, room, rounds, _, keeps, group = given
    experts, features, inner = down.shape
    of_rows, counts, dropped, *tables = new_tables(chosen, size_of(group), experts, most, room)
    dtype = x.dtype if of_down is None and not rounds else torch.bfloat16
    shapes = x.shape, *(((room, features), (room, 2 * inner)) if keeps else ())
    y, *rows = (x.new_empty(shape, dtype=dtype) for shape in shapes)
    return [y, dropped, *([*rows, of_rows, counts, *tables] if keeps else [])]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, _, weights, gate_up, down, of_gate_up, of_down, *_, ctx.group = inputs
    _, dropped, *kept = output
    ctx.save_for_backward(gate_up, down, of_gate_up, of_down, *kept)
    ctx.mark_non_differentiable(dropped, *kept)
    ctx.set_materialize_grads(False)
    ctx.dtype, ctx.learns_x = weights.dtype, x.dtype not in NARROW


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    """Weights without scales have gradients; those with scales become bfloat16."""
    gate_up, down, of_gate_up, of_down, rows, hidden, *tables = ctx.saved_tensors
    wide, learns = (dequantized(gate_up, of_gate_up), dequantized(down, of_down)), of_gate_up is None
    of_x, of_weights, *of_experts = gradients(grads[0], rows, hidden, tables, *wide, learns, ctx.group)
    return of_x if ctx.learns_x else None, None, of_weights.to(ctx.dtype), *(of_experts or (None, None)), *[None] * 9


_layer.register_autograd(_backward, setup_context=_setup)
