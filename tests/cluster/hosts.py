# SPDX-License-Identifier: MIT
"""Jobs on two and four hosts that are network namespaces, by every launcher; lost links, delay and loss."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.conftest import JOB, ROOT, Hosts, finished

RUN = ["tilescale", "run"]
OPEN_MPI = Path("/usr/bin/mpirun.openmpi")


def tilescale_run(hosts: Hosts, nodes: int, ranks: int, *words: str) -> dict[int, list[str]]:
    """The command of each node."""
    where = ["--nnodes", str(nodes), "--rdzv", f"{hosts.names[0]}:29400"]
    return {n: [*RUN, "-n", str(ranks), *where, "--node-rank", str(n), *words] for n in range(nodes)}


def assert_right(outputs: Sequence[tuple[int, str]], nodes: int, ranks: int) -> None:
    """Every rank has reported a right result, on the expected host."""
    assert [code for code, _ in outputs] == [0] * len(outputs)
    text = "".join(output for _, output in outputs)
    said = re.findall(r"rank (\d+) on tsnode(\d): node (\d) of (\d), local rank (\d) of (\d)", text)
    expected = [(n * ranks + r, n, n, nodes, r, ranks) for n in range(nodes) for r in range(ranks)]
    assert sorted(tuple(map(int, found)) for found in said) == expected


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 1)])
def test_tilescale_run(hosts: Hosts, nodes: int, ranks: int) -> None:
    assert_right(hosts.run(tilescale_run(hosts, nodes, ranks, JOB, str(nodes))), nodes, ranks)


def test_torchrun(hosts: Hosts) -> None:
    start = {n: ["env", f"NODE_RANK={n}", str(ROOT / "launch/torchrun.sh"), "2", JOB, "2"] for n in range(2)}
    assert_right(hosts.run(start, NNODES="2", MASTER_ADDR=hosts.addresses[0]), 2, 2)


def test_torchrun_joins_and_starts_again(hosts: Hosts, tmp_path: Path) -> None:
    """The nodes number themselves; rank 1 fails once, and all go on from the step that they have saved."""
    words = [str(ROOT / "launch/torchrun.sh"), "1", JOB, "2", "--resume", str(tmp_path)]
    start = {n: ["env", f"LOCAL_ADDR={hosts.addresses[n]}", *words] for n in range(2)}
    outputs = hosts.run(start, NNODES="2", RDZV=f"{hosts.addresses[0]}:29500", MAX_RESTARTS="2")
    assert [code for code, _ in outputs] == [0, 0]
    text = "".join(output for _, output in outputs)
    assert text.count("the first attempt fails at step 2") >= 1
    assert len(re.findall(r"rank \d on tsnode\d: .*from step 2: right", text)) == 2


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 1)])
def test_mpirun(hosts: Hosts, tmp_path: Path, nodes: int, ranks: int) -> None:
    """MPICH's mpirun on host 0 reaches the others through what stands for ssh."""
    (tmp_path / "hostfile").write_text("".join(f"{name}:{ranks}\n" for name in hosts.names[:nodes]))
    words = [str(ROOT / "launch/mpirun.sh"), str(nodes * ranks), JOB, str(nodes)]
    outputs = hosts.run({0: words}, HOSTFILE=str(tmp_path / "hostfile"), TILESCALE_JOB_KEY=None)
    assert_right(outputs, nodes, ranks)


@pytest.mark.skipif(not OPEN_MPI.exists(), reason="apt-get install openmpi-bin")
def test_mpirun_of_open_mpi(hosts: Hosts, tmp_path: Path) -> None:
    """It hands on the environment that the script names, and goes by the network that leads to rank 0."""
    (tmp_path / "mpirun").symlink_to(OPEN_MPI)
    (tmp_path / "hostfile").write_text("".join(f"{name} slots=2\n" for name in hosts.names[:2]))
    own = {"HOSTFILE": str(tmp_path / "hostfile"), "PATH": f"{tmp_path}{os.pathsep}{hosts.env['PATH']}"}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    library = {"MPI4PY_LIBMPI": "libmpi.so.40", "TILESCALE_JOB_KEY": None}
    outputs = hosts.run({0: [str(ROOT / "launch/mpirun.sh"), "4", JOB, "2"]}, **own, **as_root, **library)
    assert_right(outputs, 2, 2)


def test_a_failure_ends_all_nodes_with_its_code(hosts: Hosts) -> None:
    outputs = hosts.run(tilescale_run(hosts, 2, 1, "--doctor", JOB, "2", "--fail", "1"))
    assert [code for code, _ in outputs] == [1, 1]
    assert "every rank reaches every other one" in outputs[0][1], "what tilescale doctor --job says"
    assert "rank 1 failed first, with exit code 1: ValueError: as asked" in outputs[1][1]
    assert "node 1: rank 1 failed first" in outputs[0][1]


def test_a_failure_before_init_ends_all_nodes(hosts: Hosts) -> None:
    early = "import os, tilescale; assert os.environ['RANK'] != '1', 'early'; tilescale.init()"
    script = hosts.folder / "early.py"
    script.write_text(early)
    outputs = hosts.run(tilescale_run(hosts, 2, 1, str(script)))
    assert [code for code, _ in outputs] == [1, 1] and "node 1: rank 1 failed first" in outputs[0][1]


def test_several_hosts_without_a_key_are_refused(hosts: Hosts) -> None:
    for code, output in hosts.run(tilescale_run(hosts, 2, 1, JOB, "2"), TILESCALE_JOB_KEY=None):
        assert code == 1 and "a job on several hosts has no key" in output


def test_a_host_that_is_cut_off_ends_the_job(hosts: Hosts) -> None:
    commands = tilescale_run(hosts, 2, 1, JOB, "2", "--stall", "1")
    processes = [hosts.start(node, words) for node, words in commands.items()]
    assert processes[1].stdout is not None
    while "stalls" not in (line := processes[1].stdout.readline()):
        assert line, "it ended before"
    began = time.monotonic()
    subprocess.run(["ip", "link", "set", hosts.names[1], "down"], check=True)
    try:
        outputs = finished(processes)
    finally:
        subprocess.run(["ip", "link", "set", hosts.names[1], "up"], check=True)
    print(f"ended {time.monotonic() - began:.1f} s after the cut")
    assert all(code != 0 for code, _ in outputs)
    assert re.search("node 1 is gone|rank 1 .*disappeared", outputs[0][1]), outputs[0][1]


@pytest.fixture
def slow_link(hosts: Hosts) -> Iterator[None]:
    """20 ms more, and one packet in a hundred lost, towards host 1."""
    words = ["tc", "qdisc", "add", "dev", hosts.names[1], "root", "netem", "delay", "20ms", "loss", "1%"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this kernel delays and loses nothing: {done.stderr.strip()}")
    yield
    subprocess.run([*words[:2], "del", *words[3:6]], check=True)


def test_delay_and_loss(hosts: Hosts, slow_link: None) -> None:
    assert_right(hosts.run(tilescale_run(hosts, 2, 1, JOB, "2")), 2, 1)


def test_doctor_of_a_job(hosts: Hosts) -> None:
    (code, output), _ = hosts.run(tilescale_run(hosts, 2, 1, "--bind", "-m", "tilescale.cli", "doctor", "--job"))
    assert code == 0 and "2, started by tilescale run, on tsnode0, tsnode1" in output
    assert "every rank reaches every other one" in output and "memory on its node" in output
    assert re.search("rank 0: .*NCCL_SOCKET_IFNAME=eth0; rank 1: .*NCCL_SOCKET_IFNAME=eth0", output), output
