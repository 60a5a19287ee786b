# SPDX-License-Identifier: MIT
"""Kernels that a run will need: found by a dry run, compiled all at once.

In a dry run a kernel that has never run only zeroes what it would write. Zeros are valid indices and counts, so the
rest of the run continues, and reaches every kernel.

A kernel's compilation begins, in forked processes, when the dry run calls the kernel, and with it that of its
backward's kernels. Those that only other row counts take are compiled afterwards, with the least priority, and nothing
waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilescale import backends
from tilescale.backends.processes import COMPILING, Running, compile_missing, cores, wait
from tilescale.backends.progress import progress_bar
from tilescale.comm import Team, init
from tilescale.errors import UsageError
from tilescale.hda.current import current_machine
from tilescale.passes.mod_analysis import written_parameters
from tilescale.program.builder import call_name
from tilescale.runtime.outputs import output_positions

if TYPE_CHECKING:
    from tilescale.runtime.kernel import Kernel

Finder = Callable[..., "Sequence[Kernel]"]

LEAST_PRIORITY = 19
"""As `nice` has it."""

_GRIDS = 2
"""Grids that a launch may become, where nothing is declared: local rows, and those of other ranks."""


class NeededKernels:
    """Kernels to compile: those of a run, whose compilation begins at once, and others for later runs.

    The grids of a kernel are compiled by several processes. Each lowers the program first, which takes less time than
    compiling a grid does.

    Attributes:
        now: the kernels of the run, the same on each rank.
        later: functions that find those of other row counts, with their arguments; estimates for all of them take as
            long as the run itself.
        runs: compilations that this rank has begun, by kernel. They lower all of their programs first.
        most: processes of this rank that compile at a time.
    """

    def __init__(self) -> None:
        self.now: list[Kernel] = []
        self.later: dict[tuple[Finder, tuple[Any, ...]], None] = {}
        self.runs: dict[Kernel, Running] = {}
        self._shared_out: dict[Kernel, None] = {}
        self._unbegun: list[Kernel] = []

    def add(self, kernel: Kernel) -> None:
        """Add a kernel of the run. Ranks of a node share out the compilations, which take a process for each
        launch, and one for its second grid, if it may have one and many are free."""
        if kernel in self.now:
            return
        self.now.append(kernel)
        if kernel in self._shared_out:
            return
        self._shared_out[kernel] = None
        if self._is_own(len(self._shared_out)) and not kernel.is_compiled:
            self._unbegun.append(kernel)
            if (busy := self.busy) < self.most:
                self.begin(self.most - busy)

    @property
    def busy(self) -> int:
        """Number of processes that compile kernels of the run."""
        return sum(len(run.sentinels) for run in set(self.runs.values()))

    def begin(self, most: int) -> None:
        """Begin the compilations that no process was left for, in up to `most` processes."""
        own, self._unbegun = self._unbegun, []
        if own and backends.compiles():
            counts = [_counts(kernel) for kernel in own]
            parts = [(kernel, count) for kernel, (_, count) in zip(own, counts, strict=True)]
            grids = [partial(_compile, kernel, n, count) for kernel, count in parts for n in range(count)]
            jobs: list[Callable[[], Any]] = [kernel.lower for kernel in own]
            count = min(most, len(grids), max(sum(launches for launches, _ in counts), most // 2))
            self.runs |= dict.fromkeys(own, Running([*jobs, *grids], count))

    def wait_for_programs(self) -> None:
        """Wait until this rank's programs are lowered."""
        runs = list(self.runs.values())
        wait({run: runs.count(run) for run in runs})

    def wait_for(self, kernel: Kernel, what: str | None = None) -> None:
        """Wait until a kernel is compiled, if this rank does it. `what`: a description for a progress bar."""
        if kernel in self.runs:
            run = self.runs[kernel]
            wait({run: len(run.jobs)}, what)

    def begin_later(self) -> None:
        """Begin those of other runs, which nothing waits for: in one process if this run's were in the caches. Without
        a process for those that the caches are known to have: as long as it lives, what this one writes is copied."""
        if not backends.compiles():
            return
        own = [(each, done_file(*each)) for n, each in enumerate(self.later) if self._is_own(n)]
        jobs = [partial(self._compile_found, *each, done) for each, done in own if done is None or not done.exists()]
        if jobs:
            Running(jobs, self.most if self.runs else 1, LEAST_PRIORITY)

    def found(self) -> list[Kernel]:
        """The kernels of all row counts."""
        return [*self.now, *(kernel for find, given in self.later for kernel in find(*given))]

    def _compile_found(self, find: Finder, given: tuple[Any, ...], done: Path | None) -> None:
        for kernel in find(*given):
            if kernel not in self.now:
                _compile(kernel)
        if done is not None:
            done.touch()

    def _is_own(self, number: int) -> bool:
        return number % self._ranks == init().local_rank

    @cached_property
    def _ranks(self) -> int:
        return init().local_size

    @cached_property
    def most(self) -> int:
        return max(cores() // self._ranks, 1)


def done_file(find: Callable[..., Any], given: tuple[Any, ...]) -> Path | None:
    """The file that says that the caches have all kernels of a call; the same for each rank of a team."""
    return backends.done_file(call_name(find, _without_teams(given)), current_machine())


def _without_teams(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with the numbers of a team's ranks in place of the team, which each rank has in another form."""
    return tuple(
        each.ranks if isinstance(each, Team) else _without_teams(each) if isinstance(each, tuple) else each
        for each in given
    )


def _counts(kernel: Kernel) -> tuple[int, int]:
    """Number of its launches, and the largest number of its grids."""
    if kernel.declaration is not None:
        return 1, kernel.declaration.grids
    launches = len(kernel.program.launches)
    return launches, max(launches, _GRIDS)


def _compile(kernel: Kernel, part: int = 0, parts: int = 1) -> None:
    """Compile a part of the grids into the caches, which needs no other rank, in a process that must not query the
    hardware."""
    for each in kernel.lower().ahead(kernel.options)[part::parts]:
        each.pinned().run()


_needed: NeededKernels | None = None
"""Those of the current dry run; shared by all threads, as gradients are computed in another one."""


@contextlib.contextmanager
def dry_run(needed: NeededKernels | None = None) -> Iterator[NeededKernels]:
    """Within the block, kernels that have never run zero their results. Yields those that were called, and those
    that were needed before.

    Raises UsageError within another one.
    """
    global _needed
    if _needed is not None:
        raise UsageError("a dry run within a dry run", hint="end the first one before the next")
    _needed = NeededKernels() if needed is None else needed
    try:
        yield _needed
    finally:
        _needed = None


def is_dry() -> bool:
    """Whether a dry run is in progress."""
    return _needed is not None


def met() -> int:
    """Number of kernels that the current dry run has called; 0 without one."""
    return 0 if _needed is None else len(_needed.now)


def also_needed(find: Finder, *given: Any) -> None:
    """In a dry run, add kernels that later runs need, or a part of this one that the dry run does not reach: those that
    `find(*given)` returns."""
    if _needed is not None:
        _needed.later[find, given] = None


def noted(kernel: Kernel, args: Sequence[Any]) -> bool:
    """Whether a dry run takes this first call of a kernel; one that returns outputs has to run."""
    if _needed is None:
        return False
    declared = kernel.declared_outputs
    if declared is None and output_positions(kernel.program, kernel.options.get("out_idx")):
        return False
    _needed.add(kernel)
    for position in written_parameters(kernel.program) if declared is None else declared:
        args[position].detach().zero_()
    return True


def compile_others(kernels: Sequence[Kernel]) -> None:
    """Compile the kernels of programs that are not their grids: barriers of ranks, messages. Collective over the ranks
    that call the programs; those of a node share the compilations.

    Raises as `BoundProgram.compilations`.
    """
    # All programs are read before the first one is bound, where ranks meet: each has read others in a dry run.
    grids = [each for kernel in kernels for each in kernel.lower().ahead(kernel.options)]
    known = [each for kernel in kernels for each in kernel.compilations()]
    compile_missing([each for each in known if each not in grids], init().local_rank, init().local_size)


def compile_all(needed: NeededKernels) -> None:
    """Collective over the job: compile and load the kernels of a run, over all ranks and CPU cores of each node.

    Raises the errors of a kernel's first call, except those of its arguments.
    """
    world = init()
    needed.begin(needed.most)
    needed.wait_for_programs()
    are_compiled = not any(world.all_gather(bool(needed.runs)))
    compile_others(needed.now)
    with progress_bar(COMPILING, False if world.local_rank else None, len(needed.now)) as advance:
        for kernel in needed.now:
            needed.wait_for(kernel)
            if not are_compiled:
                world.barrier()
            kernel.prepare()
            advance(1)
    needed.begin_later()  # not before: processes on one core share its units at any priority
