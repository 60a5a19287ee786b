# SPDX-License-Identifier: MIT
"""Element-wise combination of tiles of several units: the rules that collectives of all levels share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.tile import TileRegion
from tilescale.errors import UnsupportedError
from tilescale.program.operations import Combine

COMBINE = {
    "sum": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "max": lambda a, b: ir.Max(a, b),
    "min": lambda a, b: ir.Min(a, b),
}


class UnitTiles(Protocol):
    """Access to the tiles that the units combine."""

    @property
    def devices(self) -> int:
        """Number of units."""

    def received(self, sender: Any, index: list[Any]) -> ir.PrimExpr:
        """An element of a unit's tile."""


def accumulator(dtype: str) -> str:
    """The type in which elements are combined."""
    if dtype.startswith(("int", "uint")) or dtype in ("float32", "float64"):
        return dtype
    return "float32"


def combined(op: str, a: Any, b: Any) -> ir.PrimExpr:
    """The combination of two elements; maximum and minimum propagate NaN, which CUDA's own do not."""
    if op in ("max", "min") and "float" in str(a.dtype):
        return tir.extern(f"tilescale::combined<tilescale::{op.upper()}>", a, b, dtype=str(a.dtype))
    return COMBINE[op](a, b)


def reduced(values: Sequence[Any], op: str, dtype: str, result: str) -> ir.PrimExpr:
    """Values of a type, combined in order in its accumulator's type, as a value of the result's type."""
    wide, total = accumulator(dtype), None
    for value in values:
        value = ir.Cast(wide, value) if wide != dtype else value
        total = value if total is None else combined(op, total, value)
    return ir.Cast(result, total) if wide != result else total


def fold(
    unsupported: Callable[[str], UnsupportedError],
    combine: Combine,
    which: int,
    tiles: Sequence[TileRegion],
    exchanges: Sequence[UnitTiles],
    store: Callable[[ir.PrimExpr, list[ir.Var]], ir.Stmt] | None = None,
) -> ir.Stmt:
    """tiles[which] = the user's combination of all units' values, in the order of ranks.

    Args:
        unsupported: makes the error of a combination without a lowering.
        store: puts an element elsewhere, from its value and indices in the tile.
    """
    rank = len(tiles[which].extents)
    left, right, results = combine.left, combine.right, combine.results
    loops = [ir.Var(f"i{axis}", "int32") for axis in range(rank)]
    known = [n for n, tile in enumerate(tiles) if len(tile.extents) <= rank]

    def received(n: int, sender: int) -> ir.PrimExpr:
        return exchanges[n].received(sender, loops[: len(tiles[n].extents)])

    body: list[ir.Stmt] = []
    total = {n: ir.Var(f"total{n}", tiles[n].dtype) for n in known}
    body += [ir.Bind(total[n], received(n, 0)) for n in known]
    for sender in range(1, exchanges[0].devices):
        # The values contain loads: expressions without loads are inlined at each use, which doubles their size with
        # each unit.
        mapping = {left[n]: total[n] for n in known} | {right[n]: received(n, sender) for n in known}
        following = {n: ir.Var(f"total{n}", tiles[n].dtype) for n in known}
        for n in known:
            value = ir.substitute(results[n], mapping)
            if ir.variables(value) & {*left, *right}:
                raise unsupported(f"T.allreduce(fn=): the result for {tiles[n].name!r} needs a tile of more dimensions")
            body.append(ir.Bind(following[n], value))
        total = following
    own = tiles[which]
    body.append(store(total[which], loops) if store else ir.BufferStore(own.buffer, total[which], own.at(loops)))
    return tir.parallel(loops, tiles[which].extents, tir.sequence(body))
