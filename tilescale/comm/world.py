# SPDX-License-Identifier: MIT
"""The job as one rank sees it, and `init`, which joins it."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from tilescale import __version__
from tilescale.comm import shutdown
from tilescale.comm.call import CollectiveCall
from tilescale.comm.failure_log import RankFailure
from tilescale.comm.launchers import Joined, join
from tilescale.comm.open_session import open_session
from tilescale.comm.survivors import go_on
from tilescale.comm.team import Team
from tilescale.comm.trust.handshake import this_process
from tilescale.errors import RankMismatchError, UsageError, check_type
from tilescale.settings import settings

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store


@dataclass(frozen=True, kw_only=True)
class World(Team):
    """All ranks of the job: a team, and where its ranks are.

    Attributes:
        launcher: the launcher of the job: "torchrun", "tilescale run", "MPI" or "alone".
        node_of: the node of every rank; nodes are numbered in the order of their lowest ranks.
        gpus: the number of every rank's GPU on its node; None: as ranks are numbered there.
    """

    launcher: str
    node_of: tuple[int, ...]
    gpus: tuple[int, ...] | None = None

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.node_of[self.rank]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(self.node_of) + 1

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its node."""
        return self._on_this_node().index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return len(self._on_this_node())

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on: its GPU, as numbered in `gpus`, or the CPU without GPUs or in
        emulation.

        With TILESCALE_SHARE_GPUS ranks time-slice GPUs: slow but correct, to try a program on more ranks than there are
        GPUs. NCCL refuses such jobs, so their collectives are TileScale's.

        Raises UsageError if the node has more ranks than GPUs and they do not share.
        """
        import torch

        if settings().emulate or not torch.cuda.is_available():
            return torch.device("cpu")
        count = torch.cuda.device_count()
        number = self.gpu(self.rank)
        if number >= count and not settings().share_gpus:
            raise UsageError(
                f"rank {self.rank} is number {number} on its node, which shows {count} GPUs",
                hint="start as many ranks on a node as it has GPUs (CUDA_VISIBLE_DEVICES limits what a rank sees), or "
                "set TILESCALE_SHARE_GPUS=1 to let several ranks use one GPU in turn",
            )
        return torch.device("cuda", number % count)

    def gpu(self, rank: int) -> int:
        """The number of a rank's GPU on its node, if each rank has one."""
        if self.gpus is not None:
            return self.gpus[rank]
        return self.node_of[:rank].count(self.node_of[rank])

    def on_my_gpu(self, rank: int) -> bool:
        """Whether a rank computes on this rank's GPU: it is this one, or they share."""
        if rank == self.rank:
            return True
        if self.node_of[rank] != self.node or self.device.index is None:
            return False
        import torch

        return self.gpu(rank) % torch.cuda.device_count() == self.device.index

    @property
    def store(self) -> Store:
        """The job's key-value store, for libraries of torch.distributed that join through one."""
        return _store_of_one() if self._session is None else self._session.transport.client.store

    def failure(self) -> RankFailure | None:
        """The first failure in the job that is known by now; no communication with the other ranks.

        Raises RankFailedError if rank 0, or the launcher, is gone with all that was known.
        """
        return None if self._session is None else self._session.status().failure

    def team(self, which: str | Sequence[int] = "world") -> Team:
        """The team of all ranks ("world"), of this node's ranks ("node"), or of the listed ranks in their order.

        Called by the members, no communication. Raises UsageError for a list that repeats a rank, has one outside the
        world, or lacks this rank.
        """
        if isinstance(which, str):
            named = {"world": self.ranks, "node": self._on_this_node()}
            if which not in named:
                raise UsageError(f"no team is called {which!r}", hint='"world", "node", or a list of ranks')
            ranks = named[which]
        else:
            ranks = tuple(which)
            if len(set(ranks)) != len(ranks) or not set(ranks) <= set(self.ranks):
                raise UsageError(f"ranks {list(ranks)} in a world of {self.size}", hint="list each existing rank once")
        if self.rank not in ranks:
            raise UsageError(
                f"rank {self.rank} asks for the team of ranks {list(ranks)}", hint="only its members ask for a team"
            )
        return Team(ranks=ranks, rank=ranks.index(self.rank), _session=self._session)

    def _on_this_node(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if self.node_of[rank] == self.node)


_AGREE = ("tilelang", "torch")
"""Other packages of which all ranks need the same version."""

_world: World | None = None
_shrunk = 0


def current_world() -> World | None:
    """The world that `init` has joined, or None before that."""
    return _world


def times_shrunk() -> int:
    """Number of times that this rank has continued with the survivors; state that is kept for a group belongs to one
    such number."""
    return _shrunk


def init(*, timeout_s: float | None = None) -> World:
    """Join the job that this process was started in; later calls give the same World.

    The launcher is found by the variables it sets: torchrun, `tilescale run` and MPI are known; without any of them
    this process is a world of one. In a job of several, an uncaught error from here on reaches the other ranks.

    Args:
        timeout_s: longest wait for other ranks in seconds; None takes TILESCALE_TIMEOUT_S (600 if unset).
    Raises:
        LaunchError: the ranks do not find each other, or cannot prove that they belong together.
        RankMismatchError: the ranks run different versions of TileScale, TileLang, PyTorch or Python.
        DependencyError: an MPI job without mpi4py.
        UsageError: a TILESCALE_* variable or `timeout_s` that makes no sense.
    """
    global _world
    if _world is None:
        limit = settings().timeout_s if timeout_s is None else timeout_s
        check_type("timeout_s", limit, "a number of seconds", int, float)
        if limit <= 0:
            raise UsageError(f"timeout_s={limit}", hint="give a number of seconds above 0")
        joined = join(os.environ, limit)
        try:
            _world = _enter(joined, limit)
        except BaseException:
            if joined.abort is not None:
                atexit.register(joined.abort, 1)  # MPI would wait at this process's end for ranks that wait for it
            raise
    return _world


def _enter(joined: Joined, timeout_s: float) -> World:
    if joined.store is None:
        return World(ranks=(0,), rank=0, launcher=joined.launcher, node_of=(0,))
    session = open_session(joined, timeout_s)
    ranks = tuple(range(joined.size))
    everyone = Team(ranks=ranks, rank=joined.rank, _session=session)
    shutdown.install(session, joined.abort)
    facts = everyone._all_gather(CollectiveCall.here("init"), (joined.node, this_process(), _versions()))
    nodes, processes, versions = zip(*facts, strict=True)
    for rank, process in enumerate(processes):
        session.introduce(rank, process)
    _check_versions(dict(zip(session.names, versions, strict=True)))
    return World(
        ranks=ranks,
        rank=joined.rank,
        launcher=joined.launcher,
        node_of=_numbered(nodes),
        _session=session,
    )


def shrink() -> World:
    """Continue without ranks that have died; collective over all survivors, which are renumbered, in order.

    Call it where a `RankFailedError` says that a rank is gone. `init` gives the new World from then on, and operators
    without a `group` span it. Earlier objects belong to the former ranks: teams, kernels of `tilescale.compile`,
    symmetric tensors, and groups of `torch.distributed`.

    Raises:
        RankFailedError: rank 0, which holds the job's store, has died; or this rank comes too late: it has not called
            within TILESCALE_TIMEOUT_S of the first one, and the others continued without it.
        UsageError: this process has not joined a job.
    """
    global _world, _shrunk
    if _world is None:
        raise UsageError("tilescale.shrink() before tilescale.init()", hint="join the job first")
    session = _world._session
    if session is not None:
        members, session = go_on(session)
        _shrunk += 1
        _world = World(
            ranks=tuple(range(len(members))),
            rank=session.rank,
            launcher=_world.launcher,
            node_of=_numbered([_world.node_of[rank] for rank in members]),
            gpus=tuple(_world.gpu(rank) for rank in members),
            _session=session,
        )
    return _world


def _numbered(nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """The number of each rank's node, from identities of nodes."""
    known = list(dict.fromkeys(nodes))
    return tuple(known.index(node) for node in nodes)


def _versions() -> dict[str, str]:
    own = {"Python": "{}.{}".format(*sys.version_info), "tilescale": __version__}  # a checkout need not be installed
    return own | {package: version(package) for package in _AGREE}


def _check_versions(by_rank: dict[str, dict[str, str]]) -> None:
    (first, expected), *others = by_rank.items()
    for name, found in others:
        different = [package for package in expected if found.get(package) != expected[package]]
        if different:
            package = different[0]
            raise RankMismatchError(
                f"{first} runs {package} {expected[package]}, {name} runs {found.get(package)}",
                hint="install the same versions on all nodes, and start all ranks in the same environment",
            )


@functools.cache
def _store_of_one() -> Store:
    from torch.distributed import HashStore

    return HashStore()
