# SPDX-License-Identifier: MIT
"""Tensors that peers reach: on GPUs they are in symmetric memory, or each call copies them in and out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from tilescale.comm.heap.open_heaps import is_symmetric
from tilescale.program.effects import names_of, statements
from tilescale.program.model import Program


def reached_by_peers(program: Program) -> tuple[int, ...]:
    """Positions of the parameters that a copy to or from a peer, or a signal to one, names."""
    names = names_of(program)
    effects = (names.effects(stmt) for stmt, *_ in statements(program.body))
    roots = {a.root for each in effects for a in each.accesses if a.at is not None and a.at.rank is not None}
    buffers = ((i, p.buffer, p.views) for i, p in enumerate(program.parameters))
    named = ((i, {buffer.data, *(view.data for view in views)}) for i, buffer, views in buffers if buffer is not None)
    return tuple(i for i, data in named if not roots.isdisjoint(data))


def warn_of_plain_tensors(program: Program, positions: Iterable[int], values: Sequence[Any]) -> None:
    """A warning for each of these arguments that is not symmetric, as on GPUs."""
    for position in positions:
        if not is_symmetric(values[position]):
            warnings.warn(
                f"{program.name}: peers reach {program.parameters[position].name!r}, which is not a symmetric tensor: "
                "on GPUs each call copies it in and out. Allocate it with tilescale.empty, zeros or from_tensor to "
                "avoid the copies.",
                stacklevel=5,
            )
