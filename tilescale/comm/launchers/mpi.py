# SPDX-License-Identifier: MIT
"""mpirun, mpiexec, or srun with PMI: MPI only brings the ranks together, which then use the same store as other
jobs."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilescale.comm import store_server
from tilescale.comm.launchers.base import Joined
from tilescale.comm.trust.key import JobKey, new_key
from tilescale.errors import DependencyError, LaunchError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm
    from torch.distributed import TCPStore

_MARKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


class Mpi:
    """Any MPI that mpi4py works with. mpi4py is imported only in a job of more than one process."""

    def started_this(self, env: Mapping[str, str]) -> bool:
        """A rank variable of Open MPI, PMI (MPICH, Intel MPI, srun) or PMIx is set, and the job has two or more."""
        return any(name in env for name in _MARKS) and _size(env) != 1

    def join(self, env: Mapping[str, str], timeout_s: float) -> Joined:
        """Rank 0 serves a store on a free port and broadcasts its address. Raises DependencyError or LaunchError.

        Where a rank never comes, the process ends after `timeout_s` with a traceback that shows this wait.
        """
        # MPI waits without a bound, in C, for a rank that failed before it came here: only a thread in C can end that.
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or 2)
        try:
            return self._join(env, timeout_s)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _join(self, env: Mapping[str, str], timeout_s: float) -> Joined:
        MPI = _mpi4py()
        comm = MPI.COMM_WORLD
        expected = _size(env)
        if expected not in (None, comm.size):
            library = MPI.Get_library_version().splitlines()[0]
            raise LaunchError(
                f"the launcher started {expected} processes, but mpi4py sees {comm.size}: its library is {library}",
                hint="use the mpirun of the MPI that mpi4py loads",
            )
        if comm.size == 1:
            return Joined("MPI")
        from torch.distributed import PrefixStore

        node = MPI.Get_processor_name()
        host, store, key = _rendezvous(comm, node, timeout_s)
        shared = PrefixStore("tilescale", store)
        return Joined("MPI", comm.rank, comm.size, node, host, store=shared, key=key, abort=comm.Abort)


def _rendezvous(comm: Comm, node: str, timeout_s: float) -> tuple[str, TCPStore, JobKey]:
    """The host of rank 0, the store that it serves there, and the key that it has made."""
    nodes = comm.allgather(node)
    host = "127.0.0.1" if len(set(nodes)) == 1 else nodes[0]
    store, port, error = None, 0, None
    if comm.rank == 0:
        try:
            store = store_server.serve(host, 0, timeout_s=timeout_s)
            port = store.port
        except LaunchError as caught:  # the others must not wait in the broadcast
            error = caught
    port, key, error = comm.bcast((port, new_key(), error))
    if error is not None:
        raise error
    return host, store or store_server.connect(host, port, timeout_s=timeout_s), JobKey.from_text(key)


def _size(env: Mapping[str, str]) -> int | None:
    """The number of processes; None where the launcher does not say (PMIx alone)."""
    return next((int(env[name]) for name in _SIZES if name in env), None)


def _mpi4py() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library found
        raise DependencyError(
            f"an MPI launcher started this process, but mpi4py cannot be loaded: {error}",
            hint="pip install mpi4py mpich   (or mpi4py alone, where the machine has an MPI)",
        ) from error
    return MPI
