# SPDX-License-Identifier: MIT
"""Own rows that are added up where they are made: by the tile that would have stored them.

Why: a separate reduction grid reads and writes all local rows once more. Before: each tile is stored, then counted.
After: a tile of remote rows is stored and counted; a tile of local rows is kept in registers, waits for the other
units' contributions, and is stored when all are added. Local rows are last on every unit, so a waiting tile waits for
tiles with smaller numbers on other units; the launch declares that its programs start in the order of their numbers, so
nothing can deadlock. Declines tiles that are not copied as a whole, that touch several chunks, that no order puts last,
or that do not fit into registers together with the contributions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import TileCopy
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.arrival_reduce import ArrivalReduce, copy, whole
from tilescale.passes.overlap.rewriter import LaunchRewriter
from tilescale.passes.overlap.tile_order import sets_order
from tilescale.program.model import bytes_of, location


@dataclass(frozen=True)
class EpilogueTile:
    """A tile of a program: where it is, its place in the part of its `owner`, and the unit's own `rank`."""

    buffer: ir.Buffer
    row: Any
    column: Any
    owner: Any
    rank: Any


def add_where_made(
    use: TensorUse,
    arrivals: ArrivalReduce,
    rank: ir.Var,
    others: Callable[[EpilogueTile], list[ir.Stmt]],
    rewriter: LaunchRewriter,
    uses: AccessMaps,
    after: Callable[[EpilogueTile], list[ir.Stmt]],
) -> None:
    """Let the tiles of local rows add the arriving contributions. Raises Declined: they cannot.

    Args:
        use: the store of the tiles.
        rank: the unit's, bound before its tiles.
        others: statements for a tile of remote rows.
        after: statements after the store of a tile of local rows, which then holds the sums.
    """
    tile, begins = stored(use)
    shape = (ir.integer(tile.shape[0]), ir.integer(tile.shape[1]))
    check_alone(use, arrivals, uses)
    _check_fits(use, arrivals, tile, uses)
    part, total = arrivals.fragments(rewriter, shape)
    (store,) = use.stmts
    rows, (owner, first) = arrivals.chunks.of, use.place
    row, column = rows.place(first, begins[rows.axis - 1])
    own = [arrivals.added(rank, row, column, whole(tile, "r"), part, total)]
    target = arrivals.to(rank, row, column, shape)
    sums = total
    if is_free(tile, store, use, uses) and tile.dtype == ir.region_parts(target)[0].dtype:
        own.append(copy(whole(total, "r"), whole(tile, "w")))
        sums = tile
    own += [copy(whole(sums, "r"), target), *after(EpilogueTile(sums, row, column, rank, rank))]
    away = tir.sequence(others(EpilogueTile(tile, row, column, owner, rank)))
    branch = ir.IfThenElse(ir.EQ(owner, rank), tir.sequence(own), away)
    rewriter.statements.append((store, tir.at(branch, store)))
    rewriter.in_order = True


def stored(use: TensorUse) -> tuple[ir.Buffer, list[Any]]:
    """The tile that a use stores, and the first row and column where it goes. Raises Declined: it is not a copy of a
    whole matrix."""
    (store, *others), where = use.stmts, location(use.stmts[0])
    if others or not isinstance(store, ir.Evaluate) or ir.op_name(store.value) != tl.COPY:
        raise Declined("the tiles are not stored by one T.copy", where)
    copy = TileCopy.of(store.value)
    (tile, _, extents), (_, begins, target) = ir.region_parts(copy.source), ir.region_parts(copy.target)
    shapes = [ir.constants([n for n in e if ir.constant(n) != 1]) for e in (tile.shape, extents, target)]
    if ir.scope_kind(tile) == "global" or len(tile.shape) != 2 or None in shapes or shapes[0] != shapes[1]:
        raise Declined("the tiles are not stored as a whole", where)
    if shapes[0] != shapes[2] or ir.constants(target[-2:]) != ir.constants(tile.shape):
        raise Declined("the tiles are stored in another shape", where)
    return tile, list(begins[-2:])


def check_alone(use: TensorUse, arrivals: ArrivalReduce, uses: AccessMaps) -> None:
    """Raise Declined if a tile has rows of several chunks, or programs an order of their own."""
    if arrivals.chunks.span(use, uses, arrivals.level) != (1, True):
        raise Declined("a tile has rows of several chunks", location(use.stmts[0]))
    if sets_order(use.phase):
        raise Declined("the program sets the order of its blocks itself", use.launch.where)


def _check_fits(use: TensorUse, arrivals: ArrivalReduce, tile: ir.Buffer, uses: AccessMaps) -> None:
    """Raise Declined if a tile and what is added do not fit into registers."""
    machine, launch = uses.machine, use.launch
    room = machine.capacity(machine.layer_for("fragment").name, launch.thread_count)
    held = bytes_of(tile.shape, tile.dtype) or 0 if ir.scope_kind(tile) == "fragment" else 0
    if held + added_bytes(use, str(arrivals.own.dtype)) > room:
        raise Declined("a tile and its addends do not fit into registers", location(use.stmts[0]))


def added_bytes(use: TensorUse, dtype: str) -> int:
    """Bytes of the fragments of a program that adds up tiles: a part of some type, and the total. Raises Declined: the
    tiles are not copies of a whole matrix."""
    tile, _ = stored(use)
    return sum(bytes_of(tile.shape, kind) or 0 for kind in (dtype, "float32"))


def is_free(tile: ir.Buffer, store: ir.Stmt, use: TensorUse, uses: AccessMaps, kind: str = "shared") -> bool:
    """Whether a tile in memory of a kind is used no more once it is stored."""
    order = list(ir.statements(use.phase.stmt))
    at = next(i for i, stmt in enumerate(order) if stmt.same_as(store))
    later = [a.root for stmt in order[at + 1 :] for a in uses.names.effects(stmt).accesses]
    return ir.scope_kind(tile) == kind and not any(root.same_as(tile.data) for root in later)
