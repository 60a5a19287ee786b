# SPDX-License-Identifier: MIT
"""Registers that warp specialisation would leave with other values than the program says.

Why: TileLang 0.1.15 gives the loads of a pipelined loop to a producer and all else to consumers, and takes for granted
that no loop is around it.

- What is set in registers before the pipelined loop goes into the branch of the role that reads it, and that branch is
  where the pipelined loop is. With a loop around it, values are set anew in each of its iterations: of a sum over both
  loops the last iteration's part is left. With a branch around it they are not set where the branch is not taken.
- An expression that has a name from before the loop around it may be evaluated in that loop.
- What is set after the pipelined loop is set by consumers: in the next iteration of the loop around it the producer,
  and statements of all threads, have the value from before.

Before: `T.clear(c)`, then a serial loop, and in it a pipelined loop that adds to `c`. After: consumers clear `c` in
front of the serial loop. A function in which that is not enough has no roles.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tilelang.cuda.transform
import tvm
from tvm import tirx

from tilelang_core import ir
from tilelang_core.accesses import accesses_of
from tilelang_core.rewrite import at, rewrite, rewritten, sequence

_PASS = "ProducerConsumerWarpSpecialized"
_SETS, _PLACE = "tilelang_core.sets", "tilelang_core.sets_here"
_CLONE = "_producer_ws"
"""Suffix of the names of the producer's own copies of registers."""
_STATEMENTS = (tirx.Evaluate, tirx.BufferStore, tirx.For, tirx.IfThenElse, tirx.While)
_LOOPS = tirx.For | tirx.While


@contextlib.contextmanager
def keeping_registers() -> Iterator[None]:
    """Within the block, stock's warp specialisation keeps the values of registers."""
    stock = getattr(tilelang.cuda.transform, _PASS)
    setattr(tilelang.cuda.transform, _PASS, lambda: lambda module: _specialised(module, stock()))
    try:
        yield
    finally:
        setattr(tilelang.cuda.transform, _PASS, stock)


def _specialised(module: tvm.IRModule, stock: Callable[[tvm.IRModule], tvm.IRModule]) -> tvm.IRModule:
    functions = dict(module.functions.items())
    if not any(isinstance(func, tirx.PrimFunc) and _is_around(func.body, _AROUND) for func in functions.values()):
        return stock(module)
    made = stock(tvm.IRModule({name: _marked(func) for name, func in functions.items()}, attrs=module.attrs))
    kept = {}
    for name, func in made.functions.items():
        before, after = functions[name], _restored(func)
        kept[name] = before if _differs(after, _named_early(before)) else after
    return tvm.IRModule(kept, attrs=made.attrs)


# -- what is set before a loop ----------------------------------------------------------------------------------------


def _marked(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with marks at the statements that stock's pass may move into a loop or branch."""
    count = 0

    def leave(node: Any) -> Any:
        nonlocal count
        if not isinstance(node, tirx.SeqStmt):
            return None
        found = []
        for number, stmt in enumerate(node.seq):
            if not _may_move(stmt, node.seq[number + 1 :]):
                found.append(stmt)
                continue
            found += [_mark(_PLACE, count, tirx.Evaluate(tirx.IntImm("int32", 0))), at(_mark(_SETS, count, stmt), stmt)]
            count += 1
        return sequence(found) if len(found) > len(node.seq) else None

    return rewritten(func, leave)


def _mark(key: str, number: int, body: tirx.Stmt) -> tirx.Stmt:
    return tirx.AttrStmt(tirx.IntImm("int32", number), key, tirx.IntImm("int32", number), body)


def _may_move(stmt: tirx.Stmt, later: list[tirx.Stmt]) -> bool:
    """Whether a statement sets registers before a loop around a pipelined loop, or before a branch around one that are
    read after the branch."""
    if not isinstance(stmt, _STATEMENTS) or ir.contains(stmt, ir.is_pipelined):
        return False
    own = _written(stmt)
    for number, other in enumerate(later if own else ()):
        if _is_around(other, _LOOPS):
            return True
        if _is_around(other, tirx.IfThenElse) and any(own & _read(each) for each in later[number + 1 :]):
            return True
    return False


_AROUND = _LOOPS | tirx.IfThenElse


def _is_around(stmt: tirx.Stmt, kind: Any) -> bool:
    """Whether a statement has one of some kind inside, or is one, around a pipelined loop."""
    inside = (each for each in ir.statements(stmt) if isinstance(each, kind) and not ir.is_pipelined(each))
    return any(ir.contains(each, ir.is_pipelined) for each in inside)


def _restored(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function without marks; what stock's pass has moved is where it was, for the same role."""
    moved: dict[int, list[tirx.Stmt]] = defaultdict(list)

    def taken(role: tirx.Stmt, threads: tirx.PrimExpr) -> tirx.Stmt:
        def enter(node: Any) -> Any:
            if not isinstance(node, tirx.AttrStmt) or node.attr_key != _SETS:
                return None
            moved[ir.integer(node.value)].append(tirx.IfThenElse(threads, node.body, None))
            return sequence([])

        return rewrite(role, enter=enter)

    def roles(node: Any) -> Any:
        if not ir.has_roles(node):
            return None
        branch, others = node.body, _others(node)
        first, second = taken(branch.then_case, branch.condition), taken(branch.else_case, others)
        return tirx.AttrStmt(node.node, node.attr_key, node.value, tirx.IfThenElse(branch.condition, first, second))

    def placed(node: Any) -> Any:
        if isinstance(node, tirx.AttrStmt) and node.attr_key == _PLACE:
            return sequence(moved[ir.integer(node.value)])
        return node.body if isinstance(node, tirx.AttrStmt) and node.attr_key == _SETS else None

    return func.with_body(rewrite(rewrite(func.body, enter=roles), leave=placed))


def _others(roles: tirx.AttrStmt) -> tirx.PrimExpr:
    """Whether a thread is not one of the producer's."""
    return tirx.GE(roles.body.condition.a, roles.body.condition.b)


# -- what is set after a loop, or in it -------------------------------------------------------------------------------


def _differs(func: tirx.PrimFunc, early: set[tirx.Var]) -> bool:
    """Whether in a loop around roles some thread reads registers from before that only consumers have set, or evaluates
    one of the expressions with names from before it that reads what the loop writes."""
    loops = (stmt for stmt in ir.statements(func.body) if isinstance(stmt, _LOOPS))
    loop = next((each for each in loops if ir.contains(each, ir.has_roles)), None)
    if loop is None:
        return False
    inside = list(ir.statements(loop))
    roles = next(filter(ir.has_roles, inside))
    others = _others(roles)
    consumers = [roles.body.else_case, *(each for each in inside if _is_for(each, others))]
    if _read_first(loop.body, consumers) & set().union(*map(_written, consumers)):
        return True
    named = (each for each in ir.statements(roles) if isinstance(each, tirx.Bind) and each.var in early)
    evaluated = {name for each in named for name in _read(each, everywhere=True)}
    return bool(evaluated & _written(loop.body, everywhere=True))


def _named_early(func: tirx.PrimFunc) -> set[tirx.Var]:
    """Names, from before a loop around a pipelined loop, of expressions that read something."""
    found: set[tirx.Var] = set()
    for stmt in ir.statements(func.body):
        if isinstance(stmt, tirx.SeqStmt):
            ends = [number for number, each in enumerate(stmt.seq) if _is_around(each, _LOOPS)]
            before = stmt.seq[: ends[-1]] if ends else ()
            found |= {each.var for each in before if isinstance(each, tirx.Bind) and not ir.is_pure(each.value)}
    return found


def _is_for(stmt: tirx.Stmt, threads: tirx.PrimExpr) -> bool:
    return isinstance(stmt, tirx.IfThenElse) and ir.same(stmt.condition, threads)


def _read_first(stmt: tirx.Stmt, without: list[tirx.Stmt]) -> set[str]:
    """Names of the registers that a statement, without some in it, reads before it sets them."""
    wanted: set[str] = set()
    known: set[str] = set()

    def visit(each: tirx.Stmt, always: bool) -> None:
        if any(each.same_as(one) for one in without):
            return
        wanted.update(_names(buffer for buffer, writes in _accessed(each) if not writes) - known)
        if always and isinstance(each, tirx.BufferStore) and each.buffer.scope() == "local.var":
            known.update(_names([each.buffer]))
        for inner in ir.children(each):
            visit(inner, always and not isinstance(each, _AROUND))

    visit(stmt, True)
    return wanted


def _written(stmt: tirx.Stmt, everywhere: bool = False) -> set[str]:
    """Names of the registers, or of all memory, that a statement sets."""
    return _names(buffer for inner in ir.statements(stmt) for buffer, writes in _accessed(inner, everywhere) if writes)


def _read(stmt: tirx.Stmt, everywhere: bool = False) -> set[str]:
    return _names(
        buffer for inner in ir.statements(stmt) for buffer, writes in _accessed(inner, everywhere) if not writes
    )


def _accessed(stmt: tirx.Stmt, everywhere: bool = False) -> Iterator[tuple[tirx.Buffer, bool]]:
    """The registers, or all memory, that a statement itself reads, and what it writes."""
    for access in accesses_of(stmt, lambda name: False).accesses:
        if everywhere or access.buffer.scope().startswith("local"):
            yield from ((access.buffer, kind) for kind, does in ((False, access.reads), (True, access.writes)) if does)


def _names(buffers: Iterable[tirx.Buffer]) -> set[str]:
    return {str(buffer.name).removesuffix(_CLONE) for buffer in buffers}
