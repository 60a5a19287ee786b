# SPDX-License-Identifier: MIT
"""The TIR that TileLang traces: the node classes, walkers and small constructors that the rest of the system uses.

Passes and interpreters import TIR names from here and nowhere else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from tilelang.ir import get_buffer_span, get_stmt_span, span_to_location
from tilelang.language import dtypes
from tilelang.utils import side_effect
from tvm import DataType
from tvm.arith import Analyzer
from tvm.ir import Op, Range, structural_equal
from tvm.tirx import (
    EQ,
    GE,
    GT,
    LE,
    LT,
    NE,
    Add,
    AllocBuffer,
    And,
    AssertStmt,
    AttrStmt,
    Bind,
    Broadcast,
    Buffer,
    BufferLoad,
    BufferRegion,
    BufferStore,
    Call,
    Cast,
    DeclBuffer,
    Div,
    Evaluate,
    FloatImm,
    FloorDiv,
    FloorMod,
    For,
    IfThenElse,
    IntImm,
    Let,
    Max,
    Min,
    Mod,
    Mul,
    Not,
    Or,
    PrimExpr,
    PrimFunc,
    Ramp,
    SBlock,
    SBlockRealize,
    Select,
    SeqStmt,
    Shuffle,
    Stmt,
    StringImm,
    Sub,
    Var,
    While,
    stmt_functor,
)  # fmt: skip
from tvm.tirx.expr import CallEffectKind
from tvm.tirx.stmt import ForKind
from tvm_ffi import Array

from tilelang_core import tl

__all__ = [
    "EQ", "GE", "GT", "LE", "LT", "NE", "SHARED", "VARIABLE", "Add", "AllocBuffer", "Analyzer", "And", "Array",
    "AssertStmt", "AttrStmt", "Bind", "Broadcast", "Buffer", "BufferLoad", "BufferRegion", "BufferStore", "Call",
    "Cast", "DeclBuffer", "Div", "Evaluate", "FloatImm", "FloorDiv", "FloorMod", "For", "ForKind", "IfThenElse",
    "IntImm", "Let", "Max", "Min", "Mod", "Mul", "Not", "Op", "Or", "PrimExpr", "PrimFunc", "Ramp", "Range", "SBlock",
    "SBlockRealize", "Select", "SeqStmt", "Shuffle", "Stmt", "StringImm", "Sub", "Var", "While",
    "attribute", "bits", "buffer_location", "children", "constant", "constants", "contains", "extern_arguments",
    "fingerprint", "in_order", "instances", "int_node", "integer", "is_division", "is_for_all", "is_negation",
    "is_pure", "layout_map", "loaded_element", "mark_arguments", "nodes", "op_name", "parameters", "proves",
    "region_in", "region_parts", "regions_of_copy", "same", "scope_kind", "simplified", "simplify", "statements",
    "stmt_location", "substitute", "torch_dtype", "uses", "variables", "walk", "with_regions",
]  # fmt: skip


Node: TypeAlias = Stmt | PrimExpr
"""A statement or an expression."""


def op_name(node: Any) -> str | None:
    """The operation's name if `node` is a call of a registered operation, else None."""
    return node.op.name if type(node) is Call and type(node.op) is Op else None


def attribute(call: Call, key: str, default: Any = None) -> Any:
    """The Python value of an annotation of a call."""
    value = call.annotations.get(key) if call.annotations else None
    if value is None:
        return default
    return value.value if isinstance(value, IntImm | FloatImm | StringImm) else value


def constant(expr: Any) -> int | None:
    """The value of an integer constant (after simplification), else None."""
    if isinstance(expr, bool | int):
        return int(expr)
    if isinstance(expr, IntImm):
        return int(expr.value)
    if isinstance(expr, PrimExpr) and not isinstance(expr, Var):
        simple = simplified(expr, Analyzer())
        return int(simple.value) if isinstance(simple, IntImm) else None
    return None


def integer(expr: Any) -> int:
    """The value of an expression that is known to be an integer constant."""
    value = constant(expr)
    assert value is not None, f"{expr} is not a constant"
    return value


def constants(exprs: Iterable[Any]) -> list[int] | None:
    """The values of integer constants; None if one of them is not constant."""
    values = [constant(expr) for expr in exprs]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def simplify(expr: PrimExpr, ranges: dict[Var, tuple[Any, Any]]) -> PrimExpr:
    """`expr` simplified, where each variable of `ranges` runs over range(begin, begin + extent) of its pair."""
    return simplified(expr, _with_ranges(ranges))


def proves(condition: PrimExpr, ranges: dict[Var, tuple[Any, Any]]) -> bool:
    """Whether a condition holds for all values of the variables of `ranges`, as `simplify` takes them.

    A failed proof takes 2 ms, most of it for a context of Z3, so a condition that is known to be false is not one.
    """
    analyzer = _with_ranges(ranges)
    known = simplified(condition, analyzer)
    if isinstance(known, IntImm):
        return bool(known.value)
    return not _may_change(condition) and bool(analyzer.can_prove(condition))


def simplified(expr: PrimExpr, analyzer: Analyzer) -> PrimExpr:
    """`expr` simplified with what an analyzer knows of its variables; it has the same value.

    TVM's canonical form, as TileLang 0.1.15 has it, takes negative factors out of floor divisions: `(8 - i % 4) % 8`
    becomes `-(i % 4)`. An expression that it may change is simplified by rewrite rules alone.
    """
    return analyzer.rewrite_simplify(expr) if _may_change(expr) else analyzer.simplify(expr)


def _may_change(expr: PrimExpr) -> bool:
    """Whether it divides a quotient or remainder again, and one of the two dividends has a negated term."""
    return contains(
        expr, lambda node: is_division(node) and contains(node.a, is_division) and contains(node.a, is_negation)
    )


def is_division(node: Any) -> bool:
    """Whether a node is a quotient or remainder, rounded down."""
    return isinstance(node, FloorDiv | FloorMod)


def is_negation(node: Any) -> bool:
    """Whether a node negates a term: it subtracts what is not constant, or is a negative number."""
    return isinstance(node, Sub) and not isinstance(node.b, IntImm) or isinstance(node, IntImm) and node.value < 0


def _with_ranges(ranges: dict[Var, tuple[Any, Any]]) -> Analyzer:
    analyzer = Analyzer()
    for var, (begin, extent) in ranges.items():
        analyzer.bind(var, Range.from_min_extent(begin, extent))
    return analyzer


def bits(dtype: str) -> int:
    """Bits of one element of a data type."""
    return DataType(dtype).bits * DataType(dtype).lanes


def torch_dtype(dtype: str) -> Any:
    """torch's type of that name of TileLang's."""
    return dtypes.dtype(dtype).as_torch()


SHARED = ("shared", "shared.dyn")
"""Scopes of tiles in shared memory; barriers and others have their own."""

TENSOR_MEMORY = "shared.tmem"
"""Scope of tiles in tensor memory."""

VARIABLE = "local.var"
"""Scope of a variable, as `T.alloc_var` makes it."""

DESCRIPTORS = ("local.descriptor.wgmma", "local.descriptor.tcgen05_smem", "local.descriptor.tcgen05_instr")
"""The scopes of descriptors, of which each thread has its own."""


def scope_kind(buffer: Buffer) -> str:
    """Memory kind of a buffer: "fragment", "shared" or "global"."""
    scope = buffer.scope()
    if scope.startswith("local"):
        return "fragment"
    return "shared" if scope.startswith("shared") else "global"


def int_node(value: Any) -> PrimExpr:
    """An int as an IR constant; expressions stay as they are."""
    return IntImm("int32", value) if isinstance(value, int) else value


def stmt_location(stmt: Stmt) -> tuple[str, int] | None:
    """File and line of the user's program that emitted a statement."""
    return _location(span_to_location(get_stmt_span(stmt)))


def buffer_location(buffer: Buffer) -> tuple[str, int] | None:
    """File and line where a buffer was declared."""
    return _location(span_to_location(get_buffer_span(buffer)))


def _location(found: tuple[str, int] | None) -> tuple[str, int] | None:
    """TileLang makes every name absolute, that of a prompt's input too, by which its lines are known: "<input 3>"."""
    if found is None:
        return None
    name = os.path.basename(found[0])
    return (name if name.startswith("<") else found[0]), found[1]


_INSIDE: dict[type, Callable[[Any], Iterable[Stmt]]] = {
    SeqStmt: lambda stmt: stmt.seq,
    SBlockRealize: lambda stmt: (stmt.block,),
    SBlock: lambda stmt: (stmt.body,) if stmt.init is None else (stmt.init, stmt.body),
    IfThenElse: lambda stmt: (stmt.then_case,) if stmt.else_case is None else (stmt.then_case, stmt.else_case),
    **dict.fromkeys((For, While, AttrStmt), lambda stmt: (stmt.body,)),
}
"""The statements directly inside one, by its class: no class has another as its base."""


def children(stmt: Stmt) -> Iterable[Stmt]:
    """The statements directly inside a statement, in order."""
    inside = _INSIDE.get(type(stmt))
    return inside(stmt) if inside is not None else ()


def walk(node: Node, visit: Callable[[Any], None]) -> None:
    """Call `visit` on every statement and expression below `node`, parents first."""

    def each(below: Any) -> bool:
        visit(below)
        return True

    stmt_functor.pre_order_visit(node, each)


def nodes(node: Node, wanted: Callable[[Any], bool] = lambda _: True) -> list[Any]:
    """`node` and the nodes below it, parents first, but only those for which `wanted` holds."""
    found: list[Any] = []

    def visit(below: Any) -> bool:
        if wanted(below):
            found.append(below)
        return True

    stmt_functor.pre_order_visit(node, visit)
    return found


def instances(node: Node, *kinds: type) -> list[Any]:
    """`node` and the nodes below it, parents first, but only those of some classes."""
    return nodes(node, lambda below: isinstance(below, kinds))


def uses(stmt: Stmt) -> list[Var]:
    """Variables that a statement itself, not those inside it, reads or writes; data of buffers included."""
    found: list[Var] = []

    def visit(node: Any) -> bool:
        if type(node) is BufferLoad or type(node) is BufferStore:
            found.append(node.buffer.data)
        elif isinstance(node, Var):
            found.append(node)
        return not isinstance(node, Stmt) or node.same_as(stmt)

    stmt_functor.pre_order_visit(stmt, visit)
    return found


def statements(stmt: Stmt) -> Iterator[Stmt]:
    """A statement and all below it, in program order."""
    left = [stmt]
    while left:
        found = left.pop()
        yield found
        left.extend(reversed(list(children(found))))


def in_order(stmt: Stmt) -> list[Stmt]:
    """The statements of a list, those of a list in it included; of another statement that one."""
    return [inner for one in stmt.seq for inner in in_order(one)] if isinstance(stmt, SeqStmt) else [stmt]


def same(one: Any, other: Any) -> bool:
    """Whether two nodes say the same of the same variables."""
    return bool(structural_equal(one, other))


def is_pure(expr: PrimExpr) -> bool:
    """Whether an expression has the same value at every position: it reads no memory and changes nothing."""
    return side_effect(expr) <= CallEffectKind.Pure.value


def is_pipelined(node: Any) -> bool:
    return isinstance(node, For) and tl.STAGES in node.annotations


def has_roles(node: Any) -> bool:
    """Whether a node is a branch on the thread index whose two sides are roles of a block."""
    return isinstance(node, AttrStmt) and node.attr_key == tl.ROLES


def reads_memory(expr: PrimExpr) -> bool:
    """Whether an expression loads memory or variables."""
    return contains(expr, lambda node: isinstance(node, BufferLoad))


def plain(extent: Any) -> Any:
    """A Python int for a constant expression, the expression itself otherwise."""
    value = constant(extent)
    return extent if value is None else value


def conjuncts(expr: PrimExpr) -> list[PrimExpr]:
    """The conditions that a conjunction joins, in order; a condition of another form is the only one."""
    return [*conjuncts(expr.a), *conjuncts(expr.b)] if isinstance(expr, And) else [expr]


def variables(expr: Any) -> set[Var]:
    """The variables an expression reads (not those inside buffers' declarations)."""
    found: set[Var] = set()
    if isinstance(expr, PrimExpr):
        stmt_functor.post_order_visit(expr, lambda n: found.add(n) if isinstance(n, Var) else None)
    return found


def fingerprint(func: PrimFunc) -> str:
    """A hash of a function's contents, the same in every process."""
    return hashlib.sha256(func.script().encode()).hexdigest()


def contains(node: Node, wanted: Callable[[Any], bool]) -> bool:
    """Whether `wanted` holds for `node` or anything below it."""
    found = False

    def visit(n: Any) -> bool:
        nonlocal found
        found = found or bool(wanted(n))
        return not found

    stmt_functor.pre_order_visit(node, visit)
    return found


def substitute(node: Any, mapping: dict[Var, PrimExpr]) -> Any:
    """`node` with variables replaced."""
    return stmt_functor.substitute(node, mapping)


def region_parts(region: Any) -> tuple[Buffer, list[PrimExpr], list[PrimExpr]]:
    """Buffer, begins and extents of a `tl.region(load, access, *extents)` call or of a plain BufferLoad."""
    if isinstance(region, BufferLoad):
        return region.buffer, list(region.indices), [IntImm("int32", 1)] * len(region.indices)
    load = region.args[0]
    return load.buffer, list(load.indices), list(region.args[2:])


def mark_arguments(mark: Any) -> list[Any]:
    """Arguments of a mark that one stage leaves for a later one; the file that makes the mark reads it."""
    return list(mark.args)


def loaded_element(call: Any) -> Any:
    """The argument of an atomic load that is the loaded element."""
    return call.args[0]


def regions_of_copy(call: Any) -> tuple[Any, Any]:
    """The source and the target of a copy."""
    source, target = call.args[:2]
    return source, target


def with_regions(call: Any, source: Any, target: Any) -> list[Any]:
    """The arguments of a copy with another source and target."""
    return [source, target, *call.args[2:]]


def extern_arguments(call: Any) -> tuple[str, list[Any]]:
    """The name of an external function, and its arguments."""
    return str(call.args[0].value), list(call.args[1:])


def is_for_all(barrier: Any) -> bool:
    """Whether a barrier of stock TileLang is one of all threads of a block."""
    return len(barrier.args) == 1


def region_in(region: Any, load: Any) -> tuple[Any, list[Any]]:
    """Arguments of stock TileLang's region in addition to the load that begins it: the access, and its extents."""
    _, access, *extents = region.args
    return access, extents


def layout_map(func: PrimFunc) -> dict[Buffer, Any]:
    """The layouts of tiles, and of views of these, that stock TileLang's LayoutInference has written into a function.

    The buffers are those of the traced function.
    """
    blocks = (stmt for stmt in statements(func.body) if isinstance(stmt, SBlock))
    return {buffer: layout for block in blocks for buffer, layout in block.annotations.get(tl.LAYOUTS, {}).items()}


def parameters(func: PrimFunc) -> list[tuple[Var, Buffer | None]]:
    """The parameters in order, with the buffer of those that are tensors."""
    return [(param, func.buffer_map.get(param)) for param in func.params]
