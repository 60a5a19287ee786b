# SPDX-License-Identifier: MIT
"""Where in the machine the statement that is being traced runs: the launch, the scales around it, its units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, trace
from tilescale.errors import LevelNotLaunchedError, Location, ShapeError, TileScaleError, UsageError
from tilescale.hda import Level, Machine
from tilescale.hda.current import current_machine
from tilescale.program.ops import EXTENT


def here(what: str = "") -> tuple[Location, ...]:
    """The user's line, as the place of an error."""
    found = trace.location()
    return (Location(*found, what),) if found else ()


def require_builder(name: str) -> None:
    """Raise UsageError unless a function is being traced."""
    if trace.builder() is None:
        raise UsageError(
            f"{name} was called outside a traced function",
            hint="use it inside a function decorated with @T.prim_func, @T.macro or @tilescale.jit",
        )


def plain(extent: Any) -> Any:
    """A Python int for a constant expression, the expression itself otherwise."""
    value = ir.constant(extent)
    return extent if value is None else value


def shape_of(buffer: ir.Buffer) -> list[Any]:
    """A buffer's shape with constants as ints."""
    return [plain(n) for n in buffer.shape]


@dataclass(frozen=True)
class Scale:
    """One open `T.Scale`: the level it names and the level that executes inside it."""

    level: Level
    executing: Level


class Context:
    """The launch and the open scales of the current trace.

    Levels nest inwards: a scale that names a finer level than the executing one makes its units execute; one that
    names a coarser level only selects whose ranks and which network is meant.
    """

    def __init__(self) -> None:
        frame = trace.launch()
        if frame is None:
            raise UsageError(
                "this needs a launch around it", hint="write it inside `with T.Kernel(...)`", where=here()
            )
        self.frame = frame
        self.machine: Machine = current_machine()
        self.scales: list[Scale] = trace.state().setdefault("scales", [])

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
    def selected(self) -> Level | None:
        """The level that the innermost scale names."""
        return self.scales[-1].level if self.scales else None

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
        if self.extent(level) is None:
            raise LevelNotLaunchedError(
                f"level {name!r} is not part of this launch, which has {self._launched_text()}",
                hint=f"launch it: T.Kernel({name}=..., ...)",
                where=here(),
            )
        return level

    def _launched_text(self) -> str:
        return ", ".join(repr(x.name) for x in self.machine.levels if self.extent(x) is not None)

    def finer(self, a: Level, b: Level) -> bool:
        """Whether level a lies below level b."""
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
    def threads(self) -> int:
        """Hardware threads of one program."""
        return math.prod(int(n) for n in self.frame.get_thread_extents())

    @property
    def cluster(self) -> int:
        """Programs in one cluster; 1 without clusters."""
        return int(self.frame.get_cluster_size())

    @property
    def grid(self) -> list[Any]:
        """Programs along each axis of the grid."""
        return [plain(self.frame.get_block_extent(dim)) for dim in range(len(self.frame.get_block_bindings()))]

    def extent(self, level: Level) -> Any | None:
        """How many units of a level each unit of the next launched one has; None if the launch does not include it.

        Raises:
            ShapeError: the threads of a program do not divide among units of a lanes level.
        """
        if level.kind == "unit":
            note = self.frame.get_launch_annotation(EXTENT + level.name)
            return None if note is None else plain(note)
        if level.kind == "cluster":
            if self.cluster == 1:
                return None
            return math.prod(plain(n) for n in self.grid) // self.cluster
        if level.kind == "program":
            return self.cluster if self.cluster > 1 else math.prod(self.grid)
        return self._lanes(level)

    def _lanes(self, level: Level) -> int:
        inside = self.threads
        for scale in self.scales:
            if scale.executing.kind == "lanes" and self.finer(level, scale.executing):
                inside = scale.executing.threads
        if inside % level.threads:
            raise ShapeError(
                f"{inside} threads do not divide into units of level {level.name!r}, which have {level.threads} each",
                hint=f"launch a multiple of {level.threads} threads",
                where=here(),
            )
        return inside // level.threads

    def parent(self, level: Level) -> Level | None:
        """The next coarser level of the launch, the one whose unit holds the siblings of `level`."""
        coarser = [x for x in self.machine.levels[self.machine.index(level.name) + 1 :] if self.extent(x) is not None]
        return coarser[0] if coarser else None
