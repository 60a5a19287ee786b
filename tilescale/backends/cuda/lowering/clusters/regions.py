# SPDX-License-Identifier: MIT
"""What statements name: regions of tiles, and elements that they store."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir, tl
from tilescale.program import ops


def data_of(region: ir.Call) -> ir.Var:
    """The data variable of a region's buffer."""
    return region.args[0].buffer.data


ACCESS = {1: "r", 2: "w", 3: "rw"}
"""Access of a region -> how `tir.region` names it."""


def regions(stmt: Any, *, written: bool = False) -> list[ir.Call]:
    """All regions that operations below a node work on, or those that they write."""
    found: list[ir.Call] = []
    viewed: list[ir.Call] = []

    def visit(node: Any) -> None:
        if ir.op_name(node) == ops.VIEW.name:
            viewed.append(node.args[0])
        elif ir.op_name(node) == tl.REGION and (not written or ir.integer(node.args[1]) & 2):
            found.append(node)

    ir.walk(stmt, visit)
    return [region for region in found if not any(region.same_as(v) for v in viewed)]


def stored(stmt: ir.Stmt) -> set[ir.Var]:
    """Data variables of the buffers that single elements are stored to."""
    found: set[ir.Var] = set()
    ir.walk(stmt, lambda n: found.add(n.buffer.data) if isinstance(n, ir.BufferStore) else None)
    return found


def access(node: Any, buffer: ir.Buffer, indices: list[Any]) -> Any:
    """The load or store `node` at another place."""
    if isinstance(node, ir.BufferLoad):
        return ir.BufferLoad(buffer, indices)
    return ir.BufferStore(buffer, node.value, indices)
