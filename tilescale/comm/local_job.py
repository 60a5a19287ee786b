# SPDX-License-Identifier: MIT
"""A job of processes on this machine: start them, pass their output on line by line, end all when one fails.

The processes get torchrun's variables and find each other as under torchrun; this side needs no torch, which keeps
the start short.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tilescale.comm import rank_process
from tilescale.comm.trust.key import new_key
from tilescale.errors import JobError

__all__ = ["LocalJob"]

_GRACE_S = 10.0  # for the other ranks to report the failure; most have done so before the failing one ends
_TERM_S = 2.0  # between SIGTERM and SIGKILL
_LONGEST_LINE = 1 << 16  # characters; what is longer is passed on in pieces
_NO_OUTPUT_CODE, _IO_ERROR_CODE = 128 + signal.SIGPIPE, 74  # as if SIGPIPE had ended it; EX_IOERR of sysexits.h

Print = Callable[[int, str, bool], None]


class LocalJob:
    """`size` processes that run `command`, from `run` to their end.

    Attributes:
        exit_code: 0, or that of the rank that failed first (128 + signal number if a signal ended it).
        error: what happened, if a rank failed or the output could not be written any more.
    """

    def __init__(self, command: Sequence[str], size: int, env: Mapping[str, str], show: Print):
        """Nothing starts before `run`.

        Args:
            command: program and arguments.
            size: number of ranks.
            env: environment of every rank; the variables of the job are added.
            show: called with (rank, line, whether it is from stderr) for every line of output, from several threads. If
                it raises OSError, the job ends.
        """
        self.exit_code = 0
        self.error: JobError | None = None
        self._command, self._size, self._env, self._show = command, size, env, show
        self._events: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()  # a rank has ended; output is lost
        self._last_said = [""] * size  # the last line on stderr that is not indented: of a traceback, the error
        self._quiet = False
        self._ranks: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def run(self) -> None:
        """Start all ranks and wait for their end; when one fails, the others get a moment to report it and are ended.

        No rank outlives this call, however it ends, nor this process.
        """
        try:
            self._start()
            self._watch()
        except BaseException:
            self._quiet = True
            raise
        finally:
            self._stop()
            for reader in self._readers:
                reader.join(_TERM_S)  # a grandchild may hold a pipe open

    def _start(self) -> None:
        key = new_key()
        with rank_process.reserve_port() as port:
            for rank in range(self._size):
                self._ranks.append(rank_process.start(self._command, self._env, key, rank, self._size, port))
        for rank in range(self._size):
            self._follow(rank)

    def _watch(self) -> None:
        running = set(range(self._size))
        while running and not self.exit_code:
            event = self._events.get()
            if isinstance(event, OSError):
                self.exit_code = _NO_OUTPUT_CODE if event.errno == errno.EPIPE else _IO_ERROR_CODE
                self.error = JobError(f"the output cannot be written any more ({event.strerror}), all ranks were ended")
                return
            running.discard(event)
            self.exit_code = self._code(event)
            if self.exit_code:
                self._finish_failed(event, running)

    def _finish_failed(self, failed: int, running: set[int]) -> None:
        deadline = time.monotonic() + _GRACE_S
        with contextlib.suppress(queue.Empty):
            while running:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
                running -= {event} if isinstance(event, int) else set()
        status = self._ranks[failed].returncode
        how = f"exit code {status}" if status > 0 else f"signal {-status} ({signal.Signals(-status).name})"
        others = f"; ranks {sorted(running)} did not stop and were ended" if running else ""
        said = self._last_said[failed] or "its stderr is empty"
        self.error = JobError(f"rank {failed} failed first, with {how}{others}: {said}")

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
        waiter = threading.Thread(target=lambda: (process.wait(), self._events.put(rank)), daemon=True)
        for thread in (*readers, waiter):
            thread.start()
        self._readers += readers

    def _pass_on(self, rank: int, stream: IO[str], from_stderr: bool) -> None:
        """Read to the end, also when nothing can be shown any more: a rank must not block on a full pipe."""
        while line := stream.readline(_LONGEST_LINE):
            line = line.rstrip("\n")
            if from_stderr and line[:1].strip():
                self._last_said[rank] = line
            if not self._quiet:
                try:
                    self._show(rank, line, from_stderr)
                except OSError as error:
                    self._quiet = True
                    self._events.put(error)
