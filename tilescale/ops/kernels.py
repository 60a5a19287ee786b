# SPDX-License-Identifier: MIT
"""Kernels of the operators' programs: made at the first call of a kind, then kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

from tilescale.backends import device_services
from tilescale.comm import Team
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.passes.overlap.rewrite import overlap
from tilescale.passes.overlap.schedule import Move, Schedule
from tilescale.passes.scratch import as_parameters
from tilescale.program.builder import ProgramBuilder
from tilescale.runtime import ahead
from tilescale.runtime.compile import compile as compile_program
from tilescale.runtime.kernel import Kernel

SHAPES = 4096
"""Choices of one operator that are kept, those used last."""


Choice = tuple[Any, ...]
"""Arguments of `kernel`: a function that builds a program, a team, and what else the program depends on."""


@dataclass(frozen=True, eq=False)
class ChosenKernels:
    """The kernels that a function chooses by types and shapes. `choice`: the function."""

    choice: Callable[..., Choice]

    @cached_property
    def _kept(self) -> Callable[..., Kernel]:
        return lru_cache(SHAPES)(lambda machine, *given: kernel(*self.choice(*given)))

    def __call__(self, *given: Any) -> Kernel:
        """The kernel for these arguments, of which the function is asked once for each current machine."""
        return self._kept(current_machine(), *given)


def kernel(build: Callable[..., Any], team: Team, *given: Any) -> Kernel:
    """The kernel of `build(team.size, *given)` for a team and the current machine."""
    return _kept(build, team, current_machine(), given)


@cache
def _kept(build: Callable[..., Any], team: Team, machine: Machine, given: tuple[Any, ...]) -> Kernel:
    builder = ProgramBuilder(build, (team.size, *given))
    return compile_program(builder, machine=machine, team=team, schedule="sequential")


def scheduled(func: Any, *moves: Move) -> Any:
    """A sequential program with each of its collectives overlapped as a move says, and its memory among its parameters:
    that is a part of the operators' workspace."""
    made, schedule = overlap(func, current_machine(), Schedule([*moves]))
    assert all(move.overlapped for move in schedule.moves), str(schedule)
    return as_parameters(made)


def kernels(*choices: Choice) -> list[Kernel]:
    """The kernels of several choices."""
    return [kernel(*choice) for choice in choices]


def one_of(choice: Callable[[Any], Choice], taken: Any, variants: Iterable[Any]) -> Kernel:
    """The kernel of a variant, which depends on the size of a call; a dry run adds those of all variants."""
    if ahead.is_dry():
        ahead.also_needed(kernels, *map(choice, variants))
    return kernel(*choice(taken))


@cache
def local_kernel(build: Callable[..., Any], *given: Any) -> Kernel:
    """The kernel of `build(*given)`, a program of one device that each rank calls for itself, by `call_local`."""
    return compile_program(build(*given), schedule="sequential")


def call_local(kernel: Kernel, *given: Any) -> None:
    """Call the kernel of a program of one device."""
    device_services().call_kernel(kernel, *given)
