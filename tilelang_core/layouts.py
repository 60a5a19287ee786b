# SPDX-License-Identifier: MIT
"""Layouts that a program gives to its tiles: where an element lies, as expressions of its indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang.layout import Fragment

from tilelang_core import ir


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tile lie.

    Attributes:
        indices: variables of an element's indices.
        position: in memory, or among the elements of its thread, counted in elements.
        width: how many positions a row of memory has.
        thread: that holds the element; None for memory.
    """

    indices: tuple[ir.Var, ...]
    position: ir.PrimExpr
    width: int
    thread: ir.PrimExpr | None

    @classmethod
    def of(cls, given: Any) -> Layout:
        """A layout of TileLang's; of one that replicates elements, the first replica."""
        thread = None
        if isinstance(given, Fragment):
            known = {*(v for v in _variables(given))}
            first = {v: ir.int_node(0) for v in ir.variables(given.thread) if v not in known}
            thread = ir.substitute(given.thread, first)
        width = ir.integer(given.get_output_shape()[-1])
        return cls(_variables(given), given.get_linearized_forward_index(), width, thread)


def _variables(given: Any) -> tuple[ir.Var, ...]:
    return tuple(getattr(v, "var", v) for v in given.get_forward_vars())
