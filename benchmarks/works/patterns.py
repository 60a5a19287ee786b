# SPDX-License-Identifier: MIT
"""Wires under load by pattern of senders and receivers: by copy engine, by stores of a kernel, and by NCCL."""

# No postponed annotations here: TileLang evaluates those of a traced function where its closure is not known.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import trials
from trials import Case, checked, ours

import tilescale
import tilescale.language as T
from tilescale.tuning.race import Contender, Heat, Runner

MIB = 1 << 20
PATTERNS = ("pair", "ring", "all to all", "all to one")
"""One GPU to one other; each to the next one; each to all others; all others to one."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """All patterns. Two GPUs are a pair or a ring."""
    if gpus > 1:
        for name in PATTERNS[: 2 if gpus == 2 else None]:
            yield Pattern(name, 4 * MIB if quick else 64 * MIB).heat(gpus)


def receivers(name: str, rank: int, size: int) -> list[int]:
    """Destinations of a rank, in the order of its sends."""
    every = {
        "pair": [1] if rank == 0 else [],
        "ring": [(rank + 1) % size],
        "all to all": [(rank + step) % size for step in range(1, size)],
        "all to one": [0] if rank else [],
    }
    return every[name]


def senders(name: str, rank: int, size: int) -> list[int]:
    """Ranks that send to a rank."""
    return [sender for sender in range(size) if rank in receivers(name, sender, size)]


def program(name: str, size: int, elements: int, impl: str) -> Any:
    """Position of a sender's part in the destination's tensor."""

    @T.prim_func
    def pattern(X: T.Tensor((elements,), "bfloat16"), Y: T.Tensor((size, elements), "bfloat16")):
        with T.Kernel(device=size):
            with T.Scale("device") as (rank, _):
                if name == "pair":
                    if rank == 0:
                        T.copy(X, Y[rank, 0:elements], dst=1, impl=impl)
                elif name == "ring":
                    T.copy(X, Y[rank, 0:elements], dst=(rank + 1) % size, impl=impl)
                elif name == "all to all":
                    for step in T.serial(1, size):
                        T.copy(X, Y[rank, 0:elements], dst=(rank + step) % size, impl=impl)
                else:
                    if rank != 0:
                        T.copy(X, Y[rank, 0:elements], dst=0, impl=impl)

    return pattern


@dataclass(frozen=True)
class Pattern:
    """A pattern with messages of a number of bytes."""

    name: str
    nbytes: int

    @property
    def elements(self) -> int:
        return self.nbytes // 2

    def heat(self, gpus: int) -> Heat:
        """NCCL, and ours by mechanism; the rate is that of the busiest direction of a GPU's link."""
        entries = [Contender("nccl", self.nccl)]
        for impl, title in (("copy_engine", "tilescale, copy engine"), ("lsu", "tilescale, stores")):
            entries.append(ours(title, lambda impl=impl: program(self.name, gpus, self.elements, impl), self.own))
        moved = self.nbytes * (gpus - 1 if self.name.startswith("all") else 1)
        return Heat(self.name, (self.elements,), "bfloat16", gpus, "eager", "nccl", entries, bytes=moved, calls=4)

    def draw(self, seed: int) -> Case:
        """This rank's message, and the expected messages of others, zeros from ranks that do not send."""
        world = tilescale.init()
        (x,) = trials.randoms(seed, torch.bfloat16, (self.elements,))
        every = torch.empty(world.size, self.elements, dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(every, x)
        every[[rank for rank in range(world.size) if rank not in self._senders]] = 0
        return Case((x,), every.float(), torch.zeros((), device=x.device))

    @property
    def _senders(self) -> list[int]:
        return senders(self.name, tilescale.init().rank, tilescale.init().size)

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        size = tilescale.init().size
        return trials.nothing(self.elements), trials.symmetric(size, self.elements)

    def _runner(self, x: torch.Tensor, y: torch.Tensor, call: Any, synchronize: Any) -> Runner:
        """A contender whose buffers of absent messages are zero, and of the others NaN."""

        def load(given: torch.Tensor) -> None:
            x.copy_(given)
            y[self._senders] = torch.nan
            torch.cuda.synchronize()
            dist.barrier()  # the targets of peers' stores are poisoned before

        return checked(self.draw, load, call, (), synchronize)

    def own(self, kernel: Any) -> Runner:
        x, y = self._places()
        return self._runner(x, y, trials.returning(y, kernel, x, y), kernel.synchronize)

    def nccl(self) -> Runner:
        """Messages of NCCL, all of them at once."""
        (x, y), world = self._places(), tilescale.init()
        sent = [dist.P2POp(dist.isend, x, to) for to in receivers(self.name, world.rank, world.size)]
        messages = [*sent, *(dist.P2POp(dist.irecv, y[sender], sender) for sender in self._senders)]

        def call() -> torch.Tensor:
            for work in dist.batch_isend_irecv(messages) if messages else ():
                work.wait()
            return y

        return self._runner(x, y, call, torch.cuda.synchronize)
