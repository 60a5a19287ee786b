# SPDX-License-Identifier: MIT
"""Python processes that start in milliseconds: forked from one that has loaded torch and TileLang.

Loading them takes five seconds of CPU time, and a job has several ranks. `python()` is the path of a program that is
used like Python itself, also as `sys.executable` by what it runs: it asks the server (`server.py`) for a process with
its arguments, environment, folder and open files, hands signals on to it, and ends as it ends (`client.py`).

Workers of pytest-xdist are such processes too (`worker()`). Loading all tests takes some 15 seconds more, so the server
does it once for all of them. Their `sys.executable` is Python itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

from tests.shared import made_once

__all__ = ["python", "worker"]

HERE = Path(__file__).parent
_servers: list[subprocess.Popen[str]] = []
"""Started by this process, which does not wait for their ends."""


def python() -> str:
    """The path of the program. The first call in a run starts the server, which ends with the last of its users."""
    return str(_folder() / "python") if hasattr(os, "pidfd_open") else sys.executable  # not Linux


def worker(tests: Iterable[str]) -> str:
    """The path of the program for workers; the server has loaded the tests of these files and folders."""
    return str(_folder(*tests) / "worker") if hasattr(os, "pidfd_open") else sys.executable


@cache
def _folder(*tests: str) -> Path:
    folder = made_once("warm", partial(_start, tests=tests))
    _be_a_user(folder)
    return folder


def _be_a_user(folder: Path) -> None:
    os.open(folder / "users", os.O_RDWR)


def _start(folder: Path, tests: tuple[str, ...]) -> None:
    os.mkfifo(folder / "users")
    _be_a_user(folder)
    for name, executable in (("python", folder / "python"), ("worker", sys.executable)):
        client = folder / name
        script = f'exec "{sys.executable}" -IS "{HERE / "client.py"}" {folder / "server"} "{executable}" "$@"'
        client.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        client.chmod(0o700)
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), str(folder), *tests],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=os.environ | {
            "PYTHONPATH": str(HERE.parents[1]),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTEST_XDIST_WORKER": "warm",
        },
        text=True,
        start_new_session=True,
    )
    _servers.append(server)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n", "the server has failed"
