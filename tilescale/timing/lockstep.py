# SPDX-License-Identifier: MIT
"""Units that do the same at the same time: one of them is simulated for all.

Tensor-owning units that take equal steps, synchronize all together, and demand nothing of each other or of a link that
one of them could have before another, are in the same state at all times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilescale.timing.steps import (
    AcquireStep,
    ForkStep,
    LaunchStep,
    PublishStep,
    RecordedTask,
    RendezvousStep,
    UnitResource,
    WorkStep,
)


def in_lockstep(tasks: Sequence[RecordedTask]) -> bool:
    """Whether several tasks, one for each rank, are in the same state at all times."""
    first = tasks[0].steps
    return len(tasks) > 1 and _same_for_all(first, len(tasks)) and all(task.steps == first for task in tasks[1:])


def _same_for_all(steps: Sequence[Any], units: int) -> bool:
    """Whether nothing that steps name belongs to only some of the units."""
    return all(_is_same(step, units) for step in steps)


def _is_same(step: Any, units: int) -> bool:
    if isinstance(step, WorkStep):
        keys = (key for part in step.parts for key in part.demands)
        return all(isinstance(key, str) or (isinstance(key, UnitResource) and key.row is None) for key in keys)
    if isinstance(step, PublishStep | AcquireStep):
        return isinstance(step.place, int)
    if isinstance(step, RendezvousStep):
        return isinstance(step.place, int) or step.size == units
    if isinstance(step, ForkStep | LaunchStep):
        lists = {id(task.steps): task.steps for task in step.tasks}  # Programs that do the same share them.
        return all(_same_for_all(each, units) for each in lists.values())
    return True
