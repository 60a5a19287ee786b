# SPDX-License-Identifier: MIT
"""Distribution of the iterations of parallel loops over the threads of a unit, as stock TileLang does it.

A nest of parallel loops is one loop, its iterations numbered in row-major order. With vectors of n iterations and t
threads, iteration i is executed by thread i // n % t (`PlanLoopPartition` in TileLang's loop_partition.cc). TileLang
decides n from what the loop computes, so several lengths may be possible here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilelang_core import accesses, ir

VECTOR_BITS = 256
"""Bits of the widest load or store of a thread."""

LENGTHS = (1, 2, 4, 8, 16, 32, 64)
"""Lengths of vectors of such elements."""


def loops_of(nest: ir.Stmt) -> list[ir.For]:
    """The parallel loops of a nest, from the outermost one; none of another statement."""
    loops, stmt = [], nest
    while isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
        loops.append(stmt)
        stmt = stmt.body
    return loops


def is_fragment(access: accesses.BufferAccess) -> bool:
    """Whether an access is of a tile in registers; variables are not tiles."""
    return ir.scope_kind(access.buffer) == "fragment" and access.buffer.scope() != ir.VARIABLE


def vector_lengths(loops: Sequence[ir.For], found: Sequence[accesses.BufferAccess], threads: int) -> list[int] | None:
    """Numbers of iterations that a thread may execute at a time, ascending from 1; None where the layout of a fragment
    or an annotation decides which thread executes an iteration, or an extent is not a constant, or a loop does not
    begin at 0.

    TileLang takes the longest vector that leaves no more lanes without an iteration than single iterations do.

    Args:
        loops: a nest, from the outermost loop.
        found: all accesses in it.
    """
    extents, begins = ir.constants(loop.extent for loop in loops), ir.constants(loop.min for loop in loops)
    if extents is None or begins is None or any(begins):
        return None
    if any(loop.annotations for loop in loops) or any(map(is_fragment, found)):
        return None
    return lengths_of(math.prod(extents), found, threads)


def lengths_of(count: int, found: Sequence[accesses.BufferAccess], threads: int) -> list[int]:
    """The lengths for `count` iterations without other constraints on their distribution."""
    lanes = lambda length: -(-count // (threads * length)) * threads * length  # noqa: E731
    longest = VECTOR_BITS // min((ir.bits(str(access.buffer.dtype)) for access in found), default=VECTOR_BITS)
    return [length for length in LENGTHS if length <= longest and lanes(length) == lanes(1)]
