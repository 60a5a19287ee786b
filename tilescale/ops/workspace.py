# SPDX-License-Identifier: MIT
"""Memory that operators need in addition to their arguments: made once, sized by the largest GEMM, shared by a group.

Calls of one group follow one another on a device, and a device's memory is touched only during calls in which it takes
part, so the operators of a group share one workspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from tilescale.backends import device_services
from tilescale.comm import SymmetricHeap, Team, init
from tilescale.comm.heap.default import heap_for
from tilescale.comm.heap.lasting import lasting
from tilescale.errors import ArgumentError, UsageError
from tilescale.ops.arguments import MULTIPLE, check_count
from tilescale.ops.gemm_tiles import RESULT_BYTES
from tilescale.ops.group import collective, group_name, team_of
from tilescale.ops.layout import ALIGNMENT

if TYPE_CHECKING:
    import torch

    from tilescale.ops.group import Group

_MOST_TENSORS = 5
"""Largest number of tensors that an operator has in its workspace at once."""

_KEPT = 1024
"""Choices of tensors that are kept, of each part; those that were made first are made again."""


class Workspace:
    """The workspace of one group on one device."""

    def __init__(self, team: Team, device: torch.device):
        self._team, self._device = team, device
        self._symmetric, self._own = _GrowingMemory(self._new_symmetric), _GrowingMemory(partial(_new, device))

    @property
    def nbytes(self) -> int:
        """Number of bytes of its symmetric part."""
        return self._symmetric.nbytes

    @property
    def own_nbytes(self) -> int:
        """Number of bytes of its local part."""
        return self._own.nbytes

    def reserve(self, nbytes: int) -> None:
        """Ensure a symmetric part of at least `nbytes` bytes. Collective.

        Raises:
            UsageError: it would have to grow while a CUDA graph is captured.
            HeapExhaustedError: the symmetric heap is exhausted.
        """
        self._symmetric.reserve(nbytes)

    def symmetric(self, dtype: torch.dtype, *shapes: Sequence[int]) -> list[torch.Tensor]:
        """Tensors that peers reach, consecutive in memory. Collective where the workspace has to grow for them."""
        return self._symmetric.take(dtype, shapes)

    def own(self, dtype: torch.dtype, *shapes: Sequence[int]) -> list[torch.Tensor]:
        """Tensors of this device alone."""
        return self._own.take(dtype, shapes)

    def was_read(self) -> None:
        """After a call: order the current stream's reads of the symmetric part before peers' writes of the next call,
        also if this device makes that on another stream."""
        device_services().was_read(self._device)

    def _new_symmetric(self, nbytes: int) -> torch.Tensor:
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"an operator needs a workspace of {nbytes} bytes, it has {self.nbytes}, and a CUDA graph is captured",
                hint="call tilescale.ops.workspace(rows, features) for the largest product before the capture",
            )
        heap: SymmetricHeap = heap_for(self._team)
        return heap.empty((nbytes,), torch.uint8)


def _new(device: torch.device, nbytes: int) -> torch.Tensor:
    """Memory of a device alone."""
    import torch

    return lasting(lambda: torch.empty(nbytes, dtype=torch.uint8, device=device))


class _GrowingMemory:
    """Memory that grows, with tensors in it; equal shapes get the same tensors again."""

    def __init__(self, new: Callable[[int], torch.Tensor]):
        self.nbytes = 0
        self._new = new
        self._made: list[torch.Tensor] = []  # the last one is in use; graphs may hold the others
        self._views: dict[tuple, list[torch.Tensor]] = {}

    def reserve(self, nbytes: int) -> None:
        if nbytes > self.nbytes:
            self._made.append(self._new(nbytes))
            self._views.clear()
            device_services().memory_replaced()
            self.nbytes = nbytes

    def take(self, dtype: torch.dtype, shapes: tuple[Sequence[int], ...]) -> list[torch.Tensor]:
        made = self._views.get((dtype, shapes))
        if made is None:
            sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
            ends = list(accumulate(map(_aligned, sizes)))
            self.reserve(max(ends[-1], 1))
            begins = zip([0, *ends], sizes, shapes, strict=False)
            made = [self._made[-1][at : at + size].view(dtype).view(shape) for at, size, shape in begins]
            if len(self._views) >= _KEPT:
                del self._views[next(iter(self._views))]
            self._views[dtype, shapes] = made
        return made


class EmulatedWorkspace(Workspace):
    """A workspace where nothing is symmetric: the emulator takes any tensors."""

    def symmetric(self, dtype: torch.dtype, *shapes: Sequence[int]) -> list[torch.Tensor]:
        """New tensors."""
        import torch

        return [torch.empty(shape, dtype=dtype) for shape in shapes]

    own = symmetric

    def was_read(self) -> None:
        """Do nothing: the tensors are not shared."""


_known: dict[Team, Workspace] = {}


@collective
def workspace(rows: int, features: int, dtype: torch.dtype | None = None, *, group: Group = None) -> Workspace:
    """Reserve memory for the operators of a group, so that no later call has to grow it on all ranks. Collective.

    Without it the first call that needs more memory allocates it. A workspace only grows, and its earlier memory stays,
    as CUDA graphs may use it: so pass the largest sizes first.

    Args:
        rows: of the largest matrix over all ranks of the group: M of its GEMMs; of experts the tokens that a rank
            has at most, times the ranks; of attention the tokens of all ranks and sequences; of its decode sequences
            times heads times ranks.
        features: columns of the widest matrix that is gathered or scattered; for experts those of a token; for
            attention key heads times D, twice, or four times if it is differentiated; for its decode DV + 8.
        dtype: of the matrices, None is bfloat16. For float8 it includes scales, and sums in bfloat16.
        group: as for the operators.

    Returns:
        The workspace of the group.

    Raises:
        ArgumentError: rows or features that are not positive, no type, or no group.
        UsageError: a CUDA graph is captured.
        HeapExhaustedError: the symmetric heap is exhausted.
    """
    import torch

    check_count("rows", rows)
    check_count("features", features)
    if not isinstance(dtype, torch.dtype | None):
        raise ArgumentError(f"dtype is {dtype!r}", hint="give one such as torch.bfloat16")
    found = workspace_of(team_of(group_name(group)))
    if init().device.type != "cpu":
        found.reserve(needed(rows, features, dtype or torch.bfloat16))
    return found


def needed(rows: int, features: int, dtype: torch.dtype) -> int:
    """Bytes of a symmetric part for such a matrix, if it is sent or if it is the type of a sum's terms."""
    features += -features % (2 * MULTIPLE)  # as padding.py has them
    return rows * features * max(dtype.itemsize, RESULT_BYTES) + _MOST_TENSORS * ALIGNMENT


def workspace_of(team: Team) -> Workspace:
    """The workspace of a team; empty at first."""
    found = _known.get(team)
    if found is None:
        device = init().device
        found = _known[team] = EmulatedWorkspace(team, device) if device.type == "cpu" else Workspace(team, device)
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
