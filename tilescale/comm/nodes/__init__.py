# SPDX-License-Identifier: MIT
"""The launchers of a job on several nodes: one on each, connected to node 0, which notify each other of the job's
end."""

from __future__ import annotations

from tilescale.comm.nodes.hub import Hub
from tilescale.comm.nodes.launcher_rendezvous import (
    PORT,
    JobEnded,
    LauncherRendezvous,
    News,
    NodeFailure,
    OtherNodes,
    rendezvous_of,
)
from tilescale.comm.nodes.spoke import Spoke

__all__ = ["PORT", "JobEnded", "NodeFailure", "News", "OtherNodes", "LauncherRendezvous", "join", "rendezvous_of"]


def join(rendezvous: LauncherRendezvous, ranks: int, timeout_s: float) -> OtherNodes:
    """Come together with the launchers of all other nodes. Raises LaunchError: a node does not come, has another key or
    a number twice; or node 0 is not at that address.

    Args:
        rendezvous: address, this node's number, the number of nodes, and the key.
        ranks: how many ranks this node starts.
        timeout_s: longest wait for the other nodes.
    """
    return (Spoke if rendezvous.node else Hub)(rendezvous, ranks, timeout_s)
