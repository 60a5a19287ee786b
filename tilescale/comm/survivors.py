# SPDX-License-Identifier: MIT
"""The ranks that continue after others have died: rank 0 collects them, and they begin a new session.

It has the store and the connections of the previous session, fresh names, and another key: late writes of the previous
group are never read. Rank 0 holds both, so it has to be among those that live.
"""

from __future__ import annotations

import json
import time

from tilescale.comm.session import Session
from tilescale.errors import RankFailedError

_ARRIVED, _MEMBERS, _NEXT = "survivors", "members", "next"
_PAUSE_S = 0.02


def go_on(session: Session) -> tuple[tuple[int, ...], Session]:
    """Collective over all ranks that live: their numbers, in order, and their session.

    Raises RankFailedError if rank 0 has died, or this rank comes when the others have gone on without it.
    """
    session.transport.append(_ARRIVED, json.dumps(session.rank).encode())
    members = _decided(session) if session.rank == 0 else _announced(session)
    if session.rank not in members:
        raise RankFailedError(
            f"{session.names[session.rank]} is not in the new group: it came after the others had gone on",
            hint="all ranks that live call tilescale.shrink() within TILESCALE_TIMEOUT_S (seconds)",
        )
    return members, _successor(session, members)


def _decided(session: Session) -> tuple[int, ...]:
    """The survivors, once all others have died or the time is up."""
    end = time.monotonic() + session.timeout_s
    while time.monotonic() < end:
        status = session.status()
        living = set(range(session.size)) - status.gone - status.left
        if living <= _arrived(session):
            break
        time.sleep(_PAUSE_S)
    members = tuple(sorted(living & _arrived(session)))
    session.transport.set(_MEMBERS, json.dumps(members).encode())
    return members


def _announced(session: Session) -> tuple[int, ...]:
    end = time.monotonic() + 2 * session.timeout_s
    while not session.transport.has(_MEMBERS):
        if 0 in session.status().gone or time.monotonic() > end:
            raise RankFailedError(
                f"{session.names[0]} has not announced the survivors: it has died, or does not call tilescale.shrink()",
                hint="rank 0 holds the store of the job: start it again",
            )
        time.sleep(_PAUSE_S)
    return tuple(json.loads(bytes(session.transport.value(_MEMBERS, 0))))


def _arrived(session: Session) -> set[int]:
    return {record.rank for record in session.transport.log(_ARRIVED)}


def _successor(session: Session, members: tuple[int, ...]) -> Session:
    numbers = {old: new for new, old in enumerate(members)}
    transport = session.transport.successor(_NEXT, numbers[session.rank])
    made = Session(transport, numbers[session.rank], len(members), session.timeout_s, session.liveness)
    for old, new in numbers.items():
        made.rename(new, _renamed(session.names[old], new, old))
    session.successor = made
    if session.server is not None:
        made.server = session.server
        made.server.renumber(numbers, made.rank_gone)
        for rank in set(range(1, made.size)) - made.server.holding():
            made.rank_gone(rank)
    return made


def _renamed(name: str, new: int, old: int) -> str:
    return name if new == old else f"rank {new}, before that {name}"
