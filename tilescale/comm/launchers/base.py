# SPDX-License-Identifier: MIT
"""The facts that a launcher passes to a rank (`Joined`), and the interface of launchers (`Launcher`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tilescale.comm.trust.key import JobKey

if TYPE_CHECKING:
    from torch.distributed import PrefixStore


@dataclass(frozen=True)
class Joined:
    """One rank's place in a job.

    Attributes:
        launcher: readable name of the launcher.
        rank: number of this process in the job.
        size: number of processes in the job.
        node: any text that the ranks of one node share and other nodes do not.
        host: address under which the other ranks reach rank 0; it listens there alone.
        store: key-value store shared by the job; None in a job of one.
        store_at_root: the store lives in rank 0 and dies with it (else in the launcher).
        job: an identity of the job, different from that of another job on the same port as far as it is known.
        key: the secret of the job's ranks; None if they are on one host and agree on one themselves.
        abort: ends the whole job with an exit code when ranks cannot be notified; None if the launcher sees to it.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    node: str = ""
    host: str = ""
    store: PrefixStore | None = None
    store_at_root: bool = True
    job: str = ""
    key: JobKey | None = None
    abort: Callable[[int], None] | None = None


class Launcher(Protocol):
    """A way to start a job. One file each; listed in `LAUNCHERS`."""

    def started_this(self, env: Mapping[str, str]) -> bool:
        """Whether this launcher started the process, as `env` says, or a process group that is there already."""
        ...

    def join(self, env: Mapping[str, str], timeout_s: float) -> Joined:
        """Join the other ranks. Raises LaunchError or DependencyError."""
        ...
