# SPDX-License-Identifier: MIT
"""Collectives that NVSHMEM launches on a stream, between all ranks of its heap (NVSHMEM API, Collective Communication).

Both tensors lie in the heap, at one offset on all ranks: parameters that do not have stand-ins there, as those that
peers write; what has gaps is copied. NVSHMEM wants everybody's tensors ready before anybody begins, so a barrier of all
devices comes first. It also finds a rank that does not come: NVSHMEM's own waits have no bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tilescale.backends.cuda.lowering.arguments import Site
from tilescale.backends.cuda.running.collectives import dense
from tilescale.backends.cuda.running.collectives.exchanges import UNIT_BYTES
from tilescale.backends.cuda.running.collectives.setting import Bound, Operands, Stand, Team
from tilescale.backends.cuda.running.collectives.workspaces import Landing
from tilescale.backends.cuda.running.owner import Owner
from tilescale.backends.cuda.running.steps import Work, copied

if TYPE_CHECKING:
    import torch

TYPES = {
    "int8": "int8", "uint8": "uint8", "int32": "int32", "int64": "int64", "float16": "half", "bfloat16": "bfloat16",
    "float32": "float", "float64": "double",
}  # fmt: skip
"""What NVSHMEM calls types."""


def allreduce(own: Owner, stand: Stand) -> Bound:
    """`T.allreduce`. Collective."""
    library = Library(own, stand, f"{stand.made.reduction}_reduce")
    return lambda given: library.on(given.target, given.target, lambda out, x: (out, x, x.numel()))


def reduce_scatter(own: Owner, stand: Stand) -> Bound:
    """`T.reduce_scatter`. Collective."""
    library = Library(own, stand, f"{stand.made.reduction}_reducescatter")
    return library.along(lambda out, x: (out, x, out.numel()))


def all_gather(own: Owner, stand: Stand) -> Bound:
    """`T.all_gather`. Collective."""
    library = Library(own, stand, "fcollect")
    return library.along(lambda out, x: (out, x, x.numel()))


def all_to_all(own: Owner, stand: Stand) -> Bound:
    """`T.all_to_all`. Collective."""
    library = Library(own, stand, "alltoall")
    return library.along(lambda out, x: (out, x, x.numel() // library.team.size))


def broadcast(own: Owner, stand: Stand) -> Bound:
    """`T.broadcast`. Collective."""
    library = Library(own, stand, "broadcast")

    def bind(given: Operands) -> list[Work]:
        # The root's tensor would be source and target, which NVSHMEM does not say that it takes.
        source = library.landing(given.target.nbytes).view(given.target.dtype)
        keep = [copied(given.target, source)] if library.team.rank == given.root else []
        return [*keep, *library.on(source, given.target, lambda out, x: (out, x, out.numel(), given.root))]

    return bind


Arguments = Callable[["torch.Tensor", "torch.Tensor"], tuple["torch.Tensor | int", ...]]
"""What NVSHMEM is passed for a target and a source, both contiguous, between the team and the stream."""


class Library:
    """A function of NVSHMEM as one collective of a program uses it.

    Attributes:
        team: the devices, which are all of the heap's.
    """

    def __init__(self, own: Owner, stand: Stand, function: str):
        """Collective."""
        from nvshmem import bindings

        self._own, self._made, self.team = own, stand.made, Team.of(own, stand.made.level)
        self._start = getattr(bindings, f"{TYPES[stand.dtype]}_{function}_on_stream")
        self._everybody = int(bindings.Team_id.TEAM_WORLD)
        own.sites.append(Site(stand.what, stand.where))
        self._barrier = own.barrier(len(own.sites) - 1)
        stand.written_by_peers()
        stand.read_by_peers()

    def landing(self, nbytes: int) -> torch.Tensor:
        """Bytes of the heap. Collective if they are new."""
        return self._own.exchanges.get(Landing(self._made.level, nbytes), self._own.near).slots[:nbytes]

    def along(self, arguments: Arguments) -> Bound:
        """On tensors that are cut along a dimension."""

        def bind(given: Operands) -> list[Work]:
            return self.on(*dense.by_parts(self._made.axis, given.source, given.target), arguments)

        return bind

    def on(self, source: torch.Tensor, target: torch.Tensor, arguments: Arguments) -> list[Work]:
        """The call, and copies of what has gaps. Collective if they need new memory."""
        import torch

        if not target.nbytes:
            return []
        room = -(-source.nbytes // UNIT_BYTES) * UNIT_BYTES
        dense = source.is_contiguous(), target.is_contiguous()
        memory = self.landing(room + target.nbytes) if not all(dense) else None
        given = source if memory is None else memory[: source.nbytes].view(source.dtype)
        out = target if memory is None else memory[room:].view(target.dtype)
        if source is target:
            out = given
        passed = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments(out, given)]
        stream, index = torch._C._cuda_getCurrentRawStream, self._own.device.index

        def start(_kept: object = (given, out)) -> None:
            self._start(self._everybody, *passed, stream(index))

        if memory is None:
            return [self._barrier, start]
        return [copied(source, given), self._barrier, start, copied(out, target)]
