# SPDX-License-Identifier: MIT
"""Constants of the PTX ISA and the CUDA driver for all GPUs. The machine model has those that differ."""

from __future__ import annotations

from tilescale.hda import Machine

WARP = 32
"""Threads of a warp."""

WARPGROUP = 128
"""Threads of a warpgroup, which redistribute registers together (PTX ISA, `setmaxnreg`)."""

BULK_BYTES = 16
"""Alignment of rows and strides of a bulk copy, in shared and global memory (PTX ISA, `cp.async.bulk`)."""

BOX_EXTENT, BOX_DIMENSIONS = 256, 5
"""Maximum number of elements along a dimension of a bulk copy's box, and of dimensions (CUDA driver API,
cuTensorMapEncodeTiled)."""

REGISTER_BYTES = 4


def most_threads(machine: Machine) -> int:
    """Maximum number of threads of a program."""
    return machine.program_level.max_threads_per_program or 0


def registers_of(machine: Machine) -> int:
    """Registers of an SM, for the threads of all its programs."""
    return machine.capacity(machine.layer_for("fragment").name) // REGISTER_BYTES
