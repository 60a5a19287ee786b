# SPDX-License-Identifier: MIT
"""Grids for the work of a device phase: statements in order, parallel loops, operations on whole tensors by tiles.

Why: a device phase has no programs, kernels do. Before: statements of a device phase. After: launches in addition to
the program's own, each with the values that the device has bound before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tilelang_core import ir, tl, trace
from tilelang_core import rewrite as tir
from tilelang_core.tiles import access_of, is_region, regions_of
from tilescale.errors import Location, UnsupportedError
from tilescale.program import ops
from tilescale.program.model import GridPhase, Launch, Part

ELEMENTS = 4096
"""Elements of a tensor for one program: 16 for each of its threads."""

THREADS = 256


class DevicePhaseGrids:
    """Launches for a device phase.

    Attributes:
        launch: the program's launch around the phase.
        where: the current line.
        bound: the device's earlier bindings that the host knows, too.
    """

    def __init__(self, launch: Launch):
        self.launch = launch
        self.where: Location | None = None
        self.bound: dict[ir.Var, ir.Bind] = {}
        self._read: dict[ir.Var, ir.Bind] = {}
        self._local: dict[ir.Var, int] = {}
        self._made = 0

    def unsupported(self, found: str) -> UnsupportedError:
        """The error for an unsupported construct, at the current line."""
        return UnsupportedError(found, hint="run it with tilescale.emulate", where=self.where)

    # -- values of the device ----------------------------------------------------------------------------------------

    def bind(self, bind: ir.Bind) -> None:
        """Make a value available to later grids; one that is read from memory only to the grid that reads it."""
        (self.bound if is_known(bind) else self._read)[bind.var] = bind

    def check_known(self, used: Sequence[ir.Var], here: Sequence[ir.Stmt] = ()) -> None:
        """Raise UnsupportedError for a value that was read from memory by another grid than that of `here`."""
        mine = {s.var for stmt in here for s in ir.statements(stmt) if isinstance(s, ir.Bind)}
        for var in used:
            if var in self._read and var not in mine:
                raise self.unsupported(
                    f"{var.name!r}, read from memory before an operation on whole tensors and used after it, has no "
                    "CUDA lowering"
                )

    def with_bindings(self, stmts: Sequence[ir.Stmt]) -> ir.Stmt:
        """Statements of a program after the bindings of device phases that they use."""
        needed: set[ir.Var] = set()
        todo = [var for stmt in stmts for inner in ir.statements(stmt) for var in ir.uses(inner)]
        self.check_known(todo, stmts)
        while todo:
            var = todo.pop()
            if var in self.bound and var not in needed:
                needed.add(var)
                todo += ir.uses(self.bound[var])
        return tir.sequence([*(bind for var, bind in self.bound.items() if var in needed), *stmts])

    def _check_local(self, stmts: Sequence[ir.Stmt]) -> None:
        """Check that values outside of device memory are used only in the grid of their statements."""
        on_chip = {b.data: b.name for b in self.launch.buffers if b.scope() != "global"}
        for var in {var for stmt in stmts for inner in ir.statements(stmt) for var in ir.uses(inner)} & on_chip.keys():
            if self._local.setdefault(var, self._made) != self._made:
                raise self.unsupported(
                    f"{on_chip[var]!r}, which lives across operations of a device on whole tensors, has no CUDA "
                    "lowering: keep it in device memory"
                )

    # -- grids -------------------------------------------------------------------------------------------------------

    def grid(self, stmts: Sequence[ir.Stmt], programs: ir.Var, count: int, threads: int) -> Launch:
        """A launch of `count` programs that run statements."""
        self._made += 1
        self._check_local(stmts)
        prelude = [(k, v) for k, v in self.launch.notes if k == "pragma_import_c"]
        return replace(
            self.launch,
            grid=(ir.IntImm("int32", count),),
            programs=(programs,),
            threads=(threads, 1, 1),
            thread_vars=((ir.Var("tx", "int32"), 0),),
            cluster=(1, 1, 1),
            notes=((tl.LAUNCH_THREADS, [threads, 1, 1]), *prelude),
            body=GridPhase(self.with_bindings(stmts)),
            where=self.where or self.launch.where,
        )

    def one_program(self, stmts: Sequence[ir.Stmt]) -> list[Part]:
        """One program of one thread: scalar statements have an order."""
        return [self.grid(stmts, ir.Var("bx", "int32"), 1, 1)] if stmts else []

    def elementwise(self, loop: ir.For) -> Part:
        """A nest of parallel loops: the outer ones are spread over programs, such that each has a few elements."""
        loops = list(_nest(loop))
        extents = ir.constants(nest.extent for nest in loops)
        bx = ir.Var("bx", "int32")
        if extents is None:
            return self.grid([loop], bx, 1, THREADS)
        last = next(n for n in range(len(loops)) if math.prod(extents[n + 1 :]) <= ELEMENTS)
        cut, extent = loops[last], extents[last]
        chunk = min(extent, max(1, ELEMENTS // math.prod(extents[last + 1 :])))
        pieces = -(-extent // chunk)
        inner = ir.Var(cut.loop_var.name, "int32")
        index, body = (bx % pieces if last else bx) * chunk + inner, loops[-1].body
        if extent % chunk:
            body = ir.IfThenElse(ir.LT(index, ir.IntImm("int32", extent)), body, None)
        for nest in reversed(loops[last + 1 :]):
            body = _loop(nest, nest.loop_var, nest.min, nest.extent, body)
        places, rest = {cut.loop_var: index + cut.min}, bx // pieces
        for number in reversed(range(last)):
            own = rest % extents[number] if number else rest
            places[loops[number].loop_var], rest = own + loops[number].min, rest // extents[number]
        spread = _loop(cut, inner, ir.IntImm("int32", 0), ir.IntImm("int32", chunk), ir.substitute(body, places))
        return self.grid([spread], bx, math.prod(extents[:last]) * pieces, THREADS)

    def tiles(self, call: ir.Call, axes: Sequence[tuple[int, ...]]) -> Part:
        """An operation on whole tensors as a grid of the same on tiles, cut along `axes` (one for each tensor)."""
        regions = [ir.region_parts(region) for region in regions_of(call)]
        begins = [list(begin) for _, begin, _ in regions]
        extents = [[ir.integer(n) for n in extent] for _, _, extent in regions]
        bx = ir.Var("bx", "int32")
        rest, count = bx, 1
        size = max(math.prod(shape) for shape in extents)
        cuts = []
        for together in axes:
            if size <= ELEMENTS:
                break
            extent = extents[0][together[0]]
            chunk = _largest_divisor(extent, max(1, ELEMENTS * extent // size))
            size, count = size * chunk // extent, count * (extent // chunk)
            cuts.append((together, chunk, extent // chunk))
        for number, (together, chunk, pieces) in enumerate(reversed(cuts)):
            index = rest if number == len(cuts) - 1 else rest % pieces
            rest = rest // pieces
            for tensor, axis in enumerate(together):
                begins[tensor][axis] = begins[tensor][axis] + index * chunk
                extents[tensor][axis] = chunk
        tiles = iter(
            tir.region(buffer, begin, extent, access_of(old))
            for (buffer, _, _), begin, extent, old in zip(
                regions, begins, extents, regions_of(call), strict=True
            )
        )
        args = [next(tiles) if is_region(a) else a for a in call.args]
        return self.grid([ir.Evaluate(with_args(call, args, {}))], bx, count, THREADS)


def _nest(loop: ir.For) -> Iterator[ir.For]:
    """A parallel loop and those directly inside it."""
    at: Any = loop
    while isinstance(at, ir.For) and at.kind == ir.ForKind.PARALLEL:
        yield at
        at = at.body


def _loop(like: ir.For, var: ir.Var, begin: Any, extent: Any, body: ir.Stmt) -> ir.For:
    return tir.relooped(like, loop_var=var, min=begin, extent=extent, body=body)


def with_args(call: ir.Call, args: Sequence[Any], notes: dict[str, Any], without: Sequence[str] = ()) -> ir.Call:
    """The same call with other arguments and annotations."""
    kept = {str(k): v for k, v in (call.annotations or {}).items() if str(k) not in without}
    return trace.call(call.op, *args, dtype=str(call.dtype), **{**kept, **notes})


def is_known(bind: ir.Bind) -> bool:
    """Whether the host knows a value, too: a rank, or an expression of ranks and loop variables."""
    return ir.op_name(bind.value) == ops.RANK.name or ir.is_pure(bind.value)


def _largest_divisor(n: int, most: int) -> int:
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)
