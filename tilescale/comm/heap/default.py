# SPDX-License-Identifier: MIT
"""The heap that `tilescale.empty`, `zeros` and `from_tensor` allocate from: all ranks of the job, one device each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.heap.heap import SymmetricHeap
from tilescale.comm.heap.provider import PROVIDERS
from tilescale.comm.team import Team
from tilescale.comm.world import World, init
from tilescale.settings import settings

if TYPE_CHECKING:
    import torch

BETWEEN_NODES = ("nvshmem",)
"""Providers that support several nodes."""

_of_teams: dict[Team, SymmetricHeap] = {}


def default_heap() -> SymmetricHeap:
    """The heap of this rank, opened collectively at the first call, which also joins the job if necessary.

    The heap is on `World.device`, and belongs to all ranks of the job. In a job of several nodes it belongs to those of
    this node, unless memory is shared between nodes too: by fabric handles, or where TILESCALE_HEAP names NVSHMEM.

    Raises:
        UsageError: a node has more ranks than GPUs that they do not share, or TILESCALE_HEAP names no provider.
        RankMismatchError: ranks with different kinds of device or provider.
        DependencyError: a package of the wanted provider is missing.
        DeviceError: the GPU, its driver or the operating system refuses what the wanted provider needs.
        UnsupportedError: no provider works with these devices.
        LaunchError: the ranks do not find each other.
    """
    return heap_for(init())


def heap_for(team: Team) -> SymmetricHeap:
    """The heap of a team's ranks, as `default_heap` for all of the job; opened collectively by them at the first call.

    Raises what `default_heap` raises.
    """
    world = init()
    of = world if team.ranks == world.ranks else team
    heap = _of_teams.get(of)
    if heap is None or not heap.is_open:
        heap = _of_teams[of] = SymmetricHeap(_sharing(of, world), world.device)
    return heap


def _sharing(team: Team, world: World) -> Team:
    """The ranks of a team whose memory this one can share. Collective."""
    nodes = [world.node_of[rank] for rank in team.ranks]
    count = len(set(nodes))
    if count == 1 or settings().heap in BETWEEN_NODES:
        return team
    able = HeapGroup(team).all_gather(CollectiveCall.here("heap"), _spans(world.device, count))
    here = [rank for rank, node in zip(team.ranks, nodes, strict=True) if node == world.node]
    return team if all(able) else world.team(here)


def _spans(device: torch.device, nodes: int) -> bool:
    """Whether the first provider for a device serves several nodes."""
    first = next(entry for entry in PROVIDERS.values() if entry.device_type == device.type)
    return first.load().objection(device, nodes) is None


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Collective: a symmetric tensor with arbitrary contents, of `default_heap`. See `SymmetricHeap.empty`.

    Raises HeapExhaustedError, RankMismatchError, ShapeError or UsageError, and what `default_heap` raises.
    """
    return default_heap().empty(shape, dtype)


def zeros(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Collective: a symmetric tensor of zeros, of `default_heap`. See `SymmetricHeap.zeros`.

    Raises HeapExhaustedError, RankMismatchError, ShapeError or UsageError, and what `default_heap` raises.
    """
    return default_heap().zeros(shape, dtype)


def from_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Collective: a symmetric copy of `tensor`, in `default_heap`. See `SymmetricHeap.from_tensor`.

    Raises HeapExhaustedError, RankMismatchError or UsageError, and what `default_heap` raises.
    """
    return default_heap().from_tensor(tensor)
