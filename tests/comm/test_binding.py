# SPDX-License-Identifier: MIT
"""Cores, adapters and interface of a rank, from a made-up /sys."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilescale.cli import main
from tilescale.comm import binding
from tilescale.comm.binding import Binding, binding_of, interface_to, share_of_cores
from tilescale.hda.nvml import Accelerator

CORES = [frozenset(range(4))] * 2 + [frozenset(range(4, 8))] * 2


@pytest.mark.parametrize(
    ("rank", "allowed", "expected"),
    [(0, range(8), (0, 1)), (1, range(8), (2, 3)), (3, range(8), (6, 7)), (1, (1, 2, 3, 5), (2,)), (0, (1, 5), ())],
)
def test_ranks_share_the_cores_near_their_gpus(rank: int, allowed, expected: tuple[int, ...]) -> None:
    assert share_of_cores(CORES, rank, set(allowed)) == expected


Gpus, Ports = dict[str, tuple[str, int]], dict[str, tuple[str, int, str]]


def host(folder: Path, monkeypatch, gpus: Gpus, adapters: Ports) -> Path:
    """A made-up /sys.

    Args:
        gpus: the number of the bus of each -> the folders of the bridges above it, and its NUMA node.
        adapters: the name of each -> the same, and the states of its ports, a letter each: A or D.
    """
    devices = folder / "bus/pci/devices"
    devices.mkdir(parents=True)
    core = min(os.sched_getaffinity(0))
    for number, (above, node) in gpus.items():
        place = folder / "devices" / above / f"0000:{number}:00.0"
        place.mkdir(parents=True)
        (place / "local_cpulist").write_text(f"{core},{core}-{core}\n")
        (place / "numa_node").write_text(f"{node}\n")
        (devices / place.name).symlink_to(place)
    for name, (above, node, states) in adapters.items():
        place = folder / "devices" / above / name
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
        for port, state in enumerate(states, 1):
            (folder / f"class/infiniband/{name}/ports/{port}").mkdir(parents=True)
            said = {"A": "4: ACTIVE", "D": "1: DOWN"}[state]
            (folder / f"class/infiniband/{name}/ports/{port}/state").write_text(f"{said}\n")
        (folder / f"class/infiniband/{name}/device").symlink_to(place)
    found = tuple(Accelerator("GPU", 0, "9.0", 0, (), f"0000:{number}:00.0") for number in gpus)
    monkeypatch.setattr(binding, "accelerators", lambda: found)
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    """A host of two GPUs, each behind a PCI switch with an adapter; a third adapter is for storage."""
    gpus = {"18": ("pci0/switch", 0), "5d": ("pci1/switch", 0)}
    adapters = {"mlx5_0": ("pci1/switch", 0, "A"), "mlx5_1": ("pci0/switch", 0, "A"), "mlx5_2": ("pci2", 0, "A")}
    return host(tmp_path, monkeypatch, gpus, adapters)


RANK = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("env", "rank", "adapters"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, ("mlx5_0:1",)),
        ({"LOCAL_RANK": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "2(x2)"}, 0, ("mlx5_1:1",)),
        (RANK | {"CUDA_VISIBLE_DEVICES": "1,0"}, 1, ("mlx5_1:1",)),
        (RANK | {"CUDA_VISIBLE_DEVICES": "GPU-5"}, 1, ()),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}, 2, ()),
    ],
)
def test_a_rank_is_next_to_its_gpu(root: Path, env: dict[str, str], rank: int, adapters: tuple[str, ...]) -> None:
    found = binding_of(env, root)
    assert (found.local_rank, found.adapters.of(rank), found.interface) == (rank, adapters, None)


def test_the_libraries_of_a_rank_are_told_of_its_adapters(root: Path) -> None:
    """NCCL all of the node's, in every rank the same; UCX the rank's; NVSHMEM one for each rank in turn."""
    assert binding_of(RANK, root).variables({}) == {
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
        "NVSHMEM_HCA_PE_MAPPING": "mlx5_1:1:1,mlx5_0:1:1",
    }


def test_what_the_user_says_of_adapters_stays(root: Path) -> None:
    said = {"NCCL_IB_HCA": "mlx5_2", "NVSHMEM_HCA_LIST": "mlx5_2:1"}
    assert binding_of(RANK, root).variables(said) == {"UCX_NET_DEVICES": "mlx5_0:1"}


HOSTS = {
    "two GPUs and two adapters behind each switch": (
        {"1a": ("p0/s", 0), "1b": ("p0/s", 0), "5a": ("p1/s", 1), "5b": ("p1/s", 1)},
        {"m0": ("p0/s", 0, "A"), "m1": ("p0/s", 0, "A"), "m2": ("p1/s", 1, "A"), "m3": ("p1/s", 1, "A")},
        (("m0:1",), ("m1:1",), ("m2:1",), ("m3:1",)),
    ),
    "four GPUs share two adapters": (
        {"1a": ("p0", 0), "1b": ("p1", 0), "5a": ("p2", 1), "5b": ("p3", 1)},
        {"m0": ("p4", 0, "A"), "m1": ("p5", 1, "A")},
        (("m0:1",), ("m0:1",), ("m1:1",), ("m1:1",)),
    ),
    "one GPU has two ports, a third has no link": (
        {"1a": ("p0/s", 0)},
        {"m0": ("p0/s", 0, "ADA"), "m1": ("p1", 0, "A"), "m2": ("p0/s", 0, "D")},
        (("m0:1", "m0:3"),),
    ),
    "a virtual machine in which all are alike": (
        {"1a": ("p0", -1), "1b": ("p0", -1)},
        {"m0": ("p0", -1, "A"), "m1": ("p0", -1, "A"), "m2": ("p0", -1, "A")},
        (),
    ),
    "no adapters": ({"1a": ("p0", 0)}, {}, ()),
}


@pytest.mark.parametrize("name", HOSTS)
def test_ranks_share_the_adapters_near_their_gpus(tmp_path: Path, monkeypatch, name: str) -> None:
    gpus, adapters, expected = HOSTS[name]
    root = host(tmp_path, monkeypatch, gpus, adapters)
    for rank in range(len(gpus)):
        found = binding_of({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(gpus))}, root)
        assert found.adapters.ports == expected
        assert bool(found.variables({})) == bool(expected)


def test_a_rank_alone_beside_its_gpu_has_all_cores_there(root: Path) -> None:
    assert binding_of({}, root).cores == (min(os.sched_getaffinity(0)),)


def test_the_interface_is_for_all_that_open_sockets_but_where_the_user_has_said_another() -> None:
    said = {"NCCL_SOCKET_IFNAME": "eth7", "OMPI_MCA_btl_tcp_if_exclude": "docker0"}
    added = Binding(0, interface="ib0").variables(said)
    assert added == {"GLOO_SOCKET_IFNAME": "ib0", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "ib0"}
    assert Binding(0, interface="ib0").variables({})["OMPI_MCA_btl_tcp_if_include"] == "ib0"
    assert Binding(0).variables({}) == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_of_a_node_says_which_adapters_are_taken(root: Path, monkeypatch, rank: int) -> None:
    """As the program that it becomes finds them in its environment."""
    monkeypatch.setattr(sys.modules["tilescale.cli.bind"], "binding_of", lambda env: binding_of(env, root))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: None)
    became = {}
    monkeypatch.setattr(os, "execvpe", lambda program, words, env: became.update(words=words, env=env))
    said = CliRunner(env=RANK | {"MPI_LOCALRANKID": str(rank)}).invoke(main, ["bind", "python", "-c", "1"]).output
    assert became["words"] == ["python", "-c", "1"] and became["env"]["UCX_NET_DEVICES"] == f"mlx5_{1 - rank}:1"
    line = "adapter mlx5_1:1; NCCL_IB_HCA==mlx5_0:1,mlx5_1:1 UCX_NET_DEVICES=mlx5_1:1 NVSHMEM_ENABLE_NIC_PE_MAPPING=1"
    assert (line in said) == (rank == 0), said


def test_a_program_named_like_a_value_of_a_flag_is_a_program(monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["tilescale.cli.bind"], "binding_of", lambda env: Binding(0))
    became = []
    monkeypatch.setattr(os, "execvpe", lambda program, words, env: became.append((program, words)))
    assert CliRunner().invoke(main, ["bind", "--show", "true"]).output == f"tilescale bind: {Binding(0)}\n"
    assert became == [("true", ["true"])]


@pytest.mark.parametrize("name", ["127.0.0.1", "no-such-host.invalid"])
def test_no_interface_leads_there(name: str) -> None:
    assert interface_to(name) is None
