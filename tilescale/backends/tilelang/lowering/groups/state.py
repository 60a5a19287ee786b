# SPDX-License-Identifier: MIT
"""The units' parts of a phase's tiles: distributions, and the buffers of the parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.groups.distribution import TileDistributions, parallel_loops
from tilescale.backends.tilelang.lowering.groups.unit import UnitThreads
from tilescale.backends.tilelang.lowering.phase import Phase, Stage
from tilescale.backends.tilelang.ptx import WARP
from tilescale.hda import Level
from tilescale.program import ops


class GroupStage(Stage):
    """The stage of thread groups at work: the units' parts of a phase's tiles.

    Attributes:
        whole: the program, the unit around the others.
        stored: data variables of sums of which units need only a part (results.py).
        reducing: threads of the largest unit that reduces across its warps concurrently with siblings.
    """

    def __init__(self, phase: Phase):
        super().__init__(phase)
        self.whole = UnitThreads("", 0, 0, self.launch.thread_count)
        levels = {data: self.target.machine.level(name) for data, name in self.launch.owners}
        self._owners = {data: level for data, level in levels.items() if level.kind == "thread_group"}
        self._buffers = {buffer.data: buffer for buffer in self.launch.buffers}
        self._made: dict[tuple, ir.Buffer] = {}
        self.stored: set[ir.Var] = set()
        self.reducing = 0

    @cached_property
    def distributions(self) -> TileDistributions:
        """Distributions of the program's tiles."""
        return TileDistributions(self, self._owners)

    @property
    def thread(self) -> ir.Var:
        """The index of a thread, along the first axis."""
        return self.launch.thread_vars[0][0]

    def level(self, name: str) -> Level:
        return self.target.machine.level(name)

    def level_of(self, stmt: ir.Stmt) -> Level | None:
        """The level whose units execute a statement of the program."""
        if isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == ops.SCALE:
            level = self.level(str(stmt.value.value))
            return level if level.kind == "thread_group" else None
        if not (isinstance(stmt, ir.Evaluate | ir.BufferStore) or parallel_loops(stmt)):
            return None
        held = self.distributions.touched(stmt)
        return held.level if held is not None else None

    def reduces(self, unit: UnitThreads) -> None:
        """A unit reduces across its warps, at the same time as its siblings."""
        if unit.threads > WARP and unit.threads < self.whole.threads:
            self.reducing = max(self.reducing, unit.threads)

    # -- tiles -------------------------------------------------------------------------------------------------------

    def owner(self, buffer: ir.Buffer) -> Level | None:
        """The level whose units own an instance of a tile each; None if the program does."""
        return self._owners.get(buffer.data)

    def tile(self, data: ir.Var) -> ir.Buffer | None:
        """The program's tile behind a data variable."""
        return self._buffers.get(data)

    def owned(self, data: ir.Var) -> ir.Buffer | None:
        """The tile behind a data variable, if units own it."""
        return self._buffers[data] if data in self._owners else None

    def make(self, key: tuple, name: str, shape: Sequence[int], dtype: str, scope: str) -> ir.Buffer:
        """The tile that stands for a key: made at its first use."""
        if key not in self._made:
            number = sum(buffer.name.rpartition("_")[0] == name for buffer in self._made.values())
            self._made[key] = tir.local_buffer(f"{name}_{number}" if number else name, list(shape), dtype, scope)
            self.tiles.append(self._made[key])
        return self._made[key]

    def copy_of(self, buffer: ir.Buffer, unit: UnitThreads) -> ir.Buffer:
        """A unit's part of a tile: its copy or share, or its instance of a tile that units own."""
        held = self.distributions.of(buffer)
        level = held.level if held is not None else self.owner(buffer)
        assert level is not None, f"{buffer.name} is a tile of the whole program"
        holder = unit if level.threads == 1 else unit.inside(level.name)
        shape = [ir.integer(n) for n in buffer.shape]
        if held is not None and held.axis is not None:
            shape[held.axis] //= held.count
        scope = buffer.scope()
        if scope == "shared.barrier":
            raise self.unsupported(f"barriers {buffer.name!r} that units own; allocate them outside T.Scale")
        if level.threads == 1:
            scope = "local"
        return self.make((buffer.data, holder.name), f"{buffer.name}{holder.name}", shape, str(buffer.dtype), scope)

    def whole_of(self, buffer: ir.Buffer, unit: UnitThreads, *, gathered: bool = False) -> ir.Buffer:
        """All of a fragment that units hold as shares, on a unit: there after a T.all_gather of the shares. Raises
        UnsupportedError: nothing has gathered it."""
        held = self.distributions.of(buffer)
        assert held is not None
        key = ("whole", buffer.data, unit.inside(held.level.name).name)
        if not gathered and key not in self._made:
            raise self.unsupported(
                f"a {held.level.name} names all of {buffer.name!r}, which is held {held}, before T.all_gather of the "
                "shares"
            )
        shape = [ir.integer(n) for n in buffer.shape]
        return self.make(key, f"{buffer.name}_whole{unit.name}", shape, str(buffer.dtype), buffer.scope())

    def exclusive(self) -> tuple[tuple[str, ...], ...]:
        """The units' parts of the same tile in registers, by name; a name that the user has given too may be another
        tile."""
        given = {buffer.name for buffer in self._buffers.values()}
        groups: dict[tuple, list[str]] = {}
        for (*tile, unit), buffer in self._made.items():
            if isinstance(unit, str) and buffer.scope().startswith("local"):
                groups.setdefault(tuple(tile), []).append(buffer.name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1 and given.isdisjoint(names))

    def held_in_words(self) -> dict[ir.Var, str]:
        """Descriptions of the distributions of tiles."""
        held = {data: f"held {distribution}" for data, distribution in self.distributions.held.items()}
        return {**{data: f"a tile of each {level.name}" for data, level in self._owners.items()}, **held}
