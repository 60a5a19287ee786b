# SPDX-License-Identifier: MIT
"""Data acquired by a wait: of stores, of values that recur, and of signals that publish nothing."""

import pytest

from tilescale.backends.emulator.checks.clocks import Clock
from tilescale.backends.emulator.checks.flags import Flag, Update


class Signals:
    """A flag, the tasks that update it, each once, and one that waits."""

    def __init__(self):
        self.flag, self.waiter = Flag(0), Clock("waiter")
        self.updates = []

    def add(self, value=1, after=(), **how):
        """Add to the flag, knowing those updates whose numbers are in `after`."""
        return self._update(self.flag.value, self.flag.value + value, after, how)

    def store(self, value, after=(), **how):
        return self._update(self.flag.value, value, after, {"stores": True, **how})

    def _update(self, before, value, after, how):
        author = Clock(f"author {len(self.updates)}")
        for number in after:
            self._tell(author, self.updates[number])
        update = Update(before, value, author.publish(), **how)
        self.updates.append(update)
        self.flag.add(update)
        return self

    def learn(self, number):
        """The waiting task learns of an update elsewhere."""
        self._tell(self.waiter, self.updates[number])
        return self

    def _tell(self, task, update):
        task.learn(update.past.known)
        task.learn({update.past.clock: update.past.time})

    def seen_for(self, holds):
        """Numbers of the updates that the waiting task has acquired after its wait."""
        self.flag.wait(self.waiter, holds)
        return {n for n, u in enumerate(self.updates) if self.waiter.knows(u.past.clock, u.past.time)}


def test_updates_before_a_plain_write_do_not_count():
    signals = Signals().add()
    signals._update(0, 1, (), {})  # another unit wrote 0 in between
    assert signals.seen_for(lambda value: value >= 1) == {1}


def test_a_value_that_comes_back_is_that_of_the_last_update():
    """A task that has acquired the first update cannot have seen the value before it."""
    signals = Signals().add(1).add(-1).learn(0)
    assert signals.seen_for(lambda value: value == 0) == {0, 1}
    assert Signals().add(1).add(-1).seen_for(lambda value: value == 0) == set(), "it may have been there at once"


def test_what_a_store_replaces_is_not_seen():
    assert Signals().add(1).store(5).add(1).seen_for(lambda value: value >= 6) == {1, 2}


def test_a_store_that_comes_after_another_for_sure_does_not_stand_for_it():
    for releases in (True, False):
        signals = Signals().store(1).store(1, after=[0], releases=releases)
        assert signals.seen_for(lambda value: value == 1) == {0}
    assert Signals().store(1).store(1).seen_for(lambda value: value == 1) == set(), "either would do"


@pytest.mark.parametrize("releases", [True, False])
def test_one_of_several_signals_tells_what_all_publish(releases):
    """Two tasks have acquired an update; a wait for one of their signals acquires it too, if both publish it."""
    origin = Signals().add()
    signals = Signals()
    signals.updates = origin.updates
    signals.add(after=[0]).add(after=[0], releases=releases)
    assert signals.seen_for(lambda value: value >= 1) == ({0} if releases else set())
