# SPDX-License-Identifier: MIT
"""Placement of arguments: that of a DTensor must match the view of the parameter, and tensors that peers reach are
in symmetric memory on GPUs, or each call copies them in and out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from tilelang_core import ir
from tilescale.comm.heap.open_heaps import is_symmetric
from tilescale.errors import ArgumentError
from tilescale.program.effects import names_of, statements
from tilescale.program.model import Parameter, Program, View


def local_tensor(program: Program, parameter: Parameter, value: Any) -> Any:
    """`value`, or this rank's shard if it is a DTensor.

    A mesh dimension (of more than one rank) stands for each level that the program launches above its grid, coarsest
    first. A parameter without a view is each device's own tensor: there any placement does. Raises ArgumentError: the
    DTensor is placed otherwise than the view lays the parameter out, or over other ranks.
    """
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor exists before its module is imported
    if module is None or not isinstance(value, module.DTensor):
        return value
    if parameter.views:
        _check(program, parameter, value)
    return value.to_local()


def _check(program: Program, parameter: Parameter, value: Any) -> None:
    mesh, where = value.device_mesh, parameter.views[0].where
    if mesh.mesh.flatten().tolist() != list(range(mesh.size())):
        raise ArgumentError(
            f"{parameter.name!r} is a DTensor over ranks {mesh.mesh.tolist()}; device i of the program is rank i",
            hint="use a mesh of all ranks in their order",
            where=where,
        )
    levels = [name for name, extent in program.extents if ir.constant(extent) != 1]
    found = [p for p, size in zip(value.placements, mesh.shape, strict=True) if size != 1]
    wanted = [_placement(parameter, level) for level in levels]
    if found != wanted:
        raise ArgumentError(
            f"{parameter.name!r} is a DTensor placed {_text(found)}, the program lays it out as {_text(wanted)} "
            f"over {', '.join(levels)}",
            hint="redistribute the DTensor, or view the parameter with another layout",
            where=where,
        )


def _placement(parameter: Parameter, level: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    view = next((v for v in parameter.views if v.level == level), None)
    if view is None or view.layout.dim is None:
        return Replicate()
    if view.layout.block is not None:
        raise _block_cyclic(parameter, view)
    return Shard(view.layout.dim)


def _block_cyclic(parameter: Parameter, view: View) -> ArgumentError:
    return ArgumentError(
        f"{parameter.name!r} is a DTensor, the program lays it out in blocks of {view.layout.block} along dimension "
        f"{view.layout.dim}, which no placement says",
        hint="pass this rank's share as a plain tensor",
        where=view.where,
    )


def _text(placements: list[Any]) -> str:
    return f"({', '.join(map(str, placements))})"


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
