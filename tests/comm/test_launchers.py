# SPDX-License-Identifier: MIT
"""The launcher that an environment indicates, and errors about inconsistent ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from tests.comm.conftest import ROOT, run_words
from tilescale.comm import store_server, world
from tilescale.comm.launchers import join, torchrun
from tilescale.comm.launchers.base import Joined
from tilescale.comm.launchers.mpi import Mpi
from tilescale.comm.launchers.torchrun import STORE_PORT, Torchrun
from tilescale.comm.ports import ReservedPorts
from tilescale.comm.trust.key import KEY, NO_KEY
from tilescale.comm.world import World
from tilescale.errors import DependencyError, LaunchError

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("env", "torchrun", "mpi"),
    [
        ({}, False, False),
        (TORCHRUN, True, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, False, False),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, False, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, False, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, False, False),
        ({"PMIX_RANK": "3"}, False, True),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, False, False),
    ],
)
def test_recognised_by_its_variables(env, torchrun: bool, mpi: bool) -> None:
    assert (Torchrun().started_this(env), Mpi().started_this(env)) == (torchrun, mpi)


def test_alone_and_world_of_one() -> None:
    assert join({}, 1.0).launcher == "alone"
    one = join(TORCHRUN | {"WORLD_SIZE": "1", "PMI_RANK": "5", "PMI_SIZE": "9"}, 1.0)
    assert (one.launcher, one.size, one.store) == ("torchrun", 1, None)


def test_a_world_of_one_has_a_store_for_libraries_too() -> None:
    world = World(ranks=(0,), rank=0, launcher="alone", node_of=(0,))
    world.store.set("key", "value")
    assert world.store.get("key") == b"value"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "MASTER_ADDR is not"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
    ],
)
def test_incomplete_variables(change, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        join(TORCHRUN | change, 1.0)


def test_missing_mpi4py_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DependencyError, match="pip install mpi4py mpich"):
        join({"PMI_RANK": "0", "PMI_SIZE": "2"}, 30.0)


def test_mpirun_of_another_mpi_is_found_out() -> None:
    code = "from tilescale.comm.launchers import join; join({'PMI_RANK': '0', 'PMI_SIZE': '7'}, 30.0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "the launcher started 7 processes, but mpi4py sees 1" in done.stderr


def test_a_rank_that_cannot_join_ends_an_mpi_job(monkeypatch) -> None:
    """MPI would wait at its end for the others, and they for it."""

    def cannot(*given: object) -> None:
        raise LaunchError("no rank 0", hint="")

    at_exit: list[tuple] = []
    ended: list[int] = []
    joined = Joined("MPI", size=2, store=HashStore(), abort=ended.append)
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setattr(world, "join", lambda *given: joined)
    monkeypatch.setattr(world, "open_session", cannot)
    monkeypatch.setattr(world.atexit, "register", lambda *call: at_exit.append(call))
    with pytest.raises(LaunchError, match="no rank 0"):
        world.init()
    ((function, code),) = at_exit
    function(code)
    assert ended == [1]


def test_nobody_serves_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LaunchError, match=f"cannot reach rank 0's store at 127.0.0.1:{port}"):
        store_server.connect("127.0.0.1", port, timeout_s=1.0)


def test_a_name_that_nobody_knows(monkeypatch) -> None:
    monkeypatch.setattr(store_server, "_NAME_WITHIN_S", 0.0)
    with pytest.raises(LaunchError, match="'no-such-host.invalid', is unknown on this host: "):
        store_server.connect("no-such-host.invalid", 29500, timeout_s=30.0)


def test_only_an_address_of_this_host_can_be_served() -> None:
    with pytest.raises(LaunchError, match="cannot serve 192.0.2.1:0: Cannot assign requested address") as caught:
        store_server.serve("192.0.2.1", 0, timeout_s=1.0)  # RFC 5737: an address without a host
    assert "MASTER_ADDR must be an address" in caught.value.hint


def listening(port: int) -> set[str]:
    """Addresses with a listener on a port, as the kernel writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {words[1].split(":")[0] for words in lines if words[1].endswith(f":{port:04X}") and words[3] == "0A"}


def test_the_store_listens_at_one_address_alone() -> None:
    reserved = ReservedPorts(("127.0.0.1", 0))
    port = reserved.ports.store
    assert listening(port) == {"0100007F"}
    assert not listening(reserved.ports.master), "torch.distributed may still listen there"
    store = store_server.serve("127.0.0.1", port, timeout_s=5.0, bound=os.dup(reserved.store.fileno()))
    reserved.hand_over()
    assert listening(port) == {"0100007F"}
    store_server.connect("127.0.0.1", port, timeout_s=5.0).set("key", "value")
    assert store.get("key") == b"value"


def test_nobody_takes_the_port_of_the_store_before_rank_0_listens() -> None:
    """Another user may bind all ports, with the options for sharing them."""
    reserved = ReservedPorts(("127.0.0.1", 0))
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="Address already in use"):
                thief.bind((host, reserved.ports.store))
    torch_store = TCPStore("127.0.0.1", reserved.ports.master, is_master=True, wait_for_workers=False)
    assert torch_store.port == reserved.ports.master
    reserved.close()


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as thief:
        port = thief.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} of 127.0.0.1 is taken") as caught:
            store_server.serve("127.0.0.1", port, timeout_s=5.0)
    assert "two jobs on one host need a MASTER_PORT each" in caught.value.hint


def test_the_port_of_another_job_is_not_looked_at() -> None:
    """A rank of `tilescale run` may start torchrun, whose ranks inherit its variables."""
    outer = {"MASTER_PORT": "29500", STORE_PORT: "29500 29777"}
    assert torchrun._store_port(outer) == 29777 and torchrun._store_port(outer | {"MASTER_PORT": "29501"}) == 29501


def test_a_descriptor_that_is_no_socket_of_ours_is_left_alone(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file, socket.create_server(("127.0.0.1", 0)) as other:
        for descriptor in (file.fileno(), other.fileno(), 10**6):
            store = store_server.serve("127.0.0.1", 0, timeout_s=5.0, bound=descriptor)
            assert listening(store.port) == {"0100007F"}
        assert other.getsockname()[1] and not file.closed


def test_a_store_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LaunchError, match="cannot reach"):
        store_server.connect("127.0.0.1", silent.getsockname()[1], timeout_s=0.3)


SEVERAL_HOSTS = TORCHRUN | {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500", "RANK": "1"}


def test_several_hosts_need_a_key(monkeypatch) -> None:
    monkeypatch.setattr(store_server, "connect", lambda host, port, timeout_s: HashStore())
    with pytest.raises(LaunchError, match="several hosts has no key") as caught:
        join(SEVERAL_HOSTS, 1.0)
    assert "TILESCALE_JOB_KEY_FILE" in caught.value.hint and "TILESCALE_ALLOW_NO_KEY=1" in caught.value.hint
    for consent in ({KEY: "ab" * 32}, {NO_KEY: "1"}):
        joined = join(SEVERAL_HOSTS | consent, 1.0)
        assert joined.key is not None and joined.host == "192.0.2.1"


@pytest.mark.parametrize("change", [{"MASTER_ADDR": "127.0.0.1"}, {"LOCAL_WORLD_SIZE": "2"}])
def test_ranks_of_one_host_agree_on_a_key(monkeypatch, change: dict[str, str]) -> None:
    monkeypatch.setattr(store_server, "connect", lambda host, port, timeout_s: HashStore())
    joined = join(SEVERAL_HOSTS | change, 1.0)
    assert joined.key is None and joined.host == "127.0.0.1"


@pytest.mark.parametrize("change", [{"MASTER_ADDR": "127.0.0.1"}, {NO_KEY: "1"}], ids=["one host", "public key"])
def test_jobs_without_a_secret_are_told_apart_by_their_script(monkeypatch, change: dict[str, str]) -> None:
    monkeypatch.setattr(store_server, "connect", lambda host, port, timeout_s: HashStore())
    monkeypatch.setattr(sys, "argv", ["/home/a/first.py"])
    assert join(SEVERAL_HOSTS | change, 1.0).job == "/home/a/first.py"
    assert join(SEVERAL_HOSTS | change | {KEY: "ab" * 32}, 1.0).job == ""


def test_ranks_that_a_program_starts_itself_join_by_its_process_group() -> None:
    done = run_words([sys.executable, str(ROOT / "tests/comm/scripts/own_ranks.py"), "2"], TILESCALE_EMULATE="1")
    assert done.code == 0 and done.output.count("passed") == 2, done.output


def test_importing_comm_is_light() -> None:
    code = "import sys, tilescale.comm, tilescale.cli.run; print({'torch', 'tilelang', 'mpi4py'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"
