# SPDX-License-Identifier: MIT
"""The interface of `DeviceProgram` to its steps: the program on this rank's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tilelang_core import ir
from tilescale.backends.cuda.running.copy_queue import CopyQueue
from tilescale.backends.cuda.running.peer_group import PeerGroup
from tilescale.backends.cuda.running.steps import StreamWork
from tilescale.backends.cuda.running.sums import FlagSums
from tilescale.backends.cuda.running.wait_guard import WaitGuard
from tilescale.backends.tilelang.lowering.arguments import WaitSite
from tilescale.backends.tilelang.lowering.check import KernelCheck
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.comm import Team, World
from tilescale.comm.heap import SymmetricHeap
from tilescale.errors import Location
from tilescale.program.model import Program

if TYPE_CHECKING:
    from tilescale.backends.cuda.running.memory import ProgramMemory
    from tilescale.backends.cuda.running.transports import Transport


class ProgramContext(Protocol):
    """The context in which a step is made and bound.

    Attributes:
        options: options of TileLang's compiler.
        is_alone: whether it has no level above its grid.
        team: the ranks that run it.
        sizes: units of each launched level.
        sites: the waits and signals, by number; steps add theirs.
        reached: positions of parameters that peers reach.
        fixed: positions of parameters whose addresses decide what is launched.
        reads_at: the line of a decision on values in device memory; None without one.
        by_nccl: whether a step uses NCCL.
        queue: the device's copy queue, once a step uses it.
        queue_waits: whether a step makes the queue wait for a flag.
        spared: SMs that waiting grids leave to the queue's messages.
        exchanges: the workspaces of its collectives.
    """

    program: Program
    options: dict[str, Any]
    world: World
    team: Team
    device: torch.device
    is_alone: bool
    sizes: tuple[tuple[str, int], ...]
    target: LoweringTarget
    sites: list[WaitSite]
    memory: ProgramMemory
    reached: set[int]
    fixed: set[int]
    reads_at: Location | None
    by_nccl: bool
    queue: CopyQueue | None
    queue_waits: bool
    spared: int
    sums: FlagSums
    exchanges: Any

    @property
    def heap(self) -> SymmetricHeap:
        """The memory that this device shares with others of the program."""

    @property
    def peer_group(self) -> PeerGroup:
        """The devices that it shares memory with."""

    @property
    def transport(self) -> Transport:
        """The transport to devices without shared memory. Collective at its first use."""

    @property
    def queue_transport(self) -> Transport:
        """The transport of the copy queue, concurrent with the stream's work. Collective at its first use."""

    @property
    def guard(self) -> WaitGuard:
        """The bounds of its waits."""

    def rank(self, level: str) -> int:
        """This rank's rank at a level."""

    def compile(self, func: ir.PrimFunc, check: KernelCheck | None = None) -> Any:
        """A kernel. Collective."""

    def device_code(self, text: str) -> bytes:
        """A text compiled for this rank's device. Collective."""

    def on_all(self, check: Callable[[], Any]) -> None:
        """Run a check; an error on any rank is raised on all. Collective."""

    def barrier(self, site: int) -> StreamWork:
        """A launch that synchronizes all devices, in the order of the current stream."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""
