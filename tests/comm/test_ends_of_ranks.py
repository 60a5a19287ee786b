# SPDX-License-Identifier: MIT
"""Ends of ranks, as the kernel reports them: failures that all ranks name alike."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from tilescale.comm import Team
from tilescale.comm.failure_log import JobStatus
from tilescale.comm.session import Session
from tilescale.comm.store_client import StoreClient
from tilescale.comm.transport import Transport
from tilescale.comm.trust.key import JobKey
from tilescale.errors import RankFailedError


class Line:
    """Liveness connection of a rank to rank 0."""

    is_cut = False

    def cut(self) -> bool:
        return self.is_cut


def pair() -> tuple[Session, Session, Line]:
    """The sessions of two ranks, and the line between them."""
    store, line = HashStore(), Line()
    root, other = (Session(Transport(StoreClient(store, 5.0), JobKey(b""), rank), rank, 2, 5.0) for rank in range(2))
    other.liveness = line  # type: ignore[assignment]
    return root, other, line


@pytest.mark.parametrize("has_left", [False, True])
def test_the_end_of_rank_0_is_a_failure_for_all_unless_it_had_left(has_left: bool) -> None:
    root, other, line = pair()
    assert other.status() == JobStatus()
    if has_left:
        root.failure_log.left(0)
    line.is_cut = True
    status = other.status()
    assert status.gone == {0} and (status.failure is None) == has_left
    assert root.failure_log.read().failure == status.failure
    assert has_left or "rank 0 disappeared" in str(status.failure)


@pytest.mark.parametrize("has_left", [False, True])
def test_the_end_of_another_rank_is_a_failure_for_all_unless_it_had_left(has_left: bool) -> None:
    root, other, _ = pair()
    if has_left:
        other.failure_log.left(1)
    root.rank_gone(1)
    status = other.status()
    assert status.gone == {1} and (status.failure is None) == has_left
    assert has_left or "rank 1 disappeared" in str(status.failure)


def test_ranks_that_fail_since_one_has_left_are_not_the_first_failure() -> None:
    root, other, _ = pair()
    other.failure_log.left(1)
    with pytest.raises(RankFailedError, match="rank 1 ended before it came to barrier()"):
        Team(ranks=(0, 1), rank=0, _session=root).barrier()
    failure = other.status().failure
    assert failure is not None and failure.rank == 1
