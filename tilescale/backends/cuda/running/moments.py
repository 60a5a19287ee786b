# SPDX-License-Identifier: MIT
"""Moments that the blocks of a program record on this device, as a timeline (headers/sync.cuh, timing/moments.py)."""

from __future__ import annotations

from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.errors import UnsupportedError
from tilescale.program.grids import programs
from tilescale.timing.moments import moments_of, timeline_of
from tilescale.timing.timeline import Timeline


def kept(context: ProgramContext) -> int:
    """Moments of all blocks of a launch. Raises UnsupportedError: the number of blocks is known at launch only."""
    most = 0
    for launch in context.program.launches if context.program.moments else ():
        blocks = programs(launch, dict(context.sizes))
        if blocks is None:
            raise UnsupportedError(
                "timeline=True: the extent of a grid is known at launch only", hint="leave it out", where=launch.where
            )
        most = max(most, blocks)
    return context.program.moments * most


def timeline(context: ProgramContext) -> Timeline:
    """The last launch. Raises as `ProgramContext.synchronize`."""
    context.synchronize()
    blocks = moments_of(context.guard.records.moments.tolist(), context.program.moments)
    sites = [(site.what, site.where) for site in context.sites]
    return timeline_of(blocks, sites, f"{context.program.name} on {context.device}")
