# SPDX-License-Identifier: MIT
"""Checks: observers that find mistakes which a run by itself does not show.

    races.py            accesses that nothing orders: clocks.py says what is ordered, flags.py what a wait has seen,
                        states.py what is kept of the past of an element, explain.py what a report says,
                        phases.py mbarriers whose next phase may end before a wait for the last one,
                        redundant.py waits that no access needs, witness.py all races of a run, for remedies
    threads.py          threads of one program, on device memory, where TileScale inserts no barriers
    initialization.py   reads of what was never written
    replicas.py         replicas that should be one and are not
    outputs.py          remarks: outputs that are written in part, tensors that were the same on all units and are not
    shadow.py text.py   cells beside the memory of a program, one an element; words of reports
"""

from __future__ import annotations

from collections.abc import Iterable

from tilescale.backends.emulator.checks.initialization import Initialization
from tilescale.backends.emulator.checks.outputs import Outputs
from tilescale.backends.emulator.checks.races import Races
from tilescale.backends.emulator.checks.replicas import Replicas
from tilescale.backends.emulator.checks.threads import Threads
from tilescale.backends.emulator.execute.observe import Observer
from tilescale.errors import UsageError, check_type

_CHECKS: dict[str, tuple[type[Observer], ...]] = {
    "races": (Races, Threads),
    "uninitialized": (Initialization,),
    "replicas": (Replicas,),
    "outputs": (Outputs,),
}

CHECKS = tuple(_CHECKS)
"""The names of all checks."""


def observers(check: str | Iterable[str]) -> list[Observer]:
    """The observers that make some checks: names, or "all" or "none" in place of them.

    Raises:
        UsageError: a check that does not exist.
    """
    check_type("check", check, "names of checks", str, Iterable)
    names = {check} if isinstance(check, str) else set(check)
    if names == {"all"}:
        names = set(CHECKS)
    unknown = sorted(names - set(CHECKS) - ({"none"} if len(names) == 1 else set()))
    if unknown:
        raise UsageError(
            f"check={', '.join(map(repr, unknown))}: the checks are {', '.join(map(repr, CHECKS))}",
            hint='name one or several of them, or "all", or "none"',
        )
    return [observer() for name in CHECKS if name in names for observer in _CHECKS[name]]
