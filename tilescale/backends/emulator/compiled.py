# SPDX-License-Identifier: MIT
"""A program as closures, and those that a kernel keeps from one call to the next."""

from __future__ import annotations

from collections.abc import Hashable

from tilescale.backends.emulator.assumptions import Assumptions
from tilescale.backends.emulator.interpret import branches, expr, statements  # noqa: F401
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.lockstep import lockstep
from tilescale.backends.emulator.interpret.phases import compile_part
from tilescale.backends.emulator.operations import (  # noqa: F401
    allreduce,
    atomics,
    barriers,
    blockscaled,
    decoders,
    descriptors,
    externs,
    mma,
    peer_atomics,
    random,
    reducers,
    remote,
    tcgen05,
    threads,
    tiles,
    unequal,
    wgmma,
    words,
)
from tilescale.backends.emulator.operations import collectives as _collectives  # noqa: F401
from tilescale.backends.emulator.record import costs, transfers  # noqa: F401
from tilescale.backends.emulator.record.instrumentation import Recording
from tilescale.backends.emulator.record.recorder import Recorder
from tilescale.hda import Machine
from tilescale.program.model import Program


class Compiled:
    """A program as closures over frames. One run at a time uses them.

    Attributes:
        recorder: the one that the closures write to; None where nothing is recorded: programs in lockstep do not
            decide by their data, so that a run without data gives the same record.
        compiler: has the slots of variables and buffers.
        body: what a device runs.
    """

    def __init__(
        self,
        program: Program,
        machine: Machine,
        recorder: Recorder | None = None,
        data: bool = True,
        preempts: bool = False,
        assumptions: Assumptions | None = None,
    ):
        self.compiler = Compiler(program, machine, data, preempts, assumptions)
        self.compiler.lockstep = lockstep(self.compiler) if data and not preempts else None
        self.recorder = recorder if self.compiler.lockstep is None else None
        if self.recorder is not None:
            self.compiler.instrumentation = Recording(self.recorder)
        self.body = compile_part(self.compiler, program.body)

    def release(self) -> Recorder | None:
        """Give up everything of the run that has ended but the closures; returns its record."""
        self.compiler.host_memory.clear()
        return self.recorder.take() if self.recorder is not None else None


Kept = dict[Hashable, Compiled]
"""The closures of one program, by what else they depend on. A run that fails does not return its closures."""
