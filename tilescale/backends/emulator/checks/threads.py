# SPDX-License-Identifier: MIT
"""Races on device memory between two threads of a program: a store and another access without a barrier between.

TileScale inserts such barriers, but a program without its constructs is compiled unchanged, and stock TileLang orders
the threads of a block on shared memory alone. The thread that makes an access is known for statements that each thread
executes for itself, and for parallel loops and copies without fragments, with fragments of a known distribution
(fragments.py), or with a layout that TileLang reports. Loops may be vectorized with several widths (parallel_loops.py),
and one thread may copy a tile to or from shared memory: a race is reported if it is one in all of these cases. Threads
along y and z repeat what those along x do. Any statement that may contain a barrier counts as one: operations that
threads execute together, and accesses to shared memory between which TileLang inserts a barrier.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.accesses import accesses_in
from tilelang_core.layouts import TileLayout, inferred
from tilescale.backends.base import text_target
from tilescale.backends.emulator.checks.in_program import InProgram
from tilescale.backends.emulator.checks.shadow import Memory, Shadow, touched_cells
from tilescale.backends.emulator.execute.frame import Frame, active
from tilescale.backends.emulator.execute.observe import READ, WRITE
from tilescale.backends.emulator.execute.programs import ProgramInstance
from tilescale.backends.emulator.execute.tasks import Task
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.run import Run
from tilescale.errors import RaceError
from tilescale.program.effects import phases, statements
from tilescale.program.fragments import ThreadDistribution, spread, steps
from tilescale.program.model import Launch
from tilescale.program.parallel_loops import is_fragment, loops_of

_SEVERAL = -1
"""Marks a cell that more than one thread accessed."""

_EACH = ThreadDistribution(0, (1,))
"""Distribution of statements that each thread executes for itself."""


@dataclass
class _Epoch:
    """The accesses of a program's threads since they last synchronized.

    Attributes:
        number: unique among the epochs of all programs.
        loaded, stored: tiles in shared memory.
    """

    number: int
    loaded: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)


class Threads(InProgram):
    """Raises a RaceError at the second of two racing accesses by threads of a plain TileLang program."""

    def starts(self, run: Run) -> None:
        super().starts(run)
        self._tensors = set() if run.program.is_hierarchical else _written_and_used_again(run)
        self._distributions: dict[ir.Stmt, ThreadDistribution] = {}
        self._by_layout: dict[ir.Stmt, _Layouts] = {}  # steps with a distribution that is asked for when they are run
        if self._tensors:
            self._find_distributions()
        self._rows = max((len(known.lengths) + bool(known.shared) for known in self._distributions.values()), default=1)
        self._across = run.program.launches[0].threads[0]
        last = np.dtype([("epoch", "i4"), ("place", "i4"), ("threads", "i4", (self._rows,))])
        cell = np.dtype([("loaded", last), ("stored", last)])
        self._memory: Memory[Shadow] = Memory(lambda owner, given: Shadow(owner, cell))
        self._numbers = itertools.count(1)
        self._epochs: WeakKeyDictionary[ProgramInstance, _Epoch] = WeakKeyDictionary()
        self._acting: WeakKeyDictionary[Task, ProgramInstance] = WeakKeyDictionary()

    def _find_distributions(self) -> None:
        """Find the steps of programs with a known distribution over threads, and those whose fragments decide."""
        if len({launch.threads for launch in self._run.program.launches}) > 1:
            return
        for phase, launch in phases(self._run.program.body):
            if launch is None:
                continue
            found = list(steps(phase.stmt, launch.threads[0], lambda stmt: None))
            held = spread(found) - set(dict(launch.notes).get(tl.LAYOUTS, ()))
            layouts = _Layouts(self._run, launch)
            for step, threads in found:
                known = ThreadDistribution.of(step, threads, held)
                if known is not None:
                    self._distributions[step] = known
                elif any(is_fragment(access) for access in accesses_in(step)):
                    self._by_layout[step] = layouts

    def looks_at(self, home: Home) -> bool:
        return bool(self._tensors) and home.shared and (not home.guarded or home.root in self._tensors)

    # -- order ---------------------------------------------------------------------------------------------------------

    def synchronizes(self, frame: Frame) -> None:
        self._epochs.pop(frame.program, None)

    def _meets(self) -> None:
        """The current task arrives at a barrier with other tasks."""
        program = self._acting.get(self._run.scheduler.current)
        if program is not None:
            self._epochs.pop(program, None)

    def publishes(self, place: Hashable) -> None:
        self._meets()

    def acquires(self, place: Hashable) -> None:
        self._meets()

    def joins(self, ended: Sequence[Task]) -> None:
        self._meets()

    def orders(self, frame: Frame, array: np.ndarray, index: Any, op: str, order: str) -> None:
        if order != "relaxed":
            self.synchronizes(frame)

    # -- accesses ------------------------------------------------------------------------------------------------------

    def accesses(self, frame: Frame, home: Home, kind: str, array: np.ndarray, index: Any) -> None:
        if frame.program is None or array.size == 0:
            return
        self._acting[self._run.scheduler.current] = frame.program
        if home.guarded:
            self._of_device(frame, home, kind, array, index)
        else:
            self._of_program(frame, home, kind)

    def _epoch(self, frame: Frame) -> _Epoch:
        found = self._epochs.get(frame.program)
        if found is None:
            found = self._epochs[frame.program] = _Epoch(next(self._numbers))
        return found

    def _of_program(self, frame: Frame, home: Home, kind: str) -> None:
        """An access to shared memory: TileLang inserts a barrier between a load and a store of a tile."""
        epoch = self._epoch(frame)
        if home.root in (epoch.stored if kind == READ else epoch.loaded):
            self.synchronizes(frame)
            epoch = self._epoch(frame)
        (epoch.loaded if kind == READ else epoch.stored).add(home.root)

    def _of_device(self, frame: Frame, home: Home, kind: str, array: np.ndarray, index: Any) -> None:
        shadow = self._memory.of(array)
        numbers = shadow.numbers(array)
        if kind == READ and home.of_tile:
            self._before_it_fills(frame, home)
        found = self._by_thread(frame, home, numbers, index) if kind in (READ, WRITE) else None
        if found is not None:
            self._record(frame, home, kind, shadow, *found)
        elif kind != READ:
            shadow.cells[numbers[index]] = 0

    def _before_it_fills(self, frame: Frame, home: Home) -> None:
        """A tile is about to be loaded from device memory: TileLang inserts a barrier if the tile is in use."""
        known = self._known(home)
        roots = {self._root(data) for data in known.shared} if known is not None else set()
        epoch = self._epoch(frame)
        if roots & (epoch.loaded | epoch.stored):
            self.synchronizes(frame)

    def _root(self, data: ir.Var) -> int:
        compiler = self._run.compiler
        return compiler.root(compiler.slot(data))

    def _by_thread(
        self, frame: Frame, home: Home, numbers: np.ndarray, index: Any
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """The touched cells and the threads that touch them, a row for each vector width; None if unknown."""
        known, apart = self._known(home), home.apart or frame.own is not None
        if known is None and not apart:
            known = self._known_by_layout(home.step)
        if known is None or (known is not _EACH and apart):
            return None
        items = np.arange(known.items) if home.of_tile else np.flatnonzero(active(frame))
        cells = touched_cells(frame, home, numbers, index, items)
        if cells.size != items.size:
            return None  # some of them are out of bounds
        if known is _EACH:
            return cells, np.broadcast_to(items % frame.threads, (self._rows, items.size))
        several = frame.threads if self._across < frame.threads else 0
        shares = [np.array(known.held)] if known.held else [items // n % self._across for n in known.lengths]
        rows = [share + several for share in shares]
        rows += [np.full_like(items, several) if known.shared else rows[-1]] * (self._rows - len(rows))
        return cells, np.stack(rows)

    def _known(self, home: Home) -> ThreadDistribution | None:
        """The distribution of an access's step over threads, if known without TileLang's layouts, or asked for."""
        return self._distributions.get(home.step) if home.of_tile or loops_of(home.step) else _EACH

    def _known_by_layout(self, step: ir.Stmt) -> ThreadDistribution | None:
        """The same by a fragment's layout; TileLang is asked for layouts at the first such step of a launch."""
        layouts = self._by_layout.pop(step, None)
        known = ThreadDistribution.by_layout(step, layouts.found) if layouts is not None else None
        if known is not None:
            self._distributions[step] = known
        return known

    def _record(
        self, frame: Frame, home: Home, kind: str, shadow: Shadow, cells: np.ndarray, threads: np.ndarray
    ) -> None:
        """Note an access. Raises RaceError: it races with an access of another thread."""
        now = self._epoch(frame).number
        for earlier, verb in (("stored", WRITE), ("loaded", READ))[: 1 + (kind == WRITE)]:
            last = shadow.cells[earlier]
            hit = cells[self._by_others(last, cells, now, threads, (verb, kind))]
            if hit.size:
                first = self._places[last["place"][hit[0]]]
                raise self._error(frame, (first, verb), (home, kind), shadow, hit)
        if kind == READ and home.of_tile and self._distributions[home.step].shared:
            return  # all threads wait for it before they go on
        last = shadow.cells["stored" if kind == WRITE else "loaded"]
        if kind == READ:
            threads = np.where(self._by_others(last, cells, now, threads, (READ, READ)), _SEVERAL, threads)
        last["threads"][cells], last["place"][cells], last["epoch"][cells] = threads.T, self._place(home), now
        apart = last["threads"][cells].T != threads  # several iterations touch the element
        if kind == WRITE:
            last["epoch"][cells[apart.any(axis=0)]] = 0
        else:
            last["threads"][cells[apart.all(axis=0)]] = _SEVERAL

    def _by_others(
        self, last: np.ndarray, cells: np.ndarray, now: int, threads: np.ndarray, verbs: tuple[str, str]
    ) -> np.ndarray:
        """Mask of cells last accessed by other threads in an epoch, of any that may make either access."""
        lately = last["epoch"][cells] == now
        if lately.any():
            before = last["threads"][cells].T
            lately &= self._differ(before[:, None], threads[None], verbs).all(axis=(0, 1))
        return lately

    def _differ(self, one: np.ndarray, other: np.ndarray, verbs: tuple[str, str]) -> np.ndarray:
        """Whether the threads differ. Threads that repeat another's work along y and z always differ: they store the
        same value, so that a load between the stores, or a repeated store, is harmless."""
        differ, count = one != other, self._run.program.launches[0].thread_count
        if self._across == count:
            return differ
        if verbs[0] == READ:
            return differ | (np.maximum(one, other) >= count)
        alike = (one >= count) & (one % self._across == other % self._across)
        return np.where(alike, (other < count) & (verbs[1] == WRITE), differ | (other >= count))

    def _error(
        self, frame: Frame, first: tuple[Home, str], second: tuple[Home, str], shadow: Shadow, cells: np.ndarray
    ) -> RaceError:
        one, other = first[0].where, second[0].where
        between = f"line {one.line} and line {other.line}" if one and other else "the two"
        hint = f"T.sync_threads() between {between}: TileLang itself orders threads on shared memory alone"
        if one and one == other:
            hint = f"in line {one.line}, load, T.sync_threads(), then store; or T.atomic_add, if threads add up"
        return self._race(frame, "thread", (first, second), shadow, cells, "with no barrier between them", hint)


class _Layouts:
    """Layouts of a launch's fragments, queried from TileLang where a step needs them."""

    def __init__(self, run: Run, launch: Launch):
        self._run, self._launch = run, launch

    @cached_property
    def found(self) -> dict[ir.Var, TileLayout]:
        """Layouts by data variable; empty without fragments, or without code for the machine."""
        if not any(b.scope() == "local.fragment" for b in self._launch.buffers):
            return {}
        target = text_target(self._run.machine)
        known = inferred(self._run.program.func, target) if target is not None else {}
        return {b.data: known[b] for b in self._launch.buffers if b in known}


def _written_and_used_again(run: Run) -> set[int]:
    """Tensors in device memory that statements of a launch write, and others of it or the same ones access as well."""
    return {root for launch in run.program.launches for root in _written_and_used_again_in(launch, run)}


def _written_and_used_again_in(launch: Launch, run: Run) -> Iterator[int]:
    compiler = run.compiler
    effects = [compiler.surroundings.effects(stmt) for stmt, _, _ in statements(launch)]
    found = [access for each in effects for access in each.accesses if access.buffer.scope() == "global"]
    roots = [compiler.root(compiler.slot(access.root)) for access in found]
    uses = Counter(roots)
    yield from (root for root, access in zip(roots, found, strict=True) if access.writes and uses[root] > 1)
