# SPDX-License-Identifier: MIT
"""Whether the tiles that a program holds at one time fit its shared memory.

It changes nothing. The compiler gives tiles that are not needed at the same time the same place, so their sum may
exceed the layer; but a tile that is used before and after a statement is there while the statement runs. What the
compiler adds, pipeline stages and exchanges, is not known here: the text that it generates is checked once more.
"""

from __future__ import annotations

from tilelang_core import ir
from tilescale.errors import AllocationTooLargeError
from tilescale.hda import Machine
from tilescale.hda.units import format_bytes
from tilescale.program.dependence import lifetimes
from tilescale.program.effects import Surroundings
from tilescale.program.model import GridPhase, Launch, declaration, location
from tilescale.program.residency import tile_bytes


def check_room(phase: GridPhase, launch: Launch, names: Surroundings, machine: Machine) -> None:
    """Check one grid phase.

    Raises:
        AllocationTooLargeError: the tiles that live at one statement are larger than the layer.
    """
    layer = machine.layer_for("shared")
    room, sizes = machine.capacity(layer.name), tile_bytes(machine, launch, ir.SHARED)
    if sum(sizes.values()) <= room:
        return
    order = list(ir.statements(phase.stmt))
    live = {data: span for data, span in lifetimes(phase, names).items() if data in sizes}
    buffers = {b.data: b for b in launch.buffers}
    for number in sorted(first for first, _ in live.values()):
        alive = [data for data, (first, last) in live.items() if first <= number <= last]
        asked = sum(sizes[data] for data in alive)
        if asked > room:
            tiles = ", ".join(f"{buffers[data].name!r} {format_bytes(sizes[data])}" for data in alive)
            places = [location(order[number], "all are needed here"), *(declaration(buffers[data]) for data in alive)]
            raise AllocationTooLargeError(
                f"tiles that live at the same time take {format_bytes(asked)} of {layer.title or layer.name}, "
                f"{machine.name} has {format_bytes(room)} for one program: {tiles}",
                hint="use smaller tiles, or let the last use of one come before the first use of another",
                where=[place for place in places if place],
            )
