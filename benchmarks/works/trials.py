# SPDX-License-Identifier: MIT
"""Common parts of works: the job, random inputs, skewed ranks, poisoned outputs, comparison with a reference."""

from __future__ import annotations

import functools
import importlib
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tilescale
from tilescale.backends.cuda.running import nccl
from tilescale.tuning.race import Contender, Runner

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "distributed"
WAIT_S = 3.0
"""Longest wait of a kernel for its peers: a contender that hangs drops out soon."""
SKEW_CYCLES = 2_000_000
"""Skew of ranks before a checked call: about a millisecond."""


@dataclass(frozen=True)
class Case:
    """Inputs of this rank, its expected result, and the error bound of each element."""

    inputs: tuple[torch.Tensor, ...]
    want: torch.Tensor
    bound: torch.Tensor


Draw = Callable[[int], Case]
"""A case for each seed; collective."""


@functools.cache
def device() -> torch.device:
    """This rank's GPU, with NCCL started where there are several ranks."""
    world = tilescale.init()
    torch.cuda.set_device(world.device)
    if world.size > 1:
        nccl.group_of_all(world)
    return world.device


@functools.cache
def alone() -> Any:
    """A process group of this rank only; collective."""
    device()
    groups = [dist.new_group([rank], backend="gloo") for rank in range(tilescale.init().size)]
    return groups[tilescale.init().rank]


def example(name: str) -> Any:
    """Import an example's module. Raises ImportError if there is none of the name."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def compiled(program: Any) -> Any:
    """A program's kernel, built now."""
    kernel = tilescale.compile(program, schedule="sequential", wait_s=WAIT_S)
    assert kernel.device == "cuda", "times need GPUs"  # asking builds it
    return kernel


def randoms(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random tensors, different on every rank; scaled by a tenth, so that sums of products stay far from overflow."""
    generator = torch.Generator(device()).manual_seed(1000 * seed + tilescale.init().rank)
    made = (torch.randn(shape, generator=generator, device=device(), dtype=torch.float32) for shape in shapes)
    return [x.mul_(0.1).to(dtype) for x in made]


def nothing(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of this rank that holds NaN."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device())


def symmetric(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that peers reach, zero."""
    return tilescale.zeros(shape, dtype=dtype)


def checked(
    draw: Draw,
    load: Callable[..., None],
    call: Callable[[], torch.Tensor],
    outputs: Sequence[torch.Tensor] = (),
    synchronize: Callable[[], None] = torch.cuda.synchronize,
) -> Runner:
    """A contender that is checked on every case: ranks out of step, outputs poisoned.

    Args:
        load: puts a case's inputs where the call finds them.
        call: returns the result.
        outputs: tensors that are poisoned before.
        synchronize: waits for the call, and raises its errors.
    """

    def check(seed: int) -> None:
        case = draw(seed)
        load(*case.inputs)
        for output in outputs:
            output.fill_(torch.nan)
        skew(seed)
        result = call()
        synchronize()
        compare(result, case)

    return Runner(call, check)


def skew(seed: int) -> None:
    """Delay one rank by a random time."""
    world, chance = tilescale.init(), random.Random(seed)
    late, cycles = chance.randrange(world.size), chance.randrange(SKEW_CYCLES)
    if world.rank == late:
        torch.cuda._sleep(cycles)


def compare(result: torch.Tensor, case: Case) -> None:
    """Check the error bound. Raises ValueError if an element exceeds it; NaN always does."""
    error = (result.reshape(case.want.shape).float() - case.want).abs()
    wrong = int((~(error <= case.bound)).sum())
    if wrong:
        worst = float((error / case.bound.clamp_min(1e-30)).nan_to_num(torch.inf).max())
        raise ValueError(f"wrong: {wrong} of {error.numel()} elements, up to {worst:.3g} times the bound")


def product_bound(terms: int, want: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Error bound of a bfloat16 result of float32 sums.

    Args:
        terms: number of terms of each element.
        want: magnitudes of intermediate values that are rounded to bfloat16.
        magnitudes: the sum of the terms' magnitudes.
    """
    return 2.0**-8 * want.abs() + min(terms, 4 * terms**0.5) * 2.0**-24 * magnitudes


def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a (M, K) times b (N, K) transposed in float32, and the sums of the magnitudes."""
    a, b = a.float(), b.float()
    return a @ b.T, a.abs() @ b.abs().T


def ours(name: str, program: Callable[[], Any], make: Callable[[Any], Runner]) -> Contender:
    """A contender with a program, made from the program's kernel."""
    return Contender(name, lambda: make(compiled(program())), lambda: compiled(program()))


def returning(result: torch.Tensor, function: Callable[..., Any], *given: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A call of a function on tensors, with its result."""

    def call() -> torch.Tensor:
        function(*given)
        return result

    return call


def into(*places: torch.Tensor) -> Callable[..., None]:
    """A `load` that copies each input to its place."""

    def load(*given: torch.Tensor) -> None:
        for place, x in zip(places, given, strict=True):
            place.copy_(x)

    return load
