# SPDX-License-Identifier: MIT
"""`tilescale.shrink()`: ranks that live go on without those that have died."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import tilescale
from tests.comm.conftest import SCRIPTS, command, run_words
from tilescale.comm import Team
from tilescale.comm.survivors import go_on
from tilescale.errors import ForgedMessageError, RankFailedError


@pytest.mark.parametrize(("how", "ranks"), [("kill", 4), ("raise", 3), ("mixed", 3)])
def test_operators_go_on_as_ranks_die_one_after_the_other(how: str, ranks: int) -> None:
    """See scripts/survivors.py."""
    words = [*command("tilescale run", ranks), "--keep-going", str(SCRIPTS / "survivors.py"), how]
    done = run_words(words, TILESCALE_EMULATE="1")
    assert done.code == 0, done.output
    assert "rank 0 is alone" in done.output


def test_without_keep_going_the_launcher_ends_the_job(run_job) -> None:
    done = run_job("tilescale run", 2, "survivors.py", "kill", TILESCALE_EMULATE="1")
    assert done.code != 0 and "SIGKILL" in done.output, done.output


def test_who_lives_goes_on_and_who_comes_late_does_not(run_ranks) -> None:
    decided = threading.Event()

    def rank(team: Team) -> Any:
        if team.rank == 1:
            decided.wait(60)
        try:
            members, session = go_on(team._session)
        finally:
            decided.set()
        again = Team(ranks=tuple(range(len(members))), rank=session.rank, _session=session)
        return members, session.names[-1], again.all_gather(team.rank)

    first, late, last = run_ranks(3, rank, timeout_s=2.0)
    assert first == last == ((0, 2), "rank 1, before that rank 2", [0, 2])
    assert isinstance(late, RankFailedError) and "rank 1 is not in the new group" in str(late)


def test_all_may_go_on(run_ranks) -> None:
    assert [made[0] for made in run_ranks(3, lambda team: go_on(team._session))] == [(0, 1, 2)] * 3


def test_nobody_goes_on_without_rank_0(run_ranks) -> None:
    def rank(team: Team) -> Any:
        if team.rank == 0:
            team._session.failure_log.gone(0)
            return None
        return go_on(team._session)

    for error in run_ranks(3, rank)[1:]:
        assert isinstance(error, RankFailedError) and "has not announced the survivors" in str(error)


def test_what_a_rank_of_the_old_group_writes_does_not_count(run_ranks) -> None:
    def rank(team: Team) -> Any:
        _, session = go_on(team._session)
        if session.rank == 0:
            sealed = team._session.transport
            sealed.client.under("next").set("said", seal_of(sealed, "said"))
        team.barrier()
        return session.transport.value("said", 0)

    assert all(isinstance(error, ForgedMessageError) for error in run_ranks(2, rank))


def seal_of(transport: Any, name: str) -> bytes:
    """A value that a rank of the old group signs."""
    transport.set(name, b"old")
    return transport.client.get(name)


def test_a_job_of_one_stays() -> None:
    assert tilescale.init() is tilescale.shrink()
