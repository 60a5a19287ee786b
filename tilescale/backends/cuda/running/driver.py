# SPDX-License-Identifier: MIT
"""Calls of the CUDA driver."""

from __future__ import annotations

from typing import Any

from tilescale.errors import DeviceError


def call(name: str, *arguments: Any) -> Any:
    """A function of the driver; its first result, if it has one.

    Raises:
        DeviceError: the driver refuses.
    """
    found = results(name, *arguments)
    return found[0] if found else None


def results(name: str, *arguments: Any) -> list[Any]:
    """The same, and all of its results."""
    from cuda.bindings import driver

    status, *found = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{name}: {status.name}")
    return found
