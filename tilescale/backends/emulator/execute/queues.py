# SPDX-License-Identifier: MIT
"""Copy queues: operations that a tensor-owning unit has started run asynchronously, in order.

A queue is a task of its own. The start of an operation publishes the unit's earlier accesses. The queue's accesses are
published only by the flags that it signals. A run ends when all queues are empty.
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
    """A started operation; its unit publishes its earlier accesses there.

    Attributes:
        where: its line.
        perform: executes it.
    """

    where: Location | None
    perform: Callable[[], None]


class CopyQueue:
    """The queue of one unit, made by its task. `pending`: started operations that have not completed; the first one is
    being executed."""

    def __init__(self, run: Emulation, unit: Unit):
        self._run, self._closed = run, False
        self.pending: deque[Start] = deque()
        self.name = f"{unit}, copy queue"
        run.scheduler.spawn(self.name, self._work, started_by=run.scheduler.current)

    def start(self, where: Location | None, perform: Callable[[], None]) -> None:
        """The current task, the unit's, starts an operation."""
        start = Start(where, perform)
        self._run.publishes(start)
        self.pending.append(start)

    def close(self) -> None:
        """The unit starts no more operations."""
        self._closed = True

    def behind(self) -> list[Location]:
        """Lines of the operations that are queued after the current one."""
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
