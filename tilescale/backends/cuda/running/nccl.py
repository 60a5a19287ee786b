# SPDX-License-Identifier: MIT
"""NCCL through torch.distributed: one process group for the devices of each level with collectives.

A collective with a missing peer runs forever on the device, so groups can be aborted, and made again afterwards.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tilescale.collectives import records
from tilescale.comm import Team, World
from tilescale.program.mesh import Mesh
from tilescale.settings import settings


class NcclMember(Protocol):
    """The program on this rank's device, for groups; `by_nccl` becomes true once it has a group."""

    world: World
    team: Team
    device: torch.device
    sizes: tuple[tuple[str, int], ...]
    by_nccl: bool


_EXIT_S, _ABORT_S = 5.0, 10.0
"""Time limits of NCCL's shutdown at process exit, and after a peer has died, in seconds."""

KNOWN = frozenset(records()["nccl"].dtypes)
"""Types of elements that NCCL supports."""

RankGroups = tuple[tuple[int, ...], ...]
"""Devices, or ranks of the job, by process group."""

_groups: dict[tuple[RankGroups, int | None], Any] = {}
_generation = 0
_aborted = False


def generation() -> int:
    """Number of times that all groups were made anew. Programs built with a group of an earlier one cannot run."""
    return _generation


def aborted() -> bool:
    """Whether this process has aborted its groups."""
    return _aborted


def joins(team: Team, world: World) -> bool:
    """Whether NCCL can join a team's ranks: all of the job; or a part, in order, where the user has joined the whole
    job.

    Subgroups of a process group bound to its device are split off it, which NCCL allows only with all of its ranks.
    """
    if team.ranks == world.ranks:
        return True
    if not dist.is_initialized() or list(team.ranks) != sorted(team.ranks):
        return False
    return dist.distributed_c10d._get_default_group().bound_device_id is None


def group(member: NcclMember, level: str) -> Any:
    """The process group of the devices that are siblings at a level. Collective: all ranks request groups in the same
    order."""
    return group_of(member, Mesh(member.sizes).groups(level))


def group_of(member: NcclMember, teams: RankGroups, sms: int | None = None) -> Any:
    """This device's process group among those of `teams`, which partition the devices. Collective, as `group`.

    A group limited to `sms` SMs has its own order of operations, independent of the unlimited one's.
    """
    member.by_nccl = True
    ranks = tuple(tuple(member.team.ranks[device] for device in team) for team in teams)
    return _group(member.world, member.team.ranks, ranks, sms)


def group_of_all(world: World) -> Any:
    """The process group of all ranks of the job. Collective, as `group`."""
    return _group(world, world.ranks, (world.ranks,), None)


def _group(world: World, among: tuple[int, ...], teams: RankGroups, sms: int | None) -> Any:
    """This rank's process group. Collective over the ranks `among` those of the job."""
    _start(world)
    key = teams, sms
    if key not in _groups:
        _groups[key] = _made(world, among, teams, _options(sms))
    return _groups[key]


def _options(sms: int | None) -> dict[str, Any]:
    """Options of a group; kernels of one with a limit of SMs start before those of other work."""
    timeout = timedelta(seconds=settings().timeout_s)  # else that of NCCL's groups is PyTorch's
    if sms is None:
        return {"timeout": timeout}
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = sms
    options._timeout = timeout
    return {"timeout": timeout, "pg_options": options}


def _made(world: World, among: tuple[int, ...], teams: RankGroups, options: dict[str, Any]) -> Any:
    """This rank's new process group of the job's ranks."""
    if among == world.ranks:
        made = [dist.new_group(list(team), **options) for team in teams]
        return next(g for team, g in zip(teams, made, strict=True) if world.rank in team)
    mine = next(team for team in teams if world.rank in team)
    return dist.new_group(list(mine), use_local_synchronization=True, **options)  # others of the job do not take part


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in a type that NCCL supports: others as bytes, along a last dimension."""
    if str(tensor.dtype).removeprefix("torch.") in KNOWN:
        return tensor
    return (tensor if tensor.ndim > 1 else tensor.unsqueeze(-1)).view(torch.uint8)


def reduce_op(reduction: str) -> Any:
    """torch.distributed's name of a combining operation of the language."""
    from torch.distributed import ReduceOp

    return {"sum": ReduceOp.SUM, "prod": ReduceOp.PRODUCT, "max": ReduceOp.MAX, "min": ReduceOp.MIN}[reduction]


def abort() -> None:
    """End the collectives that run on this device, and all groups with them. `renew` allows new ones.

    All groups at once: the end of one waits for the whole device, where a kernel of another one may hang
    (https://github.com/pytorch/pytorch/issues/119797).
    """
    global _aborted
    if not _groups or _aborted:
        return
    _aborted = True
    ends = [threading.Thread(target=_abort, args=(made,), daemon=True) for made in _groups.values()]
    for end in ends:
        end.start()
    until = time.monotonic() + _ABORT_S
    for end in ends:
        end.join(max(0.0, until - time.monotonic()))


def _abort(made: Any) -> None:
    from torch.distributed.distributed_c10d import _abort_process_group

    with contextlib.suppress(RuntimeError, ValueError):  # a group that has never communicated
        _abort_process_group(made)


def is_failure(error: BaseException) -> bool:
    """Whether an error is one of NCCL, or of PyTorch about it."""
    return isinstance(error, dist.DistError)


def renew() -> None:
    """Forget all groups, on all ranks: programs make new ones at their next call."""
    global _aborted, _generation
    abort()
    _groups.clear()
    _aborted = False
    _generation += 1


def _start(world: World) -> None:
    """Join NCCL, unless the program's user has already started torch.distributed."""
    if dist.is_initialized():
        return
    dist.init_process_group(
        "nccl",
        store=dist.PrefixStore("tilescale/nccl", world.store),
        rank=world.rank,
        world_size=world.size,
        device_id=world.device,
        timeout=timedelta(seconds=settings().timeout_s),
    )
    # Threads start here: Python starts none while it exits.
    begin, done = threading.Event(), threading.Event()
    threading.Thread(target=_end, args=(begin, done), name="tilescale-nccl-end", daemon=True).start()
    owner = os.getpid()

    def leave() -> None:
        if os.getpid() == owner:
            begin.set()
            done.wait(_EXIT_S)

    atexit.register(leave)


def _end(begin: threading.Event, done: threading.Event) -> None:
    """End torch.distributed when requested. It may hang if another rank is gone."""
    begin.wait()
    with contextlib.suppress(Exception):  # the process ends; earlier errors have been reported
        if dist.is_initialized():
            dist.destroy_process_group()
    done.set()
