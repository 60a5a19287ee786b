# SPDX-License-Identifier: MIT
"""Kernels of the operators' programs: made at the first call of a kind, then kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, wraps
from typing import Any

from tilescale.comm import Team
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.ops import repeated
from tilescale.runtime.compile import compile as compile_program
from tilescale.runtime.kernel import Kernel

SHAPES = 4096
"""Choices of one operator that are kept, those used last."""


def chosen(choose: Callable[..., Kernel]) -> Callable[..., Kernel]:
    """A function that chooses a kernel by types and shapes: asked once for the same arguments and current machine."""
    kept = lru_cache(SHAPES)(lambda machine, *given: choose(*given))
    return wraps(choose)(lambda *given: kept(current_machine(), *given))


def kernel(build: Callable[..., Any], team: Team, *given: Any) -> Kernel:
    """The kernel of `build(team.size, *given)` for a team and the current machine."""
    return _kept(build, team, current_machine(), given)


@cache
def _kept(build: Callable[..., Any], team: Team, machine: Machine, given: tuple[Any, ...]) -> Kernel:
    return compile_program(build(team.size, *given), machine=machine, team=team, schedule="sequential")


def local_kernel(build: Callable[..., Any], *given: Any) -> Kernel:
    """The kernel of `build(*given)`, a program of one device that each rank calls for itself."""
    repeated.not_recorded()  # TileLang's plain launches need no notification of other ranks
    return _kept_local(build, given)


@cache
def _kept_local(build: Callable[..., Any], given: tuple[Any, ...]) -> Kernel:
    return compile_program(build(*given), schedule="sequential")
