# SPDX-License-Identifier: MIT
"""Recording of a persistent loop: its epilogues are a task concurrent with the compute task, and its producer loads
ahead."""

from __future__ import annotations

from tilescale.timing.record import Log
from tilescale.timing.steps import Acquire, Fork, Publish, Task, Work


class Persistent(Log):
    """The compute task of a persistent loop.

    Attributes:
        around: the log of the program around the loop.
        epilogue: of the role that ends iterations: one at a time, each while the next tile is computed.
    """

    def __init__(self, around: Log):
        super().__init__(Task("", around.task.row), around)
        self.around, self.epilogue = around, Log(Task("epilogue", around.task.row), around)
        self.primed = False
        self._handed, self._full, self._empty = 0, around.place(object()), around.place(object())
        around.flush()
        around.task.steps.append(Fork([self.task, self.epilogue.task]))

    def waits_for_room(self) -> None:
        """The last tile that was handed over has been taken out of shared memory."""
        if self._handed:
            self.step(Acquire(self._empty, self._handed, "wait for the epilogue", None))

    def hands_over(self) -> Log:
        """A tile is handed to the epilogue, whose log is returned."""
        self._handed += 1
        self.step(Publish(self._full, name="hand-over"))
        self.epilogue.step(Acquire(self._full, self._handed, "wait for a tile", None, idle=True))
        return self.epilogue

    def is_taken(self) -> None:
        """The epilogue of the tile is over."""
        self.epilogue.step(Publish(self._empty, name="hand-over"))

    def _pipelined(self, works: list[Work], times: int, stages: int) -> None:
        super()._pipelined(works, times, stages)
        self.primed = True
