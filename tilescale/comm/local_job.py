# SPDX-License-Identifier: MIT
"""A job of processes on this machine: start them, pass their output on line by line, end all when one fails.

The processes get torchrun's variables and find each other as under torchrun; this side needs no torch, which keeps
the start short.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tilescale.errors import JobError

__all__ = ["LocalJob"]

_GRACE_S = 2.0  # for the other ranks to report the failure; most have done so before the failing one ends
_TERM_S = 2.0  # between SIGTERM and SIGKILL
_LAST_LINES = 20

Print = Callable[[int, str, bool], None]


class LocalJob:
    """`size` processes that run `command`, from `run` to their end.

    Attributes:
        exit_code: 0, or that of the rank that failed first (128 + signal number if a signal ended it).
        error: what happened, if a rank failed.
    """

    def __init__(self, command: Sequence[str], size: int, env: Mapping[str, str], show: Print):
        """Nothing starts before `run`.

        Args:
            command: program and arguments.
            size: number of ranks.
            env: environment of every rank; the variables of the job are added.
            show: called with (rank, line, whether it is from stderr) for every line of output, from several threads.
        """
        self.exit_code = 0
        self.error: JobError | None = None
        self._command, self._size, self._env, self._show = command, size, env, show
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._last_lines = [deque[str](maxlen=_LAST_LINES) for _ in range(size)]
        self._quiet = False
        self._ranks: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def run(self) -> None:
        """Start all ranks and wait for their end; when one fails, the others get a moment to report it and are ended.

        No rank outlives this call, however it ends.
        """
        try:
            self._start()
            running = set(range(self._size))
            while running and not self.exit_code:
                rank = self._ended.get()
                running.discard(rank)
                self.exit_code = self._code(rank)
            if self.exit_code:
                self._finish_failed(rank, running)
        except BaseException:
            self._quiet = True
            raise
        finally:
            self._stop()
            for reader in self._readers:
                reader.join(_TERM_S)  # a grandchild may hold a pipe open

    def _start(self) -> None:
        port = _free_port()
        for rank in range(self._size):
            self._ranks.append(_process(self._command, _rank_env(self._env, rank, self._size, port), rank))
        for rank in range(self._size):
            self._follow(rank)

    def _finish_failed(self, failed: int, running: set[int]) -> None:
        deadline = time.monotonic() + _GRACE_S
        with contextlib.suppress(queue.Empty):
            while running:
                running.discard(self._ended.get(timeout=max(0.0, deadline - time.monotonic())))
        status = self._ranks[failed].returncode
        how = f"exit code {status}" if status > 0 else f"signal {-status} ({signal.Signals(-status).name})"
        text = "".join(f"\n    | {line}" for line in self._last_lines[failed])
        others = f"; ranks {sorted(running)} did not stop and were ended" if running else ""
        said = f"its last words:{text}" if text else "it said nothing on stderr"
        self.error = JobError(f"rank {failed} failed first, with {how}{others}; {said}")

    def _stop(self) -> None:
        for process in self._ranks:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _TERM_S
        for process in self._ranks:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _code(self, rank: int) -> int:
        status = self._ranks[rank].returncode
        return status if status >= 0 else 128 - status

    def _follow(self, rank: int) -> None:
        process = self._ranks[rank]
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=self._pass_on, args=(rank, stream, from_stderr), daemon=True)
            for stream, from_stderr in ((process.stdout, False), (process.stderr, True))
        ]
        # One thread waits for each rank, so that ends are seen in the order in which they happen.
        waiter = threading.Thread(target=lambda: (process.wait(), self._ended.put(rank)), daemon=True)
        for thread in (*readers, waiter):
            thread.start()
        self._readers += readers

    def _pass_on(self, rank: int, stream: IO[str], from_stderr: bool) -> None:
        for line in stream:
            line = line.rstrip("\n")
            if from_stderr:
                self._last_lines[rank].append(line)
            if not self._quiet:
                self._show(rank, line, from_stderr)


def _process(command: Sequence[str], env: Mapping[str, str], rank: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _rank_env(env: Mapping[str, str], rank: int, size: int, port: int) -> dict[str, str]:
    # A job inside a torchrun job is its own: it must not look for the outer one's store.
    inherited = {name: value for name, value in env.items() if not name.startswith("TORCHELASTIC_")}
    if size > 1:
        inherited.setdefault("OMP_NUM_THREADS", "1")
        inherited.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else its store logs C++ frames when rank 0 dies
    return inherited | {
        "TILESCALE_RUN": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
