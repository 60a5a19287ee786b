# SPDX-License-Identifier: MIT
"""Binding of a rank to its host: cores and adapters next to its GPU, and the interface that leads to rank 0.

Linux says in /sys which cores are on a PCI device's side of the host; `tilescale.comm.adapters` has the adapters.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tilescale.comm.adapters import Adapters, adapters_near
from tilescale.hda.nvml import Accelerator, accelerators

_LOCAL = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
)
"""Variables in which launchers pass a rank's number on its node, and the number of ranks there."""

_INTERFACE_OF = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME",
    "OMPI_MCA_btl_tcp_if_include",
)
"""Variables from which NCCL, Gloo, NVSHMEM and Open MPI read the network interface of their sockets."""


@dataclass(frozen=True)
class Binding:
    """Cores, adapters and interface that a rank is bound to.

    Attributes:
        local_rank: its number on its node, which is that of its GPU.
        cores: CPU cores that it runs on; () leaves that to the system.
        interface: the network interface that leads to rank 0; None where it is not known.
        adapters: those of all ranks of its node.
    """

    local_rank: int
    cores: tuple[int, ...] = ()
    interface: str | None = None
    adapters: Adapters = Adapters()

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """Variables to add to the environment for libraries that use the network; those that the user has set stay."""
        added = self.adapters.variables(self.local_rank, env)
        if self.interface is not None:
            # Open MPI rejects an include list together with an exclude list.
            free = [name for name in _INTERFACE_OF if name not in env and name.replace("include", "exclude") not in env]
            added |= dict.fromkeys(free, self.interface)
        return added

    def __str__(self) -> str:
        cores = f"cores {self.cores[0]}-{self.cores[-1]}" if self.cores else "all cores"
        ports = ",".join(self.adapters.of(self.local_rank))
        of_network = [f"interface {self.interface}"] if self.interface else []
        of_network += [f"adapter {ports}"] if ports else []
        return f"local rank {self.local_rank}: {', '.join([cores, *of_network])}"


def binding_of(env: Mapping[str, str], root: Path = Path("/sys")) -> Binding:
    """The binding of the rank that a launcher has started with `env`; that of local rank 0 where none has."""
    rank, ranks = _place_on_node(env)
    gpus = [root / "bus/pci/devices" / gpu.bus for gpu in _visible(env)]
    interface = interface_to(env["MASTER_ADDR"]) if env.get("MASTER_ADDR") else None
    if rank >= len(gpus):
        return Binding(rank, interface=interface)
    nearby = [_cores_near(gpu) for gpu in gpus[:ranks]]
    cores = share_of_cores(nearby, rank, os.sched_getaffinity(0))
    return Binding(rank, cores, interface, adapters_near(gpus[:ranks], root))


def share_of_cores(nearby: Sequence[frozenset[int]], rank: int, allowed: set[int]) -> tuple[int, ...]:
    """This rank's part of the allowed cores next to its GPU; ranks whose GPUs have the same cores share them out.

    Args:
        nearby: for each local rank, the cores next to its GPU.
        rank: the local rank.
        allowed: cores that this process may use; () is returned if they are too few for all.
    """
    usable = sorted(nearby[rank] & allowed)
    sharing = [other for other, cores in enumerate(nearby) if cores == nearby[rank]]
    each = len(usable) // len(sharing)
    begin = sharing.index(rank) * each
    return tuple(usable[begin : begin + each])


def interface_to(host: str) -> str | None:
    """The network interface over which this host reaches `host`; None if that is not known, or within the host."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; the kernel chooses the route
            mine = probe.getsockname()[0]
    except OSError:
        return None
    names = [name for name, has in psutil.net_if_addrs().items() if any(one.address == mine for one in has)]
    return None if not names or names[0] == "lo" else names[0]


def _place_on_node(env: Mapping[str, str]) -> tuple[int, int]:
    for rank, ranks in _LOCAL:
        if rank in env and ranks in env:
            return int(env[rank]), int(env[ranks].partition("(")[0].partition(",")[0])  # Slurm: "8(x2),4"
    return 0, 1


def _visible(env: Mapping[str, str]) -> Sequence[Accelerator]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; none where it names them otherwise than by number."""
    gpus, text = accelerators(), env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return gpus
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        return ()
    return [gpus[int(number)] for number in numbers if int(number) < len(gpus)]


def _cores_near(gpu: Path) -> frozenset[int]:
    """The cores on a PCI device's side of the host; none where Linux does not say."""
    try:
        text = (gpu / "local_cpulist").read_text().strip()
    except OSError:
        return frozenset()
    ends = [part.partition("-")[::2] for part in text.split(",") if part]
    return frozenset(core for first, last in ends for core in range(int(first), int(last or first) + 1))
