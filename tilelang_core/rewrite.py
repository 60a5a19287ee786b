# SPDX-License-Identifier: MIT
"""Rewriting traced TIR: one walk with hooks, and the constructors that passes need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilelang.ir import get_stmt_span, set_stmt_span
from tvm import ir, tirx
from tvm.arith import Analyzer
from tvm.tirx import stmt_functor

from tilelang_core import tl
from tilelang_core.inlined_names import with_inlined_names
from tilelang_core.ir import simplified
from tilelang_core.reserved_names import with_valid_names

BLOCK_ORDER = "threadblock_swizzle_pattern"
"""AttrStmt key: the order in which the blocks of a grid have their indices."""

LAUNCH = "tilelang_root"
"""Name of the root block of a launch."""

COMPOSED = "tilelang_core.composed"
"""Attribute of the functions that `function` makes. Others are a user's, whose text is that of stock TileLang."""

_KINDS = [
    f"tirx.{name}"
    for name in (
        "AllocBuffer", "AttrStmt", "Bind", "Evaluate", "For", "IfThenElse", "SBlock", "SeqStmt", "While", "BufferStore",
        "BufferLoad", "Call", "FloorDiv", "FloorMod", "Var",
    )
]  # fmt: skip


def rewrite(
    stmt: tirx.Stmt,
    *,
    enter: Callable[[Any], Any] | None = None,
    leave: Callable[[Any], Any] | None = None,
) -> tirx.Stmt:
    """A copy of `stmt` with nodes replaced.

    Args:
        enter: called on each node before its children; a result replaces the node, and its children are not visited.
        leave: called on each node after its children; a result replaces the node.
    """
    raised: list[Exception] = []

    def kept(hook: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        """The hook; its exceptions would cross TVM's native code as RuntimeErrors, so they are kept aside."""

        def call_hook(node: Any) -> Any:
            try:
                return hook(node) if hook is not None else None
            except Exception as error:
                raised.append(error)
                raise

        return call_hook

    try:
        return stmt_functor.ir_transform(stmt, kept(enter), kept(leave), _KINDS)
    except Exception:
        if raised:
            raise raised[0] from None
        raise


def rewritten(func: tirx.PrimFunc, leave: Callable[[Any], Any]) -> tirx.PrimFunc:
    """The function itself, or if `leave` replaces nodes of its body one with these replaced."""
    body = rewrite(func.body, leave=leave)
    return func if body.same_as(func.body) else func.with_body(body)


def relooped(loop: tirx.For, **changed: Any) -> tirx.For:
    """The same loop, with its step and source location, but for some attributes."""
    names = "loop_var", "min", "extent", "kind", "body", "thread_binding", "annotations", "step"
    return at(tirx.For(**{name: getattr(loop, name) for name in names} | changed), like=loop)


def renamed(stmt: tirx.Stmt, which: Callable[[Any], bool] = lambda node: True) -> tirx.Stmt:
    """A copy of `stmt` with fresh variables in its loops and bindings, those for which `which` holds."""
    names: dict[tirx.Var, tirx.Var] = {}

    def own(node: Any) -> None:
        if isinstance(node, tirx.For | tirx.Bind) and which(node):
            var = node.loop_var if isinstance(node, tirx.For) else node.var
            names[var] = tirx.Var(var.name, var.type_annotation)

    def leave(node: Any) -> Any:
        if isinstance(node, tirx.For) and node.loop_var in names:
            return relooped(node, loop_var=names[node.loop_var])
        if isinstance(node, tirx.Bind) and node.var in names:
            return at(tirx.Bind(names[node.var], node.value), like=node)
        return None

    stmt_functor.post_order_visit(stmt, own)
    return rewrite(stmt_functor.substitute(stmt, names), leave=leave)


def sequence(stmts: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Join statements in order; no statements become a no-op."""
    flat: list[tirx.Stmt] = []
    for stmt in stmts:
        flat += list(stmt.seq) if isinstance(stmt, tirx.SeqStmt) else [] if is_nothing(stmt) else [stmt]
    if not flat:
        return tirx.Evaluate(tirx.IntImm("int32", 0))
    return flat[0] if len(flat) == 1 else tirx.SeqStmt(flat)


def evaluate(expr: tirx.PrimExpr) -> tirx.Stmt:
    return tirx.Evaluate(expr)


def call(name: str, *args: Any, dtype: str = "handle", annotations: dict[str, Any] | None = None) -> tirx.Call:
    """A call of a registered operation."""
    return tirx.call_intrin(dtype, ir.Op.get(name), *args, annotations=annotations)


def extern(name: str, *args: Any, dtype: str = "handle") -> tirx.Call:
    """A call of a function of the prelude."""
    return tirx.call_extern(dtype, name, *args)


def is_extern(node: Any) -> bool:
    """Whether a node calls a function of the prelude, as `extern` makes them."""
    return isinstance(node, tirx.Call) and getattr(node.op, "name", None) == tl.CALL_EXTERN


def extern_name(node: Any) -> str | None:
    """The name of the function of the prelude that a node calls, template arguments included; None for others."""
    return str(node.args[0].value) if is_extern(node) else None


def address_of(buffer: tirx.Buffer) -> tirx.PrimExpr:
    """The address of a buffer's first element."""
    return call(tl.ADDRESS_OF, tirx.BufferLoad(buffer, [tirx.IntImm("int32", 0)] * len(buffer.shape)))


def region(buffer: tirx.Buffer, begins: Sequence[Any], extents: Sequence[Any], access: str) -> tirx.Call:
    """A region argument of a tile operation; access is "r", "w" or "rw"."""
    mode = {"r": 1, "w": 2, "rw": 3}[access]
    return call(tl.REGION, tirx.BufferLoad(buffer, list(begins)), mode, *extents)


def beginning(area: tirx.Call, begins: Sequence[Any]) -> tirx.Call:
    """The same region argument with another begin."""
    return recall(area, [tirx.BufferLoad(area.args[0].buffer, list(begins)), *area.args[1:]])


def resized(area: tirx.Call, extents: Sequence[Any]) -> tirx.Call:
    """The same region argument with other extents."""
    return recall(area, [*area.args[:2], *extents])


def tile_call(name: str, *args: Any, **annotations: Any) -> tirx.Stmt:
    """A tile operation as a statement."""
    notes = {k: tirx.IntImm("int32", int(v)) if isinstance(v, bool | int) else v for k, v in annotations.items()}
    return tirx.Evaluate(call(tl.TILE_OPERATIONS + name, *args, annotations=notes or None))


def register_limit(count: int, *, more: bool) -> tirx.Stmt:
    """Set the register limit of the executing group of 128 threads to `count` each, from here on: more than before, or
    fewer."""
    return tirx.Evaluate(call(tl.SET_MAX_REGISTERS, count, int(more)))


def specialized(condition: tirx.PrimExpr, first: tirx.Stmt, second: tirx.Stmt) -> tirx.Stmt:
    """A branch on the thread index whose two roles run at the same time.

    Marked like TileLang's own: its allocator of shared memory orders the first role before the second, so tiles that
    the second uses late may reuse memory that both have finished with.
    """
    branch = tirx.IfThenElse(condition, first, second)
    return tirx.AttrStmt(tirx.IntImm("int32", 0), tl.ROLES, tirx.IntImm("int32", 0), branch)


def elected(threads: int) -> tirx.PrimExpr:
    """Whether a thread is the elected one of `threads` consecutive threads that issues their bulk stores."""
    return call(tl.ELECT, threads, dtype="bool")


def marker(key: str) -> tirx.Stmt:
    """A statement that says only that it is here."""
    return tirx.AttrStmt(tirx.StringImm(key), key, tirx.StringImm(key), tirx.Evaluate(tirx.IntImm("int32", 0)))


def at(stmt: tirx.Stmt, like: tirx.Stmt) -> tirx.Stmt:
    """Give `stmt` the source location of `like`."""
    span = get_stmt_span(like)
    if span is not None:
        set_stmt_span(stmt, span)
    return stmt


def with_indices(node: Any, indices: Sequence[Any]) -> Any:
    """The same access of a buffer, at other indices."""
    if all(map(tirx.PrimExpr.same_as, node.indices, indices)):
        return node
    if isinstance(node, tirx.BufferLoad):
        return tirx.BufferLoad(node.buffer, indices, node.predicate)
    return at(tirx.BufferStore(node.buffer, node.value, indices, node.predicate), like=node)


def truncated_remainder(a: tirx.PrimExpr, by: tirx.PrimExpr) -> tirx.PrimExpr:
    """`a % by` for a positive divisor, in truncated divisions: TVM's simplifiers of floor divisions leave it alone."""
    return tirx.truncmod(tirx.truncmod(a, by) + by, by)


def truncated_quotient(a: tirx.PrimExpr, by: tirx.PrimExpr) -> tirx.PrimExpr:
    """`a // by`, likewise."""
    return tirx.truncdiv(a - truncated_remainder(a, by), by)


def recall(call: tirx.Call, args: Sequence[Any]) -> tirx.Call:
    """The same operation on other arguments."""
    return tirx.Call(call.dtype, call.op, list(args), call.annotations)


def is_nothing(stmt: tirx.Stmt) -> bool:
    """Whether a statement is one that does nothing, as `sequence` makes it of none."""
    return isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tirx.IntImm)


def loop_variables(extents: Sequence[Any]) -> list[tirx.Var]:
    """A new variable for each loop of a nest."""
    return [tirx.Var(f"i{axis}", "int32") for axis in range(len(extents))]


def copy_nest(call: tirx.Call) -> tirx.Stmt:
    """A copy or fill of a tile as parallel loops over its elements.

    Loops over a symbolic extent cover the larger tile, and are predicated on the extent.
    """
    is_copy = call.op.name == tl.COPY
    target = call.args[1 if is_copy else 0]
    extents = [n for n in target.args[2:] if not _is_one(n)] or [tirx.IntImm("int32", 1)]
    loops = loop_variables(extents)
    value = _element(call.args[0], loops) if is_copy else call.args[1]
    dtype = target.args[0].buffer.dtype
    value = value if value.dtype == dtype else tirx.Cast(dtype, value)
    store = tirx.BufferStore(target.args[0].buffer, value, _element(target, loops).indices)
    return parallel(loops, extents, store)


def _is_one(extent: Any) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent.value) == 1


def _element(area: tirx.Call, loops: Sequence[tirx.Var]) -> tirx.BufferLoad:
    """The element of a region at a position along its dimensions of more than one element."""
    load, left = area.args[0], list(loops)
    indices = [b if _is_one(n) else b + left.pop(0) for b, n in zip(load.indices, area.args[2:], strict=True)]
    return tirx.BufferLoad(load.buffer, indices)


def parameter_buffer(
    name: str, shape: Sequence[Any], dtype: str, *, strides: Sequence[Any] | None = None
) -> tuple[tirx.Var, tirx.Buffer]:
    """A tensor parameter: its handle and its buffer in device memory."""
    strides = list(strides) if strides is not None else _dense(shape)
    buffer = tirx.decl_buffer(list(shape), dtype, name, strides=strides, scope="global")
    return tirx.Var(f"{name}_handle", "handle"), buffer


def _dense(shape: Sequence[Any]) -> list[Any]:
    strides: list[Any] = []
    step: Any = tirx.IntImm("int32", 1)
    for extent in reversed(list(shape)):
        strides.insert(0, step)
        step = step * extent
    return strides


def alias(buffer: tirx.Buffer, shape: Sequence[Any], dtype: str, strides: Sequence[Any]) -> tirx.Buffer:
    """The memory of a buffer in another shape and type."""
    return tirx.decl_buffer(
        list(shape), dtype, buffer.name, data=buffer.data, strides=list(strides), scope=buffer.scope()
    )


def local_buffer(name: str, shape: Sequence[Any], dtype: str, scope: str) -> tirx.Buffer:
    """A buffer to allocate inside a kernel."""
    return tirx.decl_buffer(list(shape), dtype, name, scope=scope)


def parallel(variables: Sequence[tirx.Var], extents: Sequence[Any], body: tirx.Stmt) -> tirx.Stmt:
    """A nest of parallel loops from zero."""
    for var, extent in zip(reversed(list(variables)), reversed(list(extents)), strict=True):
        body = tirx.For(var, tirx.IntImm("int32", 0), extent, tirx.ForKind.PARALLEL, body)
    return body


def launch_nest(
    programs: Sequence[tuple[tirx.Var, Any]],
    thread_vars: Sequence[tuple[tirx.Var, int]],
    buffers: Sequence[tirx.Buffer],
    annotations: dict[str, Any],
    body: tirx.Stmt,
) -> tirx.Stmt:
    """TileLang's form of a launch: loops over the grid, thread indices, the root block with its allocations."""
    block = tirx.SBlock([], [], [], LAUNCH, body, None, list(buffers), [], annotations)
    binds = [tirx.Bind(var, call(tl.THREAD_INDEX, axis, dtype="int32")) for var, axis in thread_vars]
    nest = tirx.SeqStmt([*binds, tirx.SBlockRealize([], tirx.IntImm("bool", 1), block)])
    for axis, (var, extent) in reversed(list(enumerate(programs))):
        tag = tirx.IterVar(None, tirx.Var(f"block_{'xyz'[axis]}", "int32"), 1, f"blockIdx.{'xyz'[axis]}")
        nest = tirx.For(var, tirx.IntImm("int32", 0), extent, tirx.ForKind.THREAD_BINDING, nest, tag)
    return nest


def relaunched(
    func: tirx.PrimFunc,
    number: int,
    body: tirx.Stmt,
    buffers: Sequence[tirx.Buffer],
    annotations: dict[str, Any],
    grid: Mapping[tirx.Var, Any] | None = None,
) -> tirx.PrimFunc:
    """A function one of whose launches does something else.

    Args:
        number: which launch, in program order.
        body, annotations: replacements of its root block's.
        buffers: additional allocations.
        grid: indices of programs with other extents.
    """
    met, extents = 0, grid or {}

    def enter(node: Any) -> Any:
        nonlocal met
        if not isinstance(node, tirx.SBlock) or node.name_hint != LAUNCH:
            return None
        met += 1
        if met - 1 != number:
            return node
        return tirx.SBlock([], [], [], LAUNCH, body, None, [*node.alloc_buffers, *buffers], [], annotations)

    def leave(node: Any) -> Any:
        if not isinstance(node, tirx.For) or node.loop_var not in extents:
            return None
        extent = extents[node.loop_var]
        return tirx.For(node.loop_var, node.min, extent, node.kind, node.body, node.thread_binding, node.annotations)

    return func.with_body(rewrite(func.body, enter=enter, leave=leave if extents else None))


def with_values(func: tirx.PrimFunc, values: Mapping[tirx.Var, int]) -> tirx.PrimFunc:
    """A function with numbers in place of symbolic extents, in its tensors too."""
    numbers = {var: tirx.IntImm(str(var.dtype), value) for var, value in values.items()}
    buffers: dict[tirx.Buffer, tirx.Buffer] = {}

    def known(expr: Any) -> Any:
        if not isinstance(expr, tirx.PrimExpr):
            return expr
        return simplified(stmt_functor.substitute(expr, numbers), Analyzer())

    def of(buffer: tirx.Buffer) -> tirx.Buffer:
        if buffer not in buffers:
            shape, strides = ([known(n) for n in sizes] for sizes in (buffer.shape, buffer.strides))
            buffers[buffer] = tirx.decl_buffer(
                shape, buffer.dtype, buffer.name, data=buffer.data, strides=strides, scope=buffer.scope()
            )
        return buffers[buffer]

    def leave(node: Any) -> Any:
        if isinstance(node, tirx.Var):
            return numbers.get(node)
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(of(node.buffer), node.indices)
        if isinstance(node, tirx.BufferStore):
            return at(tirx.BufferStore(of(node.buffer), node.value, node.indices), node)
        if isinstance(node, tirx.Call):
            return recall(node, [known(arg) for arg in node.args])
        if isinstance(node, tirx.For):
            nest = node.loop_var, node.min, known(node.extent), node.kind, node.body
            return at(tirx.For(*nest, node.thread_binding, node.annotations), node)
        if isinstance(node, tirx.SBlock):
            body, own = node.body, [of(buffer) for buffer in node.alloc_buffers]
            return tirx.SBlock([], [], [], node.name_hint, body, None, own, [], node.annotations)
        return None

    body = rewrite(func.body, leave=leave)
    return tirx.PrimFunc(
        func.params, body, func.ret_type, {var: of(buffer) for var, buffer in func.buffer_map.items()}, func.attrs
    )


def function(
    name: str, parameters: Sequence[tuple[tirx.Var, tirx.Buffer | None]], body: tirx.Stmt, attrs: dict[str, Any]
) -> tirx.PrimFunc:
    """A function with these parameters; a tensor that peers write is never `__restrict__`."""
    root = tirx.SBlock([], [], [], "root", with_inlined_names(body))
    buffers = {var: buffer for var, buffer in parameters if buffer is not None}
    func = tirx.PrimFunc(
        [var for var, _ in parameters], tirx.SBlockRealize([], tirx.IntImm("bool", 1), root), None, buffers
    )
    func = func.with_attr("global_symbol", name).with_attr("tirx.noalias", True).with_attr(COMPOSED, True)
    func = func.with_attr(tl.NON_RESTRICT, [buffer.data for buffer in buffers.values()])
    for key, value in attrs.items():
        func = func.with_attr(key, value)
    return with_valid_names(func)
