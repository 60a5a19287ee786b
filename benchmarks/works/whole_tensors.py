# SPDX-License-Identifier: MIT
"""Collectives on whole tensors, from 4 KiB to 256 MiB: TileScale's, NCCL's, and those of PyTorch's symmetric memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import nccl_windows
import programs
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
import trials
from calls import Put
from trials import Case, checked, ours

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(4 * KIB << n for n in range(17))
ODD = (10_002, 100_002, MIB + 6, 10_000_002)
"""Bytes of whole tensors: powers of two, and sizes that divide nothing, which are rounded up to whole parts."""

NAMES = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
OURS = {"allreduce": ("one_shot", "two_shot"), "all_gather": ("direct", "copy_engine"),
        "all_to_all": ("direct", "copy_engine"), "broadcast": ("direct", "copy_engine")}  # fmt: skip
"""Algorithms of TileScale; of the others, direct."""


def doubled(least: int) -> tuple[int, ...]:
    """Bytes of whole tensors from `least` to 8 GiB, doubling, as in nccl-tests."""
    return tuple(least << n for n in range(31) if least << n <= 8 << 30)


def heats(
    gpus: int, modes: tuple[str, ...], algorithms: bool, tensors: Sequence[tuple[str, int]], windows: bool = False
) -> Iterator[Heat]:
    """Collectives and the bytes of their tensors; `algorithms`: each algorithm alone; `windows`: NCCL with registered
    memory in place of PyTorch's kernels.

    Before them a put by copy engine, which measures the link's rate.
    """
    put = Put(128).heat()
    yield replace(put, contenders=[c for c in put.contenders if c.name == put.baseline])
    for mode in modes:
        for name, nbytes in tensors:
            yield Work(name, nbytes).heat(gpus, mode, algorithms, windows)


@dataclass(frozen=True)
class Work:
    """A collective of whole tensors of a number of bytes."""

    name: str
    nbytes: int

    @property
    def elements(self) -> int:
        """Elements of the whole tensor, a multiple of the ranks if it has parts."""
        whole, size = -(-self.nbytes // 2), tilescale.init().size
        return whole if self.name in ("allreduce", "broadcast") else -(-whole // size) * size

    def heat(self, gpus: int, mode: str, algorithms: bool, windows: bool = False) -> Heat:
        """All contenders; with `algorithms`, NCCL and those of TileScale."""
        if algorithms:
            others = [self.own(impl) for impl in OURS.get(self.name, ("direct",))]
        else:
            others = [*(self.windows() if windows else self.symmetric()), self.own(None)]
        entries = [Contender("nccl", self.nccl), *others]
        share = {"allreduce": 2 * (gpus - 1) / gpus, "broadcast": 1.0}.get(self.name, (gpus - 1) / gpus)
        calls = 8 if self.nbytes <= 4 * MIB else 3
        moved = share * 2 * self.elements
        return Heat(self.name, (self.elements,), "bfloat16", gpus, mode, "nccl", entries, bytes=moved, calls=calls)

    # -- what is right -----------------------------------------------------------------------------------------------

    def lengths(self) -> tuple[int, int]:
        """Elements of the source and of the result on each rank."""
        part = self.elements // tilescale.init().size
        source = part if self.name == "all_gather" else self.elements
        return source, part if self.name == "reduce_scatter" else self.elements

    def draw(self, seed: int) -> Case:
        """This rank's source, and its result by NCCL: of sums in float32, with their error bound."""
        world = tilescale.init()
        (x,) = trials.randoms(seed, torch.bfloat16, (self.lengths()[0],))
        if self.name in ("allreduce", "reduce_scatter"):
            wide = x.float()
            sums = torch.stack([wide, wide.abs()])
            dist.all_reduce(sums)
            want, magnitudes = sums if self.name == "allreduce" else (s.chunk(world.size)[world.rank] for s in sums)
            return Case((x,), want, 2.0**-7 * magnitudes)
        want = torch.empty(self.elements, dtype=x.dtype, device=x.device)
        if self.name == "broadcast":
            dist.broadcast(want.copy_(x), 0)
        elif self.name == "all_gather":
            dist.all_gather_into_tensor(want, x)
        else:
            dist.all_to_all_single(want, x)
        return Case((x,), want.float(), torch.zeros_like(want, dtype=torch.float32))

    # -- contenders --------------------------------------------------------------------------------------------------

    def own(self, impl: str | None) -> Contender:
        """TileScale, by a named algorithm or by the chosen one."""
        name = "tilescale" if impl is None else f"tilescale {impl}"
        source, target = self.lengths()
        program = lambda: programs.collective(self.name, source, target, impl)  # noqa: E731
        return ours(name, program, self.kernel)

    def kernel(self, kernel: Any) -> Runner:
        """A program. Peers write into its result, if it is copied, or large."""
        source, target = self.lengths()
        x = trials.symmetric(source) if self.name == "broadcast" else trials.nothing(source)
        y = trials.symmetric(target)
        result = x if self.name in ("allreduce", "broadcast") else y
        return checked(self.draw, x.copy_, trials.returning(result, kernel, x, y), [y], kernel.synchronize)

    def nccl(self) -> Runner:
        """NCCL, as PyTorch calls it."""
        x, y = map(trials.nothing, self.lengths())
        return self.library(x, y, None)

    def windows(self) -> list[Contender]:
        """NCCL with registered memory; by copy engines where nothing is added up."""
        copies = {"all_gather": (False, True), "all_to_all": (False, True), "broadcast": ()}.get(self.name, (False,))
        names = {False: "nccl, windows", True: "nccl, windows, copy engines"}
        return [Contender(names[each], lambda each=each: self.registered(each)) for each in copies]

    def registered(self, copies: bool) -> Runner:
        """The same calls, of registered memory."""
        made = nccl_windows.windows(copies)
        return self.library(*made.tensors(*self.lengths()), made.group, nccl_windows.aside if copies else None)

    def library(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        group: dist.ProcessGroup | None,
        around: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None,
    ) -> Runner:
        """PyTorch's call, `around` which there may be another; in place where a source is as long as a result."""
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: dist.all_reduce(x, group=group),
            "broadcast": lambda: dist.broadcast(x, 0, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(y, x, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, x, group=group),
            "all_to_all": lambda: dist.all_to_all_single(y, x, group=group),
        }
        call = calls[self.name] if around is None else around(calls[self.name])
        result = x if self.name in ("allreduce", "broadcast") else y
        return checked(self.draw, x.copy_, trials.returning(result, call), [y])

    def symmetric(self) -> list[Contender]:
        """PyTorch's kernels on symmetric memory, without multicast."""
        if self.name != "allreduce":
            return []
        one = [Contender("symm_mem one-shot", lambda: self.symm_mem("one"))] if self.nbytes <= 16 * MIB else []
        # Its vectors have 16 bytes: it raises an error for tensors with parts that are not multiples.
        even = self.elements % (8 * tilescale.init().size) == 0
        return [*one, *([Contender("symm_mem two-shot", lambda: self.symm_mem("two"))] if even else [])]

    def symm_mem(self, shots: str) -> Runner:
        """Write in place, or into a new tensor."""
        x = symm.empty(self.elements, dtype=torch.bfloat16, device=trials.device())
        symm.rendezvous(x, dist.group.WORLD)
        group = dist.group.WORLD.group_name
        function = {"one": torch.ops.symm_mem.one_shot_all_reduce, "two": torch.ops.symm_mem.two_shot_all_reduce_}
        return checked(self.draw, x.copy_, lambda: function[shots](x, "sum", group))
