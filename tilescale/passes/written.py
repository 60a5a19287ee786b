# SPDX-License-Identifier: MIT
"""Which parameters a program may write: only those travel back from the rank that emulated it, and can be raced for."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilescale.program.model import Program
from tilescale.program.ops import VIEW

_REGION = "tl.region"
_WRITES = 2  # the bit of a region's access mask


def written_parameters(program: Program) -> frozenset[int]:
    """Positions of the parameters that are written, or whose elements are handed to an operation by address.

    It errs on the side of "written": a value that an intrinsic takes straight from a tensor counts too.
    """
    views: dict[ir.Var, ir.Var] = {}
    declared: set[ir.Call] = set()
    found: set[ir.Var] = set()

    def visit(node: Any) -> None:
        if isinstance(node, ir.BufferStore):
            found.add(node.buffer.data)
        elif isinstance(node, ir.Bind) and ir.op_name(node.value) == VIEW.name:
            region = node.value.args[0]
            views[node.var] = ir.region_parts(region)[0].data
            declared.add(region)
        elif ir.op_name(node) == _REGION:
            if node not in declared and ir.constant(node.args[1]) & _WRITES:
                found.add(node.args[0].buffer.data)
        elif isinstance(node, ir.Call):
            found.update(arg.buffer.data for arg in node.args if isinstance(arg, ir.BufferLoad))
            found.update(arg for arg in node.args if isinstance(arg, ir.Var))

    ir.walk(program.func.body, visit)
    origins = {_origin(data, views) for data in found}
    return frozenset(
        i for i, p in enumerate(program.parameters) if p.buffer is not None and _origin(p.buffer.data, views) in origins
    )


def _origin(data: ir.Var, views: dict[ir.Var, ir.Var]) -> ir.Var:
    while data in views:
        data = views[data]
    return data
