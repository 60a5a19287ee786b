# SPDX-License-Identifier: MIT
"""One rank of a job, as a process of this host: its environment, its port, and its end with that of its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilescale.comm.launchers.torchrun import STORE_FD, STORE_PORT
from tilescale.comm.ports import Ports, ReservedPorts

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class NodePlacement:
    """Position of this node's ranks in their job.

    Attributes:
        ranks: how many ranks this node has.
        first: the number of the first of them.
        size: ranks of the whole job.
        node: number of this node.
        host: the address of rank 0.
        ports: those of the job there.
        reserved: on the node of rank 0, the sockets of these ports.
    """

    ranks: int
    first: int
    size: int
    node: int
    host: str
    ports: Ports
    reserved: ReservedPorts | None

    @classmethod
    def on_one_node(cls, ranks: int) -> NodePlacement:
        """The placement of all ranks of a job on one node."""
        reserved = ReservedPorts(("127.0.0.1", 0))
        return cls(ranks, 0, ranks, 0, "127.0.0.1", reserved.ports, reserved)


def start(
    command: Sequence[str], env: Mapping[str, str], place: NodePlacement, local_rank: int
) -> subprocess.Popen[str]:
    """Start a rank. It is killed when this process dies; rank 0 gets the socket to serve the job's store on.

    Call it in a thread that lives as long as the rank may: the kernel takes its end for that of the process.
    """
    store = place.reserved.store if place.reserved is not None and place.first + local_rank == 0 else None
    return subprocess.Popen(
        command,
        env=_environment(env, place, local_rank) | ({} if store is None else {STORE_FD: str(store.fileno())}),
        stdin=None if local_rank == 0 else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        pass_fds=() if store is None else (store.fileno(),),
        preexec_fn=_ends_with(os.getpid()),
    )


def _environment(env: Mapping[str, str], place: NodePlacement, local_rank: int) -> dict[str, str]:
    # A job inside a torchrun job is its own: it must not look for the outer one's store.
    inherited = {
        name: value for name, value in env.items() if not name.startswith("TORCHELASTIC_") and name != STORE_FD
    }
    if place.size > 1:
        inherited.setdefault("OMP_NUM_THREADS", "1")
        inherited.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else its store logs C++ frames when rank 0 dies
    return inherited | {
        "TILESCALE_RUN": "1",
        "RANK": str(place.first + local_rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(place.ranks),
        "GROUP_RANK": str(place.node),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.ports.master),
        STORE_PORT: f"{place.ports.master} {place.ports.store}",
        "PYTHONUNBUFFERED": "1",
    }


def _ends_with(launcher: int) -> Callable[[], None]:
    """The first action of a new process: ask the kernel for SIGKILL when `launcher` dies, or end if it has died
    already."""
    prctl = ctypes.CDLL(None).prctl  # looked up here: little is allowed between fork and exec

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)

    return ask
