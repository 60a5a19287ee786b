# SPDX-License-Identifier: MIT
"""Copy queues: what a unit that owns tensors has started runs beside it, one operation after the other.

A queue is a task of its own. The start of an operation publishes what its unit did until then; what the queue has done
is known only through the flags that it signals. A run ends when all queues are empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tilescale.backends.emulator.execute.emulation import Emulation
from tilescale.backends.emulator.execute.tasks import Wait
from tilescale.backends.emulator.execute.units import Unit
from tilescale.errors import Location


@dataclass(eq=False)
class Start:
    """An operation that was started: a place where its unit publishes what it did before.

    Attributes:
        where: its line.
        perform: executes it.
    """

    where: Location | None
    perform: Callable[[], None]


class CopyQueue:
    """The queue of one unit, made by its task.

    Attributes:
        pending: what was started and is not done; the first one is being executed.
    """

    def __init__(self, run: Emulation, unit: Unit):
        self._run, self._closed = run, False
        self.pending: deque[Start] = deque()
        self.name = f"{unit}, copy queue"
        run.scheduler.spawn(self.name, self._work, beside=run.scheduler.current)

    def start(self, where: Location | None, perform: Callable[[], None]) -> None:
        """The current task, which is the unit's, starts an operation."""
        start = Start(where, perform)
        self._run.publishes(start)
        self.pending.append(start)

    def close(self) -> None:
        """The unit starts no more."""
        self._closed = True

    def behind(self) -> list[Location]:
        """Lines of the operations that wait for the one that is being executed."""
        return [start.where for start in list(self.pending)[1:] if start.where]

    def _work(self) -> None:
        idle = Wait(lambda: bool(self.pending) or self._closed, "its unit", quiet=True)
        while True:
            self._run.scheduler.block(idle)
            if not self.pending:
                return
            start = self.pending[0]
            self._run.acquires(start)
            start.perform()
            self.pending.popleft()
