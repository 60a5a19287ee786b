# SPDX-License-Identifier: MIT
"""Calls of the CUDA driver."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tilescale.errors import DeviceError


def call(name: str, *arguments: Any) -> Any:
    """A function of the driver; its first result, if it has one. Raises DeviceError: the driver refuses."""
    found = results(name, *arguments)
    return found[0] if found else None


def results(name: str, *arguments: Any) -> list[Any]:
    """All results of a call of the driver. Raises as `call`."""
    status, *found = function(name)(*arguments)
    if status:
        raise refused(name, status)
    return found


@cache
def function(name: str) -> Callable[..., Any]:
    """Hot-path variant of `call`: a function of the driver that returns a status, then results."""
    from cuda.bindings import driver

    return getattr(driver, name)


def refused(name: str, status: Any) -> DeviceError:
    """The error for a nonzero status."""
    from cuda.bindings import driver

    return DeviceError(f"{name}: {driver.CUresult(status).name}")
