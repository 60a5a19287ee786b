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


_inferred: LruCache[tuple[ir.PrimFunc, str], dict[str, TileLayout]] = LruCache(64)


def inferred(func: ir.PrimFunc, target: Any) -> dict[str, TileLayout]:
    """The layouts of tiles that TileLang finds for a target, by name, but for names that several tiles have.

    A function that cannot be lowered has those that were found before the failure.
    """
    return _inferred.made((func, str(target)), lambda: _infer(func, tvm.target.Target(target)))


def _infer(func: ir.PrimFunc, target: Any) -> dict[str, TileLayout]:
    seen, config = _Inferred(), dict(func.attrs.get("tilelang_pass_configs", {})) if func.attrs else {}
    try:
        with (
            logs.following(),
            proving(),
            tvm.transform.PassContext(opt_level=3, config=config, instruments=[seen]),
            target,
        ):
            tilelang.lower(mended(func), target=target)
    except Exception:  # noqa: BLE001 - compiling the program reports the error
        pass
    names = [str(data.name) for data, _ in seen.found]
    return {
        name: TileLayout.of(given) for name, (_, given) in zip(names, seen.found, strict=True) if names.count(name) == 1
    }


class _Found(Exception):
    """The layouts are known."""


@tvm.instrument.pass_instrument
class _Inferred:
    """Keeps the layouts that TileLang's inference has written into a function."""

    def __init__(self) -> None:
        self.found: list[tuple[ir.Var, Any]] = []

    def run_after_pass(self, module: Any, info: Any) -> None:
        """A pass has ended."""
        if not str(info.name).endswith("LayoutInference"):
            return
        known: dict[ir.Var, Any] = {}
        for func in module.functions.values():
            for stmt in ir.statements(func.body):
                if isinstance(stmt, ir.SBlock):
                    known |= dict(stmt.annotations.get("layout_map", {}))
        self.found = list(known.items())
        raise _Found  # results of later passes are not needed
