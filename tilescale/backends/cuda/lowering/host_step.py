# SPDX-License-Identifier: MIT
"""What the host puts on a device's stream: the record of one operation on whole tensors."""

from __future__ import annotations

from dataclasses import dataclass

from tilelang_core import ir
from tilescale.errors import Location
from tilescale.program.model import DevicePhase

QUEUE, QUEUE_BETWEEN, JOIN = "queue", "queue between nodes", "join"
"""What a `HostStep` says instead of a mechanism: the device's copy queue executes it beside what follows; the queues of
sender and receiver do; and, of no operation, what follows waits for the queue."""


@dataclass(frozen=True)
class HostStep(DevicePhase):
    """An operation on whole tensors that the host puts on the stream; `impl` names how, `where` its line."""

    impl: str = ""
    where: Location | None = None

    @property
    def call(self) -> ir.Call:
        """The operation."""
        return self.stmt.value
