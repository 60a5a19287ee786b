# SPDX-License-Identifier: MIT
"""Limits of every lowering for a number of threads: checked by every back end for such a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tilelang_core import ir, tl
from tilelang_core.products import WARP, refusal
from tilelang_core.tiles import Gemm, first_element, is_region
from tilescale.backends.base import generator
from tilescale.errors import Location, ShapeError
from tilescale.hda import Machine
from tilescale.program.effects import names_of, phases
from tilescale.program.footprint import FRAGMENTS
from tilescale.program.model import GridPhase, Launch, Program, location
from tilescale.program.ops import SCALE


def check_threads(program: Program, machine: Machine) -> None:
    """Check that the units of a program have enough threads for their tiles, and not too many. Raises ShapeError: the
    result of a GEMM cannot be distributed over the warps of its unit."""
    names = names_of(program)
    divided = {names.root(view) for view in names.views}
    for stmt, threads, where in _of_units(program, machine):
        if not isinstance(stmt, ir.Evaluate) or ir.op_name(stmt.value) not in (tl.GEMM, tl.WGMMA_GEMM):
            continue
        product = Gemm.of(stmt.value)
        result = ir.region_parts(product.c)[0]
        if names.root(result.data) in divided or result.scope() not in FRAGMENTS:
            continue
        reason = refusal(product, threads, generator(machine).target(machine))
        if reason is not None:
            raise ShapeError(
                f"T.gemm of {product.sizes[0]} x {product.sizes[1]} by {threads} threads: {reason}",
                hint=_hint(product, threads),
                where=where,
            )


def may_be_uneven(program: Program, machine: Machine) -> bool:
    """Whether threads may be unable to distribute the elements of a tile, or the iterations of a loop, evenly."""
    return any(_is_uneven(stmt, threads) for stmt, threads, _ in _of_units(program, machine))


def _is_uneven(stmt: ir.Stmt, threads: int) -> bool:
    call = stmt.value if isinstance(stmt, ir.Evaluate) else None
    if ir.op_name(call) == tl.TMA_COPY:
        return False  # one thread issues it
    reduces = ir.op_name(call) == tl.REDUCE
    for shape, scope in [*_tiles(stmt), (_iterations(stmt), "")]:
        if shape is None:
            continue
        count, odd = math.prod(shape), any(n & (n - 1) for n in (*shape, threads))
        in_registers = count > threads and count % threads and scope in FRAGMENTS
        if in_registers or odd and (reduces or count > threads and sum(n > 1 for n in shape) > 2):
            return True
    return False


def _tiles(stmt: ir.Stmt) -> Iterator[tuple[list[int] | None, str]]:
    """Shapes and scopes of the tiles that a statement accesses.

    Threads distribute the part of a tile in shared memory that is named, as a slot of a ring. Layouts of fragments are
    those of the whole fragment.
    """
    regions = ir.nodes(stmt, is_region)
    begins = [first_element(region) for region in regions]
    accesses = [a for a in ir.instances(stmt, ir.BufferLoad, ir.BufferStore) if not any(map(a.same_as, begins))]
    for node in (*regions, *accesses):
        buffer, _, extents = ir.region_parts(node) if is_region(node) else (node.buffer, [], node.buffer.shape)
        if buffer.scope() != "global":
            yield ir.constants(buffer.shape if buffer.scope() in FRAGMENTS else extents), buffer.scope()


def _iterations(stmt: ir.Stmt) -> list[int] | None:
    """The extents of perfectly nested parallel loops, where they are known."""
    extents = []
    while isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
        extents.append(stmt.extent)
        stmt = stmt.body
    return ir.constants(extents)


def _hint(product: Gemm, threads: int) -> str:
    rows, columns = (ir.constant(size) or 0 for size in product.sizes[:2])
    most = rows // 16 * (columns // 8) * WARP
    if rows % 16 or columns % 8 or most == 0:
        return (
            "make the tile a multiple of 16 rows and of 8 columns; copies into it fill what is beyond a tensor with 0"
        )
    return f"launch another number of threads, a multiple of {WARP} and at most {most}, or make the tile larger"


def _of_units(program: Program, machine: Machine) -> Iterator[tuple[ir.Stmt, int, Location | None]]:
    """Operations and parallel loops of programs, each with its line and the threads of the unit that executes it, where
    these are known."""
    for phase, launch in phases(program.body):
        if isinstance(phase, GridPhase) and launch is not None:
            for stmt, threads in _inside(phase.stmt, launch, launch.thread_count, machine):
                yield stmt, threads, location(stmt) or launch.where


def _inside(stmt: ir.Stmt, launch: Launch, threads: int, machine: Machine) -> Iterator[tuple[ir.Stmt, int]]:
    if isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == SCALE:
        level = machine.level(str(stmt.value.value))
        if level.kind == "cluster":
            return  # its programs split it first
        threads = level.threads if level.kind == "thread_group" and level.threads else threads
    if isinstance(stmt, ir.IfThenElse) and ir.variables(stmt.condition) & {var for var, _ in launch.thread_vars}:
        return  # a subset of threads, counted by the user
    is_parallel = isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL
    if isinstance(stmt, ir.Evaluate) or is_parallel:
        yield stmt, threads
    for inner in () if is_parallel else ir.children(stmt):
        yield from _inside(inner, launch, threads, machine)
