# SPDX-License-Identifier: MIT
"""The launchers that a job can be started with, and the search for the one that started this process."""

from __future__ import annotations

from collections.abc import Mapping

from tilescale.comm.launchers.base import Joined, Launcher
from tilescale.comm.launchers.mpi import Mpi
from tilescale.comm.launchers.process_group import ProcessGroup
from tilescale.comm.launchers.torchrun import Torchrun

__all__ = ["LAUNCHERS", "Joined", "Launcher", "join"]

# First match wins. torchrun is often itself started by srun or mpirun, whose variables its ranks then inherit.
# A process group is asked last: ranks of the others make one, too.
LAUNCHERS: tuple[Launcher, ...] = (Torchrun(), Mpi(), ProcessGroup())


def join(env: Mapping[str, str], timeout_s: float) -> Joined:
    """Join the job that `env` describes, or be a job of one. Raises LaunchError or DependencyError."""
    for launcher in LAUNCHERS:
        if launcher.started_this(env):
            return launcher.join(env, timeout_s)
    return Joined(launcher="alone")
