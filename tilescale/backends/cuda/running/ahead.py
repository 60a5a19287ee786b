# SPDX-License-Identifier: MIT
"""Kernels of a program that are known before it is built, so that all are compiled in parallel."""

from __future__ import annotations

from typing import Any

from tilelang_core.compile import KernelCompilation as KernelCompilation
from tilelang_core.compile import TextCompilation
from tilescale.backends.base import Compilation
from tilescale.backends.cuda.running.barrier_kernel import barrier_function
from tilescale.backends.cuda.running.phases import message_texts
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.tilelang.lowering.program import LoweredProgram
from tilescale.backends.tilelang.text import REWRITES, check_of

OWN_OPTIONS = ("out_idx", "wait_s", "team", "timeline")
"""Options of a kernel that TileLang's compiler does not have."""


def compiler_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a kernel that TileLang's compiler has."""
    return {name: value for name, value in options.items() if value is not None and name not in OWN_OPTIONS}


def of_grids(lowered: LoweredProgram, options: dict[str, Any]) -> list[Compilation]:
    """The kernels of a program's grids, but those that call a library: these follow it."""
    kernels = [grid.kernel for grid in lowered.grids if not grid.kernel.libraries]
    program, machine = lowered.program, lowered.target.machine
    return [KernelCompilation(k.func, REWRITES, check_of(k, program, machine), options, k.digest) for k in kernels]


def compilations(context: ProgramContext, lowered: LoweredProgram, target: Any) -> list[Compilation]:
    """The kernels of its grids; and those of its barriers and messages, which programs of a job share.

    `target`: the compilation target of the messages' texts.
    """
    made = of_grids(lowered, context.options)
    if not context.is_alone:
        made.append(
            KernelCompilation(
                barrier_function(context.peer_group.size, context.peer_group.stride), REWRITES, None, context.options
            )
        )
    texts = dict.fromkeys(text for step in lowered.host_steps for text in message_texts(context, step))
    return [*made, *(TextCompilation(text, target) for text in texts)]
