# SPDX-License-Identifier: MIT
"""Random numbers in parallel loops: the thread of each iteration, and the order in which it draws.

Before: a loop's body is evaluated once, over all iterations. Where an iteration draws several numbers, each evaluation
is of the iterations that all threads execute at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir
from tilelang_core.layouts import TileLayout
from tilelang_core.random_draws import CALLS, RandomDraws, random_draws
from tilescale.backends.base import text_target
from tilescale.backends.emulator.execute.frame import Frame, active, spread
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.errors import UnsupportedError
from tilescale.program.fragments import ThreadDistribution
from tilescale.program.parallel_loops import loops_of

Vectors = Callable[[int, np.ndarray], np.ndarray]
"""Draws of some lanes for each thread of a mask, shape (lanes, threads)."""


@dataclass(frozen=True)
class DrawOrder:
    """The order in which the threads of a program execute a nest of parallel loops that draws.

    Attributes:
        thread: of each iteration; `position`, among those of its thread.
        lanes: iterations of a thread that draw at the same time.
        in_rounds: whether an iteration draws several numbers.
    """

    thread: Closure
    position: Closure
    lanes: int
    in_rounds: bool

    @classmethod
    def of(cls, compiler: Compiler, call: ir.Call) -> DrawOrder:
        """The order of the nest that is being compiled, which a call draws in. Raises UnsupportedError: it is not
        known."""
        launch, step = compiler.launch, compiler.step
        calls = ir.nodes(step, lambda node: ir.op_name(node) in CALLS)
        inner = [stmt for stmt in ir.statements(loops_of(step)[-1].body) if isinstance(stmt, ir.For | ir.While)]
        in_rounds = len(calls) > 1 or bool(inner)
        alone = compiler.executing == compiler.machine.program_level and not compiler.threads_apart
        if alone and launch.thread_count == launch.threads[0]:
            if (known := draws_of(compiler).loops.get(call)) and (parts := _parts(compiler, known.layout)):
                return cls(*parts, known.lanes, in_rounds)
            spread_out = ThreadDistribution.of(step, launch.thread_count, ())
            if spread_out is not None and spread_out.lengths == (1,):
                return cls(*_one_by_one(launch.thread_count), 1, in_rounds)
        raise UnsupportedError(
            "random numbers in T.Parallel: which thread draws for which iteration is up to TileLang",
            hint="draw in a loop of each thread (for i in T.serial(...)), or outside of branches between threads, for "
            "tiles of at least as many elements as threads",
        )

    def run(self, body: Closure, frame: Frame) -> None:
        """Execute the body for all iterations of the frame's space."""
        if not self.in_rounds:
            body(frame)
            return
        rounds = spread(self.position(frame), frame) // self.lanes
        for number in range(int(rounds.max()) + 1):
            frame.mask, frame.dead, frame.broken = rounds == number, None, None
            body(frame)

    def drawn(self, frame: Frame, draw: Vectors) -> np.ndarray:
        """A number for each active iteration: a thread draws for its iterations in order."""
        items = np.flatnonzero(active(frame))
        threads, places = (spread(part(frame), frame).reshape(-1)[items] for part in (self.thread, self.position))
        order = np.lexsort((places, threads))
        items, threads = items[order], threads[order]
        rank = np.arange(items.size) - np.searchsorted(threads, threads)
        counts = np.bincount(threads, minlength=frame.threads)
        rows = [draw(self.lanes, counts > first) for first in range(0, int(counts.max(initial=0)), self.lanes)]
        values = np.concatenate(rows)
        found = np.zeros(frame.space, values.dtype)
        found.reshape(-1)[items] = values[rank, threads]
        return found


def _parts(compiler: Compiler, layout: TileLayout) -> tuple[Closure, Closure] | None:
    """The thread and the position of an iteration by the layout of a nest; None of a nest that begins elsewhere than
    at 0."""
    nest = loops_of(compiler.step)
    if len(layout.indices) < len(nest):  # TileLang leaves out loops of one iteration
        nest = [loop for loop in nest if ir.constant(loop.extent) != 1]
    if layout.thread is None or len(layout.indices) != len(nest) or any(ir.constant(loop.min) != 0 for loop in nest):
        return None
    names = dict(zip(layout.indices, [loop.loop_var for loop in nest], strict=True))
    thread, position = (ir.substitute(part, names) for part in (layout.thread, layout.position))
    return compiler.expr(thread), compiler.expr(position)


def _one_by_one(threads: int) -> tuple[Closure, Closure]:
    """The threads and positions of iterations that threads execute one at a time, in order."""

    def numbers(frame: Frame) -> np.ndarray:
        return np.arange(int(np.prod(frame.space))).reshape(frame.space)

    return lambda frame: numbers(frame) % threads, lambda frame: numbers(frame) // threads


def draws_of(compiler: Compiler) -> RandomDraws:
    """The draws of a plain program after lowering; none of another program."""
    target: Any = text_target(compiler.machine)
    if compiler.program.is_hierarchical or target is None:
        return RandomDraws()
    return random_draws(compiler.program.func, target)
