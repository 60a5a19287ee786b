# SPDX-License-Identifier: MIT
"""Operators on the host: the time until a call of small tensors returns, without and with gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import trials
from torch.distributed.nn.functional import all_reduce
from trials import Case

import tilescale
from tilescale import ops
from tilescale.tuning.race import Contender, Heat, Runner

CALLS = 20
"""Calls of a group, each on tensors of its own: too few to fill the launch queue."""

MODES = "", " forward", " backward", " backward of all"
"""A call without gradients, the two halves of one with gradients, and one backward pass of all calls of a group."""

Call = Callable[..., torch.Tensor]


def _gathered_product(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.all_gather_tensor_autograd(a, 0, dist.group.WORLD) @ w.t()


def _product_scattered(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.reduce_scatter_tensor_autograd(a @ w.t(), "sum", 0, dist.group.WORLD)


def _product_summed(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return all_reduce(a @ w.t())


class _Nothing(torch.autograd.Function):
    """The least that a function with gradients does in Python."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return grad


WAYS: dict[str, tuple[Call, ...]] = {
    "all_reduce": (all_reduce, ops.all_reduce),
    "all_gather_matmul": (_gathered_product, lambda a, w: ops.all_gather_matmul(a, w.t())),
    "matmul_reduce_scatter": (_product_scattered, lambda a, w: ops.matmul_reduce_scatter(a, w.t())),
    "matmul_all_reduce": (_product_summed, lambda a, w: ops.matmul_all_reduce(a, w.t())),
    "a product": (lambda a, w: a @ w.t(),),
    "a function in Python": (_Nothing.apply,),
}
"""Name of an operator -> PyTorch's functional collectives and GEMM, and TileScale's operator. The last two are
PyTorch's alone: lower bounds of operators with such parts."""

SHAPES: dict[str, list[list[tuple[int, int]]]] = {
    "all_reduce": [[(32, 1024)]],
    "a function in Python": [[(32, 1024)]],
    "all_gather_matmul": [[(128, 1024), (512, 1024)], [(2048, 1024), (512, 1024)]],
    "matmul_reduce_scatter": [[(128, 1024), (512, 1024)], [(2048, 1024), (512, 1024)]],
    "matmul_all_reduce": [[(128, 1024), (512, 1024)]],
    "a product": [[(128, 1024), (512, 1024)]],
}
"""Name of a work -> shapes of its inputs on each rank."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """All works in all modes."""
    if gpus == 1:
        return
    for name, every in SHAPES.items():
        for shapes in every[:1] if quick else every:
            yield from (Work(name, tuple(shapes), mode).heat(gpus) for mode in MODES)


@dataclass(frozen=True)
class Work:
    """Calls of an operator in a mode.

    Attributes:
        shapes: of its inputs on each rank.
    """

    name: str
    shapes: tuple[tuple[int, int], ...]
    mode: str

    def heat(self, gpus: int) -> Heat:
        named = zip(("pytorch", "tilescale"), WAYS[self.name], strict=False)
        entries = [Contender(name, partial(self.runner, call)) for name, call in named]
        shape = tuple(size for given in self.shapes for size in given)
        return Heat(self.name + self.mode, shape, "bfloat16", gpus, "host", "pytorch", entries, calls=CALLS)

    def draw(self, seed: int) -> Case:
        """This rank's tensors, and their result by PyTorch in float32."""
        given = trials.randoms(seed, torch.bfloat16, *self.shapes)
        want = WAYS[self.name][0](*(x.float() for x in given))
        return Case(tuple(given), want, 2.0**-6 * want.abs() + 2.0**-6 * want.abs().mean())

    def runner(self, call: Call) -> Runner:
        """Calls on alternating tensors, which all have the case's numbers."""
        grad = bool(self.mode)
        every = [[trials.nothing(*shape).requires_grad_(grad) for shape in self.shapes] for _ in range(CALLS)]

        @torch.no_grad()
        def load(*given: torch.Tensor) -> None:
            for places in every:
                for place, x in zip(places, given, strict=True):
                    place.copy_(x)

        once = partial(call, *every[0])
        timed = {" backward": _backward, " backward of all": _backward_of_all}.get(self.mode, _forward)
        runner = trials.checked(self.draw, load, lambda: once().detach())
        return Runner(once, runner.check, partial(timed, call, every))


def _forward(call: Call, every: list[list[torch.Tensor]], calls: int) -> float:
    """Microseconds of a call, the results kept as in a model."""
    return _timed([partial(call, *given) for given in every])


def _backward(call: Call, every: list[list[torch.Tensor]], calls: int) -> float:
    """Microseconds of a backward pass of one call."""
    return _timed([partial(x.backward, grad) for x, grad in zip(*_results(call, every), strict=True)])


def _backward_of_all(call: Call, every: list[list[torch.Tensor]], calls: int) -> float:
    """Microseconds of a call's part in the backward pass of all, as in a model."""
    return _timed([partial(torch.autograd.backward, *_results(call, every))]) / len(every)


def _results(call: Call, every: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results of all calls, whose inputs have no gradients yet, and the gradients of the results."""
    results = [call(*given) for given in every]
    for x in (x for given in every for x in given):
        x.grad = None
    return results, [torch.ones_like(result) for result in results]


def _timed(calls: list[Callable[[], object]]) -> float:
    torch.cuda.synchronize()
    tilescale.init().barrier()
    begin = time.perf_counter()
    kept = [call() for call in calls]
    us = (time.perf_counter() - begin) * 1e6 / len(kept)
    torch.cuda.synchronize()
    return us
