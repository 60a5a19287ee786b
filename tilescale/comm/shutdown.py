# SPDX-License-Identifier: MIT
"""End of a rank: its uncaught error is logged for the others, and it stays a moment until the others have seen it.

Launchers kill the remaining ranks as soon as one ends, and blame the one that ended first. So a rank that ends waits
for the others to end their scripts too, and those that fail because of another rank exit after that one. The first
failure is shown in full, its consequences on other ranks in one line each.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from tilescale import tracebacks
from tilescale.comm.session import Session
from tilescale.comm.team import raised_at
from tilescale.errors import ForgedMessageError, RankFailedError
from tilescale.settings import settings

_GRACE_S = 3.0
_HEAD_START_S = 0.3  # for the interpreter of the rank that failed first to shut down
_PAUSE_S = 0.02
_LONGEST_LINE = 600


def install(session: Session, abort: Callable[[int], None] | None) -> None:
    """Notify the job of this process's end. `abort` ends the whole job if the other ranks do not stop by themselves."""
    owner = os.getpid()
    tracebacks.install()
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != owner or _is_first_failure(session.latest, error, trace) or settings().traceback == "full":
            previous(kind, error, trace)
        else:
            print(_one_line(error), file=sys.stderr, flush=True)

    def leave() -> None:
        if os.getpid() != owner:
            return
        try:
            all_stop = _leave(session.latest)
        except (RankFailedError, ForgedMessageError):  # rank 0 has ended, and the store with it
            time.sleep(_HEAD_START_S)
            return
        if not all_stop and abort is not None:
            print("tilescale: the other ranks do not stop; ending the job", file=sys.stderr, flush=True)
            abort(1)

    sys.excepthook = report
    atexit.register(leave)


def _is_first_failure(session: Session, error: BaseException, trace: TracebackType | None) -> bool:
    """Log an error, unless the job has failed before; returns whether it is the one to be shown in full."""
    if raised_at(error) not in (None, session.rank):
        time.sleep(_HEAD_START_S)  # the rank where it was raised knows more of it
    try:
        if session.status().failure is None:
            session.failure_log.failed(session.rank, f"{session.names[session.rank]} failed: {_text(error, trace)}")
        first = session.status().failure
        return first is None or first.rank == session.rank
    except (RankFailedError, ForgedMessageError):  # no rank can be notified any more
        return not isinstance(error, RankFailedError)


def _one_line(error: BaseException) -> str:
    text = "; ".join(line.strip() for line in f"{type(error).__name__}: {error}".splitlines())
    return text if len(text) <= _LONGEST_LINE else text[:_LONGEST_LINE] + " ..."


def _text(error: BaseException, trace: TracebackType | None) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    innermost = traceback.extract_tb(trace)[-1:]
    return text + "".join(f"\n    at {frame.filename}:{frame.lineno}" for frame in innermost)


def _leave(session: Session) -> bool:
    """Leave the job; False if it has failed and other ranks continued regardless."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no reader is left
            stream.flush()
    session.transport.client.limit_s = min(session.timeout_s, _GRACE_S)  # an ending rank no longer waits for rank 0
    session.has_left = True
    session.failure_log.left(session.rank)
    others = frozenset(range(session.size)) - {session.rank}
    end = time.monotonic() + _GRACE_S

    def all_left() -> bool:
        status = session.status()
        return others <= status.left | status.gone

    all_stop = _until(all_left, end)
    failure = session.status().failure
    elsewhere = failure.rank if failure is not None and failure.rank != session.rank else None
    if elsewhere is not None:
        _until(lambda: elsewhere in session.status().gone, end)
    if session.server is not None and (failure is None or elsewhere is not None):
        # Rank 0 keeps the store and watches the others: it ends last.
        server = session.server
        _until(lambda: not server.holding(), end if failure else time.monotonic() + session.timeout_s)
    session.close()
    if elsewhere is not None:
        time.sleep(_HEAD_START_S)
    return all_stop or failure is None


def _until(done: Callable[[], bool], end: float) -> bool:
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE_S)
    return True
