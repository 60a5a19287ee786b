# SPDX-License-Identifier: MIT
"""Words that the reports of several checks share."""

from __future__ import annotations

import numpy as np

from tilescale.backends.emulator.units import Unit

Box = list[tuple[int, int]]
"""Begin and end of a range of indices along each dimension."""


def region_text(name: str, box: Box) -> str:
    """A box of a buffer's elements as a program writes it."""
    return f"{name}[{', '.join(str(b) if e == b + 1 else f'{b}:{e}' for b, e in box)}]"


def owner_of(unit: Unit, slot: int, memory: np.ndarray) -> Unit | None:
    """The unit, `unit` or one inside it, whose instance of a buffer lies in some memory."""
    array = unit.storage.get(slot)
    if isinstance(array, np.ndarray) and np.may_share_memory(array, memory):
        return unit
    found = (owner_of(child, slot, memory) for child in unit.children.values())
    return next((u for u in found if u is not None), None)


def acting(unit: Unit, task: str) -> str:
    """Who acts: a unit, with the threads where a part of its threads are a task of their own."""
    return task if task.startswith(str(unit)) else str(unit)
