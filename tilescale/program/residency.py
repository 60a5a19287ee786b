# SPDX-License-Identifier: MIT
"""How many programs of a launch a tensor-owning unit holds at once, by the machine model."""

from __future__ import annotations

from collections.abc import Collection

from tilelang_core import ir
from tilescale.hda import Machine
from tilescale.program.model import Launch, bytes_of

FRAGMENTS = ("local.fragment",)
"""Scopes of tiles in registers."""


def held(machine: Machine, launch: Launch, shared_bytes: int, fragment_bytes: int) -> int:
    """Programs that one tensor-owning unit holds at once; 0 if not even one fits.

    Args:
        shared_bytes, fragment_bytes: what one program allocates in shared memory and in fragments.
    """
    program = machine.program_level
    if program.count is not None and not program.virtual:
        return program.count
    room = machine.capacity(machine.layer_for("shared").name)
    # The compiler reuses shared memory between tiles that do not live at the same time: their sum may exceed it.
    shared = min(shared_bytes, room)
    registers = machine.capacity(machine.layer_for("fragment").name, launch.thread_count)
    per_unit = machine.residency(
        threads=launch.thread_count, shared_bytes=shared, fragment_bytes=min(fragment_bytes, registers)
    )
    return per_unit * machine.count(program.name, machine.tensor_level.name)


def tile_bytes(machine: Machine, launch: Launch, scopes: Collection[str]) -> dict[ir.Var, int]:
    """Bytes that each tile in some scopes takes in one program, for tiles whose extents are known."""
    owners = dict(launch.owners)
    found: dict[ir.Var, int] = {}
    for buffer in launch.buffers:
        size = bytes_of(buffer.shape, buffer.dtype)
        owner = machine.level(owners.get(buffer.data, machine.program_level.name))
        if buffer.scope() not in scopes or size is None or owner.kind == "unit":
            continue
        instances = launch.thread_count // owner.threads if owner.kind == "thread_group" and owner.threads else 1
        parts = launch.cluster_size if owner.kind == "cluster" else 1
        found[buffer.data] = size * instances // parts
    return found
