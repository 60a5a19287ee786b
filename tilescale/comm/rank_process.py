# SPDX-License-Identifier: MIT
"""One rank of a job on this machine, as a process: its environment, its port, and its end with that of its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

from tilescale.comm.launchers.torchrun import STORE_FD
from tilescale.comm.trust.key import KEY

__all__ = ["reserve_port", "start"]

_PR_SET_PDEATHSIG = 1


def reserve_port() -> socket.socket:
    """A socket that is bound to a free port of the loopback interface: nobody is given that port as long as it is open.

    It does not listen: a script that starts torch.distributed before TileScale may still do so on this port.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    return bound


def start(
    command: Sequence[str], env: Mapping[str, str], key: str, rank: int, size: int, port: socket.socket
) -> subprocess.Popen[str]:
    """Start a rank. It is killed when this process dies; rank 0 gets the socket `port`, to serve the job's store on.

    Call it in a thread that lives as long as the rank may: the kernel takes its end for that of the process.
    """
    return subprocess.Popen(
        command,
        env=_environment(env, rank, size, port) | {KEY: key},
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        pass_fds=(port.fileno(),) if rank == 0 else (),
        preexec_fn=_ends_with(os.getpid()),
    )


def _environment(env: Mapping[str, str], rank: int, size: int, port: socket.socket) -> dict[str, str]:
    # A job inside a torchrun job is its own: it must not look for the outer one's store.
    inherited = {
        name: value for name, value in env.items() if not name.startswith("TORCHELASTIC_") and name != STORE_FD
    }
    if size > 1:
        inherited.setdefault("OMP_NUM_THREADS", "1")
        inherited.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else its store logs C++ frames when rank 0 dies
    if rank == 0:
        inherited[STORE_FD] = str(port.fileno())
    return inherited | {
        "TILESCALE_RUN": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port.getsockname()[1]),
        "PYTHONUNBUFFERED": "1",
    }


def _ends_with(launcher: int) -> Callable[[], None]:
    """What a new process does first: ask the kernel for SIGKILL when `launcher` dies, or end if it has died already."""
    prctl = ctypes.CDLL(None).prctl  # looked up here: little is allowed between fork and exec

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)

    return ask
