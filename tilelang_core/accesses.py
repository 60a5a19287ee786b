# SPDX-License-Identifier: MIT
"""Declared reads and writes of TileLang's statements.

A tile operation declares its regions, and whether it reads or writes each. Loads, stores, atomics and declared pointers
(`T.access_ptr`) name their elements. Other operations of TileLang's with an effect are *fixed*: they order threads, or
are done later. Functions from elsewhere are *opaque*: nothing is known of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tvm import arith, ir, tirx
from tvm.tirx import stmt_functor
from tvm.tirx.expr import CallEffectKind

from tilelang_core import tl
from tilelang_core.ir import contains, proves, simplified, statements

READS, WRITES = 1, 2
"""The bits of a region's access mask."""

_TILE_OP = tl.TILE_OPERATIONS
_OVERWRITES = frozenset(_TILE_OP + name for name in ("copy", "fill", "transpose", "im2col", "c2d_im2col"))
"""Tile operations that only write what they declare to write; others may read it too, as T.reduce(clear=False)."""
_LATER = tuple(_TILE_OP + name for name in ("async_copy", "tma_copy", "wgmma_", "tcgen05_"))
_BEYOND = frozenset(("barrier", "dst_block", "cluster_mask"))
"""Annotations of operations that are done later, or reach other blocks."""
_OF_THREADS = tl.OF_THREADS
"""Operations that access only their operands."""
_POINTERS = (tl.DECLARED_PTR, tl.ADDRESS_OF, tl.ACCESS_PTR)
_STATES = (tl.TUPLE, tl.ASSUME)
"""Operations that declare facts and have no effect."""
_EFFECT = "TCallEffectKind"
_BREAK = tl.LOOP_BREAK


@dataclass(frozen=True)
class BufferAccess:
    """Some elements of a buffer that a statement reads or writes.

    Attributes:
        begins, extents: the region; None where it is not known, which means anywhere in the buffer.
        atomic: whether other threads may do the same at the same time.
    """

    buffer: tirx.Buffer
    begins: tuple[tirx.PrimExpr, ...] | None
    extents: tuple[tirx.PrimExpr, ...] | None
    reads: bool
    writes: bool
    atomic: bool = False


@dataclass
class DeclaredAccesses:
    """Accesses of a statement itself, without the statements inside it.

    Attributes:
        handed: data variables that an operation gets as plain pointers, and may read and write anywhere.
        calls: calls that the caller of `accesses_of` claimed; their arguments are not in `accesses`.
        fixed: whether it orders threads, is done later, or leaves a loop: nothing may be moved across it.
        opaque: whether it may read and write more than it says.
    """

    accesses: list[BufferAccess] = field(default_factory=list)
    handed: list[tirx.Var] = field(default_factory=list)
    calls: list[tirx.Call] = field(default_factory=list)
    fixed: bool = False
    opaque: bool = False


def accesses_of(node: Any, claims: Callable[[str], bool]) -> DeclaredAccesses:
    """Reads and writes of a statement itself, or of an expression. `claims`: names of operations that the caller knows
    better; they are listed, and not looked into."""
    found = DeclaredAccesses()
    reader = _Reader(found, claims)
    if isinstance(node, tirx.BufferStore):
        found.accesses.append(_element(node.buffer, node.indices, WRITES))
        reader.expressions([*node.indices, node.value])
    else:
        reader.expressions(_own_expressions(node))
    return found


def accesses_in(stmt: tirx.Stmt) -> list[BufferAccess]:
    """Declared reads and writes of a statement and of all inside it."""
    return [access for inner in statements(stmt) for access in accesses_of(inner, lambda name: False).accesses]


def _own_expressions(node: Any) -> list[Any]:
    if isinstance(node, tirx.Bind | tirx.Evaluate | tirx.AttrStmt):
        return [node.value]
    if isinstance(node, tirx.For):
        return [node.min, node.extent]
    if isinstance(node, tirx.While | tirx.IfThenElse | tirx.AssertStmt):
        return [node.condition]
    return [] if isinstance(node, tirx.Stmt) else [node]


def _element(buffer: tirx.Buffer, indices: Iterable[Any], mask: int) -> BufferAccess:
    """One element; a vector of several counts as anywhere."""
    indices = tuple(indices)
    if any(isinstance(i, tirx.Ramp) or "x" in str(i.dtype) for i in indices):
        return BufferAccess(buffer, None, None, bool(mask & READS), bool(mask & WRITES))
    ones = tuple(tirx.IntImm("int32", 1) for _ in indices)
    return BufferAccess(buffer, indices, ones, bool(mask & READS), bool(mask & WRITES))


def leaves_loop(node: Any) -> bool:
    """Whether a node ends the loop around it early."""
    return isinstance(node, tirx.Call) and isinstance(node.op, ir.Op) and node.op.name == _BREAK


class _Reader:
    def __init__(self, found: DeclaredAccesses, claims: Callable[[str], bool]):
        self.found, self.claims = found, claims

    def expressions(self, exprs: Iterable[Any]) -> None:
        for expr in exprs:
            if isinstance(expr, tirx.PrimExpr):
                stmt_functor.pre_order_visit(expr, self._visit)

    def _visit(self, node: Any) -> bool:
        """Record a node's accesses; return whether to visit its children."""
        if type(node) is tirx.BufferLoad:
            self.found.accesses.append(_element(node.buffer, node.indices, READS))
        if type(node) is not tirx.Call:
            return True
        name = node.op.name if isinstance(node.op, ir.Op) else ""
        if self.claims(name):
            self.found.calls.append(node)
        elif name == tl.REGION:
            self._region(node, overwrites=False)
        elif name in _POINTERS:
            self._pointer(node, name)
        elif name.startswith(_TILE_OP) and not name.startswith(_LATER) and not _BEYOND & set(node.annotations or {}):
            self._tile_operation(node, overwrites=name in _OVERWRITES)
        elif name.startswith(tl.ATOMICS + "_"):
            self._atomic(node)
        elif name in _STATES or name and int(node.op.get_attr(_EFFECT) or 0) <= CallEffectKind.ReadState.value:
            return True
        else:
            self._other(node, name)
        return False

    def _region(self, region: tirx.Call, overwrites: bool) -> None:
        load, mask = region.args[0], int(region.args[1])
        reads = bool(mask & READS) or not overwrites and bool(mask & WRITES)
        extents = tuple(region.args[2:])
        self.found.fixed |= "barrier" in load.buffer.scope()
        self.found.accesses.append(BufferAccess(load.buffer, tuple(load.indices), extents, reads, bool(mask & WRITES)))
        self.expressions([*load.indices, *extents])

    def _tile_operation(self, call: tirx.Call, overwrites: bool) -> None:
        atomic, before = "atomic" in call.op.name, len(self.found.accesses)
        for arg in call.args:
            if isinstance(arg, tirx.Call) and isinstance(arg.op, ir.Op) and arg.op.name == tl.REGION:
                self._region(arg, overwrites)
            else:
                self.expressions([arg])
        mine = self.found.accesses[before:]
        self.found.fixed |= any("barrier" in access.buffer.scope() for access in mine)
        if atomic:
            self.found.accesses[before:] = [_as_atomic(access) for access in mine]

    def _atomic(self, call: tirx.Call) -> None:
        before = len(self.found.accesses)
        self.expressions(call.args[:1])
        self.found.accesses[before:] = [_as_atomic(access) for access in self.found.accesses[before:]]
        self.expressions(call.args[1:])

    def _pointer(self, call: tirx.Call, name: str) -> None:
        """A pointer to elements: those of `T.access_ptr` are declared, others may be followed anywhere."""
        if name == tl.ACCESS_PTR:
            self.found.handed.append(call.args[1])
            return
        load = call.args[0]
        if not isinstance(load, tirx.BufferLoad):
            self.found.opaque = True
            return
        self.expressions(load.indices)
        if name == tl.ADDRESS_OF:
            self.found.accesses.append(BufferAccess(load.buffer, None, None, reads=True, writes=True))
            return
        mask, one = int(call.args[2]), isinstance(call.args[1], tirx.IntImm) and int(call.args[1]) == 1
        access = _element(load.buffer, load.indices, mask)
        self.found.accesses.append(
            access if one else BufferAccess(load.buffer, None, None, access.reads, access.writes)
        )

    def _other(self, call: tirx.Call, name: str) -> None:
        self.found.fixed = True
        self.found.opaque |= not name.startswith(_OF_THREADS)
        for arg in call.args:
            if isinstance(arg, tirx.Var) and str(arg.dtype) == "handle":
                self.found.handed.append(arg)
            elif isinstance(arg, tirx.BufferLoad):  # it may take the element by address
                self.found.accesses.append(_element(arg.buffer, arg.indices, READS | WRITES))
                self.expressions(arg.indices)
            else:
                self.expressions([arg])


def _as_atomic(access: BufferAccess) -> BufferAccess:
    return BufferAccess(access.buffer, access.begins, access.extents, access.reads, access.writes, atomic=access.writes)


def span(begin: Any, extent: Any, ranges: dict[tirx.Var, tuple[Any, Any]]) -> tuple[Any, Any] | None:
    """The least begin and the greatest end of a range whose begin depends on variables.

    Args:
        ranges: variables that run, each over range(begin, begin + extent) of its pair.

    Returns:
        Two expressions without these variables, or None if no bounds are known.
    """
    analyzer = arith.Analyzer()
    sets = {var: arith.IntervalSet(low, analyzer.simplify(low + count - 1)) for var, (low, count) in ranges.items()}
    ends = [analyzer.int_set(tirx.convert(expr), sets) for expr in (begin, begin + extent)]
    low, high = ends[0].min_value, ends[1].max_value
    unknown = [*ranges, arith.int_set.pos_inf(), arith.int_set.neg_inf()]
    if any(contains(bound, lambda node: any(map(node.same_as, unknown))) for bound in (low, high)):
        return None
    return simplified(low, analyzer), simplified(high, analyzer)


def known_before(a: Any, b: Any) -> bool:
    """Whether a <= b holds for all values of the variables."""
    return proves(a <= b, {})
