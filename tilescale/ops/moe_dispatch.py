# SPDX-License-Identifier: MIT
"""Mixture of experts: tokens to the ranks of their experts, and their results back, weighted and summed.

A token crosses the network once for each rank that it needs, and is copied to its experts' rows there; their outputs
are summed there first, and cross back once. Dispatch and combine are each other's backward.
"""

from typing import Any

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.arguments import SCALED, SUMS, check_same, check_tensor, dense
from tilescale.ops.group import collective, team_of
from tilescale.ops.layout import more_rows, row_bytes, rows_of_bytes
from tilescale.ops.moe_route import Routing, check_routing
from tilescale.ops.operator import operator
from tilescale.ops.row_exchange import UNIT_BYTES, scatter_rows, sum_rows


@collective
def moe_dispatch(x: torch.Tensor, routing: Routing, scales: torch.Tensor | None = None) -> Any:
    """The tokens of all ranks that chose an expert of this one, expert by expert. Collective.

    Args:
        x: (tokens, features): bfloat16, float16, float32, or float8 with scales; rows of a multiple of 16 bytes.
        routing: of these tokens, from `moe_route`.
        scales: (tokens, n), float32: are sent with the tokens.

    Returns:
        (room, features), rows at the positions of `routing`; other rows are undefined. With scales also
        theirs, (room, n); both are parts of one tensor. Without scales, the gradient is `moe_combine` without weights.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("x", x, 2, (*SUMS, *SCALED))
    check_routing(routing)
    _check_rows("x", x, routing, routing.tokens)
    routes = routing.order, routing.sent, routing.received, routing.places, routing.before, routing.room, routing.group
    if scales is None:
        return _dispatch(x, *routes)
    check_tensor("scales", scales, 2, (torch.float32,))
    _check_rows("scales", scales, routing, routing.tokens, 4)
    bytes_of_x = row_bytes(x)
    rows = _dispatch(rows_of_bytes(x, scales), *routes)
    ends = bytes_of_x + row_bytes(scales)
    return rows[:, :bytes_of_x].view(x.dtype), rows[:, bytes_of_x:ends].view(torch.float32)


@collective
def moe_combine(y: torch.Tensor, routing: Routing, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Sum the weighted expert outputs of each token on the rank where the token came from. Collective.

    Sums are made in float32: on each rank over a token's choices, in their order, rounded to the type of y; then over
    the ranks, in their order. So they have the same bits each time.

    Args:
        y: (room, features), in the rows in which `moe_dispatch` gave the tokens; bfloat16, float16 or float32, rows of
            a multiple of 16 bytes.
        routing: of these tokens.
        weights: (room,), float32, such as `routing.weights`; None for ones.

    Returns:
        (tokens, features). It can be differentiated: its backward is `moe_dispatch`.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("y", y, 2, SUMS)
    check_routing(routing)
    _check_rows("y", y, routing, routing.room)
    if weights is not None:
        check_tensor("weights", weights, 1, (torch.float32,))
        _check_rows("weights", weights, routing, routing.room, 4)
    routes = routing.order, routing.sent, routing.received, routing.places, routing.before, routing.tokens
    return _combine(y, weights, *routes, routing.group)


def _check_rows(name: str, x: torch.Tensor, routing: Routing, rows: int, multiple: int = UNIT_BYTES) -> None:
    check_same("device", name, x, "routing", routing.order)
    if x.shape[0] != rows:
        raise ArgumentError(
            f"{name} has {x.shape[0]} rows, routing says {rows}", hint="give it the routing made for it"
        )
    if x.ndim > 1 and (not x.shape[1] or row_bytes(x) % multiple):
        raise ArgumentError(f"a row of {name} has {row_bytes(x)} bytes", hint=f"supported: multiples of {multiple}")


@operator("moe_dispatch")
def _dispatch(
    x: torch.Tensor,
    order: torch.Tensor,
    sent: torch.Tensor,
    received: torch.Tensor,
    places: torch.Tensor,
    before: torch.Tensor,
    room: int,
    group: str,
) -> torch.Tensor:
    rows = more_rows(dense(x).view(torch.uint8), order.shape[1])
    return scatter_rows(rows, order, sent, (received, places, room), team_of(group)).view(x.dtype)


@operator("moe_combine")
def _combine(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    order: torch.Tensor,
    sent: torch.Tensor,
    received: torch.Tensor,
    places: torch.Tensor,
    before: torch.Tensor,
    tokens: int,
    group: str,
) -> torch.Tensor:
    """The sums of the experts' rows."""
    given = weights if weights is None else dense(weights)
    return sum_rows(dense(y), given, (received, places, y.shape[0]), before, team_of(group))[:tokens]


@_dispatch.register_fake
def _(x: torch.Tensor, *routes: Any) -> torch.Tensor:
    return x.new_empty(routes[-2], x.shape[1])


@_combine.register_fake
def _(y: torch.Tensor, weights: torch.Tensor | None, *routes: Any) -> torch.Tensor:
    return y.new_empty(routes[-2], y.shape[1])


def _setup_dispatch(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, *tables, _, ctx.group = inputs
    ctx.save_for_backward(*tables)
    ctx.tokens = x.shape[0]


def _backward_dispatch(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    back = _combine(grad, None, *ctx.saved_tensors, ctx.tokens, ctx.group)
    return back, *[None] * 7


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    y, weights, *tables, _, ctx.group = inputs
    ctx.save_for_backward(y, weights, *tables)


def _backward_combine(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Gradients: dy = weights * dispatch(grad); dw = sum(y * dispatch(grad)) for each row; zero for rows without a
    token."""
    y, weights, *tables = ctx.saved_tensors
    places = tables[3].flatten().long()
    room = y.shape[0]
    is_named = torch.zeros(room + 1, dtype=torch.bool, device=y.device)
    is_named = is_named.scatter_(0, torch.where(places >= 0, places, room), True)[:room, None]
    far = _dispatch(grad, *tables, room, ctx.group)
    if weights is None:
        return torch.where(is_named, far, 0), *[None] * 8
    dy = torch.where(is_named, far.float() * weights[:, None], 0).to(y.dtype)
    dw = torch.where(is_named, far.float() * y.float(), 0).sum(1)
    return dy, dw, *[None] * 7


_dispatch.register_autograd(_backward_dispatch, setup_context=_setup_dispatch)
_combine.register_autograd(_backward_combine, setup_context=_setup_combine)
