# SPDX-License-Identifier: MIT
"""Multicast loads: the first program of a mask loads one tile for all programs of its cluster in the mask.

On hardware each of them waits for its tile, so in the emulator each loads it by itself, from the first one's address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilelang_core import ir, rewrite
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Region
from tilescale.errors import UnsupportedError
from tilescale.program.effects import statements


def multicast(compiler: Compiler, source: ir.Call, mask: int, copy: Callable[[Region, Frame], None]) -> Closure:
    """The closure of a load from region `source` with `cluster_mask=mask`; `copy` makes one program's. Raises
    UnsupportedError: the tile's position depends on more than grid indices, numbers and loop variables."""
    region, first = _of_indices(compiler, source), (mask & -mask).bit_length() - 1
    indices = [compiler.slot(var) for var in compiler.launch.programs]

    def run(frame: Frame) -> None:
        own = [frame.slots[slot] for slot in indices]
        if mask >> frame.program.cluster_rank & 1:
            _set(frame, indices, frame.program.in_cluster(first).unit.index)
        copy(region, frame)
        _set(frame, indices, own)

    return run


def _set(frame: Frame, slots: Sequence[int], values: Sequence[Any]) -> None:
    for slot, value in zip(slots, values, strict=True):
        frame.slots[slot] = value


def _of_indices(compiler: Compiler, source: ir.Call) -> Region:
    buffer, begins, extents = ir.region_parts(source)
    values = {stmt.var: stmt.value for stmt, _, _ in statements(compiler.program.body) if isinstance(stmt, ir.Bind)}
    while values.keys() & {var for begin in begins for var in ir.variables(begin)}:
        begins = [ir.substitute(begin, values) for begin in begins]
    if any(ir.contains(begin, _is_other) for begin in begins):
        raise UnsupportedError(
            f"the emulator does not run a multicast load of {buffer.name!r} from a position that depends on memory, "
            "threads or ranks",
            hint="use only grid indices, numbers and loop variables for the position",
        )
    return Region(compiler, rewrite.region(buffer, begins, extents, "r"))


def _is_other(node: ir.Node) -> bool:
    return isinstance(node, ir.BufferLoad) or str(ir.op_name(node)).startswith("tl.")
