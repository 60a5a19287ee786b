# SPDX-License-Identifier: MIT
"""All passes, in their order: from a traced function to a program that back ends run."""

from __future__ import annotations

from collections.abc import Callable

from tilelang_core import ir
from tilescale.hda import Machine
from tilescale.passes import faults, rematerialize, retrace, smem_capacity, structure, uniformity, validate
from tilescale.program.model import Program

REWRITES: tuple[Callable[[Program, Machine], Program], ...] = (
    rematerialize.rematerialize,  # each phase gets the values of earlier ones that it uses
)
"""Rewrites of a program after it is taken apart."""

CHECKS: tuple[Callable[[Program, Machine], None], ...] = (
    validate.check_launches,  # there are some, of the same units
    validate.check_loops,  # no loops that TileLang refuses
    validate.check_copies,  # nor copies between tiles of other extents
    validate.check_whole_uses,  # split data is used through its view
    validate.check_extents,  # memory has a size before anything runs
    validate.check_device_phases,  # no index and no tile of a program where a device executes
    validate.check_tiles,  # on-chip tiles end with their phase
    uniformity.check_together,  # all threads of a unit reach its collective operations
    smem_capacity.check_capacity,  # and fits there
)
"""Checks of the result that change nothing."""


def analyse(func: ir.PrimFunc, machine: Machine) -> Program:
    """The program that a function is on a machine; it is traced again if it was traced for another one.

    Raises:
        PhaseError, UsageError, AllocationTooLargeError: as the passes say.
        InternalError: a pass failed.
    """
    traced = retrace.for_machine(func, machine)
    with faults.faults_reported(traced, lambda func: _analysed(func, machine)):
        return _analysed(traced, machine)


def _analysed(func: ir.PrimFunc, machine: Machine) -> Program:
    program = structure.structure(func, machine)
    for rewrite in REWRITES:
        program = rewrite(program, machine)
    for check in CHECKS:
        check(program, machine)
    return program
