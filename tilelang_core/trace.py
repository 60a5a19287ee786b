# SPDX-License-Identifier: MIT
"""Tracing with TileLang's builder: where we are in the user's program, scoped regions, and operations of our own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tvm_ffi
from tilelang.jit.exceptions import JITNoBuilderError
from tilelang.language.allocate import alloc_var
from tilelang.language.copy_op import _normalize_copy_regions
from tilelang.language.eager.builder import Builder, Frame, prim_func, register_var_scope_frame
from tilelang.language.frame import get_let_value, has_let_value
from tilelang.language.kernel import KernelLaunchFrame, kernel_launch_factory, launch_kernel
from tilelang.utils.language import to_tile_region
from tvm import ir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as tir_builder
from tvm.tirx.script.builder.ir import attr as attr_frame
from tvm.tirx.script.builder.ir import sblock_attr

from tilelang_core.dialect import SCOPE_ATTR
from tilelang_core.ir import instances

__all__ = [
    "DEFAULT_THREADS", "JITNoBuilderError", "bind", "bind_view", "call", "conditions", "copy_regions", "definition",
    "emit", "is_tracing", "kernel_launch_factory", "launch", "launch_kernel", "locations", "note_buffer", "note_of",
    "register_op", "retrace", "scope_factory", "scoped", "state", "tile_region", "variable",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_THREADS = 128
"""Threads of a program whose launch does not say how many; the default of TileLang's CUDA launch."""


def is_tracing() -> bool:
    """Whether a function is being traced."""
    return Builder.current() is not None


def state() -> dict[str, Any]:
    """A dictionary that lives as long as the current trace."""
    return Builder.current().__dict__.setdefault("tilelang_core_state", {})


def locations() -> list[tuple[str, int]]:
    """File and line of the user's statement that is being traced, then of the macro calls around it."""
    current = Builder.current()
    stack = reversed(current.get_fileline_stack()) if current is not None else ()
    return list(dict.fromkeys((file, line) for file, line, _ in stack if line > 0))


def launch() -> KernelLaunchFrame | None:
    """The kernel launch that is being traced, or None."""
    return KernelLaunchFrame.Current()


def scope_factory(values: int) -> Callable[[F], F]:
    """Mark a function that returns a scoped region of `values` values: `with f(...) as a, b:` then binds both names."""

    def mark(function: F) -> F:
        setattr(function, SCOPE_ATTR, values)
        return function

    return mark


class _NameScope(Frame):
    """A region at whose end the names bound inside end too."""


register_var_scope_frame(_NameScope)


@contextlib.contextmanager
def scoped(key: str, value: str, *, ends_names: bool) -> Iterator[None]:
    """A region of the traced program: `AttrStmt(key, value)` around the statements inside. `ends_names`: whether a use
    of a name after the region that binds it is an error of TileLang's."""
    builder = Builder.current()
    names = builder.with_frame(_NameScope()) if ends_names else contextlib.nullcontext()
    with names, builder.with_frame(attr_frame(None, key, value)):
        yield


def bind(name: str, expr: tirx.PrimExpr) -> tirx.Var:
    """A variable of the traced program that holds `expr`."""
    return Builder.current().bind(name, expr)


def variable(name: str, dtype: Any) -> tirx.Buffer:
    """A variable of each thread that operations may assign to."""
    return IRBuilder.name(name, alloc_var(dtype))


def emit(operation: tirx.PrimExpr) -> None:
    """Make a call a statement of the traced program."""
    Builder.current().eval(operation)


def bind_view(base: tirx.Buffer, shape: list, operation: tirx.Call) -> tirx.Buffer:
    """A buffer of `shape` whose data is what `operation` (a handle) yields; same type and scope as `base`."""
    pointer = ir.PointerType(ir.PrimType(base.dtype), base.scope())
    data = tirx.Var(f"{base.name}_view", pointer)
    tir_builder.bind(operation, var=data)
    return tirx.decl_buffer(shape, base.dtype, f"{base.name}_view", data=data, scope=base.scope())


def note_buffer(key: str, buffer: tirx.Buffer, value: str | int) -> None:
    """Record `value` for a buffer in the launch's annotation `key` (a map from data variables)."""
    sblock_attr({key: {buffer.data: _node(value)}})


def register_op(name: str, *, pure: bool = False) -> ir.Op:
    """Register an operation of ours; a second registration of the same name is an error."""
    if name in ir.Op.list_op_names():
        raise ValueError(f"operation {name} is registered twice")
    tvm_ffi.get_global_func("ir.RegisterOp")(name, "")
    op = ir.Op.get(name)
    op.set_attr("TCallEffectKind", tirx.CallEffectKind.Pure if pure else tirx.CallEffectKind.Opaque)
    op.set_attr("TScriptPrinterName", name)
    return op


def _node(value: Any) -> Any:
    if isinstance(value, bool | int):
        return tirx.IntImm("int32", int(value))
    if isinstance(value, str):
        return tirx.StringImm(value)
    return value


def call(op: ir.Op, /, *args: Any, dtype: str = "handle", **attributes: Any) -> tirx.Call:
    """A call of one of our operations, without attributes that have no value."""
    notes = {key: _node(value) for key, value in attributes.items() if value is not None}
    return tirx.call_intrin(dtype, op, *[_node(a) for a in args], annotations=notes or None)


def tile_region(tile: Any, access: str) -> tirx.Call:
    """A buffer, a slice or an element as the region argument of a tile operation; access is "r", "w" or "rw"."""
    return to_tile_region(tile, access_type=access)


def copy_regions(src: Any, dst: Any) -> tuple[Any, Any]:
    """Source and destination of a copy with TileLang's rules for extents: both as regions."""
    source, target = _normalize_copy_regions(src, dst)
    return tuple(
        to_tile_region(x, access_type=a) if isinstance(x, tirx.BufferLoad) else x
        for x, a in ((source, "r"), (target, "w"))
    )


def definition(var: tirx.Var) -> tirx.PrimExpr | None:
    """The expression that a bound variable of the current trace stands for."""
    return get_let_value(var) if has_let_value(var) else None


def conditions() -> Iterator[tirx.PrimExpr]:
    """Conditions and trip counts of the control flow around the statement that is being traced, innermost first."""
    for frame in reversed(Builder.current().frames):
        if isinstance(frame, tir_builder.frame.IfFrame | tir_builder.frame.WhileFrame):
            yield frame.condition
        elif isinstance(frame, tir_builder.frame.ForFrame):
            yield from (domain.extent for domain in frame.doms)


def note_of(func: tirx.PrimFunc, key: str) -> str | None:
    """The first value of a launch annotation anywhere in a function."""
    found = [block for block in instances(func.body, tirx.SBlock) if key in block.annotations]
    return str(found[0].annotations[key].value) if found else None


def retrace(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """Trace the Python function of `func` again (under another machine, say); None if it is not known."""
    original = getattr(func, "orig_func", None)
    return prim_func(original) if original is not None else None
