# SPDX-License-Identifier: MIT
"""Independence of the programs of a grid: none orders another one or reads what another one has written.

Decided on the text: every tensor that is written is accessed by one statement, and along each axis of the grid the
program's index selects the elements, as in `Y[bx * 32 + i, j]` with `i < 32`.
"""

from __future__ import annotations

from collections import defaultdict

from tilelang_core import ir, tl
from tilescale.backends.emulator.interpret.symbols import Symbols
from tilescale.program.effects import Access, union
from tilescale.program.model import GridPhase, Launch, Part, Sequence


def only_phase(part: Part) -> tuple[Launch, GridPhase] | None:
    """The launch and the grid phase of a program that has nothing else; None for other programs."""
    launch = _only(part)
    if not isinstance(launch, Launch):
        return None
    phase = _only(launch.body)
    return (launch, phase) if isinstance(phase, GridPhase) else None


def _only(part: Part) -> Part:
    while isinstance(part, Sequence) and len(part.parts) == 1:
        part = part.parts[0]
    return part


def are_independent(symbols: Symbols, launch: Launch, phase: GridPhase) -> bool:
    """Whether the programs of a phase of plain TileLang can run in any order, also one statement of all at a time."""
    effects = union(
        symbols.surroundings.effects(stmt)
        for stmt in ir.statements(phase.stmt)
        if not (isinstance(stmt, ir.Evaluate) and is_barrier(stmt.value))
    )
    if effects.orders or launch.cluster_size > 1 or launch.in_order or launch.barriers or launch.flags:
        return False
    own = {buffer.data for buffer in launch.buffers}
    by_tensor: dict[ir.Var, list[Access]] = defaultdict(list)
    for access in effects.accesses:
        if access.root not in own:
            by_tensor[access.root].append(access)
    ranges = _ranges(launch, phase)
    return all(
        len(accesses) == 1 and _is_separate(accesses[0], launch, ranges)
        for accesses in by_tensor.values()
        if any(access.writes for access in accesses)
    )


def is_barrier(node: ir.Node) -> bool:
    """Whether a node is a barrier of all threads of a program."""
    return ir.op_name(node) == tl.STORAGE_SYNC and ir.is_for_all(node)


def _ranges(launch: Launch, phase: GridPhase) -> dict[ir.Var, tuple[ir.PrimExpr, ir.PrimExpr]]:
    """Begin and extent of the indices of programs and threads, and of loops."""
    zero = ir.IntImm("int32", 0)
    found = {var: (zero, extent) for var, extent in zip(launch.programs, launch.grid, strict=True)}
    found |= {var: (zero, ir.IntImm("int32", launch.threads[axis])) for var, axis in launch.thread_vars}
    loops = (stmt for stmt in ir.statements(phase.stmt) if isinstance(stmt, ir.For))
    return found | {loop.loop_var: (loop.min, loop.extent) for loop in loops}


def _is_separate(access: Access, launch: Launch, ranges: dict[ir.Var, tuple[ir.PrimExpr, ir.PrimExpr]]) -> bool:
    """Whether programs access different elements."""
    if access.begins is None or access.extents is None or access.atomic:
        return False
    axes = [var for var, extent in zip(launch.programs, launch.grid, strict=True) if ir.constant(extent) != 1]
    sides = list(zip(access.begins, access.extents, strict=True))
    return all(any(_selects(var, begin, extent, ranges) for begin, extent in sides) for var in axes)


def _selects(
    program: ir.Var,
    begin: ir.PrimExpr,
    extent: ir.PrimExpr,
    ranges: dict[ir.Var, tuple[ir.PrimExpr, ir.PrimExpr]],
) -> bool:
    """Whether `begin` is `step * program + rest`, with `rest + extent` at most `step`."""
    if program not in ir.variables(begin):
        return False
    step = ir.constant(ir.substitute(begin, {program: program + 1}) - begin)
    if step is None or step <= 0:
        return False
    rest = ir.substitute(begin, {program: ir.IntImm(program.dtype, 0)})
    others = {var: both for var, both in ranges.items() if var is not program}
    return ir.proves(rest >= 0, others) and ir.proves(rest + extent <= step, others)
