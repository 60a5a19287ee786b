# SPDX-License-Identifier: MIT
"""Concurrent grids: the first on the current stream, the others on a side stream, which the current one joins.

Captured in a CUDA graph, these are a fork and a join. Programs of the first grid start first, and those of the others
on the remaining SMs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tilescale.backends.cuda.running.grids import grid_step
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import CallStep, KernelLaunch, ProgramCall, StreamWork, in_order
from tilescale.backends.cuda.running.streams import side_stream
from tilescale.backends.tilelang.lowering.program import ConcurrentGrids


def concurrent_grids_step(context: ProgramContext, grids: ConcurrentGrids) -> CallStep:
    """Concurrent grids as a step; sequential ones where grids that wait leave SMs to the queue. Collective, and raises,
    as `grid_step`."""
    steps = [grid_step(context, grid) for grid in grids.grids]
    if context.spared:
        return in_order(steps)

    def bind(call: ProgramCall) -> list[StreamWork]:
        first, *others = (step(call) for step in steps)
        if not first:
            return first  # no programs
        side = side_stream(context.device)
        return [
            lambda: side.wait_stream(torch.cuda.current_stream()),
            *first,
            *(_on(side, work) for each in others for work in each),
            lambda: torch.cuda.current_stream().wait_stream(side),
        ]

    return bind


def _on(side: torch.cuda.Stream, work: StreamWork) -> StreamWork:
    assert isinstance(work, KernelLaunch), "a grid is a launch"
    return replace(work, stream=side)
