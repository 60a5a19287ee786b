# SPDX-License-Identifier: MIT
"""The ranks of a job on this node: start them, pass their output on line by line, end all when one fails.

Where the job has other nodes, their launchers hear of that, and this one of theirs (`tilescale/comm/nodes/`). The
processes get torchrun's variables and find each other as under torchrun; this side needs no torch, so it starts fast.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tilescale.comm import rank_process
from tilescale.comm.nodes import NodeFailure, OtherNodes
from tilescale.comm.rank_process import NodePlacement
from tilescale.errors import JobError

_GRACE_S = 10.0  # for the other ranks to report the failure; most have done so before the failing one ends
_TERM_S = 2.0  # between SIGTERM and SIGKILL
_LAST_WORDS_S = 2.0  # for output that a rank has written before its end; a grandchild may hold its pipe open
_OF_A_RANK = re.compile(r"^\[rank\d+\]: ?")  # PyTorch's, before each line of an error, given a process group
_LONGEST_LINE = 1 << 16  # characters; longer lines are passed on in pieces
_NO_OUTPUT_CODE, _IO_ERROR_CODE = 128 + signal.SIGPIPE, 74  # as if SIGPIPE had ended it; EX_IOERR of sysexits.h

_NO_MEMORY = "MemoryError", "failed to map segment", "Cannot allocate memory", "std::bad_alloc", "Memory allocation"
_NO_THREAD = "can't start new thread"
_SIGNS_OF_LIMITS = (
    ((*_NO_MEMORY, _NO_THREAD), resource.RLIMIT_AS, "-v"),
    (("Too many open files",), resource.RLIMIT_NOFILE, "-n"),
    ((_NO_THREAD,), resource.RLIMIT_NPROC, "-u"),
)

Print = Callable[[int, str, bool], None]


class LocalJob:
    """The processes of this node that run `command`, from `run` to the end of the job.

    Attributes:
        exit_code: 0, or that of the rank that failed first, on any node (128 + signal number if a signal ended it).
        error: what happened, if a rank failed or the output could not be written any more.
    """

    def __init__(
        self,
        command: Sequence[str],
        place: NodePlacement,
        env: Mapping[str, str],
        show: Print,
        others: OtherNodes | None = None,
        keeps_going: bool = False,
    ):
        """Nothing starts before `run`.

        Args:
            command: program and arguments.
            place: which ranks of the job this node has.
            env: environment of every rank; the variables of the job are added.
            show: called with (rank, line, whether it is from stderr) for every line of output, from several threads. If
                it raises OSError, the job ends.
            others: the launchers of the other nodes; they hear how this one ends, and it ends when they fail.
            keeps_going: a rank that fails ends no other one; the job has failed if all ranks have.
        """
        self.exit_code = 0
        self.error: JobError | None = None
        self._command, self._place, self._env, self._show, self._others = command, place, env, show, others
        # A rank of this node has ended; output is lost; or how the job ends.
        self._events: queue.SimpleQueue[object] = others.news if others else queue.SimpleQueue()
        self._last_said = [""] * place.ranks  # the last line on stderr that is not indented: of a traceback, the error
        self._quiet, self._keeps_going = False, keeps_going
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
            if self._others is not None:
                self._others.close()
            self._stop()
            if self._place.reserved is not None:
                self._place.reserved.close()
            for reader in self._readers:
                reader.join(_TERM_S)  # a grandchild may hold a pipe open

    def _start(self) -> None:
        for rank in range(self._place.ranks):
            self._ranks.append(rank_process.start(self._command, self._env, self._place, rank))
        if self._place.reserved is not None:
            self._place.reserved.hand_over()
        for rank in range(self._place.ranks):
            self._follow(rank)

    def _watch(self) -> None:
        running = set(range(self._place.ranks))
        while not self.exit_code:
            event = self._events.get()
            if isinstance(event, int):
                running.discard(event)
                if (code := self._code(event)) and not self._goes_on(running):
                    self._fail(NodeFailure(code, self._how_failed(event)), running)
                elif not running:
                    if self._others is None:
                        return
                    self._others.ended()
            elif isinstance(event, OSError):
                code = _NO_OUTPUT_CODE if event.errno == errno.EPIPE else _IO_ERROR_CODE
                said = f"the output cannot be written any more ({event.strerror}), all ranks were ended"
                self._fail(NodeFailure(code, said), set())
            elif isinstance(event, NodeFailure):
                self._finish(event, running)
            else:
                return

    def _goes_on(self, running: set[int]) -> bool:
        return self._keeps_going and (bool(running) or any(process.returncode == 0 for process in self._ranks))

    def _fail(self, failure: NodeFailure, running: set[int]) -> None:
        if self._others is not None:
            self._others.failed(NodeFailure(failure.code, f"node {self._place.node}: {failure.text}"))
        self._finish(failure, running)

    def _finish(self, failure: NodeFailure, running: set[int]) -> None:
        deadline = time.monotonic() + _GRACE_S
        with contextlib.suppress(queue.Empty):
            while running:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
                running -= {event} if isinstance(event, int) else set()
        left = [self._place.first + rank for rank in sorted(running)]
        also = f"\nranks {left} did not stop and were ended" if left else ""
        self.exit_code, self.error = failure.code, JobError(failure.text + also)

    def _how_failed(self, rank: int) -> str:
        status = self._ranks[rank].returncode
        how = f"exit code {status}" if status > 0 else f"signal {-status} ({signal.Signals(-status).name})"
        for reader in self._readers[2 * rank : 2 * rank + 2]:
            reader.join(_LAST_WORDS_S)
        said = self._last_said[rank] or "its stderr is empty"
        return f"rank {self._place.first + rank} failed first, with {how}: {said}{limit_behind(said)}"

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
        waiter = threading.Thread(target=self._wait_for, args=(rank,), daemon=True)
        for thread in (*readers, waiter):
            thread.start()
        self._readers += readers

    def _wait_for(self, rank: int) -> None:
        self._ranks[rank].wait()
        self._events.put(rank)

    def _pass_on(self, rank: int, stream: IO[str], from_stderr: bool) -> None:
        """Read a rank's stream to its end, also after printing has failed: a rank must not block on a full pipe."""
        while line := stream.readline(_LONGEST_LINE):
            line = line.rstrip("\n")
            said = _OF_A_RANK.sub("", line)
            if from_stderr and said[:1].strip():
                self._last_said[rank] = said
            if not self._quiet:
                try:
                    self._show(self._place.first + rank, line, from_stderr)
                except OSError as error:
                    self._quiet = True
                    self._events.put(error)


def limit_behind(said: str) -> str:
    """The limit to raise, given the last output of a process; empty where no configured limit explains it."""
    for signs, limit, option in _SIGNS_OF_LIMITS:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and any(sign in said for sign in signs):
            return f" (`ulimit {option}` is {soft >> 10 if option == '-v' else soft} here: raise it)"
    return ""
