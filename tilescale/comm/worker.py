# SPDX-License-Identifier: MIT
"""A thread for calls that may block in C for ever, so that the caller can give up."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

_LOOK_S = 0.05


class _WorkerCall:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]):
        self._function, self._args = function, args
        self._value: Any = None
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._value = self._function(*self._args)
        except BaseException as error:  # noqa: BLE001 - raised where the answer is wanted
            self._error = error
        self.done.set()

    def answer(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class Worker:
    """A daemon thread that makes calls one after the other."""

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[_WorkerCall] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float, hopeless: Callable[[], bool]) -> Any:
        """Call a function and return or raise its result. Raises TimeoutError after `limit_s`, or once no answer can
        come any more.

        The call itself continues after a TimeoutError, and later ones wait for it: the worker is then unusable.
        """
        task = _WorkerCall(function, args)
        self._tasks.put(task)
        end = time.monotonic() + limit_s
        while not task.done.wait(min(_LOOK_S, limit_s)):
            if hopeless() or time.monotonic() > end:
                raise TimeoutError
        return task.answer()

    def _serve(self) -> None:
        while True:
            self._tasks.get().run()
