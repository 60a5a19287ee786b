# SPDX-License-Identifier: MIT
"""A collective of a program, as an algorithm is chosen for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilescale.collectives.record import PROGRAMS, THREAD_GROUPS, form_of
from tilescale.collectives.select import CollectiveQuery, members, numbering
from tilescale.cost.operations import region_bytes
from tilescale.hda import Machine
from tilescale.program.operations import Collective


def wanted_of(
    made: Collective, machine: Machine, extents: Mapping[str, int], in_program: bool, grid: Sequence[int] = ()
) -> CollectiveQuery:
    """The request that an algorithm is chosen for.

    Args:
        extents: units of each launched level down to the one that owns tensors, coarsest first.
        in_program: whether programs execute it, else units that own tensors.
        grid: as for `numbering`.
    """
    form = form_of(machine, machine.level(made.level), in_program)
    inside = form in (PROGRAMS, THREAD_GROUPS)
    return CollectiveQuery(
        made.name,
        form,
        made.level,
        units=() if inside else members(extents, made.level),
        sizes=() if inside else numbering(machine, extents, grid),
        nbytes=_bytes(made),
        dtype=made.dtype,
        function=made.combine is not None,
        reduction=made.op,
    )


def _bytes(made: Collective) -> int | None:
    known = [region_bytes(tile) for tile in made.whole]
    return None if None in known else sum(n or 0 for n in known)
