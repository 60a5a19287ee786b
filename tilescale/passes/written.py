# SPDX-License-Identifier: MIT
"""What a program may write: only such parameters travel back from the rank that emulated it, and can be raced for."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilescale.program.model import Program
from tilescale.program.ops import VIEW

_REGION = "tl.region"
_WRITES = 2  # the bit of a region's access mask


def written_parameters(program: Program) -> frozenset[int]:
    """Positions of the parameters that are written, or whose elements are handed to an operation by address."""
    views: dict[ir.Var, ir.Var] = {}

    def visit(node: Any) -> None:
        if isinstance(node, ir.Bind) and ir.op_name(node.value) == VIEW.name:
            views[node.var] = ir.region_parts(node.value.args[0])[0].data

    ir.walk(program.func.body, visit)
    origins = {_origin(data, views) for data in written_data(program.func.body)}
    return frozenset(
        i for i, p in enumerate(program.parameters) if p.buffer is not None and _origin(p.buffer.data, views) in origins
    )


def written_data(body: ir.Stmt) -> set[ir.Var]:
    """The memory, as the data of buffers and views, that statements write, or hand to an operation by address.

    It errs on the side of "written": a value that an intrinsic takes straight from a tensor counts too.
    """
    declared: set[ir.Call] = set()
    found: set[ir.Var] = set()

    def visit(node: Any) -> None:
        if isinstance(node, ir.BufferStore):
            found.add(node.buffer.data)
        elif isinstance(node, ir.Bind) and ir.op_name(node.value) == VIEW.name:
            declared.add(node.value.args[0])
        elif ir.op_name(node) == _REGION:
            if node not in declared and ir.constant(node.args[1]) & _WRITES:
                found.add(node.args[0].buffer.data)
        elif isinstance(node, ir.Call):
            found.update(arg.buffer.data for arg in node.args if isinstance(arg, ir.BufferLoad))
            found.update(arg for arg in node.args if isinstance(arg, ir.Var))

    ir.walk(body, visit)
    return found


def _origin(data: ir.Var, views: dict[ir.Var, ir.Var]) -> ir.Var:
    while data in views:
        data = views[data]
    return data
