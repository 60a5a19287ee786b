# SPDX-License-Identifier: MIT
"""InfiniBand or RoCE adapters next to the GPUs of a host's ranks, and their configuration for NCCL, NVSHMEM and UCX.

Linux shows in /sys how devices hang below PCI bridges: adapters are the nearer the longer the path is that they share
with the GPU, and those of its NUMA node are nearer than others. The libraries want this said in different ways:

- NCCL wants one list for all ranks of a node, those next to any of their GPUs, and chooses by topology within it. Lists
  that differ break its rings (https://github.com/NVIDIA/nccl/issues/1478). Adapters for storage and administration are
  left out.
- NVSHMEM gives the ranks of a node the entries of one list in turn.
- UCX, under an MPI, wants those of the process.

A host whose adapters are equally near to all GPUs, as many virtual machines show it, leaves the choice to them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_NVSHMEM = ("NVSHMEM_ENABLE_NIC_PE_MAPPING", "NVSHMEM_HCA_PE_MAPPING", "NVSHMEM_HCA_LIST")


@dataclass(frozen=True)
class Adapters:
    """The adapters of the ranks of a node.

    Attributes:
        ports: for each rank those next to its GPU, as libraries write them, e.g. ("mlx5_0:1",); () leaves the choice to
            the libraries.
    """

    ports: tuple[tuple[str, ...], ...] = ()

    def of(self, rank: int) -> tuple[str, ...]:
        """Adapters of a rank."""
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
    """The longer the path that two PCI devices share the more; then whether they are on the same NUMA node."""
    shared = os.path.commonprefix([gpu.resolve().parts, adapter.resolve().parts])
    return len(shared), _numa(gpu) == _numa(adapter)


def _numa(device: Path) -> str:
    try:
        return (device / "numa_node").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _share(nearest: Sequence[tuple[str, ...]], rank: int) -> tuple[str, ...]:
    """This rank's part of the ports nearest to it: one of several ranks at least one, one alone all."""
    mine = nearest[rank]
    sharing = [other for other, near in enumerate(nearest) if near == mine]
    number = sharing.index(rank)
    return mine[number :: len(sharing)] or (mine[number % len(mine)],)
