# SPDX-License-Identifier: MIT
"""Marks of stages for later ones in the statements of a phase: the executing unit, and synchronization of threads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl, trace
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.nvshmem_link import IMPL
from tilescale.program import ops
from tilescale.program.model import Launch

SYNC = trace.register_op("tilescale.sync")
"""sync([begin, threads]): synchronize the named threads, by default those that execute it; each one's earlier writes to
shared memory are then visible to the others. Hardware barriers are assigned when all are known (barriers.py)."""

UNIT = "tilescale.unit"
"""AttrStmt key: the statements inside are executed by a unit inside the program (`ExecutingThreads`)."""

CARRIER = "carrier"
"""Annotation of an operation between devices without shared memory: the library for it (internode.py)."""

CARRIED = frozenset((ops.COPY.name, ops.SIGNAL.name, ops.ATOMIC_ADD.name, *ops.COLLECTIVES))
"""Operations of programs that a library can execute."""

BY_PRODUCER = "by_producer"
"""Annotation of a wait that the producer makes for its loads, without a barrier of the program."""

BY_PRODUCER_FUNCTION = "tilescale::wait_by_producer"
"""The device function of such a wait."""


def is_gate(node: ir.Node) -> bool:
    """Whether a node is a lowered wait of the producer."""
    return (tir.extern_name(node) or "").startswith(f"{BY_PRODUCER_FUNCTION}<")


BY_THREAD = "by_thread"
"""Annotation of an operation that each thread executes for itself, without a barrier."""

AHEAD = "ahead"
"""Annotation of a copy from a peer that the producer issues ahead of its use, by bulk copies."""

BARRIER = "barrier"
"""Annotation of such a copy: the mbarrier that counts its bytes, where TileLang makes none itself."""

ONLY_ACQUIRES = "only_acquires"
"""Annotation of an expression that one thread evaluates for its unit: it publishes nothing."""

ATOMIC_LOAD = trace.register_op("tilescale.atomic_load")
"""atomic_load(element[, loop]) -> the element's value; `loop` is the state of the loop that polls it."""

ITERATION = trace.register_op("tilescale.iteration")
"""iteration(loop, condition, decides, polls) -> int32: whether a loop continues (1), by its condition, whose value
depends on numbers that `decides` mixes; 0: it ends, 2: it polled in vain (polling.cuh)."""

LOADER = "tilescale.loader"
"""AttrStmt key: the producer executes the statements inside (role_graph/split.py)."""


def by_nvshmem(node: ir.Node) -> bool:
    """Whether NVSHMEM executes an operation: it is marked, or a copy that requests it."""
    name = ir.op_name(node)
    if name not in CARRIED:
        return False
    asked = name == ops.COPY.name and ir.attribute(node, "impl") == IMPL
    return asked or ir.attribute(node, CARRIER) == IMPL


@dataclass(frozen=True)
class ExecutingThreads:
    """The unit that executes a statement: a range of threads, with a unique name in the program."""

    begin: int
    threads: int
    name: str = ""

    @classmethod
    def of(cls, stmt: ir.Stmt) -> ExecutingThreads | None:
        """The unit of the statements inside `stmt`; None for all but `executed`."""
        if not isinstance(stmt, ir.AttrStmt) or str(stmt.attr_key) != UNIT:
            return None
        begin, threads = map(ir.integer, stmt.node)
        return cls(begin, threads, str(stmt.value.value))


def executed(by: ExecutingThreads, stmt: ir.Stmt) -> ir.Stmt:
    """A statement that a unit executes."""
    threads = [ir.IntImm("int32", by.begin), ir.IntImm("int32", by.threads)]
    return ir.AttrStmt(threads, UNIT, ir.StringImm(by.name), stmt)


def loading(stmt: ir.Stmt) -> ir.Stmt:
    """A statement of the producer."""
    return ir.AttrStmt(ir.StringImm(LOADER), LOADER, ir.StringImm(LOADER), stmt)


def is_loading(stmt: ir.Stmt) -> bool:
    """Whether a statement is one of the producer."""
    return isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == LOADER


def by_producer(stmt: ir.Stmt) -> ir.Stmt:
    """A statement whose waits the producer makes, for the loads after them."""
    return _marked(stmt, BY_PRODUCER, {ops.WAIT.name})


THREADS_OWN = frozenset(op.name for op in (ops.SIGNAL, ops.WAIT, ops.ATOMIC_ADD, ops.INVOKE_ONE))
"""Operations that a thread can execute for itself."""


def by_thread(stmt: ir.Stmt) -> ir.Stmt:
    """A statement whose operations each thread executes for itself."""
    return _marked(stmt, BY_THREAD, THREADS_OWN)


def _marked(stmt: ir.Stmt, mark: str, names: Collection[str]) -> ir.Stmt:
    def leave(node: ir.Node) -> Any:
        if ir.op_name(node) not in names:
            return None
        said = {**dict(node.annotations), mark: ir.IntImm("int32", 1)}
        return ir.Call(node.dtype, node.op, list(node.args), said)

    return tir.rewrite(stmt, leave=leave)


def grid_wait() -> ir.Stmt:
    """Wait in all threads for the preceding grid on the stream, where this one may begin earlier."""
    return tir.evaluate(tir.call(tl.WAIT_FOR_KERNEL_BEFORE, dtype="void"))


def is_grid_wait(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, ir.Evaluate) and ir.op_name(stmt.value) == tl.WAIT_FOR_KERNEL_BEFORE


def sync(by: ExecutingThreads | None = None) -> ir.Stmt:
    """Synchronize the threads that execute it, or the named ones."""
    return tir.evaluate(tir.call(SYNC.name, *((by.begin, by.threads) if by is not None else ())))


def acquired(*barrier: ir.Stmt) -> ir.Stmt:
    """A barrier after which others' earlier writes are visible here, also to bulk copies; or no barrier if none is
    needed."""
    return tir.sequence([*barrier, tir.evaluate(tir.extern("tilescale::acquired"))])


def one_thread(launch: Launch, body: ir.Stmt, begin: int = 0) -> ir.Stmt:
    """`body` for one thread of a program, or of the unit that begins with a thread."""
    condition: Any = None
    for var, axis in launch.thread_vars:
        if launch.threads[axis] > 1:
            test = var == (0 if axis else begin)
            test = test.asobject() if hasattr(test, "asobject") else test
            condition = test if condition is None else ir.And(condition, test)
    return body if condition is None else ir.IfThenElse(condition, body, None)


def located(stmt: ir.Stmt, like: ir.Stmt) -> ir.Stmt:
    """A statement with the source location of `like`, including inner statements without one."""
    for inner in ir.statements(stmt):
        if ir.stmt_location(inner) is None:
            tir.at(inner, like)
    return stmt
