# SPDX-License-Identifier: MIT
"""Tensors in the layout of collectives: contiguous, cut and joined along their first dimension.

Other layouts are copied in and out. PyTorch allocates the copies from its pool, also in a CUDA graph. What lasts, such
as workspaces, is made before: launches that are captured cannot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilescale.backends.cuda.running.collectives.setting import Operands
from tilescale.backends.cuda.running.steps import StreamWork, moved, run

Change = Callable[["torch.Tensor"], list[StreamWork]]
"""A change of a contiguous tensor in place."""

Exchange = Callable[["torch.Tensor", "torch.Tensor"], list[StreamWork]]
"""An exchange between contiguous tensors from the first to the second, each cut along the first dimension."""


def in_place(given: Operands, change: Change) -> list[StreamWork]:
    """`change` for any target, into which the source is copied first."""
    tensor = given.target
    before = moved(given.source, tensor)
    if tensor.is_contiguous():
        return [*before, *change(tensor)]
    change(_dense_like(tensor))  # makes what lasts

    def launch() -> None:
        dense = tensor.contiguous()
        run(change(dense))
        tensor.copy_(dense)

    return [*before, launch]


def by_parts(axis: int, source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors with the dimension first along which they are cut."""
    # The result of a gather has one more dimension than its parts.
    whole = source if source.ndim == target.ndim else source.unsqueeze(axis)
    return whole.movedim(axis, 0), target.movedim(axis, 0)


def along(axis: int, source: torch.Tensor, target: torch.Tensor, exchange: Exchange) -> list[StreamWork]:
    """`exchange` for tensors cut along any dimension."""
    first, out = by_parts(axis, source, target)
    if first.is_contiguous() and out.is_contiguous():
        return exchange(first, out)
    exchange(_dense_like(first), _dense_like(out))  # makes what lasts

    def launch() -> None:
        dense, given = out.contiguous(), first.contiguous()  # the tensors themselves if contiguous
        run(exchange(given, dense))
        if dense is not out:
            out.copy_(dense)

    return [launch]


def _dense_like(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of this form, uninitialized; the tensor itself if it is one."""
    return x if x.is_contiguous() else x.new_empty(x.shape)
