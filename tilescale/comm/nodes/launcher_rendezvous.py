# SPDX-License-Identifier: MIT
"""Rendezvous of launchers (`LauncherRendezvous`), and the view that one of them has of the others (`OtherNodes`)."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tilescale.comm.ports import Ports, ReservedPorts
from tilescale.comm.trust.key import JobKey
from tilescale.errors import UsageError

PORT = 29400
"""Default port of node 0."""

GONE = 69
"""Exit code of a job that lost a node: EX_UNAVAILABLE of sysexits.h."""

LAUNCHERS = b"launchers of nodes"
"""Label from which the launchers' key is derived with the job's key: signatures of ranks are invalid for launchers."""


@dataclass(frozen=True)
class LauncherRendezvous:
    """Rendezvous of the launchers of a job.

    Attributes:
        host: a name or address of node 0 that all nodes reach.
        port: the port on which node 0 listens.
        node: number of this node.
        nodes: number of nodes, at least two.
        key: the key of the job.
    """

    host: str
    port: int
    node: int
    nodes: int
    key: JobKey


def rendezvous_of(nodes: int, node: int | None, where: str | None, env: Mapping[str, str]) -> LauncherRendezvous:
    """The rendezvous that the options of a command and its environment describe.

    Raises UsageError for missing or contradictory options, LaunchError if the key is missing or malformed.
    """
    if node is None or where is None:
        raise UsageError(
            f"--nnodes {nodes} needs --node-rank and --rdzv",
            hint="on every node: --node-rank 0, 1, ..., and --rdzv HOST[:PORT] with the address of node 0",
        )
    if node >= nodes:
        raise UsageError(f"--node-rank {node} with --nnodes {nodes}", hint=f"nodes count from 0 to {nodes - 1}")
    host, colon, port = where.rpartition(":")
    if not colon or where.endswith("]"):  # no port; an IPv6 address is in brackets before one
        host, port = where, str(PORT)
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--rdzv {where}: {port!r} is not a port", hint="HOST or HOST:PORT; [ADDRESS]:PORT for IPv6")
    return LauncherRendezvous(host.strip("[]"), int(port), node, nodes, JobKey.of_hosts(env))


@dataclass(frozen=True)
class NodeFailure:
    """The first failure of a job: the exit code of all launchers, and what happened."""

    code: int
    text: str


@dataclass(frozen=True)
class JobEnded:
    """All ranks of all nodes have ended well."""


News = NodeFailure | JobEnded


class OtherNodes(Protocol):
    """The other nodes of the job, as one launcher sees them.

    Attributes:
        first: number of this node's first rank.
        size: ranks of the whole job.
        reserved: at node 0 the sockets of the job's ports; None elsewhere.
        ports: the job's ports, at node 0.
        news: how the job ends, at most once: from another node, or that all have ended.
    """

    first: int
    size: int
    ports: Ports
    news: queue.SimpleQueue[object]

    @property
    def reserved(self) -> ReservedPorts | None: ...

    def failed(self, failure: NodeFailure) -> None:
        """Notify the others of a failure here; the first one is kept."""
        ...

    def ended(self) -> None:
        """Notify the others that all ranks of this node have ended well."""
        ...

    def close(self) -> None:
        """Leave. Without `ended` or a failure before, the others take this node for lost."""
        ...
