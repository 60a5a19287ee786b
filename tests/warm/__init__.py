# SPDX-License-Identifier: MIT
"""Python processes that start in milliseconds, for tests of jobs: forked from one that has loaded torch and TileLang.

Loading them takes five seconds of CPU time, and a job has several ranks. `python()` is the path of a program that is
used like Python itself, also as `sys.executable` by what it runs: it asks the server (`server.py`) for a process with
its arguments, environment, folder and open files, hands signals on to it, and ends as it ends (`client.py`).
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["python"]

HERE = Path(__file__).parent


@cache
def python() -> str:
    """The path of the program; the server is started by the first call, and ends with this process."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        return sys.executable
    folder = tempfile.TemporaryDirectory(prefix="tilescale-warm-")
    client, address = Path(folder.name) / "python", f"{folder.name}/server"
    script = f'#!/bin/sh\nexec "{sys.executable}" -IS "{HERE / "client.py"}" {address} "$@"\n'
    client.write_text(script, encoding="utf-8")
    client.chmod(0o700)
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), address, str(client)],
        stdin=subprocess.PIPE,  # closed when this process ends
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        text=True,
        start_new_session=True,
    )
    assert server.stdin is not None and server.stdout is not None
    atexit.register(lambda: (server.stdin.close(), server.wait(), folder.cleanup()))
    assert server.stdout.readline() == "ready\n", "the server has failed"
    return str(client)
