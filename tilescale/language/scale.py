# SPDX-License-Identifier: MIT
"""`T.Scale`, `T.rank`, `T.size`: which units run what, and which of them a unit is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tilelang_core import ir, stock, trace
from tilescale.errors import PhaseError, UsageError
from tilescale.hda import Level
from tilescale.language.context import Context, here, require_builder
from tilescale.language.context import Scale as OpenScale
from tilescale.program.ops import RANK, SCALE


@trace.scope_factory
@contextlib.contextmanager
def Scale(level: str) -> Iterator[tuple[Any, Any]]:  # noqa: N802 - a name of the language
    """Run the statements inside once on every unit of a level: `with T.Scale("device") as (rank, size):`.

    Scales nest inwards. Naming a coarser level inside a finer one does not change who executes: it selects whose ranks
    and which network `T.copy(dst=)`, `T.signal`, `T.barrier` and the collectives speak of.

    Args:
        level: a level of the machine that the launch includes.

    Yields:
        rank and size: the unit's number among its siblings and how many they are.

    Raises:
        UnknownLevelError: the machine does not describe the level.
        LevelNotLaunchedError: the launch does not include it.
        ShapeError: the program's threads do not divide into units of the level.
    """
    require_builder("T.Scale")
    context = Context()
    found = context.level(level)
    entry = OpenScale(found, context.enters(found))
    context.scales.append(entry)
    with trace.scoped(SCALE, level):
        try:
            yield _rank(context, found), _size(context, found)
        finally:
            context.scales.remove(entry)


def rank(level: str) -> Any:
    """The number of the executing unit (or of the unit around it) among its siblings at `level`, an int32 expression.

    For a level finer than the executing one it is the number of the executing thread's unit.

    Raises:
        UnknownLevelError, LevelNotLaunchedError: as for `T.Scale`.
    """
    require_builder("T.rank")
    context = Context()
    return _rank(context, context.level(level))


def size(level: str) -> Any:
    """How many siblings a unit of `level` has, itself included: an int if it is known, else an int32 expression.

    Raises:
        UnknownLevelError, LevelNotLaunchedError: as for `T.Scale`.
    """
    require_builder("T.size")
    context = Context()
    return _size(context, context.level(level))


def _size(context: Context, level: Level) -> Any:
    extent = context.extent(level)
    return extent if isinstance(extent, int | ir.Var) else trace.bind(f"{level.name}_size", extent)


def _rank(context: Context, level: Level) -> Any:
    if level.kind == "lanes" and context.finer(level, context.executing):
        if context.executing.kind == "unit":
            raise PhaseError(
                f"T.rank({level.name!r}) in a phase of level {context.executing.name!r}, where no threads run",
                hint=f"write it inside T.Scale({context.program.name!r})",
                where=here(),
            )
        return trace.bind(f"{level.name}_rank", _linear_thread(context) // level.threads % context.extent(level))
    return trace.bind(f"{level.name}_rank", trace.call(RANK, level.name, dtype="int32"))


def _linear_thread(context: Context) -> ir.PrimExpr:
    extents = [int(n) for n in context.frame.get_thread_extents()]
    x, y, z = stock.get_thread_bindings()
    linear = x if extents[1:] == [1, 1] else x + extents[0] * (y + extents[1] * z)
    return linear


def open_level(context: Context, name: str) -> Level:
    """The level that the innermost scale selects.

    Raises:
        UsageError: no scale is open.
    """
    if context.selected is None:
        raise UsageError(
            f"{name} needs a level to speak of", hint='write it inside `with T.Scale("..."):`', where=here()
        )
    return context.selected
