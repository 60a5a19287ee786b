# SPDX-License-Identifier: MIT
"""The state in which statements run: one frame per coroutine.

Values are Python numbers, numpy scalars, or arrays over the frame's *space*: its threads, or inside `T.Parallel` the
loop's iterations. The mask says which elements of the space are active.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from tilescale.errors import UsageError

if TYPE_CHECKING:
    from tilescale.backends.emulator.execute.barriers import Participants
    from tilescale.backends.emulator.execute.emulation import Emulation
    from tilescale.backends.emulator.execute.units import Unit


BREAK, CONTINUE = "break", "continue"
"""Result of a statement's closure when all active elements leave the body of the innermost loop."""


class Frame:
    """The state on which compiled closures run.

    Attributes:
        run: the whole emulation.
        unit: the unit that executes.
        program: the program (thread block, core) around it, or None at device level.
        slots: values of variables and instances of buffers, by slot number.
        threads: threads of the program.
        programs: the number of programs in lockstep that the frame stands for.
        span: the unit's range of these threads.
        own: the threads of this frame, None for all.
        space: shape over which array values extend: (threads,), or that of a parallel loop.
        mask: active elements of the space, None for all.
        participants: the threads of a plain barrier at this point.
        dead: elements that left the innermost loop's body by break or continue; broken: those that left the loop.
    """

    __slots__ = (
        "broken", "dead", "mask", "own", "participants", "program", "programs", "run", "slots", "space", "span",
        "threads", "unit",
    )  # fmt: skip

    def __init__(self, run: Emulation, unit: Unit, slots: list, threads: int, program: Any = None, own: Any = None):
        self.run = run
        self.unit = unit
        self.program = program
        self.slots = slots
        self.threads = threads
        self.programs = 1
        self.span = range(threads)
        self.own = own
        self.participants: Participants | None = program.participants if program is not None else None
        self.space: tuple[int, ...] = (threads,)
        self.mask = own
        self.dead: np.ndarray | None = None
        self.broken: np.ndarray | None = None

    def fork(self, unit: Unit, own: np.ndarray | None) -> Frame:
        """A frame of the same program for some of its threads."""
        side = Frame(self.run, unit, self.slots.copy(), self.threads, self.program, own)
        side.participants, side.span = self.participants, self.span
        return side

    def leave(self, left: Any, mask: np.ndarray) -> None:
        """Record that the elements of `mask` left the innermost loop's body, if `left` is BREAK or CONTINUE."""
        if left is not None:
            self.dead = _union(self.dead, mask)
            if left is BREAK:
                self.broken = _union(self.broken, mask)

    def join(self, side: Frame) -> None:
        """Take over the exits from a loop by threads that ran in a frame of their own."""
        self.dead, self.broken = _union(self.dead, side.dead), _union(self.broken, side.broken)

    def active(self) -> int:
        """Number of active elements of the space."""
        if self.mask is None:
            return int(np.prod(self.space, dtype=np.int64))
        return int(np.count_nonzero(np.broadcast_to(self.mask, self.space)))


def _union(some: np.ndarray | None, more: np.ndarray | None) -> np.ndarray | None:
    if some is None or more is None:
        return more if some is None else some
    return some | more


def without(mask: np.ndarray | None, gone: np.ndarray) -> np.ndarray:
    """A mask less some elements."""
    return ~gone if mask is None else mask & ~gone


def is_vector(value: Any) -> TypeGuard[np.ndarray]:
    """Whether a value differs, or may differ, between the elements of the space."""
    return isinstance(value, np.ndarray) and value.ndim > 0


def spread(value: Any, frame: Frame) -> np.ndarray:
    """A value as an array over the whole space."""
    return np.broadcast_to(np.asarray(value), frame.space)


def uniform(value: Any, frame: Frame, what: str) -> Any:
    """The one value that all active elements agree on. Raises UsageError: they differ; `what` names the value."""
    if type(value) is int:
        return value
    if not is_vector(value):
        return value.item() if isinstance(value, np.generic | np.ndarray) else value
    values = spread(value, frame)
    picked = values[np.broadcast_to(frame.mask, frame.space)] if frame.mask is not None else values
    flat = picked.reshape(-1)
    if flat.size == 0:
        return 0
    if (flat != flat[0]).any():
        raise UsageError(
            f"{what} differs between threads that execute this together: {flat[0]} and {flat[flat != flat[0]][0]}",
            hint="a tile operation takes the same arguments on all threads that run it",
        )
    return flat[0].item()


def active(frame: Frame) -> np.ndarray:
    """Mask of the active elements of the space."""
    return spread(True if frame.mask is None else frame.mask, frame)


def check(holds: Any, message: str, frame: Frame) -> None:
    """Raise UsageError unless a condition holds on all active threads."""
    if not np.all(spread(holds, frame)[active(frame)]):
        raise UsageError(f"{frame.unit}: the program's assertion failed: {message}")
