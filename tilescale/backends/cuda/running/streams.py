# SPDX-License-Identifier: MIT
"""Streams that are not shared.

`torch.cuda.Stream` is the next one of 32 that PyTorch keeps for each device and priority, so it may be in use already.
Work that must pass a waiting stream must not be queued on the same hardware queue.
"""

from __future__ import annotations

from functools import cache

import torch

from tilescale.backends.cuda.running import driver

_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: it does not wait for the default stream by itself."""

_PAST_WAITS = -2
"""A priority that differs from those of waiting streams, hence another hardware queue."""


def own_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A new stream, which stays until the process ends. Raises DeviceError."""
    context = driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", device.index))
    driver.call("cuCtxPushCurrent", context)  # a thread may not have a context yet
    try:
        made = driver.call("cuStreamCreateWithPriority", _NON_BLOCKING, priority)
    finally:
        driver.call("cuCtxPopCurrent")
    return torch.cuda.ExternalStream(int(made), device=device)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for work that is concurrent with the current stream's, which waits for it."""
    return own_stream(device)


@cache
def past_waits(device: torch.device) -> torch.cuda.Stream:
    """The stream for work that must pass kernels and streams that wait: stops, reads, and writes that end a wait.
    Nothing on it ever waits, so all programs of a device share it."""
    return own_stream(device, _PAST_WAITS)
