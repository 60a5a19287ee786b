# SPDX-License-Identifier: MIT
"""NCCL through torch.distributed: one process group for the devices of each level that collectives speak of."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tilescale.settings import settings

if TYPE_CHECKING:
    from tilescale.backends.cuda.execute import DeviceProgram

_GROUPS: dict[tuple[tuple[int, ...], ...], Any] = {}


def group(own: DeviceProgram, level: str) -> Any:
    """The process group of the devices that are siblings at a level. Collective: all ranks ask in the same order."""
    import torch.distributed as dist

    _start(own)
    teams = _teams(own, level)
    if teams not in _GROUPS:
        made = [dist.new_group(list(team)) for team in teams]
        _GROUPS[teams] = next(g for team, g in zip(teams, made, strict=True) if own.world.rank in team)
    return _GROUPS[teams]


def _teams(own: DeviceProgram, level: str) -> tuple[tuple[int, ...], ...]:
    """Ranks by group: those that agree in all levels but this one."""
    names, sizes = [n for n, _ in own.sizes], [s for _, s in own.sizes]
    axis = names.index(level)
    stride = 1
    for size in sizes[axis + 1 :]:
        stride *= size
    groups: dict[int, list[int]] = {}
    for rank in range(own.world.size):
        own_part = rank // stride % sizes[axis]
        groups.setdefault(rank - own_part * stride, []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values())


def _start(own: DeviceProgram) -> None:
    """Join NCCL, unless the program's user has already started torch.distributed."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    world = own.world
    dist.init_process_group(
        "nccl",
        store=dist.PrefixStore("tilescale/nccl", world.store),
        rank=world.rank,
        world_size=world.size,
        device_id=own.device,
        timeout=timedelta(seconds=settings().timeout_s),
    )
