# SPDX-License-Identifier: MIT
"""Replicas that differ: tiles viewed with `T.Replica` and read as a whole, parameters at the end of the program.

Units that compute partial sums hold different values until a collective combines them. Values are equal if rounding
explains the difference: sums in another order are the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tilescale.backends.emulator.checks.text import Box, acting, declared_name, owners, region_text
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.observe import READS, Observer
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.numerics import is_float
from tilescale.backends.emulator.run import Run
from tilescale.errors import DivergedReplicaError, Location
from tilescale.program.model import View


class Replicas(Observer[Frame, Home]):
    """Raises a DivergedReplicaError where units hold different replicas."""

    def starts(self, run: Run) -> None:
        self._run = run
        # Tile and the unit that owns it -> the last line that wrote a replica of it.
        self._written: dict[tuple[int, Unit], Location | None] = {}

    def looks_at(self, home: Home) -> bool:
        return self._run.compiler.is_replicated(home.root)

    def accesses(self, frame: Frame, home: Home, kind: str, array: np.ndarray, index: Any) -> None:
        if home.replicated is None:
            if kind not in READS:
                self._written[home.root, frame.unit.owner(home.root)] = home.where
        elif kind in READS:
            self._check(frame, home, array, index)

    def _check(self, frame: Frame, home: Home, array: np.ndarray, index: Any) -> None:
        owner = frame.unit.owner(home.root)
        units = list(_holders(owner, home.root, owner.versions.get(home.root, 0)))
        held = [unit.replicas[home.root].array for unit in units]
        for unit, other in zip(units[1:], held[1:], strict=True):
            apart = different(held[0], other)
            if apart.any():
                box = _box(_part(owner.storage[home.root], array, index) & apart)
                if box:
                    raise self._error(frame, home, owner, box, {units[0]: held[0], unit: other})

    def _error(
        self, frame: Frame, home: Home, owner: Unit, box: Box, held: dict[Unit, np.ndarray]
    ) -> DivergedReplicaError:
        level = next(iter(held)).level
        reads = home.where and Location(home.where.file, home.where.line, "reads the whole here")
        wrote = self._written.get((home.root, owner))
        name = declared_name(self._run, home)
        error = DivergedReplicaError(
            f"{acting(frame.unit, self._run.scheduler.current.name)} reads {region_text(name, box)} as a whole, while "
            f"the {level}s hold different values of it: {_values(name, box, held)}",
            hint=f'combine the replicas before: T.allreduce(T.view({name}, layout=T.Replica)) in T.Scale("{level}")',
            where=[w for w in (reads, wrote and Location(wrote.file, wrote.line, "written differently here")) if w],
        )
        error.located = True
        return error

    def ends(self) -> None:
        program, compiler = self._run.program, self._run.compiler
        for i, parameter in enumerate(program.parameters):
            for view in parameter.views:
                if view.layout.is_replica and parameter.buffer is not None:
                    slot = compiler.slot(parameter.buffer.data)
                    for group in _groups(self._run.root, view.level, slot):
                        _check_group(parameter.name, slot, view, group, i in self._run.written)


def _holders(unit: Unit, slot: int, version: int) -> Iterator[Unit]:
    """The units inside another one that hold the current version of its tile."""
    for child in unit.children.values():
        replica = child.replicas.get(slot)
        if replica is not None and replica.version == version:
            yield child
        yield from _holders(child, slot, version)


def different(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Elements in which two arrays differ by more than rounding: half of the type's digits, relative to the largest
    value."""
    if not is_float(one.dtype):
        return one != other
    left, right = one.astype(np.float64), other.astype(np.float64)
    scale = max(_largest(left), _largest(right))
    with np.errstate(invalid="ignore"):
        near = np.abs(left - right) <= math.sqrt(ml_dtypes.finfo(one.dtype).eps) * scale
    return ~(near | (left == right) | (np.isnan(left) & np.isnan(right)))


def _largest(values: np.ndarray) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0


def _part(tile: np.ndarray, array: np.ndarray, index: Any) -> np.ndarray:
    """The elements of a tile that an access to a view of it touches."""
    touched = np.zeros(tile.nbytes, bool)
    offset = array.__array_interface__["data"][0] - tile.__array_interface__["data"][0]
    np.ndarray(array.shape, bool, touched, offset, array.strides)[index] = True
    return touched[:: tile.itemsize].reshape(tile.shape)


def _box(chosen: np.ndarray) -> Box:
    places = np.nonzero(chosen)
    return [(int(axis.min()), int(axis.max()) + 1) for axis in places] if places[0].size else []


def _values(name: str, box: Box, held: dict[Unit, np.ndarray]) -> str:
    first = tuple(b for b, _ in box)
    values = ", ".join(f"{array[first]} on {unit.level} {unit.rank}" for unit, array in held.items())
    return f"{region_text(name, [(b, b + 1) for b in first])} is {values}"


def _groups(root: Unit, level: str, slot: int) -> Iterator[list[Unit]]:
    """Groups of units that own an instance of a buffer and differ only in their rank at a level."""
    groups: dict[Any, list[Unit]] = {}
    for unit in owners(root, slot):
        groups.setdefault(tuple(step for step in unit.path() if step[0] != level), []).append(unit)
    yield from groups.values()


def _check_group(name: str, slot: int, view: View, group: Sequence[Unit], written: bool) -> None:
    """Raise DivergedReplicaError if the units of a group hold different values of a replicated parameter. `written`:
    whether the program writes it; if not, the arguments were different."""
    first = group[0].storage[slot]
    if written:
        did = "end with"
        hint = f'combine the replicas at the end: T.allreduce({name}) in T.Scale("{view.level}"), or view it with the '
        hint += "layout that it has"
    else:
        did = "were given"
        hint = f"pass the same values on every {view.level}; a tensor that each has for itself needs no view"
    for unit in group[1:]:
        box = _box(different(first, unit.storage[slot]))
        if box:
            held = {group[0]: first, unit: unit.storage[slot]}
            raise DivergedReplicaError(
                f"the {view.level}s {did} different values of {region_text(name, box)}, of which each should hold "
                f"the same: {_values(name, box, held)}",
                hint=hint,
                where=view.where and Location(view.where.file, view.where.line, "viewed with T.Replica here"),
            )
