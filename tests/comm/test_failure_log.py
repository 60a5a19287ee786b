# SPDX-License-Identifier: MIT
"""Failures that ranks record can be read by all of them."""

from types import SimpleNamespace
from typing import Any

from tilescale.comm.failure_log import FailureLog, JobStatus, RankFailure


class Records:
    """Stands for the transport: what was appended, by the name of the log."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Any]] = {}

    def append(self, name: str, payload: bytes) -> None:
        self._kept.setdefault(name, []).append(SimpleNamespace(payload=payload))

    def log(self, name: str) -> list[Any]:
        return self._kept.get(name, [])


def test_ranks_that_leave_are_gone_or_fail_are_told_apart():
    records: Any = Records()
    one, other = FailureLog(records), FailureLog(records)
    assert other.read() == JobStatus()
    one.left(1)
    assert other.read() == JobStatus(left=frozenset({1}))
    one.gone(2)
    one.gone(0)
    assert other.read() == JobStatus(left=frozenset({1}), gone=frozenset({0, 2}))
    other.failed(3, "first")
    one.failed(0, "second")
    assert one.read() == JobStatus(frozenset({1}), frozenset({0, 2}), RankFailure(3, "first"))


def test_a_long_text_is_cut():
    records: Any = Records()
    FailureLog(records).failed(0, "x" * (1 << 20))
    failure = FailureLog(records).read().failure
    assert failure is not None and failure.text == "x" * (16 << 10)
