# SPDX-License-Identifier: MIT
"""Position of the traced statement in the machine: the launch, the scales around it, its units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, trace
from tilelang_core.ir import plain
from tilescale.errors import LevelNotLaunchedError, Location, ShapeError, TileScaleError, UsageError
from tilescale.hda import Level, Machine
from tilescale.hda.current import current_machine
from tilescale.program.ops import EXTENT


class NotTracedError(UsageError, trace.JITNoBuilderError):
    """A construct used in plain Python. TileLang's error too: by it `jit` sees that a function is in eager style."""


def here(what: str = "") -> tuple[Location, ...]:
    """The user's line, as the place of an error; inside a macro also the lines that called it."""
    places = trace.locations()
    return tuple(Location(*place, what if i == 0 else "called here") for i, place in enumerate(places))


def require_trace(name: str) -> None:
    """Raise UsageError unless a function is being traced."""
    if not trace.is_tracing():
        raise NotTracedError(
            f"{name} was called outside a traced function",
            hint="use it inside a function decorated with @T.prim_func, @T.macro or @tilescale.jit",
        )


def shape_of(buffer: ir.Buffer) -> list[Any]:
    """A buffer's shape with constants as ints."""
    return [plain(n) for n in buffer.shape]


def extents_of(region: ir.Call) -> list[Any]:
    """A region's extents with constants as ints."""
    return [plain(n) for n in ir.region_parts(region)[2]]


@dataclass(frozen=True)
class OpenScale:
    """One open `T.Scale`: the level it names and the level that executes inside it."""

    level: Level
    executing: Level


class Context:
    """The launch and the open scales of the current trace.

    Levels nest inwards: a scale that names a finer level than the executing one makes its units execute; one that
    names a coarser level only selects whose ranks and which network is meant.

    Args:
        name: the construct that asks, for error messages.

    Raises:
        UsageError: no function is being traced, or no launch is open.
    """

    def __init__(self, name: str) -> None:
        require_trace(name)
        frame = trace.launch()
        if frame is None:
            raise UsageError(
                f"{name} needs a launch around it", hint="write it inside `with T.Kernel(...)`", where=here()
            )
        self.name = name
        self.frame = frame
        self.machine: Machine = current_machine()
        self.scales: list[OpenScale] = trace.state().setdefault("scales", [])

    # -- levels -------------------------------------------------------------------------------------------------------

    @property
    def program(self) -> Level:
        """The level whose units run tile programs."""
        return self.machine.program_level

    @property
    def executing(self) -> Level:
        """The level whose units execute the current statement."""
        return self.scales[-1].executing if self.scales else self.program

    @property
    def in_unit_phase(self) -> bool:
        """Whether the statement runs once per unit above the programs, where no threads run."""
        return self.executing.kind == "unit" and self.executing != self.program

    def selected(self) -> Level:
        """The level that the innermost scale names. Raises UsageError: no scale is open."""
        if not self.scales:
            launched = ", ".join(repr(x.name) for x in reversed(self.machine.levels) if self._launched(x))
            raise UsageError(
                f"{self.name} needs a T.Scale around it",
                hint=f"write it inside `with T.Scale(level):`, for one of {launched}",
                where=here(),
            )
        return self.scales[-1].level

    def level(self, name: str) -> Level:
        """A level of the machine that is part of this launch.

        Raises:
            UnknownLevelError: the machine has no such level.
            LevelNotLaunchedError: the launch does not include it.
        """
        try:
            level = self.machine.level(name)
        except TileScaleError as error:
            raise error.at(*here()) from None
        if not self._launched(level):
            launched = ", ".join(repr(x.name) for x in self.machine.levels if self._launched(x))
            raise LevelNotLaunchedError(
                f"level {name!r} is not part of this launch, which has {launched}",
                hint=self._otherwise(level),
                where=here(),
            )
        return level

    def _otherwise(self, level: Level) -> str:
        if level.kind == "unit" and self.finer(level, self.machine.tensor_level):
            return f"its units own no tensors, and programs run on any of them: name {self.program.name!r}"
        return f"launch it: T.Kernel({level.name}=..., ...)"

    def _launched(self, level: Level) -> bool:
        if level.kind == "unit":
            return self.frame.get_launch_annotation(EXTENT + level.name) is not None
        return level.kind != "cluster" or self.cluster > 1

    def finer(self, a: Level, b: Level) -> bool:
        """Whether level a is below level b."""
        return self.machine.index(a.name) < self.machine.index(b.name)

    def enters(self, level: Level) -> Level:
        """The level that executes inside a scale of `level` opened here."""
        if self.scales and not self.finer(level, self.executing):
            return self.executing
        if level.kind != "unit":
            return level
        # Whole tensors belong to the units of the tensor level: a phase of any coarser level runs on those.
        tensor = self.machine.tensor_level
        return tensor if self.finer(self.program, tensor) else self.program

    # -- how many -----------------------------------------------------------------------------------------------------

    @property
    def thread_extents(self) -> list[int]:
        """Threads of one program along x, y and z."""
        extents = self.frame.thread_extents
        return [int(n) for n in extents] if extents is not None else [trace.DEFAULT_THREADS, 1, 1]

    @property
    def threads(self) -> int:
        """Hardware threads of one program."""
        return math.prod(self.thread_extents)

    @property
    def cluster(self) -> int:
        """Programs in one cluster; 1 without clusters."""
        return int(self.frame.get_cluster_size())

    @property
    def grid(self) -> list[Any]:
        """Programs along each axis of the grid."""
        return [plain(n) for n in self.frame.grid_extents]

    def extent(self, level: Level) -> Any:
        """Number of units of a launched level in each unit of the next launched one: an int or an expression. Raises
        ShapeError: the threads of a program do not divide among units of a level of thread groups."""
        if level.kind == "unit":
            return plain(self.frame.get_launch_annotation(EXTENT + level.name))
        if level.kind == "thread_group":
            return self._thread_groups(level)
        programs = plain(math.prod(self.grid))
        if level.kind == "cluster":
            return plain(programs // self.cluster)
        return self.cluster if self.cluster > 1 else programs

    def _thread_groups(self, level: Level) -> int:
        inside, each = self.threads, level.threads or 1
        for scale in self.scales:
            if scale.executing.kind == "thread_group" and self.finer(level, scale.executing):
                inside = scale.executing.threads or inside
        if inside % each:
            raise ShapeError(
                f"{inside} threads do not divide into units of level {level.name!r}, which have {each} each",
                hint=f"launch a multiple of {each} threads",
                where=here(),
            )
        return inside // each

    def parent(self, level: Level) -> Level | None:
        """The level whose one unit holds the siblings of `level`; None for the whole machine."""
        coarser = self.machine.levels[self.machine.index(level.name) + 1 :]
        # A launch that names no unit level runs on one unit that owns tensors.
        return next((x for x in coarser if self._launched(x) or x == self.machine.tensor_level), None)
