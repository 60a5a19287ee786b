# SPDX-License-Identifier: MIT
"""Assign the hardware barriers at which threads of a program synchronize, once all are known.

Before: a phase with marks of executing and synchronizing units (markers.py). After: barriers of the program, of warps,
or with numbers assigned here: stock TileLang numbers those of the program and those that it adds itself in two passes,
which know nothing of each other. Declines more barriers than there are, and fragments of several ranges of threads.
"""

from __future__ import annotations

from dataclasses import replace

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.headers import header
from tilescale.backends.tilelang.lowering.groups.ranges import HARDWARE_BARRIERS, check_ranges
from tilescale.backends.tilelang.lowering.groups.registers import marks
from tilescale.backends.tilelang.lowering.markers import SYNC, ExecutingThreads
from tilescale.backends.tilelang.lowering.phase import Phase, ThreadGroups
from tilescale.backends.tilelang.ptx import WARP


def lower(phase: Phase) -> Phase:
    """A phase with barriers instead of marks. Raises UnsupportedError: a tile that stock TileLang would not compute as
    written, with its line."""
    groups, threads = phase.groups or ThreadGroups(), phase.launch.thread_count
    loading = phase.graph.added if phase.groups else 0
    barriers = _Barriers(ExecutingThreads(0, threads), threads + loading)
    body = barriers.stmt(phase.stmt)
    taken = len(barriers.numbers)
    others = threads // groups.reducing - 1 if groups.reducing else 0
    check_ranges(phase.launch, groups, taken + others, body, loading > 0)
    text = marks(map(list, groups.arrays))
    if groups.reducing:
        # Needed in the text where several units reduce across their warps concurrently.
        second = HARDWARE_BARRIERS - 1 - taken
        sizes = f"#define TILESCALE_UNIT_THREADS {groups.reducing}\n#define TILESCALE_UNIT_BARRIER {second}\n"
        text = f"{text}{sizes}{header('units.cuh')}\n"
    return replace(phase, stmt=body, text=phase.text + text)


class _Barriers:
    """The barriers of one phase. `numbers`: (first thread, threads) of a synchronizing unit -> the hardware barrier."""

    def __init__(self, whole: ExecutingThreads, threads: int):
        self.whole, self.threads = whole, threads
        self.executing = whole
        self.numbers: dict[tuple[int, int], int] = {}

    def stmt(self, stmt: ir.Stmt) -> ir.Stmt:
        return tir.rewrite(stmt, enter=self._enter)

    def _enter(self, node: ir.Node) -> ir.Stmt | None:
        unit = ExecutingThreads.of(node)
        if unit is not None:
            outer, self.executing = self.executing, unit
            body = self.stmt(node.body)
            self.executing = outer
            return body
        if not isinstance(node, ir.Evaluate) or ir.op_name(node.value) != SYNC.name:
            return None
        if not node.value.args:
            return self._barrier(self.executing)
        begin, threads = map(ir.integer, node.value.args)
        return self._barrier(ExecutingThreads(begin, threads))

    def _barrier(self, group: ExecutingThreads) -> ir.Stmt:
        if self.executing.threads == self.whole.threads == self.threads:
            return tir.evaluate(tir.call(tl.STORAGE_SYNC, "shared", dtype="int32"))
        if group.threads == WARP:
            return tir.evaluate(tir.call(tl.SYNC_WARP, dtype="void"))
        key = (group.begin, group.threads)
        number = self.numbers.setdefault(key, HARDWARE_BARRIERS - 1 - len(self.numbers))
        return tir.evaluate(tir.call(tl.STORAGE_SYNC, "shared", number, group.threads, dtype="int32"))
