# SPDX-License-Identifier: MIT
"""Distributed shared memory of a cluster's programs: ranks, barriers, and copies between tiles.

Peers access a tile at its local address, in 16-byte words where both ends lie in shared memory: all layouts that
TileLang chooses keep 16 bytes of a row together, except for 64-bit types and layouts that the user gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.markers import grid_wait
from tilescale.backends.tilelang.lowering.phase import Phase, Stage
from tilescale.backends.tilelang.lowering.tile import TileRegion

WORD = 16
"""Bytes of the widest access."""

AT_ONCE = 8
"""Maximum words in flight per thread, each of which takes registers."""

BARRIER = "tilescale::cluster_barrier"

COMBINE = {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}
_ACCUMULATORS = {"float64": "double", "int64": "long", "uint64": "unsigned long", "int32": "int", "uint32": "unsigned"}


class ClusterStage(Stage):
    """The stage of clusters at work: the cluster around a program.

    Attributes:
        size: its programs.
        rank: the executing program's number in it, the first axis fastest.
        has_barriers: whether the programs synchronize at all.
        begun: whether all programs are known to have begun when one gets to the body.
    """

    def __init__(self, phase: Phase):
        super().__init__(phase)
        self.size = self.launch.cluster_size
        self.rank = self._rank()
        self.has_barriers = self.begun = False
        self._variables: list[ir.Buffer] = []
        self._reached: dict[ir.Buffer, bool] = {}

    def _rank(self) -> ir.PrimExpr:
        # Not the register that has it: the compiler knows the range of a remainder, and checks no bounds.
        rank, step = ir.IntImm("int32", 0), 1
        for var, programs in zip(self.launch.programs, self.launch.cluster, strict=False):
            rank, step = rank + var % programs * step, step * programs
        return ir.simplify(rank, {})

    def number(self) -> ir.PrimExpr:
        """The cluster's number in the grid."""
        launch, number = self.launch, ir.IntImm("int32", 0)
        axes = list(zip(launch.programs, launch.grid, launch.cluster, strict=False))
        for var, extent, programs in reversed(axes):
            number = number * (extent // programs) + var // programs
        return number

    def barrier(self) -> ir.Stmt:
        """All programs of the cluster arrive; what each wrote is then visible."""
        self.has_barriers = True
        return tir.evaluate(tir.extern(BARRIER))

    def reach(self, buffer: ir.Buffer, *, to_the_end: bool = True) -> None:
        """Peers touch this tile from the program's beginning, and to its end or until its last use here."""
        self._reached[buffer] = self._reached.get(buffer, False) or to_the_end

    def between_barriers(self, tiles: Iterable[TileRegion], *moves: ir.Stmt) -> list[ir.Stmt]:
        """Moves by which peers touch these tiles after one barrier and until another, and no longer."""
        return [self.barrier(), *moves, *(_in_use(tile.buffer) for tile in tiles), self.barrier()]

    def variable(self, name: str) -> ir.Buffer:
        """An int32 that each thread holds, zero at first."""
        made = tir.local_buffer(name, [1], "int32", "local")
        self.tiles.append(made)
        self._variables.append(made)
        return made

    def assign(self, variable: ir.Buffer, value: Any) -> ir.Stmt:
        """Set such a variable."""
        return ir.BufferStore(variable, ir.int_node(value), [0])

    def enclose(self, body: ir.Stmt) -> ir.Stmt:
        """`body` between barriers at the cluster's beginning and end.

        No peer may access a program's memory before it has begun or after it has ended. And a tile that peers access
        keeps its address: they may be ahead of this program, or behind it.
        """
        # A cluster may be started before the kernel ahead of it has ended.
        begin = [grid_wait()]
        begin += [self.assign(v, 0) for v in self._variables]
        if not self.has_barriers:
            return tir.sequence([*begin, body])
        stmts = ir.in_order(body)
        first = [] if self.begun or self._comes_together(stmts) else [self.barrier()]
        last = [] if self._comes_together(stmts[::-1]) else [self.barrier()]
        kept = [_in_use(b) for b, to_the_end in self._reached.items() if to_the_end]
        inner = without_repeats([*first, *stmts, *kept, *last])
        return tir.sequence([*begin, *(_in_use(b) for b in self._reached), *inner])

    def _comes_together(self, stmts: Iterable[ir.Stmt]) -> bool:
        """Whether a barrier comes before all statements that touch peers."""
        if self.arrivals or self._reached:
            return False  # copies in bulk touch them too, and what is reached is so from the beginning to the end
        touching = next((s for s in stmts if ir.contains(s, _touches_peers)), None)
        return touching is not None and is_barrier(touching)

    # -- moves -------------------------------------------------------------------------------------------------------

    def move(self, near: TileRegion, far: TileRegion, peer: Any, *, put: bool) -> ir.Stmt:
        """Copy a tile to `far` of a peer, or from it; the caller orders it with what is around, and says when it is
        reached."""
        if [n for n in near.extents if n != 1] != [n for n in far.extents if n != 1]:
            raise self.unsupported(f"a copy between tiles of extents {near.extents} and {far.extents}")
        if near.buffer.scope().startswith("shared") and near.dtype == far.dtype:
            return self._move_words(near, far, peer, "put" if put else "get")
        loops, extents = _loops(far)
        there = _address(far, loops)
        if put:
            value = _as_type(ir.BufferLoad(near.buffer, _at(near, loops)), far.dtype)
            body = tir.evaluate(tir.extern("tilescale::cluster_store", there, peer, value))
        else:
            value = tir.extern("tilescale::cluster_load", there, peer, dtype=far.dtype)
            body = ir.BufferStore(near.buffer, _as_type(value, near.dtype), _at(near, loops))
        return tir.parallel(loops, extents, body)

    def _move_words(self, near: TileRegion, far: TileRegion, peer: Any, direction: str) -> ir.Stmt:
        elements = self._together([near, far])
        width = elements * ir.bits(near.dtype) // 8

        def body(*words: tuple[list[Any], Any]) -> ir.Stmt:
            moves = [(_address(near, loops), _address(far, loops), active) for loops, active in words]
            named = [argument for move in moves for argument in move]
            return tir.evaluate(tir.extern(f"tilescale::cluster_{direction}<{width}>", peer, *named))

        return self._each(far, elements, body, at_once=AT_ONCE)

    def allreduce(self, tile: TileRegion, op: str) -> ir.Stmt:
        """Combine a tile of shared memory over the cluster in place: each program combines some words for all."""
        elements = self._together([tile])
        kind = f"tilescale::{COMBINE[op]}, {_ACCUMULATORS.get(tile.dtype, _small(tile.dtype))}, {elements}, {self.size}"

        def body(word: tuple[list[Any], Any]) -> ir.Stmt:
            loops, active = word
            return tir.evaluate(tir.extern(f"tilescale::cluster_allreduce<{kind}>", _address(tile, loops), active))

        return self._each(tile, elements, body, split=True)

    def element(self, tile: TileRegion, index: list[Any], peer: Any) -> ir.PrimExpr:
        here = tir.call(tl.ADDRESS_OF, ir.BufferLoad(tile.buffer, tile.at(index)))
        return tir.extern("tilescale::cluster_load", here, peer, dtype=tile.dtype)

    def _together(self, tiles: list[TileRegion]) -> int:
        """Number of elements of one access: contiguous in every tile, and equally aligned."""
        bits = ir.bits(tiles[0].dtype)
        if bits % 8:
            raise self.unsupported(f"moves between programs of elements of {bits} bits")
        laid_out = dict(self.launch.notes).get(tl.LAYOUTS, {})
        if bits == 64 or any(t.buffer.data in laid_out or t.buffer.scope() != "shared.dyn" for t in tiles):
            return 1
        most = WORD * 8 // bits
        for tile in tiles:
            most = math.gcd(most, tile.extents[-1], ir.constant(tile.buffer.shape[-1]) or 1)
            while most > 1 and ir.constant(tile.begins[-1] % most) != 0:
                most //= 2
        return most

    def _each(
        self, tile: TileRegion, elements: int, body: Callable[..., ir.Stmt], *, split: bool = False, at_once: int = 1
    ) -> ir.Stmt:
        """`body` for each group of elements, distributed over threads.

        A group is its indices in the tile, and whether it exists. With `split`, the programs of the cluster share the
        groups. `body` takes up to `at_once` of a thread's groups. It is not in a branch: the compiler may put a barrier
        of the program before it.
        """
        launch = self.launch
        _, extents = _loops(tile)
        grouped = [*extents[:-1], extents[-1] // elements] if extents else [1]
        count, workers = math.prod(grouped), launch.thread_count * (self.size if split else 1)
        x, y, _ = launch.threads
        thread: Any = sum(var * (1, x, x * y)[axis] for var, axis in launch.thread_vars if launch.threads[axis] > 1)
        worker = thread + self.rank * launch.thread_count if split else thread

        def group(iteration: Any) -> tuple[list[Any], Any]:
            number = rest = iteration * workers + worker
            indices: list[Any] = []
            for extent in reversed(grouped):
                indices.insert(0, rest % extent)
                rest = rest // extent
            if extents:
                indices[-1] = indices[-1] * elements
            return indices if extents else [], number < count

        iterations = -(-count // workers)
        together = max(n for n in range(1, at_once + 1) if iterations % n == 0)
        step = ir.Var("step", "int32")
        inner = body(*(group(step * together + n) for n in range(together)))
        return ir.For(step, ir.IntImm("int32", 0), ir.IntImm("int32", iterations // together), ir.ForKind.SERIAL, inner)


def without_repeats(stmts: list[ir.Stmt]) -> list[ir.Stmt]:
    """Statements without barriers of a cluster that follow a barrier at once."""
    return [s for i, s in enumerate(stmts) if i == 0 or not (is_barrier(s) and is_barrier(stmts[i - 1]))]


def without_ends(body: ir.Stmt) -> ir.Stmt:
    """A body without the barriers that it begins and ends with."""
    stmts = ir.in_order(body)
    first, last = (int(is_barrier(stmts[at])) for at in (0, -1))
    return tir.sequence(stmts[first : len(stmts) - last])


def _touches_peers(node: ir.Node) -> bool:
    return (tir.extern_name(node) or "").startswith("tilescale::cluster_")


def is_barrier(stmt: ir.Stmt) -> bool:
    """Whether a statement is a barrier of the cluster."""
    call: Any = stmt.value if isinstance(stmt, ir.Evaluate) else None
    return tir.extern_name(call) == BARRIER


def _in_use(buffer: ir.Buffer) -> ir.Stmt:
    return tir.evaluate(tir.extern("tilescale::in_use", tir.address_of(buffer)))


def _small(dtype: str) -> str:
    return "int" if dtype.startswith(("int", "uint")) else "float"


def _loops(tile: TileRegion) -> tuple[list[ir.Var], list[int]]:
    """Loop variables and extents of a tile, without those of extent 1."""
    extents = [n for n in tile.extents if n != 1]
    return [ir.Var(f"i{axis}", "int32") for axis in range(len(extents))], extents


def _at(tile: TileRegion, loops: list[Any]) -> list[Any]:
    rest = iter(loops)
    return [b if n == 1 else b + next(rest) for b, n in zip(tile.begins, tile.extents, strict=True)]


def _address(tile: TileRegion, loops: list[Any]) -> ir.PrimExpr:
    return tir.call(tl.ADDRESS_OF, ir.BufferLoad(tile.buffer, _at(tile, loops)))


def _as_type(value: ir.PrimExpr, dtype: str) -> ir.PrimExpr:
    return value if str(value.dtype) == dtype else ir.Cast(dtype, value)
