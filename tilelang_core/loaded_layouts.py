# SPDX-License-Identifier: MIT
"""Layouts of functions that were written to a file and read.

Why: TileLang knows the indices of a layout by variables that a process has once. A layout that was read has copies of
them, with which TileLang can evaluate nothing. Before: a function whose tiles have layouts by the program. After: the
same function, whose layouts have the variables of this process.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tilelang.layout import Fragment, Layout
from tvm import tirx

from tilelang_core import ir, tl
from tilelang_core.rewrite import rewritten


def with_loaded_layouts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, whose layouts TileLang can evaluate."""
    return rewritten(func, _own) if any(map(_is_read, ir.layout_map(func).values())) else func


def _own(node: Any) -> Any:
    """A block with layouts of this process; None for any other node."""
    if not isinstance(node, tirx.SBlock) or tl.LAYOUTS not in node.annotations:
        return None
    layouts = {tile: _remade(layout) for tile, layout in node.annotations[tl.LAYOUTS].items()}
    given = node.iter_vars, node.reads, node.writes, node.name_hint, node.body, node.init
    return tirx.SBlock(*given, node.alloc_buffers, node.match_buffers, {**node.annotations, tl.LAYOUTS: layouts})


def _expressions(layout: Layout) -> list[ir.PrimExpr]:
    return [*layout.index, *([layout.thread] if isinstance(layout, Fragment) else [])]


def _is_read(layout: Layout) -> bool:
    """Whether the variables of a layout are copies of those of this process."""
    own = {*layout.get_forward_vars()}
    names = {v.name for v in own}
    return any(v.name in names and v not in own for each in _expressions(layout) for v in ir.variables(each))


def _remade(layout: Layout) -> Layout:
    """The layout with variables of this process."""
    shape, own = layout.get_input_shape(), [v.name for v in layout.get_forward_vars()]
    copies = len(own) - len(shape)  # TileLang lists the number of the copy first, and gives it last
    names, expressions = own[copies:] + own[:copies], _expressions(layout)
    read = {v for each in expressions for v in ir.variables(each)}

    def by(*indices: Any) -> list[ir.PrimExpr]:
        values = {name: getattr(v, "var", v) for name, v in zip(names, indices, strict=True)}
        return [ir.substitute(each, {v: values[v.name] for v in read if v.name in values}) for each in expressions]

    def by_threads(*indices: Any) -> tuple[ir.PrimExpr, Any]:
        *index, thread = by(*indices)
        return thread, tvm_ffi.convert(index)

    if isinstance(layout, Fragment):
        return Fragment(shape, forward_fn=by_threads, replicate=layout.replicate_size)
    return Layout(shape, by)
