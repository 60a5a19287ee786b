# SPDX-License-Identifier: MIT
"""Remarks about a program's results: outputs written in part, and tensors that were equal on all units and differ now.

Neither is an error: the rest of an output may be for a later call, and each unit may have its own result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilescale.backends.emulator.checks.replicas import different
from tilescale.backends.emulator.checks.shadow import Memory, Shadow
from tilescale.backends.emulator.checks.text import Box, region_text
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.observe import READS, Observer
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.run import Run
from tilescale.errors import Location
from tilescale.program.effects import statements


class _Written(Shadow):
    def __init__(self, owner: np.ndarray, given: bool):
        super().__init__(owner, np.bool_)


class Outputs(Observer[Frame, Home]):
    """Collects outputs that are written in part, and tensors whose replicas a call has made different."""

    def starts(self, run: Run) -> None:
        self._run = run
        self._names = {run.compiler.root(slot): name for slot, name in _written(run).items()}
        self._outputs = self._names.keys() - _read(run)
        # For tensors that are read and written: whether all units had equal values at the first write.
        self._alike: dict[int, bool] = {}
        self._first: dict[int, Location | None] = {}
        self._memory: Memory[_Written] = Memory(_Written)

    def looks_at(self, home: Home) -> bool:
        return home.root in self._names

    def accesses(self, frame: Frame, home: Home, kind: str, array: np.ndarray, index: Any) -> None:
        if kind in READS:
            return
        self._first.setdefault(home.root, home.where)
        if home.root in self._outputs:
            self._memory.of(array).view(array)[index] = True
        elif home.root not in self._alike:
            self._alike[home.root] = _are_alike([unit.storage[home.root] for unit in self._run.units])

    def ends(self) -> None:
        self._run.unwritten = [found for root in self._outputs for found in self._left(root)]
        self._run.diverged = [found for root, alike in self._alike.items() if alike for found in self._apart(root)]

    def _left(self, root: int) -> list[tuple[str, Location | None]]:
        """The parts of an output that a unit has not written; all of it if no unit wrote any."""
        written = {unit: self._cells(unit.storage[root]) for unit in self._run.units}
        if not any(cells.any() for cells in written.values()):
            return [(self._names[root], None)]
        partly = {unit: cells for unit, cells in written.items() if cells.any() and not cells.all()}
        return [(self._text(root, unit, ~cells), self._first.get(root)) for unit, cells in list(partly.items())[:1]]

    def _cells(self, array: np.ndarray) -> np.ndarray:
        cells = self._memory.of(array).view(array)
        return np.asarray(cells.any(axis=-1)) if cells.ndim > array.ndim else cells

    def _apart(self, root: int) -> list[tuple[str, Location | None]]:
        """The first difference between the first unit's tensor and that of another unit."""
        first, *others = self._run.units
        for unit in others:
            apart = different(first.storage[root], unit.storage[root])
            if apart.any():
                return [(self._text(root, unit, apart), self._first[root])]
        return []

    def _text(self, root: int, unit: Unit, chosen: np.ndarray) -> str:
        places = np.nonzero(chosen)
        box: Box = [(int(axis.min()), int(axis.max()) + 1) for axis in places]
        return f"{region_text(self._names[root], box)} of {unit}"


def _written(run: Run) -> dict[int, str]:
    """The slots of tensors that are given and written, and their names."""
    return {
        run.compiler.slot(parameter.buffer.data): parameter.name
        for i, parameter in enumerate(run.program.parameters)
        if i in run.written
        if parameter.buffer is not None and not any(view.layout.is_replica for view in parameter.views)
    }


def _read(run: Run) -> set[int]:
    """The slots of tensors that are read, including by updates in place."""
    compiler = run.compiler
    effects = [compiler.surroundings.effects(stmt) for stmt, _, _ in statements(run.program.body)]
    if any(found.opaque for found in effects):
        return {compiler.root(slot) for slot in _written(run)}
    return {compiler.root(compiler.slot(access.root)) for found in effects for access in found.reads}


def _are_alike(arrays: list[np.ndarray]) -> bool:
    """Whether several units hold equal values, and not only a constant filling."""
    first, *others = arrays
    is_filling = not first.size or bool((first == first.reshape(-1)[:1]).all())
    return bool(others) and not is_filling and not any(different(first, other).any() for other in others)
