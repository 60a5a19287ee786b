# SPDX-License-Identifier: MIT
"""Cores, adapter and interface of a rank, from a made-up /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilescale.comm import binding
from tilescale.comm.binding import Binding, binding_of, interface_to, share_of_cores
from tilescale.hda.nvml import Accelerator

CORES = [frozenset(range(4))] * 2 + [frozenset(range(4, 8))] * 2


@pytest.mark.parametrize(
    ("rank", "allowed", "expected"),
    [(0, range(8), (0, 1)), (1, range(8), (2, 3)), (3, range(8), (6, 7)), (1, (1, 2, 3, 5), (2,)), (0, (1, 5), ())],
)
def test_ranks_share_the_cores_beside_their_gpus(rank: int, allowed, expected: tuple[int, ...]) -> None:
    assert share_of_cores(CORES, rank, set(allowed)) == expected


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    """A host of two GPUs, each behind a PCI switch with an adapter."""
    devices = tmp_path / "bus/pci/devices"
    devices.mkdir(parents=True)
    (tmp_path / "class/infiniband").mkdir(parents=True)
    mine = sorted(os.sched_getaffinity(0))
    for number, bus in enumerate(("0000:18:00.0", "0000:5d:00.0")):
        switch = tmp_path / f"devices/pci{number}/switch"
        (switch / bus).mkdir(parents=True)
        (switch / bus / "local_cpulist").write_text(f"{mine[0]},{mine[0]}-{mine[0]}\n")
        (switch / "adapter").mkdir()
        (devices / bus).symlink_to(switch / bus)
        adapter = tmp_path / f"class/infiniband/mlx5_{1 - number}"
        adapter.mkdir()
        (adapter / "device").symlink_to(switch / "adapter")
    gpus = tuple(Accelerator("GPU", 0, "9.0", 0, (), bus) for bus in ("0000:18:00.0", "0000:5d:00.0"))
    monkeypatch.setattr(binding, "accelerators", lambda: gpus)
    return tmp_path


@pytest.mark.parametrize(
    ("env", "rank", "adapter"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, "mlx5_0"),
        ({"LOCAL_RANK": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "2(x2)"}, 0, "mlx5_1"),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "CUDA_VISIBLE_DEVICES": "1,0"}, 0, "mlx5_0"),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "CUDA_VISIBLE_DEVICES": "GPU-5"}, 0, None),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}, 2, None),
    ],
)
def test_a_rank_is_next_to_its_gpu(root: Path, env: dict[str, str], rank: int, adapter: str | None) -> None:
    found = binding_of(env, root)
    assert (found.local_rank, found.adapter, found.interface) == (rank, adapter, None)


def test_a_rank_alone_beside_its_gpu_has_all_cores_there(root: Path) -> None:
    assert binding_of({}, root).cores == (min(os.sched_getaffinity(0)),)


def test_what_the_user_has_set_stays() -> None:
    added = Binding(0, interface="ib0").variables({"NCCL_SOCKET_IFNAME": "eth7"})
    assert set(added.values()) == {"ib0"} and "NCCL_SOCKET_IFNAME" not in added and "GLOO_SOCKET_IFNAME" in added
    assert Binding(0).variables({}) == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_no_interface_leads_there(host: str) -> None:
    assert interface_to(host) is None
