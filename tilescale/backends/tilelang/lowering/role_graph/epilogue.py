# SPDX-License-Identifier: MIT
"""Give what ends an iteration of a persistent loop to a role of its own, while the others compute the next tile.

Why: a collective of tiles takes as long as a wave of tiles crosses the link. A signal waits, by a release at system
scope, for all that was written before it: in float8, 4 % of a GEMM of 8192 x 8192 x 3584 on an H200. Made by the
threads that compute, the tensor cores wait with them. Before: a loop whose iterations compute a tile, and combine it
with those of other devices, or store it and signal that. After: the same, from the collective on marked as what a
communication warpgroup executes, or the stores and signals as what store warps do, half of the warpgroup that loads.
Tiles are handed over in shared memory. Iterations end in their order, so what holds of a collective's slots holds here;
and waiters depend on one iteration only, so no signal is delayed. Declines, with the reason and the line for a
collective, where an iteration cannot go on before the one before it has ended. Stores without signals gain nothing over
those that complete during the next iteration (deferred_stores.py): they stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import Gemm
from tilescale.backends.tilelang.lowering.deferred_stores import is_sent
from tilescale.backends.tilelang.lowering.markers import ExecutingThreads, by_nvshmem, executed
from tilescale.backends.tilelang.lowering.role_graph.graph import COMMUNICATE, COMPUTE, STORE, Channel
from tilescale.backends.tilelang.lowering.statements import flat, is_fill, is_scalar, orders, reads_memory, tiles_named
from tilescale.passes.declined import Declined
from tilescale.passes.structure import location
from tilescale.program import ops
from tilescale.program.dependence import Dependence
from tilescale.program.effects import Access, Effects
from tilescale.program.operations import Copy

EPILOGUE_ROLE = "tilescale.epilogue_role"
"""AttrStmt key: dedicated threads execute the statements inside, concurrent with the consumers' next iteration."""

COMMUNICATING, STORING = 128, 64
"""Threads of the roles: a warpgroup, and half of that which loads. One thread issues all stores and signals."""

_COLUMNS = 128
"""Maximum columns of C in one instruction of a warpgroup concurrent with three others: its threads begin with 128
registers, which must hold the instruction's operands."""

_SQUARE = 0
"""TileLang's policy to share out rows and columns of C alike."""


@dataclass(frozen=True)
class LoopEpilogue:
    """The end of an iteration.

    Attributes:
        stmts: the replacement of its last statements.
        tiles: on-chip allocations for them.
        note: the reason why a collective among them does not overlap the next iteration.
        threads: threads of the epilogue role; 0 for none.
        results: the tiles handed to the epilogue role.
    """

    stmts: list[ir.Stmt]
    tiles: tuple[ir.Buffer, ...] = ()
    note: str = ""
    threads: int = 0
    results: Channel | None = None


def is_in_epilogue_role(node: object) -> bool:
    """Whether a node is executed by the epilogue role."""
    return isinstance(node, ir.AttrStmt) and str(node.attr_key) == EPILOGUE_ROLE


def _in_role(
    role: str,
    by: ExecutingThreads,
    first: Sequence[ir.Stmt],
    rest: Sequence[ir.Stmt],
    tiles: tuple[ir.Buffer, ...] = (),
) -> LoopEpilogue:
    """An end whose rest a role executes concurrently with the consumers; it takes the tiles that both name."""
    stmt = tir.sequence(rest)
    marked = ir.AttrStmt(ir.StringImm(EPILOGUE_ROLE), EPILOGUE_ROLE, ir.StringImm(role), executed(by, stmt))
    handed = sorted(tiles_named(tir.sequence(first)) & tiles_named(stmt), key=lambda tile: str(tile.name))
    results = Channel("results", handed, 1, COMPUTE, role)
    return LoopEpilogue([*first, tir.at(marked, rest[0])], tiles, threads=by.threads, results=results)


def ending(
    phase: ir.Stmt, loop: ir.For, last: Sequence[ir.Stmt], order: Dependence, own: int, fits: bool = True
) -> LoopEpilogue:
    """The last statements of a loop's iteration, with those of a dedicated epilogue role marked, if one is possible.

    Args:
        phase: the program's statements.
        loop: its loop.
        last: the statements of an iteration after the tile has been computed.
        own: the first thread after consumers and producer.
        fits: whether the tiles of both iterations fit together.
    """
    at = next((i for i, stmt in enumerate(last) if ir.contains(stmt, _is_collective)), None)
    if at is not None:
        return _communicated(EpilogueSplit(phase, loop, last, list(last[:at]), list(last[at:]), order), own, fits)
    first, rest = _parts(last)
    rest = _with_scalars(rest, first)
    if not fits or not any(ir.contains(stmt, _signals) for stmt in rest):
        return LoopEpilogue(list(last))
    try:
        _check_scalars(first, rest)
        EpilogueSplit(phase, loop, last, first, rest, order).check_data()
    except Declined:
        return LoopEpilogue(list(last))
    return _in_role(STORE, ExecutingThreads(own - STORING, STORING), first, rest)


def _communicated(split: EpilogueSplit, own: int, fits: bool) -> LoopEpilogue:
    try:
        if not fits:
            raise Declined("its tile does not fit next to those that are loaded, or its loop is no persistent one")
        split.check()
        first, rest, tiles = split.through_shared_memory()
    except Declined as reason:
        collective = split.rest[0]
        name = str(ir.op_name(ir.nodes(collective, _is_collective)[0])).removeprefix("tilescale.")
        note = f"T.{name}{_line(collective)} ends before the next tile is computed: {reason}"
        return LoopEpilogue(list(split.last), note=note)
    return _in_role(COMMUNICATE, ExecutingThreads(own, COMMUNICATING), first, rest, tiles)


def narrowed(stmt: ir.Stmt) -> ir.Stmt:
    """A statement of a pipelined loop in which no product has instructions of too many columns."""

    def leave(node: ir.Node) -> Any:
        if ir.op_name(node) != tl.GEMM:
            return None
        columns = ir.constant(Gemm.of(node).sizes[1])
        return None if columns is None or columns <= _COLUMNS else Gemm.of(node).shared_out(_SQUARE)

    return tir.rewrite(stmt, leave=leave)


@dataclass(frozen=True)
class EpilogueSplit:
    """The end of an iteration, `last`, in two parts: `first`, and `rest`, which overlaps the next iteration."""

    phase: ir.Stmt
    loop: ir.For
    last: Sequence[ir.Stmt]
    first: list[ir.Stmt]
    rest: list[ir.Stmt]
    order: Dependence

    def check(self) -> None:
        """Raise where the next iteration's `first`, and the computation of its tile, must not precede this one's
        `rest`, which begins with a collective."""
        self._check_operations()
        if self._effects(self._computing()).orders:
            raise Declined("the computation of the tile waits, signals or synchronizes")
        self.check_data()

    def check_data(self) -> None:
        """The same check for tensors and tiles, for any rest."""
        before, after = self._effects(self._computing()), self._effects(self.rest)
        if before.opaque or after.opaque or before.fixed or after.fixed:
            raise Declined("it calls functions with unknown effects, or synchronizes its threads")
        self._check_tensors(before, after)
        self._check_tiles(before, after)
        self._check_outside()

    def _check_operations(self) -> None:
        for stmt in self.rest:
            calls = ir.nodes(stmt, orders)
            if any(map(by_nvshmem, calls)):
                raise Declined("it goes to devices without common memory")
            if not all(map(_is_collective, calls)):
                raise Declined(f"waits, signals or copies to peers follow it{_line(stmt)}")

    def _check_tensors(self, before: Effects, after: Effects) -> None:
        """Check device memory: the consumers write none of it, and what they read does not change."""
        written = [a for a in before.writes if self._is_shared(a)]
        if written:
            raise Declined(f"the computation of the tile writes {self._name(written[0])!r}")
        read = [a for a in before.reads if self._is_shared(a)]
        # Peers' instances, and flags, have their own order: readers there wait for them.
        changed = {a.root for a in after.writes if a.at is None and not a.atomic}
        if any(a.root in changed for a in read):
            raise Declined("the statements after it write an input of the next tile")
        calls = [call for stmt in self.rest for call in ir.nodes(stmt, _is_collective)]
        for access in read:
            if any(self.order.gates(call, access.root) for call in calls):
                raise Declined(f"devices may write {self._name(access)!r} before it, of which tiles are computed")

    def _check_tiles(self, before: Effects, after: Effects) -> None:
        """Tiles: both parts share those that the first one writes when it is about to hand them over."""
        both = self._tiles(before) & self._tiles(after)
        if early := both & self._tiles(self._effects([_without(self.loop, self.last)])):
            raise Declined(f"{self._named(early)!r} is used where the next tile is computed, too")
        for root in both - self._in_registers:
            if not self._scope(root).startswith("shared"):
                raise Declined(f"{self._named({root})!r} is each thread's own")
        for stmt in self.rest:
            named = self._tiles(self._effects([stmt])) & both & self._in_registers
            if named and not _is_elementwise(stmt):
                raise Declined(f"{self._named(named)!r} lies in registers, and not only copied{_line(stmt)}")

    def _check_outside(self) -> None:
        """Check that statements around the loop do not wait for its end."""
        around = self._effects([_without(self.phase, [self.loop])])
        if around.orders or around.writes and not all(self._scope(a.root).startswith("local") for a in around.writes):
            raise Declined("more than scalars stands around the loop")
        if self._tiles(around) & self._tiles(self._effects(self.rest)):
            raise Declined("its tile is used outside of the loop, too")

    def through_shared_memory(self) -> tuple[list[ir.Stmt], list[ir.Stmt], tuple[ir.Buffer, ...]]:
        """Both parts, tiles in registers being handed over in shared memory, and what is allocated for these."""
        before, after = self._effects(self._computing()), self._effects(self.rest)
        handed = self._tiles(before) & self._tiles(after) & self._in_registers
        first, rest = list(self.first), tir.sequence(self.rest)
        tiles: list[ir.Buffer] = []
        for home in [self.order.names.homes[root] for root in self.order.names.homes if root in handed]:
            tile = tir.local_buffer(f"{home.name}_handed", list(home.shape), str(home.dtype), "shared.dyn")
            zeros = [0] * len(home.shape)
            source, target = (tir.region(b, zeros, list(home.shape), a) for b, a in ((home, "r"), (tile, "w")))
            first.append(tir.tile_call("copy", source, target))
            rest = _instead(rest, home, tile)
            tiles.append(tile)
        return first, [tir.at(rest, self.rest[0])], tuple(tiles)

    # -- effects -----------------------------------------------------------------------------------------------------

    def _computing(self) -> list[ir.Stmt]:
        return [_without(self.loop, self.last), *self.first]

    def _effects(self, stmts: Iterable[ir.Stmt]) -> Effects:
        return self.order.names.all_effects(tir.sequence(list(stmts)))

    def _is_shared(self, access: Access) -> bool:
        return self.order.names.shared(access.root)

    def _tiles(self, effects: Effects) -> set[ir.Var]:
        return {a.root for a in effects.accesses if not self._is_shared(a)}

    def _scope(self, root: ir.Var) -> str:
        home = self.order.names.homes.get(root)
        return str(home.scope()) if home is not None else "global"

    @property
    def _in_registers(self) -> set[ir.Var]:
        return {root for root, home in self.order.names.homes.items() if home.scope() == "local.fragment"}

    def _name(self, access: Access) -> str:
        return str(access.buffer.name)

    def _named(self, roots: set[ir.Var]) -> str:
        return min(str(self.order.names.homes[root].name) for root in roots)


def _is_collective(node: ir.Node) -> bool:
    return ir.op_name(node) in ops.COLLECTIVES


def _line(stmt: ir.Stmt) -> str:
    where = location(stmt)
    return f" (line {where.line})" if where is not None else ""


def _is_elementwise(stmt: ir.Stmt) -> bool:
    """Whether a statement does the same with a tile in shared memory as with one in registers."""
    if isinstance(stmt, ir.Evaluate):
        return ir.op_name(stmt.value) == tl.COPY or _is_collective(stmt.value)
    is_loop = isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL
    return is_loop or is_scalar(stmt) or is_fill(stmt)


def _without(stmt: ir.Stmt, others: Sequence[ir.Stmt]) -> ir.Stmt:
    def enter(node: ir.Node) -> ir.Stmt | None:
        if isinstance(node, ir.Stmt) and any(node.same_as(other) for other in others):
            return tir.sequence([])
        return None

    return tir.rewrite(stmt, enter=enter)


def _instead(stmt: ir.Stmt, tile: ir.Buffer, other: ir.Buffer) -> ir.Stmt:
    """A statement on another tile of the same shape."""

    def leave(node: ir.Node) -> Any:
        if isinstance(node, ir.BufferLoad) and node.buffer.same_as(tile):
            return ir.BufferLoad(other, list(node.indices))
        if isinstance(node, ir.BufferStore) and node.buffer.same_as(tile):
            return ir.BufferStore(other, node.value, list(node.indices))
        return None

    return tir.rewrite(stmt, leave=leave)


def _parts(stmts: Sequence[ir.Stmt]) -> tuple[list[ir.Stmt], list[ir.Stmt]]:
    """Statements, and the stores and signals that end them, in branches too."""
    first, rest = list(stmts), list[ir.Stmt]()
    while first and is_sent(first[-1]):
        rest.insert(0, first.pop())
    if not first or not isinstance(first[-1], ir.IfThenElse) or ir.reads_memory(first[-1].condition):
        return first, rest
    branch = first.pop()
    arms = [_parts(flat(arm)) if arm is not None else ([], []) for arm in (branch.then_case, branch.else_case)]
    before, ends = (_branch(branch, *(arm[i] for arm in arms)) for i in (0, 1))
    if before:
        return [*first, *before], [*ends, *rest]
    first, others = _parts(first)
    return first, [*others, *ends, *rest]


def _branch(branch: ir.IfThenElse, then_case: list[ir.Stmt], else_case: list[ir.Stmt]) -> list[ir.Stmt]:
    """A branch with other arms; nothing if both are empty."""
    condition, arms = branch.condition, [tir.sequence(then_case), tir.sequence(else_case) if else_case else None]
    if not then_case:
        condition, arms = ir.Not(condition), [tir.sequence(else_case), None]
    return [tir.at(ir.IfThenElse(condition, *arms), branch)] if then_case or else_case else []


def _signals(node: ir.Node) -> bool:
    return ir.op_name(node) == ops.SIGNAL.name or (
        ir.op_name(node) == ops.COPY.name and Copy.of(node).signal is not None
    )


def _with_scalars(rest: Sequence[ir.Stmt], first: Sequence[ir.Stmt]) -> list[ir.Stmt]:
    """Statements with the scalars set before them substituted."""
    known: dict[ir.Var, ir.PrimExpr] = {}
    for stmt in first:
        if isinstance(stmt, ir.Bind) and not reads_memory(stmt):
            known[stmt.var] = ir.substitute(stmt.value, known)
    return [ir.substitute(stmt, known) for stmt in rest]


def _check_scalars(first: Sequence[ir.Stmt], rest: Sequence[ir.Stmt]) -> None:
    bound = {s.var for stmt in first for s in ir.statements(stmt) if isinstance(s, ir.Bind)}
    if bound & {var for stmt in rest for var in ir.instances(stmt, ir.Var)}:
        raise Declined("the store warps use a value that the compute role defines")
