# SPDX-License-Identifier: MIT
"""Memory that operators need beside their arguments: made once, sized by the largest product, used by all of a group.

Calls of one group follow one another on a device, and nobody touches a device's memory outside of a call that it takes
part in, so the operators of a group share one workspace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilescale.comm import SymmetricHeap, Team, init
from tilescale.comm.heap.default import heap_for
from tilescale.errors import ArgumentError, UsageError
from tilescale.ops.group import group_name, team_of

if TYPE_CHECKING:
    import torch

    from tilescale.ops.group import Group

_ALIGNMENT = 256
"""Bytes at a multiple of which each tensor begins; bulk copies ask for 128."""


class Workspace:
    """The workspace of one group on one device.

    Attributes:
        nbytes: how many bytes its symmetric part has, and its part of this device alone.
    """

    def __init__(self, team: Team, device: torch.device):
        self.nbytes = 0
        self._team, self._device = team, device
        self._shared: list[torch.Tensor] = []  # the last one is in use; graphs may hold the others
        self._own: list[torch.Tensor] = []
        self._views: dict[tuple, list[torch.Tensor]] = {}

    def reserve(self, nbytes: int) -> None:
        """Collective: have at least so many bytes.

        Raises:
            UsageError: it would have to grow while a CUDA graph is captured.
            HeapExhaustedError: the symmetric heap has no room.
        """
        import torch

        if nbytes <= self.nbytes:
            return
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"an operator needs a workspace of {nbytes} bytes, it has {self.nbytes}, and a CUDA graph is captured",
                hint="call tilescale.ops.workspace(rows, features) for the largest product before the capture",
            )
        heap: SymmetricHeap = heap_for(self._team)
        self._shared.append(heap.empty((nbytes,), torch.uint8))
        self._own.append(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
        self._views.clear()
        self.nbytes = nbytes

    def symmetric(self, dtype: torch.dtype, *shapes: Sequence[int]) -> list[torch.Tensor]:
        """Tensors that peers reach, one beside the other. Collective where the workspace has to grow for them."""
        return self._take(True, dtype, shapes)

    def own(self, dtype: torch.dtype, *shapes: Sequence[int]) -> list[torch.Tensor]:
        """Tensors of this device alone. Collective where the workspace has to grow for them."""
        return self._take(False, dtype, shapes)

    def _take(self, shared: bool, dtype: torch.dtype, shapes: tuple[Sequence[int], ...]) -> list[torch.Tensor]:
        key = shared, dtype, shapes
        made = self._views.get(key)
        if made is None:
            sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
            self.reserve(sum(map(_aligned, sizes)))
            begin, made = 0, []
            memory = (self._shared if shared else self._own)[-1] if self.nbytes else None
            for shape, size in zip(shapes, sizes, strict=True):
                assert memory is not None
                made.append(memory[begin : begin + size].view(dtype).view(shape))
                begin += _aligned(size)
            self._views[key] = made
        return made


class Emulated(Workspace):
    """A workspace where nothing is symmetric: the emulator takes whatever tensors there are."""

    def _take(self, shared: bool, dtype: torch.dtype, shapes: tuple[Sequence[int], ...]) -> list[torch.Tensor]:
        import torch

        return [torch.empty(shape, dtype=dtype) for shape in shapes]


_known: dict[tuple[int, ...], Workspace] = {}


def workspace(rows: int, features: int, dtype: torch.dtype | None = None, *, group: Group = None) -> Workspace:
    """Collective: make room for the products of a group, so that no later call allocates.

    Without it the first call that needs more room makes it. A workspace only grows, and what it was before stays where
    it is, as CUDA graphs may use it: so say the largest sizes first.

    Args:
        rows: of the largest matrix over all ranks of the group: M of its products.
        features: columns of the widest matrix that is gathered, scattered or reduced.
        dtype: of the matrices; None is bfloat16.
        group: as for the operators.

    Returns:
        The workspace of the group.

    Raises:
        ArgumentError: rows or features below 1, or no group.
        UsageError: a CUDA graph is captured.
        HeapExhaustedError: the symmetric heap has no room.
    """
    import torch

    if rows < 1 or features < 1:
        raise ArgumentError(f"workspace(rows={rows}, features={features})", hint="give the largest M and its width")
    found = workspace_of(team_of(group_name(group)))
    if init().device.type != "cpu":
        found.reserve(_aligned(rows * features * (dtype or torch.bfloat16).itemsize))
    return found


def workspace_of(team: Team) -> Workspace:
    """The workspace of a team; empty at first."""
    found = _known.get(team.ranks)
    if found is None:
        device = init().device
        found = _known[team.ranks] = Emulated(team, device) if device.type == "cpu" else Workspace(team, device)
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
