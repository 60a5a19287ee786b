# SPDX-License-Identifier: MIT
"""Checks: observers that find bugs which a plain run does not show."""

from __future__ import annotations

from collections.abc import Iterable

from tilescale.backends.emulator.checks.initialization import Initialization
from tilescale.backends.emulator.checks.iterations import Iterations
from tilescale.backends.emulator.checks.outputs import Outputs
from tilescale.backends.emulator.checks.races import Races
from tilescale.backends.emulator.checks.replicas import Replicas
from tilescale.backends.emulator.checks.threads import Threads
from tilescale.backends.emulator.execute.observe import Observer
from tilescale.errors import UsageError, check_type

_CHECKS: dict[str, tuple[type[Observer], ...]] = {
    "races": (Races, Threads, Iterations),
    "uninitialized": (Initialization,),
    "replicas": (Replicas,),
    "outputs": (Outputs,),
}

CHECKS = tuple(_CHECKS)
"""The names of all checks."""


def observers(check: str | Iterable[str]) -> list[Observer]:
    """The observers of some checks: their names, or "all" or "none". Raises UsageError: a check that does not exist."""
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
