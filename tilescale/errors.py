# SPDX-License-Identifier: MIT
"""Every error that TileScale raises for a mistake of its user, one class per mistake.

A message has three parts: what was found (with the numbers), where (the line of the user's program,
several when two places disagree), and what to do next. Raise sites give the parts; this module renders them.
"""

from __future__ import annotations

import difflib
import linecache
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "AllocationTooLargeError",
    "ArgumentError",
    "CollectiveNotReachedError",
    "DeadlockError",
    "DependencyError",
    "DeviceError",
    "DivergedReplicaError",
    "ForgedMessageError",
    "HeapExhaustedError",
    "InternalError",
    "JobError",
    "LayoutError",
    "LaunchError",
    "LevelNotLaunchedError",
    "Location",
    "MachineFileError",
    "NoDataError",
    "NoPathError",
    "NotSymmetricError",
    "OutOfBoundsError",
    "PeerOutOfRangeError",
    "PhaseError",
    "RaceError",
    "RankFailedError",
    "RankMismatchError",
    "ShapeError",
    "TileScaleError",
    "UninitializedReadError",
    "UnknownLayerError",
    "UnknownLevelError",
    "UnknownMachineError",
    "UnsupportedError",
    "UntrustedCacheError",
    "UsageError",
    "WaitTimeoutError",
]


@dataclass(frozen=True)
class Location:
    """A line of the user's program. `what` says which part it played, e.g. "waits here"."""

    file: str
    line: int
    what: str = ""

    def __str__(self) -> str:
        role = f" ({self.what})" if self.what else ""
        linecache.checkcache(self.file)  # a description may have been edited since
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}{role}" + (f"\n        {text}" if text else "")


def did_you_mean(name: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """A question for the hint of an error about an unknown name; empty where no known one is like it."""
    close = difflib.get_close_matches(str(name), list(names), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}? " if close else ""


def one(name: str) -> str:
    """A name of a description with its article, for a sentence."""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def unknown_attribute(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """Python's error for a missing attribute of a module, with a similar known name as the hint.

    Tools ask for private names, some of them thousands of times; none is similar to a public one.
    """
    hint = "" if name.startswith("_") else did_you_mean(name, names)
    return AttributeError(f"module {module!r} has no attribute {name!r}; {hint}".rstrip("; "))


def print_in_short() -> None:
    """Print uncaught errors by their message and the user's lines."""
    from tilescale import tracebacks

    tracebacks.install()


class TileScaleError(Exception):
    """Base of all errors below.

    Attributes:
        message: what was found, one sentence or a small table.
        hint: what to do next, or None.
        where: the places in the user's program, most important first.
        located: whether no outer statement adds its line to them.
    """

    located = False

    def __init__(self, message: str, *, hint: str | None = None, where: Location | Sequence[Location] | None = None):
        self.message = message
        self.hint = hint
        self.where: tuple[Location, ...] = (where,) if isinstance(where, Location) else tuple(where or ())
        print_in_short()

    def _render(self) -> str:
        lines = [self.message]
        lines += [f"    at {place}" for place in self.where]
        if self.hint:
            lines.append(f"    hint: {self.hint}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self._render()

    def at(self, *places: Location) -> TileScaleError:
        """The same error with more locations, from an outer layer that knows the line."""
        self.where = self.where + tuple(p for p in places if p not in self.where)
        return self

    def _render_traceback_(self) -> list[str]:
        """The text that IPython prints for the error."""
        from tilescale import tracebacks

        return tracebacks.lines(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are sent between ranks: the keyword-only arguments must survive pickling.
        return _rebuild, (type(self), self.message, self.hint, self.where)


def _rebuild(cls: type[TileScaleError], message: str, hint: str | None, where: tuple[Location, ...]) -> TileScaleError:
    return cls(message, hint=hint, where=where)


# -- the program, found while it is traced ---------------------------------------------------------------------------


class UsageError(TileScaleError):
    """A TileScale construct used where or how it cannot be."""


class UnknownLevelError(TileScaleError):
    """A level that the machine does not describe. Lists the levels it has."""


class UnknownLayerError(TileScaleError):
    """A memory layer that the machine does not describe. Lists the layers it has."""


class LevelNotLaunchedError(TileScaleError):
    """A level that the machine has but the launch did not ask for, or that is outside the executing level."""


class AllocationTooLargeError(TileScaleError):
    """A tile that does not fit its memory layer: the requested size and the capacity."""


class ShapeError(TileScaleError):
    """Shapes that do not fit together or do not divide among the units of a level."""


class LayoutError(TileScaleError):
    """A `T.view` layout that is not recognised. Says which are."""


class NoPathError(TileScaleError):
    """A copy or signal between units that no network of the machine connects."""


class CollectiveNotReachedError(TileScaleError):
    """A collective or barrier that not all units of its level reach."""


class PeerOutOfRangeError(TileScaleError):
    """A peer rank outside the launched units."""


class PhaseError(TileScaleError):
    """A device-level phase and the grid mixed in a way that has no order, e.g. a block index in a device phase."""


class UnsupportedError(TileScaleError):
    """An operation that the chosen back end does not run. Names it and its line."""


class InternalError(TileScaleError):
    """A fault of TileScale itself, in compilation or emulation: what failed, and the program's line."""


# -- machine descriptions ---------------------------------------------------------------------------------------------


class MachineFileError(TileScaleError):
    """A machine description that does not follow the schema: file, line, field, the expected value."""


class UnknownMachineError(TileScaleError):
    """No built-in machine and no file of that name. Lists the built-in ones."""


# -- running -----------------------------------------------------------------------------------------------------------


class ArgumentError(TileScaleError):
    """Arguments of a launch that do not match the program: count, shape, data type, device, layout."""


class DeadlockError(TileScaleError):
    """Every unit that is left waits and none can make progress. Lists the waiting units and their conditions."""


class NoDataError(TileScaleError):
    """A run without data that would have to know some: a branch, an index or an extent that depends on a tensor."""


class OutOfBoundsError(TileScaleError):
    """An access outside its buffer: the access and the buffer's declaration."""


class RaceError(TileScaleError):
    """Two accesses to one location, one a write, without happens-before between them: both units, the elements, both
    lines.

    It says what orders them. Or two such accesses by threads of one block, without a barrier between, in plain
    TileLang. Or a wait for a phase of an mbarrier and the end of the next phase, which the wait could mistake for it.
    """


class UninitializedReadError(TileScaleError):
    """A read of uninitialized memory: the unit, the elements, the line, and the declaration."""


class DivergedReplicaError(TileScaleError):
    """A `T.Replica` view read as a whole while its units hold different values: where, which values, and both lines."""


class RankMismatchError(TileScaleError):
    """Ranks that do not run the same program, shapes or order."""


class RankFailedError(TileScaleError):
    """Another rank of the job failed; carries that rank's error text."""


class ForgedMessageError(TileScaleError):
    """Something in the job's store that no rank of this job has signed. It was not looked into."""


class WaitTimeoutError(TileScaleError):
    """A wait on a device ran out of time: which flag, expected, seen, and the program that waited."""


class LaunchError(TileScaleError):
    """A job that could not be started: launcher, rendezvous, world size."""


class JobError(TileScaleError):
    """A job of several processes that ended with a failure."""


class DependencyError(TileScaleError):
    """A package that is missing or of a version that was not tested. Says what to install."""


class DeviceError(TileScaleError):
    """A device, or the operating system, that refuses a call: the call, and the system's message."""


class UntrustedCacheError(TileScaleError):
    """A cache of compiled kernels that other users can write to: which folder of its path, and why."""


class HeapExhaustedError(TileScaleError):
    """The symmetric heap is exhausted: how much was asked, how much is free, how to raise it."""


class NotSymmetricError(TileScaleError):
    """A tensor that peers are to reach, but that is in no symmetric heap, or in another one than the rest."""


def check_type(name: str, value: object, wanted: str, *types: Any) -> None:
    """Check an argument of a public function; a bool is not accepted as a number. Raises UsageError: it is of none of
    these types; `wanted` says what to pass."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise UsageError(f"{name}={value!r} is of type {type(value).__name__}", hint=f"pass {wanted}")


def picklable(error: BaseException) -> BaseException:
    """`error` itself if it survives pickling, else a RankFailedError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # noqa: BLE001 - any exception of a foreign exception's reduce
        return RankFailedError(f"{type(error).__name__}: {error}")
