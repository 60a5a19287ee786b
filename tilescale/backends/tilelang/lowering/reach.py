# SPDX-License-Identifier: MIT
"""Devices that reach each other's memory in the machine model, and the transport between the others.

Why: peers have addresses inside a node, or where NVLink reaches, and nowhere else. Devices are numbered row-major,
so those that share memory are consecutive: `LoweringTarget.group_size` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.cost.reach import message_bytes
from tilescale.hda.route import Path

STORES, BULK = "lsu", "tma"
"""Mechanisms by which kernels reach peers: loads and stores of threads, which send messages; bulk copies."""

BY_MEMORY, BY_MESSAGES, BY_BOTH = "peer memory", "NCCL", "peer memory inside, NCCL between"
"""Names of the transports of whole tensors between devices."""


@dataclass(frozen=True)
class MemoryGroups:
    """The units of an operation's level, in groups that share memory."""

    inside: int
    across: int

    @property
    def carrier(self) -> str:
        """The name of the transport between them."""
        if self.across == 1:
            return BY_MEMORY
        return BY_MESSAGES if self.inside == 1 else BY_BOTH


def split(target: LoweringTarget, level: str) -> MemoryGroups | None:
    """The siblings of a level in groups that share memory; None if the groups differ in size."""
    size, near, step = target.mesh.count(level), target.group_size, target.mesh.step(level)
    if step >= near:
        return MemoryGroups(1, size) if step % near == 0 else None
    inside = min(size, near // step)
    even = near % step == 0 and size % inside == 0 and (target.devices == near or near % (inside * step) == 0)
    return MemoryGroups(inside, size // inside) if even else None


def reached(target: LoweringTarget, level: str) -> int:
    """Number of siblings of a level that share memory with each other; 0 if their groups differ in size."""
    found = split(target, level)
    return 0 if found is None else found.inside


def share_memory(target: LoweringTarget, level: str) -> bool:
    """Whether all siblings of a level reach each other's memory."""
    found = split(target, level)
    return found is not None and found.across == 1


def path_between(target: LoweringTarget) -> Path:
    """The path between two devices that do not share memory."""
    machine = target.machine
    return machine.path(machine.tensor_level.name, 0, target.group_size, sizes=dict(target.sizes[1:]))


def chunk_bytes(target: LoweringTarget) -> int:
    """Bytes of a message between devices that do not share memory."""
    return message_bytes(path_between(target))
