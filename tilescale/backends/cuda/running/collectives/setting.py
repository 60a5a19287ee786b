# SPDX-License-Identifier: MIT
"""Context of a collective: the program around it, once, and the tensors of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import StreamWork
from tilescale.backends.tilelang.lowering.arguments import WaitSite
from tilescale.errors import Location
from tilescale.program.mesh import Mesh
from tilescale.program.operations import Collective


@dataclass(frozen=True)
class PlacedCollective:
    """A collective at its place in a program.

    Attributes:
        made: the operation.
        where: its line.
        dtype: type of its elements.
        nbytes: bytes of its whole tensor; None if known only in calls.
        written_by_peers: reports that peers write into the target, which then must be symmetric.
        among: its participants among the level's devices; None for all.
    """

    made: Collective
    where: Location | None
    dtype: str
    nbytes: int | None
    written_by_peers: Callable[[], None]
    among: SiblingDevices | None = None

    def team(self, context: ProgramContext) -> SiblingDevices:
        """The participating devices."""
        return SiblingDevices.of(context, self.made.level) if self.among is None else self.among

    @property
    def what(self) -> str:
        """The operation's name in errors."""
        return f"T.{self.made.name} of level {self.made.level!r}"

    def site(self, context: ProgramContext) -> int:
        """The number of its waits in reports."""
        context.sites.append(WaitSite(self.what, self.where))
        return len(context.sites) - 1


@dataclass(frozen=True)
class Operands:
    """The tensors of a call on this device, the same one where it works in place; the root of a broadcast. For an
    all-to-all of unequal parts: the row counts to and from each rank. For an all-reduce with a norm: the weight and the
    bias, the normalized rows, the residual, and the float8 rows with their scales."""

    source: torch.Tensor
    target: torch.Tensor
    root: int = 0
    sent: torch.Tensor | None = None
    received: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    normed: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    quantized: torch.Tensor | None = None
    scales: torch.Tensor | None = None


BoundCollective = Callable[[Operands], list[StreamWork]]
"""The launches of a call with these operands."""

CollectiveLauncher = Callable[[ProgramContext, PlacedCollective], BoundCollective]
"""An algorithm for an operation, bound when all ranks build the program. Collective."""


@dataclass(frozen=True)
class SiblingDevices:
    """The devices that are siblings at a level: rank r is device `first` + r * `step`."""

    rank: int
    size: int
    first: int
    step: int

    @classmethod
    def of(cls, context: ProgramContext, level: str) -> SiblingDevices:
        """This rank's team."""
        mesh, me = Mesh(context.sizes), context.team.rank
        return cls(mesh.rank(me, level), mesh.count(level), mesh.sibling(me, level, 0), mesh.step(level))

    def device(self, rank: int) -> int:
        """The number, among all devices, of a rank."""
        return self.first + rank % self.size * self.step
