# SPDX-License-Identifier: MIT
"""Lower scales inside a program (warpgroups, warps) to TileLang's exclusive branches on the thread index.

Why: stock TileLang runs a tile operation on the threads of the branch it stands in, but a fragment belongs to one range
of threads, and what it cannot place it drops in silence. Before: regions that every unit runs, and statements of the
program on tiles that units hold. After: runs of those as one clone for each unit in `if tx < n ... else ...`, with
barriers between them where they touch memory. A clone is a program of its own, collectives included (meetings.py).
Declines 2-D threads and more units than there are hardware barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.headers import header
from tilescale.backends.cuda.lowering.lanes.clones import Clone
from tilescale.backends.cuda.lowering.lanes.holdings import Holdings, accesses, parallel_loops, threads_of
from tilescale.backends.cuda.lowering.lanes.pipelines import Pipelines
from tilescale.backends.cuda.lowering.lanes.ranges import HARDWARE_BARRIERS, ThreadNames
from tilescale.backends.cuda.lowering.lanes.registers import marks
from tilescale.backends.cuda.lowering.lanes.results import Results
from tilescale.backends.cuda.lowering.lanes.sharing import Share
from tilescale.hda import Level
from tilescale.passes.structure import location
from tilescale.program import ops

if TYPE_CHECKING:
    from tilescale.backends.cuda.lowering.lower import GridLowering


@dataclass(frozen=True)
class Unit:
    """The threads that execute a clone: one unit of a lanes level, or the whole program, which is around the others.

    Attributes:
        number: its rank among `siblings` units.
    """

    level: str
    number: int
    begin: int
    threads: int
    siblings: int = 1
    around: Unit | None = None

    @property
    def name(self) -> str:
        """A name that no other unit of the program has."""
        outer = self.around.name if self.around is not None else ""
        return f"{outer}_{self.level}{self.number}" if self.around is not None else ""

    def at(self, level: str) -> Unit | None:
        """The unit of a level that this one is or lies in."""
        if self.level == level:
            return self
        return self.around.at(level) if self.around is not None else None

    def rank(self, level: str) -> int:
        """The rank of the unit of a level that this one is or lies in."""
        return self.inside(level).number

    def inside(self, level: str) -> Unit:
        """The unit of a level that this one is or lies in, where there is one."""
        found = self.at(level)
        assert found is not None, f"{self.name} lies in no {level}"
        return found

    def sibling(self, number: int) -> Unit:
        """The unit of the same level and surroundings with another rank."""
        begin = self.begin + (number - self.number) * self.threads
        return Unit(self.level, number, begin, self.threads, self.siblings, self.around)

    def units(self, level: Level) -> list[Unit]:
        """The units of a finer level inside this one."""
        threads = threads_of(level)
        count, begins = self.threads // threads, range(self.begin, self.begin + self.threads, threads)
        return [Unit(level.name, number, at, threads, count, self) for number, at in enumerate(begins)]


class LaneLowering:
    """The units inside one program.

    Attributes:
        used: whether any have been lowered.
        unit: the one whose clone is being lowered.
    """

    def __init__(self, lowering: GridLowering):
        self.lowering = lowering
        self.whole = Unit("", 0, 0, lowering.launch.thread_count)
        self.used = False
        self._owners = {
            data: level
            for data, level in ((d, lowering.target.machine.level(name)) for d, name in lowering.launch.owners)
            if level.kind == "lanes"
        }
        self._buffers = {buffer.data: buffer for buffer in lowering.launch.buffers}
        self._made: dict[tuple, ir.Buffer] = {}
        self._barriers: dict[tuple[int, int], int] = {}
        self._names = ThreadNames(lowering)
        self._conditions = 0
        self.unit: Unit | None = None
        self._reducing = 0
        self.pipelines = Pipelines(self)

    def survey(self, phase: ir.Stmt) -> None:
        """Find out what units hold in a phase."""
        self.holdings = Holdings(self.lowering, phase)
        self.pipelines.survey(phase)
        self.results = Results(self, phase)

    def first_thread(self) -> int:
        """The first thread of the unit whose clone is being lowered, or of the program."""
        return self.unit.begin if self.unit is not None else 0

    def unit_name(self) -> str:
        """The name of the unit whose clone is being lowered; none for the program."""
        return self.unit.name if self.unit is not None else ""

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

    def has(self, key: tuple) -> bool:
        """Whether there is a tile that stands for a key."""
        return key in self._made

    def make(self, key: tuple, name: str, shape: Sequence[int], dtype: str, scope: str) -> ir.Buffer:
        """The tile that stands for a key: made at its first use."""
        if key not in self._made:
            number = sum(buffer.name.rpartition("_")[0] == name for buffer in self._made.values())
            self._made[key] = tir.local_buffer(f"{name}_{number}" if number else name, list(shape), dtype, scope)
            self.lowering.tiles.append(self._made[key])
        return self._made[key]

    def copy_of(self, buffer: ir.Buffer, unit: Unit) -> ir.Buffer:
        """What a unit holds of a tile: its copy or share, or its instance of a tile that units own."""
        held = self.holdings.of(buffer)
        level = held.level if held is not None else self.owner(buffer)
        assert level is not None, f"{buffer.name} is a tile of the whole program"
        holder = unit if level.threads == 1 else unit.inside(level.name)
        shape = [ir.integer(n) for n in buffer.shape]
        if held is not None and held.axis is not None:
            shape[held.axis] //= held.count
        scope = buffer.scope()
        if scope == "shared.barrier":
            raise self.lowering.unsupported(f"barriers {buffer.name!r} that units own; allocate them outside T.Scale")
        if level.threads == 1:
            scope = "local"
        return self.make((buffer.data, holder.name), f"{buffer.name}{holder.name}", shape, str(buffer.dtype), scope)

    # -- statements of the program -----------------------------------------------------------------------------------

    def enter(self, node: ir.Stmt) -> ir.Stmt | None:
        """What replaces a statement of the program that units execute; None for all others."""
        if self.unit is not None or not isinstance(node, ir.Stmt):
            return None
        if isinstance(node, ir.Bind):
            self._names.note(node)
        if isinstance(node, ir.IfThenElse) and self._names.tell_apart(node.condition):
            return self._condition(node)
        if isinstance(node, ir.SeqStmt):
            return self._sequence(node.seq) if any(self.level_of(s) is not None for s in node.seq) else None
        return self._sequence([node]) if self.level_of(node) is not None else None

    def _condition(self, node: ir.IfThenElse) -> ir.Stmt:
        """A branch on the thread index: the units in it do not meet the others."""
        self._conditions += 1
        arms = [self.lowering.stmt(arm) if arm is not None else None for arm in (node.then_case, node.else_case)]
        self._conditions -= 1
        return tir.at(ir.IfThenElse(self.lowering.expr(node.condition), *arms), node)

    def level_of(self, stmt: ir.Stmt) -> Level | None:
        """The level whose units execute a statement of the program."""
        if isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == ops.SCALE:
            level = self.lowering.target.machine.level(str(stmt.value.value))
            return level if level.kind == "lanes" else None
        loop = self.pipelines.of(stmt)
        if loop is not None:
            return loop.level
        if not (isinstance(stmt, ir.Evaluate | ir.BufferStore) or parallel_loops(stmt)):
            return None
        held = self.holdings.touched(stmt)
        return held.level if held is not None else None

    def _sequence(self, stmts: Sequence[ir.Stmt]) -> ir.Stmt:
        """Runs of statements that units of one level execute become one chain of branches each."""
        result: list[ir.Stmt] = []
        run: list[ir.Stmt] = []
        before: Level | None = None
        for stmt in [*stmts, None]:
            level = self.level_of(stmt) if stmt is not None else None
            if before is not None and run and (level != before or self.pipelines.of(run[-1])):
                result.append(self._run(run, before))
                run = []
            before = level
            if level is not None:
                run.append(stmt)
            elif stmt is not None:
                result.append(self.lowering.stmt(stmt))
        return tir.sequence(result)

    def _run(self, stmts: list[ir.Stmt], level: Level) -> ir.Stmt:
        if self.lowering.launch.threads[1:] != (1, 1):
            raise self.lowering.unsupported(f"units of level {level.name!r} in a launch of 2-D threads")
        if self._conditions:
            raise self.lowering.unsupported(f"units of level {level.name!r} under a condition on the thread index")
        units = [self.whole] if level.threads == 1 else self.whole.units(level)
        self.used = True
        try:
            chain = self.chain(units, [self._clone(stmts, unit) for unit in units])
        finally:
            self.unit = None
        if tir.is_nothing(chain):
            return chain
        return tir.sequence([chain, self.lowering.sync()] if any(_in_memory(s)[0] for s in stmts) else [chain])

    def _clone(self, stmts: list[ir.Stmt], unit: Unit) -> ir.Stmt:
        self.unit = unit
        return self.unit_statements(stmts, unit)

    def unit_statements(
        self, stmts: Sequence[ir.Stmt], unit: Unit, around: Clone | None = None, kept: frozenset[ir.Var] = frozenset()
    ) -> ir.Stmt:
        """One unit's part of a run of statements, with a meeting of all where memory asks for one.

        Args:
            around: the clone of the loop whose body they are.
            kept: tiles that no statement of the loop writes.
        """
        meetings = _meetings(stmts, around is not None, lambda tile: self.holdings.base(tile) in kept)
        result: list[ir.Stmt] = []
        for number, stmt in enumerate(stmts):
            self.lowering.where = location(stmt) or self.lowering.where
            result += [self.meet(unit)] if number in meetings else []
            clone, loop = Clone(self, unit, around), self.pipelines.of(stmt)
            if loop is not None:
                result.append(self.pipelines.work(loop, unit))
            elif isinstance(stmt, ir.AttrStmt):
                result.append(clone.scale(stmt) if unit is self.whole else clone.stmt(stmt.body))
            elif isinstance(stmt, ir.Bind):
                assert around is not None, "names are bound in loops"
                result.append(around.stmt(stmt))
            else:
                held = self.holdings.touched(stmt)
                assert held is not None, "units execute it because they hold a tile of it"
                part = Share(self, unit).stmt(stmt, held)
                result += [clone.stmt(part)] if part is not None else []
        return tir.sequence([*result, *([self.meet(unit)] if len(stmts) in meetings else [])])

    def chain(self, units: list[Unit], clones: list[ir.Stmt]) -> ir.Stmt:
        """Clone i on unit i: an exclusive chain of branches, which TileLang runs side by side."""
        tx = self.lowering.launch.thread_vars[0][0]
        result = clones[-1]
        for unit, clone in reversed(list(zip(units[:-1], clones[:-1], strict=True))):
            end = unit.begin + unit.threads
            if tir.is_nothing(clone):
                result = result if tir.is_nothing(result) else ir.IfThenElse(tx >= end, result, None)
            else:
                result = ir.IfThenElse(tx < end, clone, None if tir.is_nothing(result) else result)
        return result

    # -- barriers ----------------------------------------------------------------------------------------------------

    def meet(self, unit: Unit) -> ir.Stmt:
        """A unit and its siblings meet; what each wrote before is then visible to the others, bulk copies included."""
        barrier = self.barrier(unit.around or unit, unit)
        return tir.sequence([barrier, tir.evaluate(tir.extern("tilescale::acquired"))])

    def barrier(self, group: Unit, executing: Unit | None = None) -> ir.Stmt:
        """The threads of a unit meet, in the text of a unit inside it or (left out) of itself.

        In a branch the barrier has a number of ours: stock TileLang numbers those of the program and those that it adds
        itself in two passes, which know nothing of each other.
        """
        if (executing or group).threads == self.whole.threads == self.pipelines.threads():
            return tir.evaluate(tir.call("tirx.tvm_storage_sync", "shared", dtype="int32"))
        if group.threads == 32:
            return tir.evaluate(tir.call("tl.sync_warp", dtype="void"))
        number = self._barriers.setdefault((group.begin, group.threads), HARDWARE_BARRIERS - 1 - len(self._barriers))
        return tir.evaluate(tir.call("tirx.tvm_storage_sync", "shared", number, group.threads, dtype="int32"))

    def reduces(self, unit: Unit) -> None:
        """A unit reduces across its warps, at the same time as its siblings."""
        if unit.threads > 32 and unit.threads < self.whole.threads:
            self._reducing = max(self._reducing, unit.threads)

    def barriers(self) -> int:
        """How many hardware barriers are taken from the last one downwards."""
        groups = self.whole.threads // self._reducing - 1 if self._reducing else 0
        return len(self._barriers) + groups

    def prelude(self) -> str:
        """What the text of a kernel says of its units, and needs where several reduce across their warps at once."""
        arrays = marks(self._exclusive())
        if not self._reducing:
            return arrays
        second = HARDWARE_BARRIERS - 1 - len(self._barriers)
        sizes = f"#define TILESCALE_UNIT_THREADS {self._reducing}\n#define TILESCALE_UNIT_BARRIER {second}\n"
        return f"{arrays}{sizes}{header('units.cuh')}\n"

    def _exclusive(self) -> list[list[str]]:
        """What units hold of the same tile in registers, by name; a name that the user has given too may be another."""
        given = {buffer.name for buffer in self._buffers.values()}
        groups: dict[tuple, list[str]] = {}
        for (*tile, unit), buffer in self._made.items():
            if isinstance(unit, str) and buffer.scope().startswith("local"):
                groups.setdefault(tuple(tile), []).append(buffer.name)
        return [names for names in groups.values() if len(names) > 1 and given.isdisjoint(names)]


def _meetings(stmts: Sequence[ir.Stmt], repeated: bool, apart: Callable[[ir.Buffer], bool]) -> set[int]:
    """Before which statements of a run all units meet: where one writes what was touched, or reads what was written.

    Args:
        repeated: the first statement follows the last one: the number after the last stands for the end.
        apart: tiles that need no meeting.
    """
    found: set[int] = set()
    touched = written = any_written = False
    for number, stmt in enumerate(stmts):
        touches, writes = _in_memory(stmt, apart)
        if (touches and written) or (writes and touched):
            found.add(number)
            touched = written = False
        touched, written, any_written = touched or touches, written or writes, any_written or writes
    return found | ({len(stmts)} if repeated and touched and any_written else set())


def _in_memory(stmt: ir.Stmt, apart: Callable[[ir.Buffer], bool] = lambda tile: False) -> tuple[bool, bool]:
    """Whether a statement touches memory that units share (but for tiles `apart`), and whether it writes there."""
    if ir.contains(stmt, lambda n: ir.op_name(n) in ops.ALL_OPS - {ops.RANK.name, ops.VIEW.name}):
        return True, True
    named = [(buffer, writes) for buffer, _, writes in accesses(stmt) if not buffer.scope().startswith("local")]
    shared = [writes for buffer, writes in named if not apart(buffer)]
    opaque = ir.contains(stmt, lambda n: ir.op_name(n) in ("tirx.address_of", "tirx.tvm_access_ptr"))
    return bool(shared) or opaque, any(shared) or opaque
