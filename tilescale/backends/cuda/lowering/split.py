# SPDX-License-Identifier: MIT
"""Split a phase between threads that load ahead and those that use what they load.

Before: a lowered phase whose loads are marked: of a cluster in their places (clusters/roles.py), of thread groups as
the loader's statements after all others (markers.py). After: a branch on the thread index, each role with its
registers.
"""

from __future__ import annotations

from dataclasses import replace

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.clusters import roles
from tilescale.backends.cuda.lowering.markers import is_grid_wait, is_loading
from tilescale.backends.cuda.lowering.phase import Phase
from tilescale.program.model import Launch


def lower(phase: Phase) -> Phase:
    """A phase in which nothing is marked as loading any more."""
    made = roles.split(phase.launch, phase.target.machine, phase.stmt)
    return replace(phase, stmt=_beside_loader(phase.launch, made))


def _beside_loader(launch: Launch, stmt: ir.Stmt) -> ir.Stmt:
    """The program beside its loader. The loader's text is first: tiles after a loop may then lie in its rings."""
    stmts = list(stmt.seq) if isinstance(stmt, ir.SeqStmt) else [stmt]
    loader = next(filter(is_loading, stmts), None)
    if loader is None:
        return stmt
    # Where this grid may begin while the one before it still runs, loads wait for that, too.
    before = [first for first in stmts[:1] if is_grid_wait(first)]
    program = [other for other in stmts[len(before) :] if other is not loader]
    fewer, more = map(ir.integer, loader.node)
    loads = tir.sequence([tir.register_limit(fewer, more=False), loader.body])
    work = tir.sequence([tir.register_limit(more, more=True), *program])
    branch = tir.specialized(launch.thread_vars[0][0] >= launch.thread_count, loads, work)
    return tir.sequence([*before, branch])
