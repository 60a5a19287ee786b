# SPDX-License-Identifier: MIT
"""torchrun, and everything else that sets its variables: `tilescale run`, or a few lines of shell around srun."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping

from tilescale.comm import store_server
from tilescale.comm.launchers.base import Joined
from tilescale.comm.trust.key import JobKey
from tilescale.errors import LaunchError

STORE_FD = "TILESCALE_STORE_FD"
"""Environment variable of rank 0: the descriptor of a socket on which its launcher listens for it."""

STORE_PORT = "TILESCALE_STORE_PORT"
"""Environment variable of all ranks: MASTER_PORT, for which it counts, and the port of that socket."""


class Torchrun:
    """Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; the store listens at the last two.

    `tilescale run` adds a port and a socket for the store.
    """

    def started_this(self, env: Mapping[str, str]) -> bool:
        """LOCAL_RANK is asked for too: some clusters set RANK and WORLD_SIZE for whole containers."""
        return all(name in env for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))

    def join(self, env: Mapping[str, str], timeout_s: float) -> Joined:
        """Connect to the agent's store, or let rank 0 serve one. Raises LaunchError."""
        launcher = "tilescale run" if "TILESCALE_RUN" in env else "torchrun"
        rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        if not 0 <= rank < size:
            raise LaunchError(f"RANK={rank} with WORLD_SIZE={size}", hint="ranks count from 0 to WORLD_SIZE - 1")
        if size == 1:
            return Joined(launcher)
        from torch.distributed import PrefixStore

        host, port = _text(env, "MASTER_ADDR"), _store_port(env)
        by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        one_host = env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"] or _is_loopback(host)
        key = JobKey.from_env(env) if one_host else JobKey.of_hosts(env)  # on one host ranks can agree on one
        if rank == 0 and not by_agent:
            bound = _number(env, STORE_FD) if STORE_FD in env else None
            store = store_server.serve(host, port, timeout_s=timeout_s, bound=bound)
        else:
            store = store_server.connect(host, port, timeout_s=timeout_s)
        # A restarted job finds the store of the failed attempt: its notes must not be read again.
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Joined(
            launcher,
            rank,
            size,
            node=env.get("GROUP_RANK") or socket.gethostname(),
            host="127.0.0.1" if one_host else host,
            store=PrefixStore(f"tilescale/{attempt}", store),
            store_at_root=not by_agent,
            job=_job(env) if key is None or key.is_public else "",
            key=key,
        )


def _store_port(env: Mapping[str, str]) -> int:
    """The store's port; a job nested in one of `tilescale run` has another MASTER_PORT."""
    master = _number(env, "MASTER_PORT")
    of, _, store = env.get(STORE_PORT, "").partition(" ")
    return int(store) if of == str(master) else master


_JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Variables by which launchers and batch systems distinguish jobs."""


def _job(env: Mapping[str, str]) -> str:
    """Identity of a job on its host: its number, else its script."""
    known = [f"{name}={env[name]}" for name in _JOBS if name in env]
    return " ".join(known) or os.path.realpath(sys.argv[0])


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise LaunchError(
            f"RANK and WORLD_SIZE are set, but {name} is not",
            hint="set MASTER_ADDR and MASTER_PORT to an address of rank 0's node, or unset RANK to run alone",
        )
    return env[name]


def _number(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a whole number") from None
