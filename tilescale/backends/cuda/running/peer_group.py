# SPDX-License-Identifier: MIT
"""The devices that share memory with this one: addresses of their instances of a tensor, by device number."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilelang_core import ir
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.comm import Team
from tilescale.comm.heap import SymmetricHeap
from tilescale.comm.heap.reach import Reach, reach
from tilescale.errors import LaunchError, Location
from tilescale.program.model import Program


@dataclass(frozen=True)
class PeerGroup:
    """The devices of a program that share a heap.

    Attributes:
        heap: the heap of these devices.
        first: the number of the first one; the others are consecutive.
        devices: number of devices of the program.
    """

    heap: SymmetricHeap | Reach
    first: int
    devices: int

    @classmethod
    def of(cls, heap: SymmetricHeap, team: Team) -> PeerGroup:
        """The devices of a program that a team runs."""
        near = reach(heap)
        return cls(near, team.ranks.index(near.team.ranks[0]), team.size)

    @property
    def size(self) -> int:
        """Number of these devices."""
        return self.heap.team.size

    @property
    def is_whole(self) -> bool:
        """Whether all devices of the program share memory."""
        return self.size == self.devices

    @property
    def stride(self) -> int:
        """Bytes between the instances of two devices."""
        return self.heap.addresses.stride

    @property
    def shift(self) -> int:
        """The number k with `slot(device) == (device + k) % size`."""
        return self.heap.addresses.slot(0)

    def slot(self, device: int) -> int:
        """The leading index of a device in `everywhere`. Raises PeerOutOfRangeError for one without shared memory."""
        return self.heap.addresses.slot(device - self.first)

    def everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """These devices' instances of a symmetric tensor, by slot. Raises NotSymmetricError for another tensor."""
        return self.heap.peers(tensor)

    def check(self, team: Team, target: LoweringTarget, where: Location | None) -> None:
        """Check that ranks are placed as in the machine model. Raises LaunchError: devices that share memory in the
        machine model do not share it here, or nodes differ in their ranks."""
        mine, n = team.rank, target.group_size
        block = range(mine // n * n, min(mine // n * n + n, self.devices))
        missing = [d for d in block if not self.first <= d < self.first + self.size]
        if missing:
            raise LaunchError(
                f"ranks {mine} and {missing[0]} share no memory, they are on different nodes; by machine "
                f"{target.machine.name!r} devices {block[0]} to {block[-1]} do",
                hint="describe the nodes as they are, as docs/many-nodes.md shows, and name the file in "
                "TILESCALE_MACHINE; or launch node= and device=",
                where=where,
            )
        expected = team.ranks[self.first : self.first + self.size]
        if self.heap.team.ranks != expected or self.devices % self.size or self.first % self.size:
            raise LaunchError(
                f"the ranks {list(self.heap.team.ranks)} that share memory on this node are not one of equal blocks of "
                f"the {self.devices} devices",
                hint="start as many ranks on each node, numbered node by node; or run the program on a team with as "
                "many of each, tilescale.compile(func, team=world.team([...])), once all ranks have joined NCCL",
                where=where,
            )


def sizes_of(program: Program, team: Team) -> tuple[tuple[str, int], ...]:
    """Number of units of each launched level; an open level takes the job's number. Raises LaunchError: the job has
    another number of ranks."""
    known = [(name, ir.constant(extent)) for name, extent in program.extents]
    fixed = math.prod(n for _, n in known if n is not None)
    open_ = [name for name, n in known if n is None]
    if team.size % fixed or (team.size != fixed and len(open_) != 1):
        raise LaunchError(
            f"{program.name!r} launches {fixed} devices, the job has {team.size} ranks",
            hint=f"start it with `tilescale run -n {fixed} ...`",
            where=program.launches[0].where,
        )
    return tuple((name, team.size // fixed if n is None else n) for name, n in known)


def own_addresses(heap: SymmetricHeap) -> tuple[int, int]:
    """Begin and end of this device's symmetric memory."""
    first = heap.addresses.address(heap.team.rank)
    return first, first + heap.addresses.size
