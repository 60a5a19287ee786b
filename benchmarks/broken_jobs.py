# SPDX-License-Identifier: MIT
"""Jobs that are run in order to break (`faults.py`): by a launcher, on two hosts, two at once; with their output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilescale.comm.trust.key import KEY, new_key

ROOT = Path(__file__).parents[1]
RUN = [sys.executable, "-c", "from tilescale.cli.run import run; run()"]
LIMIT_S = 300.0
HANGS = "say('READY')\ntime.sleep(600)"
"""Script of a job that only ends from outside."""


def alive(output: str) -> list[int]:
    """Processes of the job's ranks that still run."""
    pids = [int(pid) for pid in re.findall(r"PID (\d+)", output)]
    return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


def launched(script: Path, ranks: int = 3) -> str:
    """Run a job by `tilescale run`; return its output."""
    return finished([*RUN, "-n", str(ranks), str(script)])


def finished(words: list[str], **variables: str) -> str:
    """Run a command that must end by itself; return its output."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    process = subprocess.Popen(
        words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise SystemExit(f"{words} hung") from None
    return output


def under_mpirun(prefix: str) -> Callable[[Path], str]:
    """Run a job by `launch/mpirun.sh` with the MPI that is installed in a folder."""

    def run(script: Path) -> str:
        paths = {"PATH": f"{prefix}/bin{os.pathsep}{os.environ['PATH']}", "LD_LIBRARY_PATH": f"{prefix}/lib"}
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return finished([str(ROOT / "launch/mpirun.sh"), "3", str(script)], PYTHON=sys.executable, **paths, **root)

    return run


# -- the launcher itself -----------------------------------------------------------------------------------------------


def launcher_killed(script: Path) -> str:
    """SIGKILL `tilescale run` after the rendezvous of its ranks."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*RUN, "-n", "3", str(script)], env=env, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    lines: list[str] = []
    while sum("READY" in line for line in lines) < 3:
        lines.append(process.stdout.readline())
    begin = time.monotonic()
    process.kill()
    while alive("".join(lines)):
        time.sleep(0.005)
    end = time.monotonic()
    return "".join(lines) + f"FAULT {begin}\nERROR the kernel kills all ranks | {end}\n"


def output_gone(sink: str) -> Callable[[Path], str]:
    """Run a job whose output is not read, or goes to a full disk."""

    def run(script: Path) -> str:
        command = " ".join(f"'{word}'" for word in [*RUN, "-n", "3", str(script)])
        with tempfile.NamedTemporaryFile("r") as log:
            begin = time.monotonic()
            finished(["bash", "-c", f"{command} 2> {log.name} {sink}"])
            end = time.monotonic()
            said = re.findall(r"tilescale run: .*", log.read())[-1]
        return f"FAULT {begin}\nERROR {said} | {end}\n"

    return run


# -- the network between hosts -----------------------------------------------------------------------------------------


@contextmanager
def two_hosts() -> Iterator[None]:
    """Make network namespaces `ts0` and `ts1`, each with an address on a link between them."""
    setup = """ip netns add ts0; ip netns add ts1
    ip link add tsv0 netns ts0 type veth peer name tsv1 netns ts1
    ip -n ts0 addr add 10.77.0.1/24 dev tsv0; ip -n ts1 addr add 10.77.0.2/24 dev tsv1
    for n in 0 1; do ip -n ts$n link set tsv$n up; ip -n ts$n link set lo up; done"""
    remove = "ip netns del ts0; ip netns del ts1"
    subprocess.run(["bash", "-c", remove], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["bash", "-ec", setup], check=True)
    try:
        yield
    finally:
        subprocess.run(["bash", "-c", remove], check=False)


def network(cut: str) -> Callable[[Path], str]:
    """Run a job of two hosts, and the shell command `cut` after their rendezvous."""

    def run(script: Path) -> str:
        with two_hosts(), tempfile.NamedTemporaryFile("w+") as log:
            job = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1"}
            env = os.environ | job | {"PYTHONPATH": str(ROOT), "MASTER_PORT": "29600", KEY: new_key()}
            ranks = [
                subprocess.Popen(
                    ["ip", "netns", "exec", f"ts{rank}", sys.executable, str(script)],
                    env=env | {"RANK": str(rank), "GROUP_RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                )
                for rank in range(2)
            ]
            while Path(log.name).read_text().count("READY") < 2:
                time.sleep(0.05)
            begin = time.monotonic()
            subprocess.run(["bash", "-ec", cut], check=True)
            for rank in ranks:
                rank.wait(LIMIT_S)
            return Path(log.name).read_text() + f"FAULT {begin}\n"

    return run


# -- two jobs on one host ----------------------------------------------------------------------------------------------


def with_full_cache(script: Path) -> str:
    """Run a job whose cache is on a full disk; needs root."""
    folder = script.parent / "cache"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)], check=True)
    try:
        (folder / "full").write_bytes(b"x" * 4096)
        os.environ["TILESCALE_CACHE_DIR"] = str(folder)
        return launched(script)
    finally:
        del os.environ["TILESCALE_CACHE_DIR"]
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def started_again(script: Path) -> str:
    """Kill all of a job, and start the next one with the same address."""
    output = launcher_killed(script)
    begin = time.monotonic()
    script.write_text(script.read_text().replace(HANGS.splitlines()[-1], "pass"))
    if launched(script).count("REACHED") != 3:
        raise SystemExit("the next job did not run")
    return output.partition("FAULT")[0] + f"FAULT {begin}\nERROR nothing: the next job runs | {time.monotonic()}\n"


def one_port(script: Path) -> str:
    """Run a second job, with a different key, on the port of the first one."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29601"}
    env = os.environ | job | {"PYTHONPATH": str(ROOT)}

    def ranks(log: Any) -> list[subprocess.Popen[bytes]]:
        own = env | {KEY: new_key()}
        each = [own | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
        return [subprocess.Popen([sys.executable, str(script)], env=e, stdout=log, stderr=log) for e in each]

    with tempfile.NamedTemporaryFile("w+") as first, tempfile.NamedTemporaryFile("w+") as second:
        running = ranks(first)
        while Path(first.name).read_text().count("READY") < 2:
            time.sleep(0.05)
        begin = time.monotonic()
        for rank in ranks(second):
            rank.wait(LIMIT_S)
        if any(rank.poll() is not None for rank in running):
            raise SystemExit(f"the first job has ended:\n{Path(first.name).read_text()}")
        for rank in running:
            rank.kill()
            rank.wait()
        return Path(second.name).read_text() + f"FAULT {begin}\n"
