# SPDX-License-Identifier: MIT
"""Regions of tiles in statements, and elements that they store."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilelang_core.tiles import is_region, is_written
from tilescale.program import ops
from tilescale.program.operations import TileView


def regions(stmt: ir.Stmt, *, written: bool = False) -> list[ir.Call]:
    """All regions that operations below a node work on, or those that they write."""
    viewed = [TileView.of(node).region for node in ir.nodes(stmt, lambda n: ir.op_name(n) == ops.VIEW.name)]
    found = ir.nodes(stmt, lambda node: is_region(node) and (not written or is_written(node)))
    return [region for region in found if not any(region.same_as(v) for v in viewed)]


def stored(stmt: ir.Stmt) -> set[ir.Var]:
    """Data variables of the buffers that single elements are stored to."""
    return {store.buffer.data for store in ir.instances(stmt, ir.BufferStore)}


def access(node: ir.Node, buffer: ir.Buffer, indices: list[Any]) -> Any:
    """The load or store `node` at another place."""
    if isinstance(node, ir.BufferLoad):
        return ir.BufferLoad(buffer, indices)
    return ir.BufferStore(buffer, node.value, indices)
