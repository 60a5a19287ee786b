# SPDX-License-Identifier: MIT
"""Shared memory and registers of one program of a grid: its tiles, and their copies in pipelined loops.

The compiler gives tiles with disjoint lifetimes the same memory. A tile that a pipelined loop loads exists once for
each stage, from the loop's first iteration to its last. Further memory of the compiler, such as tiles for exchanges
between devices, is not known here. The footprint determines the number of resident programs of a device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl
from tilescale.hda import Machine
from tilescale.program.effects import ProgramNames
from tilescale.program.model import GridPhase, Launch, bytes_of

FRAGMENTS = ("local.fragment",)
"""Scopes of tiles in registers."""


@dataclass(frozen=True)
class PeakFootprint:
    """The moment at which a program holds the most shared memory.

    Attributes:
        stmt: the statement executed at that time.
        tiles: the live tiles, and the bytes of each with all its copies.
        stages: of those, how many copies of each there are, where there are several.
    """

    stmt: ir.Stmt
    tiles: dict[ir.Var, int]
    stages: dict[ir.Var, int]

    @property
    def nbytes(self) -> int:
        return sum(self.tiles.values())


@dataclass(frozen=True)
class _LiveRange:
    """Live range of a tile: first and last statement that use it, numbered as in `ir.statements`, and its stages."""

    first: int
    last: int
    stages: int = 1


def stages_of(node: Any) -> int:
    """Iterations that the loads of a loop run ahead; 0 if it is not a pipelined loop."""
    return (ir.constant(node.annotations.get(tl.STAGES, 0)) or 0) if isinstance(node, ir.For) else 0


def tile_bytes(machine: Machine, launch: Launch, names: ProgramNames, scopes: Collection[str]) -> dict[ir.Var, int]:
    """Bytes that one of each tile in some scopes takes in one program, for tiles whose extents are known."""
    owners = dict(launch.owners)
    found: dict[ir.Var, int] = {}
    for buffer in launch.buffers:
        size = bytes_of(buffer.shape, buffer.dtype)
        owner = machine.level(owners.get(buffer.data, machine.program_level.name))
        if buffer.scope() not in scopes or size is None or owner.kind == "unit":
            continue
        replicas = (machine.level(name) for name in names.replicas(buffer.data))
        threads = [level.threads for level in (owner, *replicas) if level.kind == "thread_group"]
        instances = max((launch.thread_count // count for count in threads if count), default=1)
        parts = launch.cluster_size if owner.kind == "cluster" else 1
        found[buffer.data] = size * instances // parts
    return found


def bytes_at_most(phase: GridPhase, launch: Launch, names: ProgramNames, machine: Machine) -> int:
    """An upper bound of what `fullest` finds: all tiles at one time, each with as many copies as any loop keeps."""
    sizes = tile_bytes(machine, launch, names, ir.SHARED)
    copies = max(map(stages_of, ir.statements(phase.stmt)), default=1) if sizes else 1
    return sum(sizes.values()) * max(copies, 1)


def fullest(phase: GridPhase, launch: Launch, names: ProgramNames, machine: Machine) -> PeakFootprint:
    """When a program of a grid holds the most shared memory, and what.

    A tile is needed from the first statement that touches it to the last one; one that only arms of a branch touch,
    from the first to the last of each.
    """
    sizes = tile_bytes(machine, launch, names, ir.SHARED)
    order = list(ir.statements(phase.stmt)) if sizes else []
    touched: dict[ir.Var, list[int]] = {}
    ahead: dict[ir.Var, list[_LiveRange]] = {}
    for number, stmt in enumerate(order):
        for access in names.effects(stmt).accesses:
            if access.root in sizes:
                touched.setdefault(access.root, []).append(number)
        for root in _loaded_ahead(stmt, names):
            ahead.setdefault(root, []).append(_LiveRange(number, _end(number, stmt), stages_of(stmt)))
    branches = [(number, stmt) for number, stmt in enumerate(order) if isinstance(stmt, ir.IfThenElse)]
    spans = {root: [*_spans(numbers, branches), *ahead.get(root, ())] for root, numbers in touched.items()}
    begins = {span.first for found in spans.values() for span in found}
    moments = [_moment(order[number], number, spans, sizes) for number in sorted(begins)]
    return max(moments, key=lambda moment: moment.nbytes, default=PeakFootprint(phase.stmt, {}, {}))


def _end(number: int, stmt: ir.Stmt) -> int:
    return number + sum(1 for _ in ir.statements(stmt)) - 1


def _spans(numbers: list[int], branches: list[tuple[int, ir.IfThenElse]]) -> list[_LiveRange]:
    """Lifetimes of a tile that these statements touch; outer branches come first."""
    for place, (first, branch) in enumerate(branches):
        if branch.else_case is None or not first < numbers[0] <= numbers[-1] <= _end(first, branch):
            continue
        second = _end(first + 1, branch.then_case) + 1  # where the other arm begins
        arms = [[n for n in numbers if n < second], [n for n in numbers if n >= second]]
        return [span for arm in arms if arm for span in _spans(arm, branches[place + 1 :])]
    return [_LiveRange(numbers[0], numbers[-1])]


def _moment(
    stmt: ir.Stmt, number: int, spans: dict[ir.Var, list[_LiveRange]], sizes: dict[ir.Var, int]
) -> PeakFootprint:
    at = {root: [span.stages for span in found if span.first <= number <= span.last] for root, found in spans.items()}
    stages = {root: max(found) for root, found in at.items() if found}
    tiles = {root: sizes[root] * count for root, count in stages.items()}
    return PeakFootprint(stmt, tiles, {root: count for root, count in stages.items() if count > 1})


def _loaded_ahead(loop: ir.Stmt, names: ProgramNames) -> Iterator[ir.Var]:
    """The tiles that a pipelined loop fills from device memory, by copies in its body or unrolled loops there."""
    if stages_of(loop) < 2:
        return
    for stmt in _directly(loop):
        effects = names.effects(stmt)
        loads = any(names.shared(read.root) for read in effects.reads) and not effects.orders
        yield from (written.root for written in effects.writes if loads and not names.shared(written.root))


def _directly(stmt: ir.Stmt) -> Iterator[ir.Stmt]:
    """The statements of a loop's body, also in unrolled loops, without those of other loops and branches in it."""
    for inner in ir.children(stmt):
        is_unrolled = isinstance(inner, ir.For) and inner.kind == ir.ForKind.UNROLLED
        if isinstance(inner, ir.Evaluate):
            yield inner
        elif is_unrolled or isinstance(inner, ir.SeqStmt | ir.AttrStmt | ir.SBlock | ir.SBlockRealize):
            yield from _directly(inner)


def held(phase: GridPhase, launch: Launch, names: ProgramNames, machine: Machine, added: int = 0) -> int:
    """Programs of a grid that one tensor-owning unit holds at once; 0 if not even one fits. `added`: bytes of fragments
    that a program gets in addition."""
    program = machine.program_level
    if program.count is not None and not program.virtual:
        return program.count
    room = machine.capacity(machine.layer_for("shared").name)
    shared = min(fullest(phase, launch, names, machine).nbytes, room)
    registers = machine.capacity(machine.layer_for("fragment").name, launch.thread_count)
    touched = {access.root for access in names.all_effects(phase.stmt).accesses}
    sizes = tile_bytes(machine, launch, names, FRAGMENTS)
    fragments = min(added + sum(size for root, size in sizes.items() if root in touched), registers)
    per_unit = machine.residency(threads=launch.thread_count, shared_bytes=shared, fragment_bytes=fragments)
    return per_unit * machine.count(program.name, machine.tensor_level.name)
