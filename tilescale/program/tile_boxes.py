# SPDX-License-Identifier: MIT
"""Elements of tensors that each program of a grid touches, as boxes: in terms of the grid's indices, and as numbers.

A box errs on the side of more elements. Along a dimension whose indices follow from memory, or from variables that have
no value before the launch, it is the whole tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.program.effects import Access, ProgramNames
from tilescale.program.grids import GridValues, UnknownValue
from tilescale.program.model import GridPhase, Launch
from tilescale.program.regions import BoundVariables


@dataclass(frozen=True)
class Boxes:
    """A box for each program of a grid.

    Attributes:
        shape: extents of the tensor; 1 along dimensions of unknown extent.
        begins, ends: bounds along each dimension, in terms of the grid's indices.
        first, last: the same as numbers, each (dimensions, programs).
    """

    shape: tuple[int, ...]
    begins: tuple[ir.PrimExpr, ...]
    ends: tuple[ir.PrimExpr, ...]
    first: np.ndarray
    last: np.ndarray

    @classmethod
    def everything(cls, programs: int) -> Boxes:
        """Boxes of programs that are not distinguished."""
        zero, one = np.zeros((1, programs), int), np.ones((1, programs), int)
        return cls((1,), (ir.IntImm("int32", 0),), (ir.IntImm("int32", 1),), zero, one)

    def is_like(self, other: Boxes) -> bool:
        """Whether another grid's boxes are the same."""
        return np.array_equal(self.first, other.first) and np.array_equal(self.last, other.last)

    def intersect(self, other: Boxes) -> np.ndarray:
        """Whether a box shares an element with one of another grid: (programs, programs of the other)."""
        begin = np.maximum(self.first[:, :, None], other.first[:, None, :])
        end = np.minimum(self.last[:, :, None], other.last[:, None, :])
        return (begin < end).all(axis=0)


class TileAccesses:
    """Accesses of a grid phase to device memory.

    Args:
        grid: values of the grid's indices.

    Attributes:
        of: for each tensor, or view of one, its accesses.
    """

    def __init__(self, phase: GridPhase, launch: Launch, names: ProgramNames, grid: GridValues):
        self.grid = grid
        self.inside = BoundVariables.of(phase.stmt)
        self.inside.ranges |= {var: (0, ir.IntImm("int32", launch.threads[axis])) for var, axis in launch.thread_vars}
        self.of: dict[ir.Var, list[Access]] = {}
        on_chip = {buffer.data for buffer in launch.buffers if buffer.scope() != "global"}
        for stmt in ir.statements(phase.stmt):
            for access in names.effects(stmt).accesses:
                if access.root not in on_chip and names.shared(access.root):
                    self.of.setdefault(access.root, []).append(access)

    def writes(self, root: ir.Var) -> bool:
        """Whether the grid writes a tensor that it touches."""
        return any(access.writes for access in self.of[root])

    def form(self, root: ir.Var) -> tuple[str, ...] | None:
        """Extents and type by which a tensor's elements are counted; None where accesses differ in it."""
        forms = {(*map(str, a.buffer.shape), str(a.buffer.dtype)) for a in self.of[root]}
        return forms.pop() if len(forms) == 1 else None

    def dimensions_at(self, root: ir.Var, var: ir.Var) -> set[int]:
        """The dimensions along which each access to a tensor is at the value of a variable alone."""
        return set.intersection(*({i for i, side in self._sides(a) if self._is_at(*side, var)} for a in self.of[root]))

    def _sides(self, access: Access) -> Iterator[tuple[int, tuple[Any, Any]]]:
        return enumerate(zip(access.begins or (), access.extents or (), strict=True))

    def _is_at(self, begin: Any, extent: Any, var: ir.Var) -> bool:
        return ir.constant(extent) == 1 and ir.same(self.inside.known(begin), var)

    def boxes(self, root: ir.Var, *, writes: bool) -> Boxes:
        """Smallest known boxes around the accesses to a tensor; with `writes`, around those that write."""
        accesses = [a for a in self.of[root] if a.writes or not writes]
        extents = [ir.constant(n) for n in accesses[0].buffer.shape]
        bounds = [self.inside.bounds(access) for access in accesses]
        sides = [self._side(extent, [b[i] for b in bounds]) for i, extent in enumerate(extents)]
        begins, ends, first, last = zip(*sides, strict=True)
        return Boxes(tuple(n or 1 for n in extents), begins, ends, np.stack(first), np.stack(last))

    def _side(self, extent: int | None, pairs: Sequence[tuple[Any, Any] | None]) -> tuple[Any, Any, Any, Any]:
        """Begin and end along a dimension, as expressions and as numbers."""
        known = [pair for pair in pairs if pair is not None]
        if extent is not None and len(known) == len(pairs):
            begin = functools.reduce(_least, (b for b, _ in known))
            end = functools.reduce(_greatest, (e for _, e in known))
            try:
                return begin, end, self._numbers(begin), self._numbers(end)
            except UnknownValue:
                pass
        zero, whole = ir.IntImm("int32", 0), ir.IntImm("int32", extent or 1)
        return zero, whole, self._numbers(zero), self._numbers(whole)

    def _numbers(self, expr: ir.PrimExpr) -> np.ndarray:
        return np.broadcast_to(np.asarray(self.grid.value(expr, {}), int), (self.grid.count,))


def _least(a: Any, b: Any) -> Any:
    return a if ir.same(a, b) else ir.simplify(ir.Min(a, b), {})


def _greatest(a: Any, b: Any) -> Any:
    return a if ir.same(a, b) else ir.simplify(ir.Max(a, b), {})
