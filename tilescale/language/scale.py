# SPDX-License-Identifier: MIT
"""`T.Scale`, `T.rank`, `T.size`: which units run what, and which of them a unit is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tilelang_core import ir, stock, trace
from tilescale.errors import PhaseError, UsageError, one
from tilescale.hda import Level
from tilescale.language.context import Context, OpenScale, here
from tilescale.program.ops import RANK, SCALE


@trace.scope_factory(values=2)
@contextlib.contextmanager
def Scale(level: str) -> Iterator[Sequence[Any]]:  # noqa: N802 - a name of the language
    """Run the statements inside once on every unit of a level: `with T.Scale("device") as (rank, size):`.

    Scales nest inwards. Naming a coarser level inside a finer one does not change the executing unit: it selects the
    ranks and the network that `T.copy(dst=)`, `T.signal`, `T.barrier` and the collectives refer to. In a traced
    function `as rank, size:` means the same as `as (rank, size):`.

    Args:
        level: a level of the machine that the launch includes.

    Yields:
        rank and size: the unit's number among its siblings and how many they are.

    Raises:
        UnknownLevelError: the machine does not describe the level.
        LevelNotLaunchedError: the launch does not include it.
        PhaseError: a level of threads directly inside a scale of clusters, each of which is many programs.
        ShapeError: the program's threads do not divide into units of the level.
        UsageError: outside a launch; both values under one name, used as a number.
    """
    context = Context("T.Scale")
    found = context.level(level)
    if found.kind == "thread_group" and context.executing.kind == "cluster":
        raise _many_programs(context, f"T.Scale({level!r})")
    before, executing = context.executing, context.enters(found)
    # A value computed by a unit of a finer level is not defined for the unit around it; a device outlives its phases.
    ends_names = context.finer(executing, before) or executing.kind == "cluster" != before.kind
    context.scales.append(OpenScale(found, executing))
    with trace.scoped(SCALE, level, ends_names=ends_names):
        try:
            yield _Both((_rank(context, found), _size(context, found)))
        finally:
            context.scales.pop()


def rank(level: str) -> Any:
    """The number of the executing unit (or of the unit around it) among its siblings at `level`, an int32 expression.

    For a level finer than the executing one it is the number of the executing thread's unit.

    Raises:
        UnknownLevelError, LevelNotLaunchedError, ShapeError, UsageError: as for `T.Scale`.
        PhaseError: a finer level where a device or a cluster executes as one unit, which holds many of it.
    """
    context = Context("T.rank")
    return _rank(context, context.level(level))


def size(level: str) -> Any:
    """Number of siblings of a unit of `level`, itself included: an int if it is known, else an int32 expression.

    Raises:
        UnknownLevelError, LevelNotLaunchedError, ShapeError, UsageError: as for `T.Scale`.
    """
    context = Context("T.size")
    return _size(context, context.level(level))


class _Both(Sequence):
    """A rank and a size bound to one name. Arithmetic with the pair is an error: `rank == 0` would be false."""

    def __init__(self, both: tuple[Any, Any]):
        self._both = both

    def __getitem__(self, index: Any) -> Any:
        return self._both[index]

    def __len__(self) -> int:
        return len(self._both)

    def __repr__(self) -> str:
        return "a rank and a size under one name"

    def _refused(self, *_: Any) -> Any:
        raise UsageError(
            "T.Scale gives a rank and a size, here under one name",
            hint="write `with T.Scale(level) as (rank, size):`, or `as (rank, _):`",
            where=here(),
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused
    __hash__ = __index__ = __int__ = __float__ = __bool__ = __neg__ = _refused
    __tvm_ffi_object__ = property(_refused)
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = _refused


def _size(context: Context, level: Level) -> Any:
    extent = context.extent(level)
    return extent if isinstance(extent, int | ir.Var) else trace.bind(f"{level.name}_size", extent)


def _rank(context: Context, level: Level) -> Any:
    if context.finer(level, context.executing):
        if context.finer(context.program, context.executing):
            raise _many_programs(context, f"T.rank({level.name!r})")
        return trace.bind(f"{level.name}_rank", _linear_thread(context) // level.threads % context.extent(level))
    return trace.bind(f"{level.name}_rank", trace.call(RANK, level.name, dtype="int32"))


def _linear_thread(context: Context) -> ir.PrimExpr:
    extents = context.thread_extents
    x, y, z = stock.get_thread_bindings()
    return x if extents[1:] == [1, 1] else x + extents[0] * (y + extents[1] * z)


def _many_programs(context: Context, what: str) -> PhaseError:
    return PhaseError(
        f"{what} where {one(context.executing.name)} executes as one unit, which holds many of level "
        f"{context.program.name!r}",
        hint=f"write it inside T.Scale({context.program.name!r})",
        where=here(),
    )
