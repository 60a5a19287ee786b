# SPDX-License-Identifier: MIT
"""The machine that programs are traced for: the innermost `use_machine`, else the settings' choice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache

from tilescale.hda.machine import Machine
from tilescale.hda.names import BuiltIn
from tilescale.settings import settings

DEFAULT_MACHINE = "h200-sxm-8"

_current: ContextVar[Machine | None] = ContextVar("tilescale_machine", default=None)


def as_machine(machine: Machine | str | None) -> Machine:
    """A machine from itself, a name or path, or None for the current one."""
    if machine is None:
        return current_machine()
    return machine if isinstance(machine, Machine) else Machine.load(machine)


def current_machine() -> Machine:
    """The machine that a program traced here is meant for."""
    return _current.get() or _loaded(settings().machine or DEFAULT_MACHINE)


@cache
def _loaded(name: str) -> Machine:
    return Machine.load(name)


@contextlib.contextmanager
def use_machine(machine: Machine | BuiltIn | str) -> Iterator[Machine]:
    """Trace the programs inside for this machine: `with tilescale.use_machine("wafer-mesh"):`.

    Args:
        machine: a machine, a built-in name, or the path of a description.

    Raises:
        UnknownMachineError, MachineFileError: as `Machine.load`.
    """
    loaded = as_machine(machine)
    token = _current.set(loaded)
    try:
        yield loaded
    finally:
        _current.reset(token)
