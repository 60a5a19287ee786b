# SPDX-License-Identifier: MIT
"""Reductions over threads of a program: `T.tvm_thread_allreduce` under the `T.attr` that names a combination."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import ThreadReduction
from tilescale.backends.emulator.execute.frame import Frame, spread
from tilescale.backends.emulator.interpret.abstract import forgotten
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.backends.emulator.numerics import convert
from tilescale.backends.emulator.operations.pointers import pointed
from tilescale.errors import UsageError


@operation(tl.TVM_THREAD_ALLREDUCE)
def _allreduce(compiler: Compiler, call: ir.Call) -> Closure:
    if compiler.reduction is None:
        raise UsageError(
            "T.tvm_thread_allreduce outside of a combination",
            hint='write it in `with T.attr(T.comm_reducer(lambda x, y: x + y, [zero]), "reduce_scope", ...)`',
        )
    made = ThreadReduction.of(call)
    values, takes_part = [compiler.expr(v) for v in made.values], compiler.expr(made.takes_part)
    results = [pointed(compiler, target) for target in made.results]
    over = [compiler.expr(index) for index in made.over]
    combination = _Combination(compiler, compiler.reduction)
    if not compiler.data:
        return forgotten(results)

    def run(frame: Frame) -> None:
        active = spread(takes_part(frame), frame) != 0
        pairs = zip(values, combination.neutral, strict=True)
        brought = [np.where(active, spread(value(frame), frame), neutral(frame)) for value, neutral in pairs]
        for axis in _axes([spread(index(frame), frame) for index in over], combination.shape):
            brought = combination.fold(frame, brought, axis)
        for target, value in zip(results, brought, strict=True):
            target.store(frame, convert(value, target.home.dtype))

    return run


class _Combination:
    """The combination of two threads' values; each may be a tuple.

    Attributes:
        neutral: the value of threads that take no part.
        shape: the threads of a program, the slowest axis first.
    """

    def __init__(self, compiler: Compiler, reduction: Any):
        self.neutral = [compiler.expr(e) for e in reduction.identity_element]
        self.shape = compiler.launch.threads[::-1]
        self._left, self._right = ([compiler.slot(v) for v in side] for side in (reduction.lhs, reduction.rhs))
        self._combined = [compiler.expr(e) for e in reduction.result]

    def fold(self, frame: Frame, brought: list[np.ndarray], axis: int) -> list[np.ndarray]:
        """The combined values of all threads along an axis, in their order; each of these threads gets the result."""
        work = frame.fork(frame.unit, None)
        work.mask = None
        lines = [np.moveaxis(value.reshape(self.shape), axis, 0) for value in brought]
        work.space = lines[0].shape[1:]
        total = [line[0] for line in lines]
        for step in range(1, self.shape[axis]):
            for slot, value in zip(self._left, total, strict=True):
                work.slots[slot] = value
            for slot, line in zip(self._right, lines, strict=True):
                work.slots[slot] = line[step]
            total = [combined(work) for combined in self._combined]
        pairs = zip(total, lines, strict=True)
        return [np.moveaxis(np.broadcast_to(value, line.shape), 0, axis).reshape(-1) for value, line in pairs]


def _axes(indices: list[np.ndarray], shape: tuple[int, ...]) -> list[int]:
    """The axes of the threads, the slowest first, that some thread indices run along."""
    grid = np.indices(shape).reshape(len(shape), -1)
    return [axis for axis, along in enumerate(grid) if shape[axis] > 1 and any((i == along).all() for i in indices)]
