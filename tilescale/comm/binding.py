# SPDX-License-Identifier: MIT
"""Binding of a rank to its host: cores and adapters next to its GPU, and the interface that leads to rank 0.

Linux says in /sys which cores are on a PCI device's side of the host, and how devices hang below PCI bridges: adapters
are the nearer the longer the path is that they share with the GPU, and those of its NUMA node are nearer than others.
The libraries want adapters, of InfiniBand or RoCE, said in different ways:

- NCCL wants one list for all ranks of a node, those next to any of their GPUs, and chooses by topology within it. Lists
  that differ break its rings (https://github.com/NVIDIA/nccl/issues/1478). Adapters for storage and administration are
  left out.
- NVSHMEM gives the ranks of a node the entries of one list in turn.
- UCX, under an MPI, wants those of the process.

A host whose adapters are equally near to all GPUs, as many virtual machines show it, leaves the choice to them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tilescale.hda.nvml import Accelerator, accelerators

_NVSHMEM = ("NVSHMEM_ENABLE_NIC_PE_MAPPING", "NVSHMEM_HCA_PE_MAPPING", "NVSHMEM_HCA_LIST")


@dataclass(frozen=True)
class Adapters:
    """The adapters of the ranks of a node. `ports`: for each rank those next to its GPU, as libraries write them, e.g.
    ("mlx5_0:1",); () leaves the choice to the libraries."""

    ports: tuple[tuple[str, ...], ...] = ()

    def of(self, rank: int) -> tuple[str, ...]:
        return self.ports[rank] if rank < len(self.ports) else ()

    def variables(self, rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """Variables to add to the environment of a rank; those that the user has set stay."""
        if not self.of(rank):
            return {}
        every = sorted({port for ports in self.ports for port in ports})
        wanted = {"NCCL_IB_HCA": f"={','.join(every)}", "UCX_NET_DEVICES": ",".join(self.of(rank))}
        if not any(name in env for name in _NVSHMEM):
            wanted["NVSHMEM_ENABLE_NIC_PE_MAPPING"] = "1"
            wanted["NVSHMEM_HCA_PE_MAPPING"] = ",".join(f"{ports[0]}:1" for ports in self.ports)  # 1: for one rank
        return {name: value for name, value in wanted.items() if name not in env}


def adapters_near(gpus: Sequence[Path], root: Path) -> Adapters:
    """The adapters of ranks.

    Args:
        gpus: the GPU of each rank of this node, as a folder of /sys/bus/pci/devices. Ranks whose GPUs are next to the
            same adapters share these out.
        root: /sys.
    """
    ports = active_ports(root)
    nearest = [_nearest(gpu, ports) for gpu in gpus]
    if all(len(near) == len(ports) for near in nearest):
        return Adapters()
    return Adapters(tuple(_share(nearest, rank) for rank in range(len(gpus))))


def active_ports(root: Path) -> dict[str, Path]:
    """The ports of adapters that have a link, e.g. "mlx5_0:1", with the folders of their adapters in /sys."""
    states = sorted((root / "class/infiniband").glob("*/ports/*/state"))
    active = [state.parts[-4:] for state in states if "ACTIVE" in state.read_text(encoding="ascii")]
    return {f"{name}:{port}": root / "class/infiniband" / name / "device" for name, _, port, _ in active}


def _nearest(gpu: Path, ports: Mapping[str, Path]) -> tuple[str, ...]:
    near = {name: _nearness(gpu, adapter) for name, adapter in ports.items()}
    return tuple(name for name, value in near.items() if value == max(near.values()))


def _nearness(gpu: Path, adapter: Path) -> tuple[int, bool]:
    """Length of the PCI path that both devices share, and whether they are on the same NUMA node."""
    shared = os.path.commonprefix([gpu.resolve().parts, adapter.resolve().parts])
    return len(shared), _numa(gpu) == _numa(adapter)


def _numa(device: Path) -> str:
    try:
        return (device / "numa_node").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _share(nearest: Sequence[tuple[str, ...]], rank: int) -> tuple[str, ...]:
    """This rank's share of the ports nearest to it: at least one; all of them if no other rank has the same ports."""
    mine = nearest[rank]
    sharing = [other for other, near in enumerate(nearest) if near == mine]
    number = sharing.index(rank)
    return mine[number :: len(sharing)] or (mine[number % len(mine)],)


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
