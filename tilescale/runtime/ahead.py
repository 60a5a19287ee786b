# SPDX-License-Identifier: MIT
"""Kernels that a run will need: found by a dry run, compiled all at once.

In a dry run a kernel that has never run only zeroes what it would write. Zeros are valid indices and counts, so the
rest of the run continues, and reaches every kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tilescale.backends.processes import compile_missing, cores, run_in_processes
from tilescale.comm import init
from tilescale.errors import UsageError
from tilescale.passes.mod_analysis import written_parameters
from tilescale.runtime.outputs import output_positions
from tilescale.timing.no_gc import no_cyclic_collection

if TYPE_CHECKING:
    from tilescale.runtime.kernel import Kernel

_met: list[Kernel] | None = None
"""Kernels that the current dry run has called; shared by all threads, as gradients are computed in another one."""


@contextlib.contextmanager
def dry_run() -> Iterator[list[Kernel]]:
    """Within the block, kernels that have never run zero their results. Yields the list of those that were called.

    Raises UsageError within another one.
    """
    global _met
    if _met is not None:
        raise UsageError("a dry run within a dry run", hint="end the first one before the next")
    _met = []
    try:
        yield _met
    finally:
        _met = None


def is_dry() -> bool:
    """Whether a dry run is in progress."""
    return _met is not None


def also_needed(kernel: Kernel) -> None:
    """In a dry run, add a kernel to those that are compiled."""
    if _met is not None and kernel not in _met:
        _met.append(kernel)


def noted(kernel: Kernel, args: Sequence[Any]) -> bool:
    """Whether a dry run takes this first call of a kernel; one that returns outputs has to run."""
    if _met is None or output_positions(kernel.program, kernel.options.get("out_idx")):
        return False
    also_needed(kernel)
    for position in written_parameters(kernel.program):
        args[position].detach().zero_()
    return True


@no_cyclic_collection()  # half a second in a process with a model, also in each forked one, and its pages are copied
def compile_all(kernels: Sequence[Kernel]) -> None:
    """Collective over the job: compile and load kernels, over all ranks and CPU cores of each node.

    Raises the errors of a kernel's first call, except those of its arguments.
    """
    world = init()
    number, ranks = world.local_rank, world.local_size
    run_in_processes([kernel.lower for kernel in kernels[number::ranks]], cores() // ranks)  # into the cache
    world.barrier()
    compile_missing([each for kernel in kernels for each in kernel.compilations()], number, ranks)
    world.barrier()
    for kernel in kernels:
        kernel.prepare()
