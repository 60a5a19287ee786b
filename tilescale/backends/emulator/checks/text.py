# SPDX-License-Identifier: MIT
"""Texts that the reports of several checks share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.run import Run

Box = list[tuple[int, int]]
"""Begin and end of a range of indices along each dimension."""


def region_text(name: str, box: Box) -> str:
    """A box of a buffer's elements in the program's syntax."""
    return f"{name}[{', '.join(str(b) if e == b + 1 else f'{b}:{e}' for b, e in box)}]"


def owner_of(unit: Unit, slot: int, memory: np.ndarray) -> Unit | None:
    """The unit whose instance of a buffer lies in some memory: `unit`, one around it, or one inside these."""
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


def same_memory(unit: Unit, slot: int) -> list[Unit]:
    """Units whose argument is the same tensor as `unit`'s, including `unit`."""
    root = unit
    while root.parent is not None:
        root = root.parent
    mine = _extent(unit.storage[slot])
    return [other for other in owners(root, slot) if _extent(other.storage[slot]) == mine]


def memory_of(unit: Unit, slot: int) -> Iterator[tuple]:
    """A key for the memory of each instance of a buffer, of `unit` and the units inside it."""
    return (_extent(owner.storage[slot]) for owner in owners(unit, slot))


def _extent(array: np.ndarray) -> tuple:
    return array.__array_interface__["data"][0], array.shape, array.strides


def owners(unit: Unit, slot: int) -> Iterator[Unit]:
    """The units, `unit` and those inside it, that have an instance of a buffer."""
    if slot in unit.storage:
        yield unit
    for child in unit.children.values():
        yield from owners(child, slot)


def declared_name(run: Run, home: Home) -> str:
    """The name with which the memory of a buffer was declared."""
    return run.compiler.owned_buffer(home.root).name


def acting(unit: Unit, task: str) -> str:
    """The acting unit, with its threads where a part of the unit's threads are a task of their own."""
    return task if task.startswith(str(unit)) else str(unit)
