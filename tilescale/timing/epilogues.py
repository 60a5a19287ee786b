# SPDX-License-Identifier: MIT
"""Recording of a persistent loop: its epilogues are a task concurrent with the compute task, and its producer loads
ahead."""

from __future__ import annotations

from tilescale.timing.record import TaskLog
from tilescale.timing.steps import AcquireStep, ForkStep, PublishStep, RecordedTask, WorkStep


class PersistentTask(TaskLog):
    """The compute task of a persistent loop.

    Attributes:
        around: the log of the program around the loop.
        epilogue: of the role that ends iterations: one at a time, each while the next tile is computed.
    """

    def __init__(self, around: TaskLog):
        super().__init__(RecordedTask("", around.task.row), around)
        self.around, self.epilogue = around, TaskLog(RecordedTask("epilogue", around.task.row), around)
        self.primed = False
        self._handed, self._full, self._empty = 0, around.place(object()), around.place(object())
        around.flush()
        around.task.steps.append(ForkStep([self.task, self.epilogue.task]))

    def waits_for_room(self) -> None:
        """The last tile that was handed over has been taken out of shared memory."""
        if self._handed:
            self.step(AcquireStep(self._empty, self._handed, "wait for the epilogue", None))

    def hands_over(self) -> TaskLog:
        """A tile is handed to the epilogue, whose log is returned."""
        self._handed += 1
        self.step(PublishStep(self._full, name="hand-over"))
        self.epilogue.step(AcquireStep(self._full, self._handed, "wait for a tile", None, idle=True))
        return self.epilogue

    def is_taken(self) -> None:
        """The epilogue of the tile is over."""
        self.epilogue.step(PublishStep(self._empty, name="hand-over"))

    def _pipelined(self, works: list[WorkStep], times: int, stages: int) -> None:
        super()._pipelined(works, times, stages)
        self.primed = True
