# SPDX-License-Identifier: MIT
"""Every worker begins with its share of the slow tests, and all tests are run."""

import pytest

from tests.order import dealt


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_workers_begin_with_slow_tests(workers: int):
    slow, others = ["a", "b", "c", "d"], [str(n) for n in range(27)]
    order = dealt(slow, others, workers)
    assert sorted(order) == sorted(slow + others)
    assert [test for test in order if test in others] == others
    length = len(order) // workers
    for worker in range(workers):
        share = slow[worker::workers]
        assert order[worker * length :][: len(share)] == share


def test_there_may_be_more_workers_than_tests():
    assert sorted(dealt(["a", "b"], ["0"], 5)) == ["0", "a", "b"]
