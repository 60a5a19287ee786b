# SPDX-License-Identifier: MIT
"""Hosts for jobs: network namespaces on one bridge, each with an address, a host name and processes.

They share the file system and the CPU cores of this machine, so these tests are slow, and need root and iproute2. `make
test-cluster` runs it; `make test` does not, as pytest does not collect these files by default.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
JOB = str(HERE / "job.py")
MACHINE = "h200-sxm-8x4"

LIMIT_S = 600.0
"""A hang guard: the machine may be slow, a job of four ranks takes two minutes on two busy CPU cores."""

_BRIDGE, _NAMES, _NETWORK = "tsbridge", "tsnode{}", "10.213.77.{}"
_GATEWAY = 254


class Hosts:
    """`count` hosts with names and addresses, from `up` to `down`."""

    def __init__(self, count: int, folder: Path):
        self.names = [_NAMES.format(node) for node in range(count)]
        self.addresses = [_NETWORK.format(node + 1) for node in range(count)]
        self.gateway = _NETWORK.format(_GATEWAY)
        self.folder = folder
        self.env = os.environ | {
            "NODES": str(folder / "hosts"),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{HERE}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TILESCALE_MACHINE": MACHINE,
            "TILESCALE_JOB_KEY": secrets.token_hex(32),
        }

    def up(self) -> None:
        """Make bridge, namespaces and links. Raises CalledProcessError where the kernel does not let us."""
        lines = [f"{address} {name}" for name, address in zip(self.names, self.addresses, strict=True)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self.down()
        _ip("link add", _BRIDGE, "type bridge")
        _ip(f"address add {self.gateway}/24 dev", _BRIDGE)
        _ip("link set", _BRIDGE, "up")
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("netns add", name)
            _ip(f"link add {name} type veth peer name eth0 netns", name)
            _ip(f"link set {name} master {_BRIDGE} up")
            _ip(f"-n {name} address add {address}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")

    def down(self) -> None:
        """Remove what is there, also of an earlier run that was killed."""
        for name in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split():
            if name.startswith(_NAMES.format("")):
                subprocess.run(["ip", "netns", "del", name], check=False)
        for link in (*self.names, _BRIDGE):  # a process that still runs keeps its namespace, and so the link
            subprocess.run(["ip", "link", "del", link], check=False, stderr=subprocess.DEVNULL)

    def start(self, node: int, words: Sequence[str], **variables: str | None) -> subprocess.Popen[str]:
        """Start a command on a node; None takes a variable away."""
        env = {name: value for name, value in (self.env | variables).items() if value is not None}
        return subprocess.Popen(
            [str(HERE / "enter"), self.names[node], *words],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=ROOT,
        )  # fmt: skip

    def run(self, commands: Mapping[int, Sequence[str]], **variables: str | None) -> list[tuple[int, str]]:
        """Run one command on each node at the same time; the exit code and output of each."""
        return finished([self.start(node, words, **variables) for node, words in commands.items()])


def finished(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each, within `LIMIT_S`; what they print is shown where a test fails."""
    end = time.monotonic() + LIMIT_S
    try:
        outputs = [process.communicate(timeout=max(1.0, end - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    for output in outputs:
        print(output)
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *" ".join(words).split()], check=True, capture_output=True, text=True)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("hosts are network namespaces: they need root and iproute2 (apt-get install iproute2)")
    found = Hosts(4, tmp_path_factory.mktemp("hosts"))
    try:
        found.up()
    except subprocess.CalledProcessError as error:
        found.down()
        pytest.skip(f"this kernel does not permit network namespaces: {error.stderr.strip()}")
    yield found
    found.down()
