# SPDX-License-Identifier: MIT
"""Fixtures of the start-up tests: whole jobs with a hard time limit, and sessions of several ranks in one process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import warm
from tilescale.comm import Team
from tilescale.comm.session import Session
from tilescale.comm.store_client import StoreClient
from tilescale.comm.transport import Transport
from tilescale.comm.trust.key import JobKey

if TYPE_CHECKING:
    from torch.distributed import Store

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 280.0
RUN = [sys.executable, "-c", "from tilescale.cli.run import run; run()"]


@dataclass(frozen=True)
class Done:
    """A job that has ended: its exit code, and all of its output."""

    code: int
    output: str


def command(launcher: str, ranks: int) -> list[str]:
    """The words that start a job of `ranks` with `launcher`, up to the script."""
    if launcher == "tilescale run":
        return [*RUN, "-n", str(ranks)]
    if launcher == "torchrun":
        # --tee hands the ranks' output on line by line; on one pipe their tracebacks would run into each other.
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--tee", "3"]
        return [*torchrun, f"--nproc-per-node={ranks}"]
    return [*mpirun(), "-n", str(ranks), sys.executable]


def mpirun() -> list[str]:
    """mpirun of this Python's environment, from the package index, or the machine's."""
    program = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert program is not None, "the tests need an MPI: pip install mpi4py mpich"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return [program, "--map-by", ":OVERSUBSCRIBE"] if "Open MPI" in version else [program]


def run_words(words: Sequence[str], **variables: str) -> Done:
    """Run a command that must end by itself; everything that it started is killed if it does not.

    A Python, and those that it starts, has torch and TileLang loaded already.
    """
    words = [warm.python() if word == sys.executable else word for word in words[:1]] + [*words[1:]]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    process = subprocess.Popen(
        words,
        env=env | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{words} hung; its output:\n{output}")
    return Done(process.returncode, output)


@pytest.fixture
def run_job() -> Callable[..., Done]:
    """run_job(launcher, ranks, script, *args, **environment): a whole job, of a script under `scripts`."""

    def run(launcher: str, ranks: int, script: str, *args: str, **variables: str) -> Done:
        return run_words([*command(launcher, ranks), str(SCRIPTS / script), *args], **variables)

    return run


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """run_ranks(size, fn, timeout_s=, store=): fn(team of all) as every rank, in threads; what each gave or raised."""

    def run(size: int, fn: Callable[[Team], Any], timeout_s: float = 20.0, store: Store | None = None) -> list[Any]:
        from torch.distributed import HashStore

        store = store or HashStore()
        outcomes: list[Any] = [None] * size

        def be(rank: int) -> None:
            transport = Transport(StoreClient(store, timeout_s), JobKey(b"for tests"), rank)
            session = Session(transport, rank, size, timeout_s)
            try:
                outcomes[rank] = fn(Team(ranks=tuple(range(size)), rank=rank, _session=session))
            except BaseException as error:  # the test looks at it
                outcomes[rank] = error

        threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads), "a rank hung"
        return outcomes

    return run
