# SPDX-License-Identifier: MIT
"""Fragments that stock TileLang spreads over the threads of a unit: each element is one thread's, in order, and each
thread has equally many.

Why: a statement that touches an element of a fragment is executed by the thread that holds it. A fragment is spread if
it is only touched alone, element by element, in order, and each thread gets equally many elements: TileLang replicates
fragments with fewer elements than threads, and those that it has to broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import accesses, ir, tl
from tilelang_core.formulas import formula, one
from tilelang_core.layouts import TileLayout
from tilescale.program.parallel_loops import LENGTHS, VECTOR_BITS, is_fragment, lengths_of, loops_of, vector_lengths


def steps(stmt: ir.Stmt, threads: int, unit: Callable[[ir.Stmt], int | None]) -> Iterator[tuple[ir.Stmt, int]]:
    """Statements with none inside but elements of them, and how many threads execute each.

    Args:
        threads: those that execute the statement.
        unit: the number of threads that execute the body of a statement; None for as many as execute the statement.
    """
    if isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
        yield stmt, threads
        return
    inner = list(ir.children(stmt))
    if not inner:
        yield stmt, threads
    for child in inner:
        yield from steps(child, unit(stmt) or threads, unit)


def spread(steps: Iterable[tuple[ir.Stmt, int]]) -> frozenset[ir.Var]:
    """Data variables of the spread fragments of a phase, by all its steps."""
    found: dict[ir.Var, bool] = {}
    for step, threads in steps:
        fragments = [a for a in accesses.accesses_in(step) if is_fragment(a)]
        for access in fragments:
            data = access.buffer.data
            found[data] = found.get(data, True) and _is_spread(step, fragments, threads)
    return frozenset(data for data, is_even in found.items() if is_even)


def _is_spread(step: ir.Stmt, fragments: list[accesses.BufferAccess], threads: int) -> bool:
    """Whether a step touches one fragment, all of it in order, by vectors of which all threads have as many."""
    shape = ir.constants(fragments[0].buffer.shape)
    alone = all(a.buffer.data.same_as(fragments[0].buffer.data) for a in fragments)
    if shape is None or not alone or math.prod(shape) % threads:
        return False
    if not isinstance(step, ir.For):
        is_copy = isinstance(step, ir.Evaluate) and ir.op_name(step.value) in (tl.COPY, tl.FILL)
        return is_copy and all(map(is_whole, fragments))
    loops = loops_of(step)
    plain = not any(loop.annotations for loop in loops) and ir.constants(loop.extent for loop in loops) == shape
    return plain and all(_are(a.begins, [loop.loop_var for loop in loops]) for a in fragments)


def is_whole(access: accesses.BufferAccess) -> bool:
    shape = ir.constants(access.buffer.shape)
    begins, extents = ir.constants(access.begins or ()), ir.constants(access.extents or ())
    return shape is not None and not any(begins or [1]) and extents == shape


def _are(indices: tuple[Any, ...] | None, variables: list[ir.Var]) -> bool:
    return indices is not None and all(v.same_as(n) for v, n in zip(variables, indices, strict=True))


@dataclass(frozen=True)
class ThreadDistribution:
    """Distribution of a step over threads.

    Attributes:
        items: iterations of parallel loops, or elements of a tile that is copied, in row-major order.
        lengths: how many of them may be one vector, ascending from 1; item i is that of thread i // length % threads.
        shared: data variables of tiles in shared memory, where a tile is copied that one thread may move as a whole.
        held: the thread of each of them, where the layout of a fragment determines it.
    """

    items: int
    lengths: tuple[int, ...]
    shared: frozenset[ir.Var] = frozenset()
    held: tuple[int, ...] = ()

    @classmethod
    def of(cls, step: ir.Stmt, threads: int, spread: Collection[ir.Var]) -> ThreadDistribution | None:
        """The distribution of a step; None where something else decides. `spread` are data variables of spread
        fragments."""
        found, loops = accesses.accesses_in(step), loops_of(step)
        fragments = [access.buffer for access in found if is_fragment(access)]
        if fragments and all(buffer.data in spread for buffer in fragments):
            size, longest = math.prod(map(ir.integer, fragments[0].shape)), VECTOR_BITS // ir.bits(fragments[0].dtype)
            return cls(size, tuple(n for n in LENGTHS if n <= longest and size % (threads * n) == 0))
        if not loops and not fragments:
            return cls._of_copy(step, found, threads)
        lengths = vector_lengths(loops, found, threads) if loops else None
        return cls(math.prod(ir.integer(loop.extent) for loop in loops), tuple(lengths)) if lengths else None

    @classmethod
    def _of_copy(cls, step: ir.Stmt, found: list[accesses.BufferAccess], threads: int) -> ThreadDistribution | None:
        """The distribution of a copy between device and shared memory; None for another step, or one with an option."""
        if not isinstance(step, ir.Evaluate) or ir.op_name(step.value) != tl.COPY or step.value.annotations:
            return None
        shared = [access for access in found if ir.scope_kind(access.buffer) == "shared"]
        sizes = [ir.constants(access.extents or ()) for access in found]
        if len(shared) != 1 or len(found) != 2 or None in sizes:
            return None
        count, *others = {math.prod(extents or ()) for extents in sizes}
        lengths = tuple(lengths_of(count, found, threads))
        return None if others else cls(count, lengths, frozenset(access.buffer.data for access in shared))

    @classmethod
    def by_layout(cls, step: ir.Stmt, layouts: Mapping[ir.Var, TileLayout]) -> ThreadDistribution | None:
        """The distribution of a step that touches all of a fragment in order, by its layout; None if it replicates or
        has none."""
        loops = loops_of(step)
        copies = isinstance(step, ir.Evaluate) and ir.op_name(step.value) == tl.COPY
        extents = ir.constants(loop.extent for loop in loops) if not any(loop.annotations for loop in loops) else None
        for access in filter(is_fragment, accesses.accesses_in(step)):
            layout, shape = layouts.get(access.buffer.data), ir.constants(access.buffer.shape)
            in_order = extents == shape and _are(access.begins, [loop.loop_var for loop in loops])
            if layout is None or layout.thread is None or layout.replicated or shape is None:
                continue
            if in_order if loops else copies and is_whole(access):
                function = formula(layout.thread).function
                if function is not None:
                    indices = dict(zip(map(one, layout.indices), np.indices(shape), strict=True))
                    held = np.broadcast_to(function(indices), shape).reshape(-1)
                    return cls(held.size, (1,), held=tuple(held.tolist()))
        return None
