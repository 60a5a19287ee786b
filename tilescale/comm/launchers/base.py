# SPDX-License-Identifier: MIT
"""What a launcher tells a rank (`Joined`), what every launcher provides (`Launcher`), and the store they meet in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from tilescale.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, TCPStore

__all__ = ["Joined", "Launcher", "connect_store"]


@dataclass(frozen=True)
class Joined:
    """One rank's place in a job.

    Attributes:
        launcher: name of the launcher, for people.
        rank: number of this process in the job.
        size: number of processes in the job.
        node: any text that the ranks of one node share and other nodes do not.
        host: address under which the other ranks reach rank 0.
        store: key-value store shared by the job; None in a job of one.
        store_at_root: the store lives in rank 0 and dies with it (else in the launcher).
        abort: ends the whole job with an exit code when ranks cannot be told to stop; None if the launcher sees to it.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    node: str = ""
    host: str = ""
    store: PrefixStore | None = None
    store_at_root: bool = True
    abort: Callable[[int], None] | None = None


class Launcher(Protocol):
    """A way to start a job. One file each; listed in `LAUNCHERS`."""

    def started_this(self, env: Mapping[str, str]) -> bool:
        """Whether `env` says that this launcher started the process. Looks at nothing but `env`."""
        ...

    def join(self, env: Mapping[str, str], timeout_s: float) -> Joined:
        """Meet the other ranks. Raises LaunchError or DependencyError."""
        ...


def connect_store(host: str, port: int, *, serve: bool, timeout_s: float) -> TCPStore:
    """A connection to the job's store at host:port, which this process starts itself if `serve` (port 0: any free one).

    Raises LaunchError if nobody answers within `timeout_s`, or the port is taken.
    """
    from torch.distributed import DistError, TCPStore

    try:
        # Multi-tenant: a later init_process_group on the same MASTER_PORT shares the server instead of failing.
        return TCPStore(
            host, port, None, serve, timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True
        )
    except (DistError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        does = "cannot serve" if serve else "cannot reach rank 0's store at"
        raise LaunchError(
            f"{does} {host}:{port}: {reason}",
            hint="check that rank 0 runs, that its address is right on every node, and that no firewall is between",
        ) from error
