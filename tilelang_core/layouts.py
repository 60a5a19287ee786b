# SPDX-License-Identifier: MIT
"""Layouts of tiles, given by a program or inferred by TileLang: the position of an element, by its indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang
from tilelang import tvm
from tilelang.layout import Fragment

from tilelang_core import ir, logs
from tilelang_core.lru import LruCache
from tilelang_core.mends import mended
from tilelang_core.prover import proving
from tilelang_core.stock_passes import ended_after


@dataclass(frozen=True)
class TileLayout:
    """Mapping of a tile's elements to memory.

    Attributes:
        indices: variables of an element's indices.
        position: in memory, or among the elements of its thread, counted in elements.
        width: how many positions a row of memory has; 1 of elements of threads.
        thread: that holds the element; None for memory.
        replicated: whether others hold it, too.
    """

    indices: tuple[ir.Var, ...]
    position: ir.PrimExpr
    width: int
    thread: ir.PrimExpr | None
    replicated: bool

    @classmethod
    def of(cls, given: Any) -> TileLayout:
        """A layout of TileLang's; of one that replicates elements, the first replica."""
        thread, first = None, {}
        if isinstance(given, Fragment):
            known = {*_variables(given)}
            first = {v: ir.int_node(0) for v in ir.variables(given.thread) if v not in known}
            thread = ir.substitute(given.thread, first)
        width = 1 if isinstance(given, Fragment) else ir.integer(given.get_output_shape()[-1])
        return cls(_variables(given), given.get_linearized_forward_index(), width, thread, bool(first))


def _variables(given: Any) -> tuple[ir.Var, ...]:
    return tuple(getattr(v, "var", v) for v in given.get_forward_vars())[: len(given.get_input_shape())]


_inferred: LruCache[tuple[ir.PrimFunc, str], dict[ir.Buffer, TileLayout]] = LruCache(64)


def inferred(func: ir.PrimFunc, target: Any) -> dict[ir.Buffer, TileLayout]:
    """The layouts of tiles that TileLang finds for a target; none of a function that cannot be lowered so far."""
    return _inferred.made((func, str(target)), lambda: _infer(func, tvm.target.Target(target)))


def _infer(func: ir.PrimFunc, target: Any) -> dict[ir.Buffer, TileLayout]:
    config = dict(func.attrs.get("tilelang_pass_configs", {})) if func.attrs else {}
    try:
        with logs.following(), proving(), ended_after("LayoutInference") as end, target:
            with tvm.transform.PassContext(opt_level=3, config=config, instruments=[end]):
                tilelang.lower(mended(func), target=target)
    except Exception:  # noqa: BLE001 - compiling the program reports the error
        return {}
    return {
        tile: TileLayout.of(given)
        for made in end.module.functions.values()
        for tile, given in ir.layout_map(made).items()
    }
