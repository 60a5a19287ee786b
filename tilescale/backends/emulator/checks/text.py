# SPDX-License-Identifier: MIT
"""Words that the reports of several checks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tilescale.backends.emulator.units import Unit

if TYPE_CHECKING:
    from tilescale.backends.emulator.access import Home
    from tilescale.backends.emulator.run import Run

Box = list[tuple[int, int]]
"""Begin and end of a range of indices along each dimension."""


def region_text(name: str, box: Box) -> str:
    """A box of a buffer's elements as a program writes it."""
    return f"{name}[{', '.join(str(b) if e == b + 1 else f'{b}:{e}' for b, e in box)}]"


def owner_of(unit: Unit, slot: int, memory: np.ndarray) -> Unit | None:
    """The unit whose instance of a buffer lies in some memory: `unit`, one around it, or one inside those."""
    around: Unit | None = unit
    while around is not None:
        found = _owner_in(around, slot, memory)
        if found is not None:
            return found
        around = around.parent
    return None


def _owner_in(unit: Unit, slot: int, memory: np.ndarray) -> Unit | None:
    array = unit.storage.get(slot)
    if isinstance(array, np.ndarray) and np.may_share_memory(array, memory):
        return unit
    found = (_owner_in(child, slot, memory) for child in unit.children.values())
    return next((u for u in found if u is not None), None)


def declared_name(run: Run, home: Home) -> str:
    """The name with which the memory of a buffer was declared."""
    return run.compiler.owned_buffer(home.root).name


def acting(unit: Unit, task: str) -> str:
    """Who acts: a unit, with the threads where a part of its threads are a task of their own."""
    return task if task.startswith(str(unit)) else str(unit)
