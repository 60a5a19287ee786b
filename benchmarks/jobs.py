# SPDX-License-Identifier: MIT
"""Jobs that a benchmark starts on this computer: to compile concurrently, or to run on fewer GPUs.

A single-GPU job can also take part in a race of several GPUs: `Served` asks it for a group of calls in each round.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_OF_A_JOB = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC", "OMP_NUM_THREADS")
"""Prefixes of the variables by which a launcher identifies a process as a rank."""

STOP_S = 40.0
"""Longest time that a job may take to end after SIGTERM: torchrun gives its ranks 30 seconds."""


@dataclass
class Job:
    """A running job; its output goes to `log`."""

    process: subprocess.Popen
    log: IO[str]


def start(script: Path, arguments: Sequence[str], ranks: int = 1) -> Job:
    """Start a script as a separate job, even if this process is a rank of another one."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *torchrun, str(script), *arguments]
    log = tempfile.TemporaryFile("w+", errors="replace")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=_env(), start_new_session=True)
    return Job(process, log)


def _env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_JOB)}


def finish(jobs: Sequence[Job], limit_s: float) -> list[tuple[int, str]]:
    """Wait for jobs, together for at most `seconds`; the others are ended. Returns exit codes and outputs."""
    until = time.monotonic() + limit_s
    return [_ended(job, until) for job in jobs]


def _ended(job: Job, until: float) -> tuple[int, str]:
    try:
        code = job.process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = stop(job.process)
    with job.log as log:
        log.seek(0)
        return code, log.read()


def stop(process: subprocess.Popen) -> int:
    """End a job that has its own session; return its exit code.

    SIGTERM comes first: torchrun's ranks have sessions of their own, which it ends on SIGTERM, and leaves on the GPUs
    if it is killed.
    """
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


# -- a job that is timed when asked ------------------------------------------------------------------------------------

ANSWER, ANSWER_S = "microseconds a call:", 120.0
"""Prefix of the lines of a `Served` job that have a time, and the longest wait for one."""


class Served:
    """A single-GPU job that runs `serve`."""

    def __init__(self, script: Path, arguments: Sequence[str]):
        """Wait until the job accepts requests. Raises RuntimeError."""
        command = [sys.executable, str(script), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, **pipes, env=_env(), text=True, bufsize=1)
        self.group(1)

    def group(self, calls: int) -> float:
        """Microseconds a call, of `calls` calls. Raises RuntimeError if there is no answer."""
        late = threading.Timer(ANSWER_S, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(f"{calls}\n")
            for line in self._process.stdout:
                if line.startswith(ANSWER):
                    return float(line.removeprefix(ANSWER))
        except BrokenPipeError:
            pass  # it has ended before
        finally:
            late.cancel()
        raise RuntimeError(f"the job of one GPU ended with code {self._process.wait()}")


def serve(group: Callable[[int], float]) -> None:
    """Answer the requests of the process that started this job, until it ends."""
    for line in sys.stdin:
        print(ANSWER, group(int(line)), flush=True)
