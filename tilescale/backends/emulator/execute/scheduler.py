# SPDX-License-Identifier: MIT
"""Coroutines of the emulated units: the running task, waits, and deadlocks.

Every unit that executes is a greenlet. One runs at a time, until it waits or ends: memory is sequentially consistent.
When no task is ready, all waits are checked again; if none is satisfied, the program is deadlocked.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

from tilescale.backends.emulator.execute.observe import Observer
from tilescale.backends.emulator.execute.tasks import Task, Wait
from tilescale.errors import Location

Item = TypeVar("Item")

PATIENCE = 1_000_000
"""Number of steps in which units only spin, each writing something, after which they count as deadlocked."""

STILL = 5_000
"""The same for loops whose inputs do not change. A loop that counts in memory makes progress, and may take longer."""


class Deadlock(BaseException):
    """No task can run; has the waiting tasks. Only the run itself turns it into a DeadlockError."""

    def __init__(self, waits: dict[Task, Wait]):
        super().__init__("deadlock")
        self.waits = waits


class Scheduler:
    """Runs tasks round robin.

    Attributes:
        current: the running task.
        progress: number of events that a spinning reader could see (writes, signals).
        release: which waits of a deadlock end as if they were satisfied; for the search for its cause.
    """

    current: Task

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.observers = observers
        self.tasks: set[Task] = set()
        self.ready: deque[Task] = deque()
        self.waiting: dict[Task, Wait] = {}
        self.progress = 0
        self.release: Callable[[dict[Task, Wait]], list[Task]] = lambda waiting: []
        self._spins = 0
        self._changed = 0
        self._looks: dict[Task, Hashable] = {}
        self._hub = getcurrent()

    def spawn(
        self,
        name: str,
        body: Callable[[], None],
        done: Callable[[], None] | None = None,
        parent: Task | None = None,
        started_by: Task | None = None,
    ) -> Task:
        """Add a task; `done` is called when it has ended."""
        task = Task(name, body, done, parent, started_by)
        task.greenlet = greenlet(lambda: self._run(task), parent=self._hub)
        # numpy keeps its error state in a context variable, and a greenlet starts with an empty context.
        task.greenlet.gr_context = contextvars.copy_context()
        self.tasks.add(task)
        self.ready.append(task)
        for observer in self.observers:
            observer.begins(task)
        return task

    def _run(self, task: Task) -> None:
        task.body()
        task.ended = True
        if task.parent is not None:
            task.parent.waited |= task.waited
        self.tasks.discard(task)
        self._get_on()
        if task.done is not None:
            task.done()

    def block(self, wait: Wait) -> None:
        """Block the current task until `wait.ready()` holds."""
        self.current.waited |= not wait.quiet
        if wait.ready() and not (wait.patient and self.is_patient()):
            return
        task = self.current
        task.wait = wait
        self.waiting[task] = wait
        self._hub.switch()
        task.wait = None
        if not wait.spins:
            self._get_on()

    def _get_on(self) -> None:
        """A task has made progress: the patience with spinning tasks begins anew."""
        self._spins = self._changed = 0
        self._looks.clear()

    def changes(self) -> None:
        """The current task does something other than polling."""
        self._changed = self._spins

    def spin(
        self,
        before: int,
        what: str,
        seen: Callable[[], str],
        where: Location | None,
        decides: Callable[[], Hashable],
        gets_on: bool = False,
    ) -> None:
        """The current task polls memory in a loop: let the others run before the next iteration.

        Args:
            before: `progress` at its last look. If nothing was written since, it waits for a write.
            what, seen, where: as for `Wait`.
            decides: the values that the loop depends on.
            gets_on: whether variables that it depends on have changed: the next iteration polls something else.
        """
        wait = Wait(lambda: self.progress != before, what, seen, where, spins=True)
        self._spins += 1
        if gets_on:
            self.changes()
        if self._spins > PATIENCE or not gets_on and self._stands_still(decides):
            raise Deadlock({self.current: wait, **self.waiting, **self._spinning()})
        if self.progress == before and not gets_on:
            self.block(wait)
        else:
            self._look()
            self.current.wait = wait  # for the report, if another spinning task is given up
            self._step_aside()
            self.current.wait = None

    def _spinning(self) -> dict[Task, Wait]:
        """Tasks that are to poll memory again: iterations of others that write have made them ready."""
        return {task: task.wait for task in self.ready if task.wait is not None and task.wait.spins}

    def _stands_still(self, decides: Callable[[], Hashable]) -> bool:
        """Whether no spinning loop saw a change for long. The first iterations are not compared, to save time."""
        if self._spins <= STILL:
            return False
        values = decides()
        if self._looks.setdefault(self.current, values) != values:
            self._looks[self.current] = values
            self.changes()
        return self._spins - max(self._changed, STILL) > STILL

    def pause(self) -> None:
        """Let the others run first."""
        self.changes()
        self._step_aside()

    def _step_aside(self) -> None:
        self.current.paused = True
        self.ready.append(self.current)
        self._hub.switch()

    def yield_control(self) -> None:
        """Let others run first, also those whose waits are satisfied; a spinning task is always ready itself."""
        self._look()
        self.pause()

    def preempt(self, signals: bool) -> None:
        """A statement has ended, which `signals` a flag or not: others may run first. Not in this order."""

    def is_patient(self) -> bool:
        """Whether a patient wait that may continue lets others run first this time."""
        return True

    def pick(self, items: list[Item]) -> Item:
        """The one of several that a unit finds first."""
        return items[0]

    def order(self, items: list[Item], room: int) -> list[Item]:
        """Units of a launch in start order, `room` of them at once."""
        return items

    def run(self) -> None:
        """Run all tasks to their end.

        Raises:
            Deadlock: some tasks wait and none can run.
            Exception: the error of a task; all other tasks are dropped.
        """
        try:
            while self.tasks:
                if not self.ready:
                    self._wake()
                self.current = self._next()
                self.current.greenlet.switch()
        except BaseException:
            self._drop()
            raise

    def _next(self) -> Task:
        return self.ready.popleft()

    def _wake(self) -> None:
        self._look()
        if not self.ready:
            self._make_ready(self.release(self.waiting))
        if not self.ready:
            raise Deadlock(self.waiting)

    def _look(self) -> None:
        self._make_ready([task for task, wait in self.waiting.items() if wait.ready()])

    def _make_ready(self, woken: list[Task]) -> None:
        for task in woken:
            del self.waiting[task]
        self.ready.extend(woken)

    def _drop(self) -> None:
        for task in self.tasks:
            task.greenlet.throw(GreenletExit)
        self.tasks.clear()


class TaskGroup:
    """Tasks that the current task makes and waits for."""

    def __init__(self, scheduler: Scheduler, what: str, where: Location | None):
        self._scheduler, self._what, self._where = scheduler, what, where
        self._parent = scheduler.current
        self._members: list[Task] = []
        self._running = 0

    def spawn(self, name: str, body: Callable[[], None], done: Callable[[], None] = lambda: None) -> Task:
        """Add a member, also while the parent waits; `done` is called when it has ended."""

        def ended() -> None:
            done()
            self._running -= 1

        self._running += 1
        member = self._scheduler.spawn(name, body, ended, self._parent)
        self._members.append(member)
        return member

    def join(self) -> None:
        """The parent waits until no member runs."""
        self._scheduler.block(Wait(lambda: self._running == 0, self._what, where=self._where, quiet=True))
        members, self._members = self._members, []
        for observer in self._scheduler.observers:
            observer.joins(members)
