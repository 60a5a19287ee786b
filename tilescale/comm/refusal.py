# SPDX-License-Identifier: MIT
"""Notification of a failed collective call: the other ranks would otherwise wait until their timeout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from tilescale.comm.call import CollectiveCall
from tilescale.errors import (
    DeviceError,
    ForgedMessageError,
    OutOfBoundsError,
    RankFailedError,
    RankMismatchError,
    TileScaleError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from tilescale.comm.team import Team

F = TypeVar("F", bound=Callable[..., Any])

_COMMON = (RankFailedError, RankMismatchError, ForgedMessageError, WaitTimeoutError, OutOfBoundsError, DeviceError)
"""Errors that the other ranks raise as well, without a notification."""

_NOTIFY_LIMIT_S = 2.0


def notifies(team_of: Callable[..., Team | None]) -> Callable[[F], F]:
    """Make a collective function notify the other ranks when it fails on this one. `team_of`: takes the function's
    arguments, returns the ranks that call it; asked after a failure alone."""

    def wrapped(function: F) -> F:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except (Exception, KeyboardInterrupt) as error:
                refuse(team_of(*args, **options), function.__name__, error)
                raise

        return call  # type: ignore[return-value]

    return wrapped


def refuse(team: Team | None, op: str, error: BaseException) -> None:
    """Notify the other ranks of `team`, if there are any, that the collective `op` raises `error` here.

    An error that they know, or that reaches them otherwise, is not sent; nor is a private class, by which a library
    leaves functions: PyTorch's activation checkpointing ends a recomputation like that, on all ranks.
    """
    session = None if team is None else team._session
    is_known = isinstance(error, _COMMON) or hasattr(error, "__tilescale_raised_at__")
    if session is None or team is None or team.size == 1 or is_known or type(error).__name__.startswith("_"):
        return
    with contextlib.suppress(AttributeError):  # an error that takes no attributes is sent again
        error.__tilescale_raised_at__ = session.rank  # type: ignore[attr-defined]
    what = error.message if isinstance(error, TileScaleError) else str(error)
    call = CollectiveCall.here(op).refused(f"{type(error).__name__}: {what}".removesuffix(": "))
    client = session.transport.client
    limit_s, client.limit_s = client.limit_s, min(client.limit_s, _NOTIFY_LIMIT_S)
    try:
        session.refuse(team.ranks, call)
    except TileScaleError:  # the job has ended, or another thread of this rank is in a call
        pass
    finally:
        client.limit_s = limit_s
