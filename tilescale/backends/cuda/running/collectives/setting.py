# SPDX-License-Identifier: MIT
"""What a collective is bound to: the program that it stands in, once, and then the tensors of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilescale.backends.cuda.running.owner import Owner
from tilescale.backends.cuda.running.steps import Work
from tilescale.errors import Location
from tilescale.program.mesh import Mesh
from tilescale.program.operations import Collective

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Stand:
    """A collective where it stands in a program.

    Attributes:
        made: the operation.
        where: its line.
        dtype: of its elements.
        nbytes: of its whole tensor; None if only calls know.
        written_by_peers: tells that peers write into the target, which then has to be symmetric.
        among: those of the level's devices between which it stands; None for all.
    """

    made: Collective
    where: Location | None
    dtype: str
    nbytes: int | None
    written_by_peers: Callable[[], None]
    among: Team | None = None

    def team(self, own: Owner) -> Team:
        """The devices between which it stands."""
        return Team.of(own, self.made.level) if self.among is None else self.among

    @property
    def what(self) -> str:
        """The operation in words, for errors."""
        return f"T.{self.made.name} of level {self.made.level!r}"


@dataclass(frozen=True)
class Operands:
    """The tensors of a call on this device, the same one where it works in place; the root of a broadcast; and of an
    all-to-all of unequal parts the tensors of how many rows go to each rank, and have come from each; of an all-reduce
    with a norm the weight, where the normalised rows go, the residual, and where they go as float8 with what scales."""

    source: torch.Tensor
    target: torch.Tensor
    root: int = 0
    sent: torch.Tensor | None = None
    received: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    normed: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    quantized: torch.Tensor | None = None
    scales: torch.Tensor | None = None


Bound = Callable[[Operands], list[Work]]
"""What a call with these operands launches."""

Launcher = Callable[[Owner, Stand], Bound]
"""An algorithm for an operation, made where all ranks make the program. Collective."""


@dataclass(frozen=True)
class Team:
    """The devices that are siblings at a level: rank r of them is device `first` + r * `step` of all."""

    rank: int
    size: int
    first: int
    step: int

    @classmethod
    def of(cls, own: Owner, level: str) -> Team:
        """This rank's."""
        mesh, me = Mesh(own.sizes), own.team.rank
        return cls(mesh.rank(me, level), mesh.count(level), mesh.sibling(me, level, 0), mesh.step(level))

    def device(self, rank: int) -> int:
        """The number, over all devices, of a rank."""
        return self.first + rank % self.size * self.step
