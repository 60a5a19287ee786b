# SPDX-License-Identifier: MIT
"""One compiler for many processes: texts that wait at the same time are compiled as one file.

A process sends each text and waits for the binary. While few compilations run at a time, others queue up, and the more
there are the more share the time that headers take.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from tests.fuzz.together import headers, joined, kernels

MOST = 12
"""Texts of one file."""

Compile = Callable[[str, Any], bytes]
"""Gets a text and options; returns the binary."""


@dataclass(frozen=True)
class Job:
    """A text to compile with options; all that wait for it have its `done`."""

    text: str
    options: Any
    done: Future[bytes] = field(default_factory=Future)


class SharedCompiler:
    """Compiles for all processes that connect to its address, `slots` files at a time."""

    def __init__(self, address: str, compile_text: Compile, slots: int) -> None:
        self.address, self.compile_text = address, compile_text
        self._jobs: dict[tuple[str, str], Job] = {}
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._listener = Listener(address, family="AF_UNIX")
        for work in (self._accept, *[self._work] * slots):
            threading.Thread(target=work, daemon=True).start()

    @property
    def jobs(self) -> int:
        """Number of texts that have been asked for so far."""
        with self._lock:
            return len(self._jobs)

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._serve, args=(self._listener.accept(),), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, ConnectionError):  # the process has ended
            while True:
                done = self._asked(*connection.recv()).done
                connection.send(done.exception() or done.result())

    def _asked(self, text: str, options: Any) -> Job:
        """The job of a text: one for all processes that ask for it."""
        with self._lock:
            key = text, repr(options)
            if key not in self._jobs:
                self._jobs[key] = Job(text, options)
                self._waiting.put(self._jobs[key])
            return self._jobs[key]

    def _work(self) -> None:
        while True:
            self._compile([*self._batch()])

    def _batch(self) -> Iterator[Job]:
        """A waiting job, and others that fit into its file."""
        first = self._waiting.get()
        yield first
        names = kernels(first.text)
        for _ in range(min(MOST - 1, self._waiting.qsize())):
            try:
                other = self._waiting.get_nowait()
            except queue.Empty:
                return
            is_alike = repr(other.options) == repr(first.options) and headers(other.text) == headers(first.text)
            if not is_alike or names & kernels(other.text):
                self._waiting.put(other)
                return
            names |= kernels(other.text)
            yield other

    def _compile(self, jobs: list[Job]) -> None:
        try:
            binary = self.compile_text(joined([job.text for job in jobs]), jobs[0].options)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].done.set_exception(RuntimeError(str(error)))
            else:
                for job in jobs:
                    self._compile([job])
            return
        for job in jobs:
            job.done.set_result(binary)


def compile_at(address: str) -> Compile:
    """A function that has the compiler of an address compile a text. Raises RuntimeError with its message."""
    connection = Client(address, family="AF_UNIX")

    def compile_text(text: str, options: Any) -> bytes:
        connection.send((text, options))
        binary = connection.recv()
        if isinstance(binary, Exception):
            raise binary
        return binary

    return compile_text
