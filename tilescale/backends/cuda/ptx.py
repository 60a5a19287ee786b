# SPDX-License-Identifier: MIT
"""Numbers that the PTX ISA and the CUDA driver fix for all processors. What differs, the machine model says."""

from __future__ import annotations

from tilescale.hda import Machine

WARP = 32
"""Threads that one instruction is for."""

WARPGROUP = 128
"""Threads that share out their registers together (PTX ISA, `setmaxnreg`)."""

BULK_BYTES = 16
"""What rows and strides of a bulk copy, here and in memory, are multiples of (PTX ISA, `cp.async.bulk`)."""

BOX_EXTENT, BOX_DIMENSIONS = 256, 5
"""Elements along a dimension of a bulk copy's box, and dimensions, at most (CUDA driver API,
cuTensorMapEncodeTiled)."""

REGISTER_BYTES = 4


def most_threads(machine: Machine) -> int:
    """Threads of a program, at most."""
    return machine.program_level.max_threads_per_program or 0


def registers_of(machine: Machine) -> int:
    """Of a processor, for the threads of all its programs."""
    return machine.capacity(machine.layer_for("fragment").name) // REGISTER_BYTES
