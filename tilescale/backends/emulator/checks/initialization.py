# SPDX-License-Identifier: MIT
"""Uninitialized reads of tiles, workspaces and thread-private arrays.

Arguments are initialized, and so are flags that are zero when a call begins, and the variables of `T.alloc_var`. Once
all of a buffer has been written, its cells are dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.checks.explain import primitives
from tilescale.backends.emulator.checks.shadow import Memory, Shadow
from tilescale.backends.emulator.checks.text import Box, acting, declared_name, owner_of, region_text
from tilescale.backends.emulator.execute.frame import Frame, spread
from tilescale.backends.emulator.execute.memory import PrivateBuffer
from tilescale.backends.emulator.execute.observe import ATOMIC_STORE, WRITE, Observer
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.run import Run
from tilescale.errors import Location, UninitializedReadError
from tilescale.program.effects import statements
from tilescale.program.model import declaration, location

_WRITES = (WRITE, ATOMIC_STORE)


class _Written(Shadow):
    """Flags of written elements; `left` counts the others."""

    def __init__(self, owner: np.ndarray, given: bool):
        super().__init__(owner, np.bool_)
        self.left = 0 if given else self.cells.size

    def _refine(self) -> None:
        super()._refine()
        self.left *= 2


class Initialization(Observer[Frame, Home]):
    """Raises an UninitializedReadError at the first read of an uninitialized element."""

    def starts(self, run: Run) -> None:
        self._run = run
        buffers = (p.buffer for p in run.program.parameters if p.buffer is not None)
        self._given = {run.compiler.root(run.compiler.slot(buffer.data)) for buffer in buffers} | run.compiler.zeroed
        self._memory: Memory[_Written] = Memory(_Written)
        self._private: weakref.WeakKeyDictionary[PrivateBuffer, PrivateBuffer] = weakref.WeakKeyDictionary()

    def looks_at(self, home: Home) -> bool:
        return home.root not in self._given and home.buffer.scope() != ir.VARIABLE

    def accesses(self, frame: Frame, home: Home, kind: str, array: np.ndarray, index: Any) -> None:
        shadow = self._memory.of(array)
        if not shadow.left or array.size == 0:
            return
        cells = shadow.view(array)
        found = cells[index]
        if kind in _WRITES:
            _write(shadow, cells, index, found)
        elif not found.all():
            box = shadow.box(array, index, ~found)
            raise self._error(frame, home, box, shadow.owner)

    def copies(self, source: np.ndarray, target: np.ndarray) -> None:
        origin, shadow = self._memory.of(source), self._memory.of(target)
        if shadow.left:
            cells = shadow.view(target)
            done = np.ones(target.shape, bool) if not origin.left else origin.view(source)
            shadow.left -= int(np.count_nonzero(done & ~cells))
            cells |= done

    def accesses_private(self, frame: Frame, home: Home, kind: str, buffer: PrivateBuffer, index: tuple) -> None:
        written = self._private.get(buffer)
        if written is None:
            written = self._private[buffer] = PrivateBuffer(buffer.shape, np.dtype(bool), False)
        if kind in _WRITES:
            written.store(index, True, frame)
            return
        done = spread(_loaded(written, index, frame), frame)
        if not (done if frame.mask is None else done | ~spread(frame.mask, frame)).all():
            begin = [int(np.asarray(i).reshape(-1)[0]) for i in index]
            raise self._error(frame, home, [(b, b + 1) for b in begin], written.data)

    def _error(self, frame: Frame, home: Home, box: Box, memory: np.ndarray) -> UninitializedReadError:
        region = region_text(declared_name(self._run, home), box)
        holder = owner_of(frame.unit, home.root, memory)
        if holder is not None and frame.unit.find(holder.level) is not holder:
            region += f" of {holder}"
        declared = declaration(self._run.compiler.owned_buffer(home.root), "declared here")
        places = [Location(home.where.file, home.where.line, "reads here")] if home.where else []
        places += [declared] if declared else []
        error = UninitializedReadError(
            f"{acting(frame.unit, self._run.scheduler.current.name)} reads {region}, which is uninitialized",
            hint=self._of_others(frame, home, holder)
            or f"write {home.name} before it is read: T.clear, T.fill or a T.copy that covers what is read",
            where=places,
        )
        error.located = True
        return error

    def _of_others(self, frame: Frame, home: Home, holder: Unit | None) -> str | None:
        """Advice about the missing wait, where other units write that memory."""
        writers = list(self._writers(home))
        remote = [place for place, is_remote in writers if is_remote and place]
        if remote:
            return (
                f"line {remote[0].line} writes {home.name} from another unit: wait before it is read, "
                "T.wait(flag[i], ...) for its signal=flag[i] or T.signal, or T.barrier()"
            )
        if holder is None or holder.level == frame.unit.level or not writers:
            return None
        level = next(level for level, _ in frame.unit.path()[len(holder.path()) :])
        lines = ", ".join(dict.fromkeys(f"line {place.line}" for place, _ in writers if place))
        return f"{lines} writes {home.name} in each {level}; order it before this read: {primitives(self._run, level)}"

    def _writers(self, home: Home) -> Iterator[tuple[Location | None, bool]]:
        """Statements that write a buffer, and whether they write another unit's."""
        compiler = self._run.compiler
        for stmt, _, _ in statements(self._run.program.body):
            for write in compiler.surroundings.effects(stmt).writes:
                if compiler.root(compiler.slot(write.root)) == home.root:
                    yield location(stmt), write.at is not None


def _write(shadow: _Written, cells: np.ndarray, index: Any, found: np.ndarray) -> None:
    new = found.size - int(np.count_nonzero(found))
    if not new:
        return
    if new > 1 and isinstance(index, tuple) and any(isinstance(i, np.ndarray) for i in index):
        cells[index] = True  # Elements may be named twice.
        shadow.left = shadow.cells.size - int(np.count_nonzero(shadow.cells))
    else:
        cells[index] = True
        shadow.left -= new


def _loaded(written: PrivateBuffer, index: tuple, frame: Frame) -> Any:
    if written.lead and written.lead != frame.space:
        # Written in another space: the threads there agree on the value, so that each must have one.
        every: tuple[Any, ...] = (..., *(np.asarray(i) for i in index))
        return written.data[every].all(axis=tuple(range(len(written.lead))))
    return written.load(index, frame)
