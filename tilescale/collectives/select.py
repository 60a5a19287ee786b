# SPDX-License-Identifier: MIT
"""The choice of an algorithm: one function for the emulator, the simulation and back ends that generate code.

A requested algorithm is taken, or refused; else the fastest of the caller's: as measured, where all of them were at
such sizes, else by the estimate of their rounds over the machine's links. Estimates that differ by less than `TIE` are
a tie: the caller's first is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilescale.collectives.estimate import estimate
from tilescale.collectives.record import TENSORS, TILES, Algorithm
from tilescale.collectives.routes import Sizes
from tilescale.collectives.table import names, records
from tilescale.cost.calibrated import in_force, measured
from tilescale.cost.choose import (
    MEASURED_TIE,
    UNKNOWN_BYTES,
    MechanismChoice,
    compared,
    first_of_the_fastest,
    size_text,
)
from tilescale.errors import NoPathError, UnsupportedError
from tilescale.hda import Machine


@dataclass(frozen=True)
class CollectiveQuery:
    """A collective to choose an algorithm for.

    Attributes:
        operation: its name, e.g. "allreduce".
        form: its kind, of `FORMS`.
        level: whose units take part.
        units: their numbers; between units that own tensors (or parts of such) the numbers of these.
        sizes: units of each launched level but the coarsest, as for `Machine.path`.
        nbytes: of the whole tensor: the result of an all-gather, the tensor of one unit elsewhere; None if known at
            launch only.
        dtype: of its elements.
        function: whether a user's function combines.
        reduction: the combining operation, if it is one of the language's.
    """

    operation: str
    form: str
    level: str
    units: tuple[int, ...]
    sizes: Sizes = ()
    nbytes: int | None = None
    dtype: str = "float32"
    function: bool = False
    reduction: str | None = None


@dataclass(frozen=True)
class AvailableAlgorithms:
    """Algorithms available for a collective.

    Attributes:
        names: preferred ones first.
        on_request: those of them that are taken only where a program asks for them.
    """

    names: tuple[str, ...]
    on_request: frozenset[str] = frozenset()


def everything(machine: Machine, wanted: CollectiveQuery) -> AvailableAlgorithms:
    """All algorithms whose requirements a machine meets, also those that no back end generates."""
    count = len(wanted.units)
    known = [records()[name] for name in names(wanted.operation, wanted.form)]
    fit = [r for r in known if r.against(count, wanted.dtype, wanted.reduction) is None]
    able = [r.name for r in fit if _is_there(machine, r)]
    kept = [name for name in able if records()[name].is_kept_back(count, wanted.dtype, wanted.reduction)]
    return AvailableAlgorithms(tuple(able), frozenset(kept if len(kept) < len(able) else ()))


def _is_there(machine: Machine, record: Algorithm) -> bool:
    """Whether the networks of a machine have the library, and the mechanism, that an algorithm needs."""
    libraries = {library.name for network in machine.networks for library in network.libraries}
    mechanisms = (m for network in machine.networks for m in network.mechanisms)
    started = not record.by_host or any(m.started_by == "host" and m.put for m in mechanisms)
    return started and (not record.library or record.library in libraries)


def select(
    machine: Machine, wanted: CollectiveQuery, available: AvailableAlgorithms, impl: str | None = None
) -> MechanismChoice:
    """The algorithm of a collective: `impl` if it is given, else the fastest of those available. Raises
    UnsupportedError: `impl` is not available, or no algorithm is; lists the available ones."""
    if not available.names:
        raise UnsupportedError(
            f"T.{wanted.operation} of {wanted.dtype} between {wanted.level}s: there is no algorithm for it here"
        )
    if impl is not None:
        if impl not in available.names:
            raise refusal(wanted, impl, available)
        return MechanismChoice(impl, "asked for")
    able = [name for name in available.names if name not in available.on_request] or [*available.names]
    if len(able) < 2 or len(wanted.units) == 1 or wanted.form not in (TENSORS, TILES):
        return MechanismChoice(able[0], "the only one" if len(able) == 1 else "nothing to compare")
    if known := measured_times(machine, wanted, able):
        best = first_of_the_fastest(known, MEASURED_TIE)
        return MechanismChoice(best, compared(best, known, size_text(wanted.nbytes), "measured"))
    try:
        times = [(name, seconds(machine, wanted, name)) for name in able]
    except NoPathError:
        return MechanismChoice(able[0], "nothing to compare")
    best = first_of_the_fastest(times)
    return MechanismChoice(best, compared(best, times, size_text(wanted.nbytes)))


def refusal(wanted: CollectiveQuery, impl: str, available: AvailableAlgorithms) -> UnsupportedError:
    """The error for an algorithm that a collective cannot be made by, which says why and lists the others."""
    reason = records()[impl].against(len(wanted.units), wanted.dtype, wanted.reduction)
    why = f"{reason}; " if reason is not None else ""
    others = ", ".join(name for name in available.names if name != impl) or "none"
    return UnsupportedError(
        f"impl={impl!r} of T.{wanted.operation}: {why}available here: {others}",
        hint="leave impl out, and the machine model chooses",
    )


def measured_times(machine: Machine, wanted: CollectiveQuery, able: Sequence[str]) -> list[tuple[str, float]]:
    """Seconds of algorithms as they were measured on a machine; [] unless that is known of all of them.

    A measured time against an estimated one would compare the estimate's errors.
    """
    data = measured(machine)
    is_like_those = wanted.form == TENSORS and wanted.level == machine.tensor_level.name and not wanted.function
    if data is None or not is_like_those or wanted.nbytes is None:
        return []
    count, nbytes = len(wanted.units), wanted.nbytes
    times = [(name, data.collective_s(wanted.operation, name, count, nbytes, wanted.dtype)) for name in able]
    known = [(name, seconds) for name, seconds in times if seconds is not None]
    return known if len(known) == len(able) else []


def seconds(machine: Machine, wanted: CollectiveQuery, name: str) -> float:
    """Seconds of an algorithm between units that own tensors, or whose programs bring tiles of them."""
    nbytes: float = UNKNOWN_BYTES if wanted.nbytes is None else wanted.nbytes
    operation, nbytes = moved(wanted.operation, name, len(wanted.units), nbytes, wanted.function)
    known, level = in_force(machine), machine.tensor_level.name
    return _estimated(known, level, operation, name, nbytes, wanted.units, wanted.sizes)


@lru_cache(maxsize=4096)
def _estimated(
    machine: Machine, level: str, operation: str, name: str, nbytes: float, units: tuple[int, ...], sizes: Sizes
) -> float:
    """Seconds of an algorithm; a search over programs asks for those of the same sizes again and again."""
    return estimate(machine, level, operation, name, nbytes, units=units, sizes=dict(sizes)).seconds


def moved(operation: str, name: str, units: int, nbytes: float, function: bool) -> tuple[str, float]:
    """Traffic of an algorithm for a collective: the operation whose rounds these are, and the bytes of its tensor."""
    if function and not records()[name].takes_functions:
        return "all_gather", units * nbytes
    return operation, nbytes


def members(extents: Mapping[str, int], level: str) -> tuple[int, ...]:
    """Numbers of the tensor-owning units of a launch that are, or are in, the first unit of each other level.
    `extents`: units of each launched level down to the one that owns tensors, coarsest first."""
    numbers = np.arange(math.prod(extents.values())).reshape(tuple(extents.values()))
    axis = list(extents).index(level)
    return tuple(map(int, numbers[tuple(slice(None) if i == axis else 0 for i in range(numbers.ndim))]))


def numbering(machine: Machine, extents: Mapping[str, int], grid: Sequence[int] = ()) -> Sizes:
    """The sizes of a launch as `Machine.path` takes them: units of the coarsest level are numbered over the machine.
    `grid`: its extents, the slowest axis first, where programs own tensors."""
    sizes: dict[str, int | tuple[int, ...]] = dict(list(extents.items())[1:])
    if grid:
        sizes[machine.program_level.name] = tuple(grid)
    return tuple(sizes.items())
