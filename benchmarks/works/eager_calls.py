# SPDX-License-Identifier: MIT
"""Collectives as PyTorch programs call them: eagerly, on changing tensors, with newly allocated results.

Of small ones also the two parts of that time: the host's alone, and the device's in a CUDA graph. Graphs of large ones
compare numbers sent as they are with float8.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import trials
from trials import Case

import tilescale
from tilescale import ops
from tilescale.tuning.race import Contender, Heat, Runner

KIB = 1 << 10
SIZES = tuple(4 * KIB << n for n in range(0, 15, 2))
"""Bytes of a rank's tensor: 4 KiB to 64 MiB."""

SMALL = 1 << 20
"""Bytes of a rank's tensor up to which the host takes longer than the device."""

ROWS, INPUTS = 64, 4
"""Rows of a tensor, and number of tensors that alternate."""

FLOAT8 = 4 << 20
"""Bytes of a rank's tensor from which on numbers travel as float8, too, where `ops` can."""

LARGE = tuple(n << 20 for n in (8, 16, 64, 256))
"""Bytes of a rank's tensor whose time on the device is compared, as float8, too."""

Call = Callable[[torch.Tensor], torch.Tensor]


def _like(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty(rows, *x.shape[1:])


def _all_reduced(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    dist.all_reduce(made)
    return made


def _all_gathered(x: torch.Tensor) -> torch.Tensor:
    made = _like(x, len(x) * dist.get_world_size())
    dist.all_gather_into_tensor(made, x)
    return made


def _reduce_scattered(x: torch.Tensor) -> torch.Tensor:
    made = _like(x, len(x) // dist.get_world_size())
    dist.reduce_scatter_tensor(made, x)
    return made


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    dist.all_to_all_single(made, x)
    return made


WAYS: dict[str, tuple[Call, Call]] = {
    "all_reduce": (_all_reduced, ops.all_reduce),
    "all_gather": (_all_gathered, ops.all_gather),
    "reduce_scatter": (_reduce_scattered, ops.reduce_scatter),
    "all_to_all": (_exchanged, ops.all_to_all),
}
"""Name of a collective -> NCCL's, as PyTorch calls it, and TileScale's."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """All collectives at all sizes."""
    if gpus == 1:
        return
    for name, nbytes in itertools.product(WAYS, SIZES[:3] if quick else SIZES):
        for mode in ("eager", "host", "graph")[: 3 if nbytes <= SMALL else 1]:
            yield Work(name, nbytes).heat(gpus, mode)
    for name, nbytes in itertools.product(WAYS, () if quick else LARGE):
        if name != "all_to_all":
            yield Work(name, nbytes).heat(gpus, "graph")


@dataclass(frozen=True)
class Work:
    """A collective of a number of bytes on each rank."""

    name: str
    nbytes: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a rank's tensor, in bfloat16."""
        return ROWS, self.nbytes // 2 // ROWS

    def heat(self, gpus: int, mode: str) -> Heat:
        theirs, own = WAYS[self.name]
        entries = [Contender("nccl", lambda: self.runner(theirs)), Contender("tilescale", lambda: self.runner(own))]
        if self.nbytes >= FLOAT8 and self.name != "all_to_all":
            narrow = partial(own, wire="float8_e4m3fn")
            entries.append(Contender("tilescale, float8 on the wire", lambda: self.runner(narrow, 2.0**-3)))
        return Heat(self.name, self.shape, "bfloat16", gpus, mode, "nccl", entries, calls=20)

    def draw(self, seed: int, narrow: float = 0.0) -> Case:
        """This rank's tensor, and its result by PyTorch in float32; `narrow`: the additional error of float8."""
        (x,) = trials.randoms(seed, torch.bfloat16, self.shape)
        want, magnitudes = (WAYS[self.name][0](each) for each in (x.float(), x.float().abs()))
        sums = tilescale.init().size if "reduce" in self.name else 0
        return Case((x,), want, (sums * 2.0**-8 + narrow) * magnitudes + narrow * 2.0**-12 * magnitudes.max())

    def runner(self, call: Call, narrow: float = 0.0) -> Runner:
        """Calls on alternating tensors; all have the case's numbers."""
        given = [trials.nothing(*self.shape) for _ in range(INPUTS)]
        turn = itertools.cycle(given)
        return trials.checked(
            partial(self.draw, narrow=narrow), lambda x: [each.copy_(x) for each in given], lambda: call(next(turn))
        )
