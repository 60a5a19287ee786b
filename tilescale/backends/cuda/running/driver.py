# SPDX-License-Identifier: MIT
"""Calls of the CUDA driver."""

from __future__ import annotations

from typing import Any

from tilescale.errors import DeviceError


def call(name: str, *arguments: Any) -> Any:
    """A function of the driver; its only result, if it has one.

    Raises:
        DeviceError: the driver refuses.
    """
    from cuda.bindings import driver

    status, *results = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{name}: {status.name}")
    return results[0] if results else None
