# SPDX-License-Identifier: MIT
"""Other jobs of this computer that a benchmark starts: to compile beside one another, or to run on fewer GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_OF_A_JOB = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC", "OMP_NUM_THREADS")
"""Beginnings of variables by which a launcher tells a process that it is a rank."""


@dataclass
class Job:
    """A job that runs; its output goes to `log`."""

    process: subprocess.Popen
    log: IO[str]


def start(script: Path, arguments: Sequence[str], ranks: int = 1) -> Job:
    """Start a script as a job of its own, whatever job this process is a rank of."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_JOB)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *torchrun, str(script), *arguments]
    log = tempfile.TemporaryFile("w+", errors="replace")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    return Job(process, log)


def finish(jobs: Sequence[Job], limit_s: float) -> list[tuple[int, str]]:
    """Wait for jobs, together for so long; those that are not done are ended. Returns exit codes and outputs."""
    until = time.monotonic() + limit_s
    return [_ended(job, until) for job in jobs]


def _ended(job: Job, until: float) -> tuple[int, str]:
    try:
        code = job.process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(job.process.pid, signal.SIGKILL)  # a session of its own: all its ranks
        code = job.process.wait()
    with job.log as log:
        log.seek(0)
        return code, log.read()
