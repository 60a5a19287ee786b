# SPDX-License-Identifier: MIT
"""How a rank ends: its uncaught error goes on the board, and it stays a moment until the others have seen it.

Launchers kill the remaining ranks as soon as one ends, and blame the one that ended first. So a rank that ends waits
for the others to end their scripts too, and those that fail because of another rank let that one go first.
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
from tilescale.errors import RankFailedError

__all__ = ["install"]

_GRACE_S = 3.0
_HEAD_START_S = 0.3  # for the interpreter of the rank that failed first to shut down
_PAUSE_S = 0.02


def install(session: Session, abort: Callable[[int], None] | None) -> None:
    """Tell the job of this process's end. `abort` ends the whole job if the other ranks do not stop by themselves."""
    owner = os.getpid()
    tracebacks.install()
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if os.getpid() == owner:
            with contextlib.suppress(RankFailedError):
                if session.notes().failure is None:
                    session.board.failed(session.rank, f"{session.names[session.rank]} failed: {_text(error, trace)}")

    def leave() -> None:
        if os.getpid() != owner:
            return
        try:
            all_stop = _leave(session)
        except RankFailedError:  # rank 0 has ended, and the store with it
            time.sleep(_HEAD_START_S)
            return
        if not all_stop and abort is not None:
            print("tilescale: the other ranks do not stop; ending the job", file=sys.stderr, flush=True)
            abort(1)

    sys.excepthook = report
    atexit.register(leave)


def _text(error: BaseException, trace: TracebackType | None) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    innermost = traceback.extract_tb(trace)[-1:]
    return text + "".join(f"\n    at {frame.filename}:{frame.lineno}" for frame in innermost)


def _leave(session: Session) -> bool:
    """Leave the job; False if it has failed and other ranks went on regardless."""
    sys.stdout.flush()
    sys.stderr.flush()
    session.board.left(session.rank)
    others = frozenset(range(session.size)) - {session.rank}
    end = time.monotonic() + _GRACE_S

    def told() -> bool:
        notes = session.notes()
        return others <= notes.left | notes.gone

    all_stop = _until(told, end)
    failure = session.notes().failure
    failed_elsewhere = failure is not None and failure.rank != session.rank
    if failed_elsewhere:
        _until(lambda: failure.rank in session.notes().gone, end)
    if session.server is not None and (failure is None or failed_elsewhere):
        # Rank 0 keeps the store and watches the others: it ends last.
        server = session.server
        _until(lambda: not server.holding(), end if failure else time.monotonic() + session.timeout_s)
    session.close()
    if failed_elsewhere:
        time.sleep(_HEAD_START_S)
    return all_stop or failure is None


def _until(done: Callable[[], bool], end: float) -> bool:
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE_S)
    return True
