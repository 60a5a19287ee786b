# SPDX-License-Identifier: MIT
"""What no lowering gets out of a number of threads: told wherever a program for such a machine runs."""

from __future__ import annotations

from collections.abc import Iterator

from tilelang_core import ir, tl
from tilelang_core.products import WARP, refusal
from tilelang_core.tiles import Gemm
from tilescale.backends.cuda.target import target_for
from tilescale.errors import ShapeError
from tilescale.hda import Machine
from tilescale.program.effects import Surroundings, phases
from tilescale.program.footprint import FRAGMENTS
from tilescale.program.model import GridPhase, Launch, Program, location
from tilescale.program.ops import SCALE


def check_threads(program: Program, machine: Machine) -> None:
    """The units of a program are enough threads for what they compute, and not too many.

    Raises:
        ShapeError: the result of a product cannot be shared out to the warps of its unit.
    """
    names = Surroundings(program)
    divided = {names.root(view) for view in names.views}
    for phase, launch in phases(program.body):
        if not isinstance(phase, GridPhase) or launch is None:
            continue
        for stmt, product, threads in _products(phase.stmt, launch, launch.thread_count, machine):
            result = ir.region_parts(product.c)[0]
            if names.root(result.data) in divided or result.scope() not in FRAGMENTS:
                continue
            reason = refusal(product, threads, target_for(machine))
            if reason is not None:
                raise ShapeError(
                    f"T.gemm of {product.sizes[0]} x {product.sizes[1]} by {threads} threads: {reason}",
                    hint=_hint(product, threads),
                    where=location(stmt) or launch.where,
                )


def _hint(product: Gemm, threads: int) -> str:
    rows, columns = (ir.constant(size) or 0 for size in product.sizes[:2])
    most = rows // 16 * (columns // 8) * WARP
    if rows % 16 or columns % 8 or most == 0:
        return (
            "make the tile a multiple of 16 rows and of 8 columns; copies into it fill what is beyond a tensor with 0"
        )
    return f"launch another number of threads, a multiple of {WARP} and at most {most}, or make the tile larger"


def _products(stmt: ir.Stmt, launch: Launch, threads: int, machine: Machine) -> Iterator[tuple[ir.Stmt, Gemm, int]]:
    """The products in a statement, each with the threads of the unit that computes it, where that is known."""
    if isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == SCALE:
        level = machine.level(str(stmt.value.value))
        if level.kind == "cluster":
            return  # its programs share the product out first
        threads = level.threads if level.kind == "thread_group" and level.threads else threads
    if isinstance(stmt, ir.IfThenElse) and ir.variables(stmt.condition) & {var for var, _ in launch.thread_vars}:
        return  # some threads of the unit, as the user has counted them
    if isinstance(stmt, ir.Evaluate) and ir.op_name(stmt.value) in (tl.GEMM, tl.WGMMA_GEMM):
        yield stmt, Gemm.of(stmt.value), threads
    for inner in ir.children(stmt):
        yield from _products(inner, launch, threads, machine)
