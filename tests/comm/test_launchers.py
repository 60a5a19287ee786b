# SPDX-License-Identifier: MIT
"""Which launcher an environment speaks of, and what is said about one that makes no sense."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from tests.comm.conftest import ROOT
from tilescale.comm.launchers import join
from tilescale.comm.launchers.base import connect_store
from tilescale.comm.launchers.mpi import Mpi
from tilescale.comm.launchers.torchrun import Torchrun
from tilescale.comm.lifeline import Lifeline, LifelineServer
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


def test_nobody_serves_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LaunchError, match=f"cannot reach rank 0's store at 127.0.0.1:{port}"):
        connect_store("127.0.0.1", port, serve=False, timeout_s=1.0)


def test_importing_comm_is_light() -> None:
    code = "import sys, tilescale.comm, tilescale.cli.run; print({'torch', 'tilelang', 'mpi4py'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"


def _eventually(condition) -> bool:
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_lifelines() -> None:
    cut: list[int] = []
    server = LifelineServer(cut.append)
    first, second = (Lifeline("127.0.0.1", server.port, server.token, rank, 5.0) for rank in (2, 3))
    stranger = Lifeline("127.0.0.1", server.port, b"0" * 16, 4, 5.0)
    assert _eventually(lambda: {2, 3} <= server.holding() and stranger.cut())
    assert not first.cut()
    second.close()
    assert _eventually(lambda: 3 in cut) and 4 not in server.holding()
    server.close()
    assert _eventually(first.cut)
