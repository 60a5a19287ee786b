# SPDX-License-Identifier: MIT
"""Python processes that start in milliseconds, for tests of jobs: forked from one that has loaded torch and TileLang.

Loading them takes five seconds of CPU time, and a job has several ranks. `python()` is the path of a program that is
used like Python itself, also as `sys.executable` by what it runs: it asks the server (`server.py`) for a process with
its arguments, environment, folder and open files, hands signals on to it, and ends as it ends (`client.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.shared import made_once

__all__ = ["python"]

HERE = Path(__file__).parent
_servers: list[subprocess.Popen[str]] = []
"""Started by this process, which does not wait for their ends."""


@cache
def python() -> str:
    """The path of the program. The first call in a run starts the server, which ends with the last of its users."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        return sys.executable
    folder = made_once("warm", _start)
    _be_a_user(folder)
    return str(folder / "python")


def _be_a_user(folder: Path) -> None:
    os.open(folder / "users", os.O_RDWR)


def _start(folder: Path) -> None:
    os.mkfifo(folder / "users")
    _be_a_user(folder)
    client = folder / "python"
    script = f'#!/bin/sh\nexec "{sys.executable}" -IS "{HERE / "client.py"}" {folder / "server"} "$@"\n'
    client.write_text(script, encoding="utf-8")
    client.chmod(0o700)
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        text=True,
        start_new_session=True,
    )
    _servers.append(server)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n", "the server has failed"
