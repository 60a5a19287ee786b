# SPDX-License-Identifier: MIT
"""Halo exchange: the border slices of a tensor that is cut along some dimensions, with the ranks next to this one.

Each dimension is a batch of at most two messages in each direction. The dimensions follow one another, and slices
received in earlier ones are a part of the later borders, so corners need no separate messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.arguments import BYTES, check_count, check_dim, check_flags, check_tensor
from tilescale.ops.group import collective, group_name, is_mesh, rank_of, size_of
from tilescale.ops.send_recv import Recv, Send, batch_send_recv


@collective
def halo_exchange(
    a: torch.Tensor,
    width: int | Sequence[int] = 1,
    dim: int | Sequence[int] = 0,
    *,
    periodic: bool | Sequence[bool] = False,
    in_place: bool = False,
    group: Any = None,
) -> torch.Tensor:
    """The tensor with the slices next to it of the ranks before and after this one along each dimension. Collective.

    Args:
        a: this rank's block, of the same shape on all ranks but for the extents of the dimensions that are cut.
        width: how many slices come from each side; one for all dimensions, or one for each.
        dim: the dimension along which the ranks' blocks follow one another; or several, for a mesh.
        periodic: whether the first and the last rank are next to each other; one for all dimensions, or one for each.
        in_place: `a` includes space for the slices, `width` at both ends, and they are written there. Without it the
            result is a new tensor, with zeros beyond the first and the last rank.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job; for several dimensions a
            DeviceMesh with as many, in the order of `dim`.

    Returns:
        A tensor with 2 * width more slices along each dimension, which can be differentiated: gradients of slices go
        back to where they are from. In place `a`, whose ends beyond the first and the last rank stay as they are.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=BYTES)
    dims = [check_dim("dim", each, a) for each in (dim if isinstance(dim, Sequence) else [dim])]
    if len(set(dims)) != len(dims):
        raise ArgumentError(f"dim is {dim!r}", hint="name each dimension once")
    check_flags(in_place=in_place)
    if in_place and a.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("in_place is given where gradients are recorded", hint="leave it out: the result is new")
    widths, wraps = _for_each("width", width, dims), _for_each("periodic", periodic, dims)
    for each, slices, around, name in zip(dims, widths, wraps, _groups(group, len(dims)), strict=True):
        check_count("width", slices)
        check_flags(periodic=around)
        least = slices * (3 if in_place else 1)
        if a.shape[each] < least:
            raise ArgumentError(
                f"dimension {each} of a is {a.shape[each]}, width is {slices}",
                hint=f"give it {least} slices at least{', including the space at both ends' if in_place else ''}",
            )
        a = (_filled if in_place else _extended)(a, slices, each, around, name)
    return a


def _for_each(name: str, given: Any, dims: list[int]) -> list[Any]:
    if not isinstance(given, Sequence):
        return [given] * len(dims)
    if len(given) != len(dims):
        found = f"{name} has {len(given)} elements, dim has {len(dims)}"
        raise ArgumentError(found, hint="give one for all, or for each")
    return list(given)


def _groups(group: Any, count: int) -> list[str]:
    if is_mesh(group) and group.ndim == count:
        return [group_name(group.get_group(i)) for i in range(count)]
    if count > 1:
        raise ArgumentError(
            f"dim names {count} dimensions, group is {type(group).__name__}",
            hint=f"pass a DeviceMesh of {count} dimensions as group",
        )
    return [group_name(group)]


def _extended(a: torch.Tensor, width: int, dim: int, periodic: bool, group: str) -> torch.Tensor:
    ends = [a.narrow(dim, 0, width), a.narrow(dim, a.shape[dim] - width, width)]
    before, after = (torch.zeros_like(ends[0]) if x is None else x for x in _next_to(ends, periodic, group))
    return torch.cat([before, a, after], dim)


def _filled(a: torch.Tensor, width: int, dim: int, periodic: bool, group: str) -> torch.Tensor:
    extent = a.shape[dim]
    ends = [a.narrow(dim, width, width), a.narrow(dim, extent - 2 * width, width)]
    for begin, x in zip((0, extent - width), _next_to(ends, periodic, group), strict=True):
        if x is not None:
            a.narrow(dim, begin, width).copy_(x)
    return a


def _next_to(ends: list[torch.Tensor], periodic: bool, group: str) -> list[torch.Tensor | None]:
    """The neighbours' slices at the ends towards this rank; None at an end without a neighbour."""
    rank, size = rank_of(group), size_of(group)
    sides = [side for side in (0, 1) if periodic or 0 <= rank - 1 + 2 * side < size]
    peers = {side: (rank - 1 + 2 * side) % size for side in sides}
    # Between two ranks that are on both sides of each other, the first message is that to the rank before: its
    # counterpart comes from the rank after.
    sends = [Send(ends[side], peers[side]) for side in sides]
    receives = [Recv(ends[side], peers[side]) for side in reversed(sides)]
    came = batch_send_recv([*sends, *receives], group=group)
    made: dict[int, torch.Tensor] = dict(zip(reversed(sides), came, strict=True))
    return [made.get(0), made.get(1)]
