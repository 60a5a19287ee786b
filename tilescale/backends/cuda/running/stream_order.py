# SPDX-License-Identifier: MIT
"""Order between the streams that programs are called on, and a wait for a device that ends when the job fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache

import torch

from tilescale.comm.failure_log import RankFailure
from tilescale.errors import RankFailedError, TileScaleError

_LOOK_S = 0.05
"""Interval at which a host that waits for its device polls the job's failure log, in seconds."""

DEFAULT = 0
"""The number of the default stream, which lives as long as the process and cannot be captured (CUDA C++ Programming
Guide, Stream Capture)."""


class StreamOrder:
    """Order of programs on one device: each follows the one before, on any stream.

    If they ran concurrently, one could hold the SMs here that another one holds on the peer, each waiting for the
    other's counterpart; and calls of one program share its counters. Work added to the current stream between `begin`
    and `end` runs after the work of the previous call. Captured work has the order of its graph alone.

    An event costs a tenth of a small call. As long as all calls are on the default stream, none is recorded: a call on
    another stream waits for all work on the default stream by then. Any other stream may be captured meanwhile, or
    destroyed.

    Attributes:
        last: the number of the stream of the last call; -1 before the first one.
        records: whether the end of a call is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index
        self._number: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self._event = torch.cuda.Event()
        self._last: torch.cuda.Stream | None = None
        self.last = -1
        self.records = False
        self._thread = -1

    def stream(self) -> int | None:
        """The number of the current stream, None if it is captured in a graph. CUDA is queried only where it may be
        captured."""
        if self._thread != (thread := threading.get_ident()):
            self._enter(thread)
        number = self._number(self._index)
        return None if number != DEFAULT and self._is_capturing() else number

    def _enter(self, thread: int) -> None:
        """A call from another thread than before, which may have no context of the device yet."""
        torch.cuda.set_device(self._device)
        self._thread = thread

    def begin(self, number: int) -> None:
        """Begin a call on the current stream, given by number."""
        if number != self.last:
            self._change(number)

    def _change(self, number: int) -> None:
        """Begin a call on the current stream, which was not that of the last call."""
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None:
            if not self.records:
                self._event.record(self._last)
            stream.wait_event(self._event)
        self.records = self._last is not None or number != DEFAULT
        self._last, self.last = stream, number

    def end(self) -> None:
        """End the call: all its work is on its stream."""
        if self.records:
            self._event.record(self._last)


    def extend(self) -> None:
        """Count work added to the current stream since the last call, which was on it, as a part of that call."""
        if self.stream() is not None:
            self.end()


@cache
def stream_order(device: torch.device) -> StreamOrder:
    """The order of programs on a device of this process."""
    return StreamOrder(device)


class IdleWait:
    """A wait until a device is idle, in a thread: CUDA has no wait with a timeout."""

    def __init__(self, wait: Callable[[], None]):
        """`wait` blocks until the device is idle."""
        self._wait, self._done = wait, threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="tilescale-idle", daemon=True).start()

    def _run(self) -> None:
        try:
            self._wait()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        self._done.set()

    def within(self, seconds: float) -> bool:
        """Whether the device becomes idle within `seconds`. Raises CUDA's errors of its kernels."""
        if not self._done.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True


def wait_idle(
    idle: IdleWait,
    *,
    failure: Callable[[], TileScaleError | None],
    stopped: Callable[[], bool],
    stop: Callable[[], None],
    abort: Callable[[], None],
    grace_s: float,
) -> bool:
    """Wait for a device; False if it does not become idle within `grace_s` after all attempts. Raises RankFailedError,
    RankMismatchError: as `failure`; the device is idle, if it becomes idle at all.

    Args:
        failure: the failure of another rank, if there is one.
        stopped: whether a wait on the device has failed; then other work should end within `grace_s`.
        stop: ends the waits of kernels.
        abort: ends collectives of other libraries.
    """
    since: float | None = None
    while not idle.within(_LOOK_S):
        if since is None:
            noted = failure()
            if noted is not None:
                stop()
                abort()
                idle.within(grace_s)
                raise noted
            since = time.monotonic() if stopped() else None
        elif time.monotonic() - since > grace_s:
            abort()
            return idle.within(grace_s)
    return True


def noted_failure(failure: Callable[[], RankFailure | None]) -> RankFailedError | None:
    """The first failure of a job as an error; None if there is none. `failure` is a call of `World.failure`."""
    try:
        found = failure()
    except RankFailedError as error:  # rank 0 is gone, and the failure log with it
        return error
    return None if found is None else RankFailedError(found.text)
