# SPDX-License-Identifier: MIT
"""Host steps: the record of one operation on whole tensors that the host puts on a device's stream."""

from __future__ import annotations

from dataclasses import dataclass

from tilelang_core import ir
from tilescale.errors import Location
from tilescale.program.model import DevicePhase

QUEUE, QUEUE_BETWEEN, JOIN = "queue", "queue between nodes", "join"
"""Values of `HostStep.impl` other than mechanisms: the device's copy queue executes it asynchronously; the queues of
sender and receiver do; and, without an operation, later work waits for the queue."""


@dataclass(frozen=True)
class HostStep(DevicePhase):
    """An operation on whole tensors that the host puts on the stream; `impl` names its mechanism, `where` its line."""

    impl: str = ""
    where: Location | None = None

    @property
    def call(self) -> ir.Call:
        return self.stmt.value
